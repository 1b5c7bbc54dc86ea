"""One GRPO step under torchrun: every rank writes groups, scores rows and trains on whole groups.

    torchrun --standalone --nproc-per-node 2 examples/grpo_torchrun.py

On several hosts, start it as any torchrun job, with a name (--rdzv-id) and a cluster token
(DATAPLANE_TOKEN_FILE). The peer on MASTER_ADDR's host starts the plane, and the others join it.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
import torch.distributed as dist

import dataplane

GROUPS, GROUP_SIZE = 16, 8
STAGES = {"reward": ["tokens"], "train": ["tokens", "reward"]}


def rollout(part: dataplane.Partition, prompts: Iterable[int]) -> None:
    for prompt in prompts:
        rng = np.random.default_rng(prompt)
        lengths = rng.integers(200, 4_000, GROUP_SIZE)
        part.put(
            {"tokens": [rng.integers(0, 150_000, n, np.int64) for n in lengths]},
            group=f"prompt-{prompt}",
            tags={"length": lengths.tolist()},
        )


def reward(part: dataplane.Partition) -> None:
    for batch in part.stream("reward", rows=16, min=1):
        batch.add(reward=[float(tokens[-1] % 2) for tokens in batch["tokens"]])


def train(part: dataplane.Partition) -> tuple[int, float]:
    """Return how many rows this rank trained on, and the sum of their squared advantages."""
    rows, squares = 0, 0.0
    for batch in part.stream("train", groups=2, min=1):
        for group in batch.groups():
            scores = torch.tensor(group["reward"])
            advantages = (scores - scores.mean()) / (scores.std(correction=0) + 1e-6)
            rows += len(scores)
            squares += float(advantages.square().sum())
    return rows, squares


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    with dataplane.connect() as plane:
        part = plane.partition("step-0", stages=STAGES, group_size=GROUP_SIZE, groups=GROUPS)
        rollout(part, range(rank, GROUPS, world))
        reward(part)
        total = torch.tensor(train(part))
        dist.all_reduce(total)
        if rank == 0:
            print(f"{int(total[0])} rows on {len(plane.stats()['peers'])} host(s)")
        dist.barrier()  # no peer ends while others still read from it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
