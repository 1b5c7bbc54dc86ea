"""GRPO, small but real: a transformer learns to count from its rewards alone, on two cores.

Two rollout workers, a reward, a reference, two trainers and one that feeds prompts are a process
each. This file starts them, and starts anew who dies. What to try: README.md.
"""

import json
import multiprocessing
from argparse import ArgumentParser, Namespace
from contextlib import nullcontext
from multiprocessing.connection import wait
from pathlib import Path
from statistics import mean
from typing import Any

import over_controller
import over_dataplane
import torch
import torch.distributed as dist
from stages import WORKERS

import dataplane

LIVES = {"dataplane": 4, "controller": 1}
VICTIMS = {"rollout": ("rollout", 1), "trainer": ("train", 1)}
spawn = multiprocessing.get_context("spawn")


def main(args: Namespace) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "weights.pt").unlink(missing_ok=True)
    (args.out / "steps.jsonl").write_text("")
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    args.port = store.port  # where trainers meet
    with dataplane.connect() if args.plane == "dataplane" else nullcontext():
        keep_running(args)  # connected: the plane is there for whoever starts again, also late
    report([json.loads(line) for line in (args.out / "steps.jsonl").open()], args.out)


def keep_running(args: Namespace) -> None:
    """Until all have ended. Who died starts again; a trainer that dies takes the other one with
    it, and they meet again in their next lives."""
    pipes = {who: spawn.Pipe() for who in WORKERS if args.plane == "controller"}
    lives = dict.fromkeys([("feed", 0), *WORKERS], 1)
    running = {who: started(*who, 1, args, pipes) for who in lives}
    victim = VICTIMS.get(args.kill)
    while running:
        wait([process.sentinel for process in running.values()], timeout=0.1)
        if victim and len((args.out / "steps.jsonl").read_text().splitlines()) > args.steps // 2:
            running[victim].kill()
            victim = None
        for who in [who for who, process in running.items() if not process.is_alive()]:
            if running.pop(who).exitcode == 0:
                continue
            if lives[who] == LIVES[args.plane]:
                raise SystemExit(f"{who} died, and with it the run")
            print(f"{who} died and starts again", flush=True)
            lives[who] += 1
            running[who] = started(*who, lives[who], args, pipes)


def started(*what: Any) -> Any:
    process = spawn.Process(target=live, args=what, daemon=True)
    process.start()
    return process


def live(stage: str, rank: int, nth: int, args: Namespace, pipes: dict[Any, Any]) -> None:
    """What a process does; nth: of its lives."""
    torch.set_num_threads(1)
    if stage == "train":
        meeting = dist.PrefixStore(f"{nth}", dist.TCPStore("localhost", args.port))
        dist.init_process_group("gloo", store=meeting, rank=rank, world_size=2)
    if pipes and stage == "feed":
        over_controller.feed(args.steps, {who: ours for who, (ours, _) in pipes.items()})
    elif pipes:
        over_controller.work(stage, args.out, pipes[stage, rank][1])
    elif stage == "feed":
        over_dataplane.feed(args.steps, args.lag)
    elif stage == "train":
        over_dataplane.train(rank, args.out, args.steps)
    else:
        over_dataplane.work(stage, args.out, args.steps)


def report(steps: list[dict[str, float]], out: Path) -> None:
    """The rewards in words and as a picture."""
    import matplotlib.pyplot as plt  # the workers do without

    rewards, tenth = [step["reward"] for step in steps], max(1, len(steps) // 10)
    first, last = mean(rewards[:tenth]), mean(rewards[-tenth:])
    oldest = max(step["lag"] for step in steps)
    print(f"{len(steps)} steps, reward {first:.2f} -> {last:.2f}, lag <= {oldest}")
    plt.plot([step["step"] for step in steps], rewards)
    plt.gca().set(xlabel="step", ylabel="mean reward of the step", ylim=(0, 1))
    plt.savefig(out / "reward.png")


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plane", choices=LIVES, default="dataplane")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--lag", type=int, default=0, help="steps that rollout may be ahead")
    parser.add_argument("--kill", choices=VICTIMS, help="one of them, half-way")
    parser.add_argument("--out", type=Path, default=Path("grpo_tiny_out"))
    main(parser.parse_args())
