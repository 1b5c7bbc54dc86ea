"""GRPO, small but real: a transformer learns to count from its rewards alone, on two cores.

    python examples/grpo_tiny/run.py                         # synchronous
    python examples/grpo_tiny/run.py --lag 2                 # rollout up to two steps ahead
    python examples/grpo_tiny/run.py --kill trainer          # kill -9 one in the middle
    python examples/grpo_tiny/run.py --plane controller      # the same by way of a single driver

Two rollout workers, a reward, a reference, two trainers, each a process. `over_dataplane.py` is how
rows come to them; this file starts them, and starts anew who dies.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from pathlib import Path
from typing import Any

import over_controller
import over_dataplane
import torch
import torch.distributed as dist
from stages import WORKERS

RESTARTS = 3
spawn = multiprocessing.get_context("spawn")


class Job:
    """The worker processes. Under the controller each has a pipe to it."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.to_kill, self.restarts = given, given.kill, 0
        self.processes: dict[tuple[str, int], Any] = {}
        self.pipes: dict[str, list[Any]] = {stage: [] for stage in WORKERS}
        self.start([(stage, rank) for stage, count in WORKERS.items() for rank in range(count)])

    def start(self, workers: list[tuple[str, int]]) -> None:
        for stage, rank in workers:
            ours, theirs = spawn.Pipe()
            self.pipes[stage].append(ours)
            what = (stage, rank, self.given, self.restarts, theirs)
            self.processes[stage, rank] = spawn.Process(target=worker, args=what)
            self.processes[stage, rank].start()
            theirs.close()

    def tick(self, step: int) -> None:
        """Kill whom we are told to; start anew who died, and all trainers where one did."""
        if self.to_kill and step > self.given.steps // 2:
            self.processes["train" if self.to_kill == "trainer" else self.to_kill, 1].kill()
            self.to_kill = None
        dead = [who for who, process in self.processes.items() if process.exitcode]
        if not dead:
            return
        if self.given.plane == "controller" or self.restarts == RESTARTS:
            raise SystemExit(f"{dead} died, and so the run does")
        self.restarts += 1
        if any(stage == "train" for stage, _ in dead):
            dead = [who for who in self.processes if who[0] == "train" or who in dead]
        for who in dead:
            self.processes[who].kill()
            self.processes[who].join()
        print(f"before step {step}: {dead} died or wait for it, and start again", flush=True)
        self.start(dead)


def worker(stage: str, rank: int, given: argparse.Namespace, restarts: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    if stage == "train":
        meeting = f"file://{(given.out / f'meeting-{restarts}').absolute()}"
        dist.init_process_group("gloo", meeting, rank=rank, world_size=WORKERS[stage])
    if given.plane == "controller":
        over_controller.work(stage, given.out, pipe)
    else:
        over_dataplane.work(stage, rank, given.out, given.steps)


def main(given: argparse.Namespace) -> None:
    given.out.mkdir(parents=True, exist_ok=True)
    for left in ("weights.pt", "steps.jsonl", *(f"meeting-{n}" for n in range(RESTARTS + 1))):
        (given.out / left).unlink(missing_ok=True)
    job = Job(given)
    try:
        if given.plane == "controller":
            over_controller.feed(job.pipes, given.steps, job.tick)
        else:
            over_dataplane.feed(given.steps, given.lag, job.tick)
        for process in job.processes.values():
            process.join()
    except (EOFError, ConnectionError) as gone:
        raise SystemExit("the controller lost a worker, and with it the run") from gone
    finally:
        for process in job.processes.values():
            process.kill()
    report(given.out)


def report(out: Path) -> None:
    """The rewards in words, and as a picture where matplotlib is installed."""
    steps = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    rewards, tenth = [step["reward"] for step in steps], max(1, len(steps) // 10)
    first, last = (sum(some) / tenth for some in (rewards[:tenth], rewards[-tenth:]))
    seconds, lag = steps[-1]["time"] - steps[0]["time"], max(step["lag"] for step in steps)
    print(f"{len(steps)} steps in {seconds:.0f} s, reward {first:.2f} -> {last:.2f}, lag <= {lag}")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return print(f"no picture without matplotlib; the figures are in {out}/steps.jsonl")
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.plot([step["step"] for step in steps], rewards)
    axes.set(xlabel="step", ylabel="mean reward of the step", ylim=(0, 1))
    figure.savefig(out / "reward.png", dpi=120)
    print(f"{out}/reward.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plane", choices=["dataplane", "controller"], default="dataplane")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--lag", type=int, default=0, help="steps that rollout may be ahead")
    parser.add_argument("--kill", choices=["rollout", "trainer"], help="one of them, half-way")
    parser.add_argument("--out", type=Path, default=Path("grpo_tiny_out"))
    main(parser.parse_args())
