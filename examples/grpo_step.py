"""One GRPO step over the data plane, with every stage as a process of its own.

    python examples/grpo_step.py                        # all stages on this host
    python examples/grpo_step.py train                  # one stage, as deploy/ starts it on a host
    python examples/grpo_step.py rollout 0/2            # the first half of the prompts

Rollout writes groups of responses, reward adds scores, the trainer reads whole groups and computes
group-relative advantages (Shao et al. 2024, arXiv 2402.03300, eq. 4.1.2).
"""

from __future__ import annotations

import multiprocessing
import sys

import numpy as np

import dataplane

GROUPS, GROUP_SIZE = 16, 8
STAGES = {"reward": ["tokens"], "train": ["tokens", "reward"]}


def partition(plane: dataplane.Plane) -> dataplane.Partition:
    """Return the partition. Every process declares it in the same way, in any order."""
    return plane.partition("step-0", stages=STAGES, group_size=GROUP_SIZE, groups=GROUPS)


def rollout(nth: int = 0, of: int = 1) -> None:
    rng = np.random.default_rng(0)
    with dataplane.connect() as plane:
        part = partition(plane)
        for prompt in range(nth, GROUPS, of):
            lengths = rng.integers(200, 4_000, GROUP_SIZE)
            tokens = [rng.integers(0, 150_000, n, np.int64) for n in lengths]
            part.put(
                {"tokens": tokens}, group=f"prompt-{prompt}", tags={"length": lengths.tolist()}
            )


def reward() -> None:
    with dataplane.connect() as plane:
        for batch in partition(plane).stream("reward", rows=32):
            batch.add(reward=[float(t[-1] % 2) for t in batch["tokens"]])


def train() -> None:
    with dataplane.connect() as plane:
        for batch in partition(plane).stream("train", groups=4):
            for group in batch.groups():
                scores = np.array(group["reward"])
                advantages = (scores - scores.mean()) / (scores.std() + 1e-6)
                print(group.id, np.round(advantages, 2))


def alone(stage: str, part: str = "0/1") -> None:
    """Run one stage as the only process of its host. Wait until the trainer has read every row, so
    that this host's peer stays."""
    with dataplane.connect() as plane:
        match stage:
            case "rollout":
                rollout(*map(int, part.split("/")))
            case "reward":
                reward()
            case "train":
                train()
        partition(plane).wait("train", below=1)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        alone(*sys.argv[1:])
        raise SystemExit(0)
    spawn = multiprocessing.get_context("spawn")
    with dataplane.connect():  # processes started below join this run
        stages = [spawn.Process(target=stage) for stage in (rollout, reward, train)]
        for stage in stages:
            stage.start()
        for stage in stages:
            stage.join()
    raise SystemExit(max(stage.exitcode or 0 for stage in stages))
