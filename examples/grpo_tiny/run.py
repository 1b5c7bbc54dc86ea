"""GRPO, small but real: a transformer learns to count from its rewards alone, on two cores. Each
worker is a process. This file starts them and restarts those that die. See README.md."""

import json
import multiprocessing
from argparse import ArgumentParser, Namespace
from collections import Counter
from contextlib import nullcontext
from multiprocessing.connection import wait
from pathlib import Path
from statistics import mean

import over_controller
import over_dataplane
import torch
import torch.distributed as dist

import dataplane

PLANES = {"dataplane": over_dataplane, "controller": over_controller}
COUNTS = {"feed": 1, "rollout": 2, "reward": 1, "reference": 1, "train": 2}
processes = multiprocessing.get_context("forkserver")


def main(args: Namespace) -> None:
    log = args.out / "steps.jsonl"
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "weights.pt").unlink(missing_ok=True)
    log.write_text("")
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    args.port = store.port  # the trainers find each other here
    with dataplane.connect() if args.plane == "dataplane" else nullcontext():
        keep_running(args, log)  # stay connected, so that restarted workers find the plane
    import matplotlib.pyplot as plt  # only this process needs it

    steps = [json.loads(line) for line in log.open()]
    rewards, tenth = [step["reward"] for step in steps], max(1, len(steps) // 10)
    rise = f"{mean(rewards[:tenth]):.2f} -> {mean(rewards[-tenth:]):.2f}"
    print(f"{len(steps)} steps, reward {rise}, lag <= {max(step['lag'] for step in steps)}")
    plt.plot([step["step"] for step in steps], rewards)
    plt.gca().set(xlabel="step", ylabel="mean reward of the step", ylim=(0, 1))
    plt.savefig(args.out / "reward.png")


def keep_running(args: Namespace, log: Path) -> None:
    """Run all workers until they have finished. Restart a worker that dies. If a trainer dies, the
    other one ends too, and both are restarted."""
    processes.set_forkserver_preload(["torch._dynamo", "dataplane"])  # slow: once for all workers
    todo = [(stage, rank) for stage, count in COUNTS.items() for rank in range(count)]
    args.pipes = {who: processes.Pipe() for who in todo if args.plane == "controller"}
    lives, running, doomed = Counter(), {}, list(args.kill)
    while todo:
        for who in [who for who in todo if who not in running]:
            lives[who] += 1
            does = (*who, lives[who], args)
            running[who] = processes.Process(target=live, args=does, daemon=True)
            running[who].start()
        wait([process.sentinel for process in running.values()], timeout=0.1)
        done = len(log.read_text().splitlines()) / args.steps
        if doomed and done > 1 - len(doomed) / (len(args.kill) + 1):
            running[doomed.pop(0), 1].kill()
        for who in [who for who in todo if not running[who].is_alive()]:
            if running.pop(who).exitcode == 0:
                todo.remove(who)
            elif args.pipes or lives[who] == 4:
                raise SystemExit(f"{who} died, which ends the run")
            else:
                print(f"{who} died, restarting it", flush=True)


def live(stage: str, rank: int, nth: int, args: Namespace) -> None:
    """The body of a worker process. `nth` counts its starts, from 1."""
    torch.set_num_threads(1)
    if stage == "train":
        meeting = dist.PrefixStore(f"{nth}", dist.TCPStore("localhost", args.port))
        dist.init_process_group("gloo", store=meeting, rank=rank, world_size=COUNTS["train"])
    PLANES[args.plane].live(stage, rank, args)


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plane", choices=PLANES, default="dataplane", help="what moves the rows")
    parser.add_argument("--steps", type=int, default=120, help="training steps (default: 120)")
    parser.add_argument("--lag", type=int, default=0, help="steps by which rollout may lead")
    parser.add_argument("--kill", nargs="*", choices=("rollout", "train"), default=[])
    parser.add_argument("--out", type=Path, default=Path("grpo_tiny_out"), help="output directory")
    main(parser.parse_args())
