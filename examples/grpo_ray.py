"""One GRPO step with Ray actors: Ray places the stages, rows move over the data plane.

    python examples/grpo_ray.py

On a cluster, `ray.init()` connects to it and `start()` starts a peer on each host. Only refs, which
have a few bytes, travel through Ray.
"""

from __future__ import annotations

import numpy as np
import ray

import dataplane
import dataplane.integrations.ray

GROUPS, GROUP_SIZE = 16, 8
STAGES = {"reward": ["tokens"], "train": ["tokens", "reward"]}


def partition(plane: dataplane.Plane) -> dataplane.Partition:
    """Return the partition. Every actor declares it in the same way, in any order."""
    return plane.partition("step-0", stages=STAGES, group_size=GROUP_SIZE, groups=GROUPS)


@ray.remote(num_cpus=1)
class Rollout:
    def __init__(self) -> None:
        self.plane = dataplane.connect()

    def generate(self, prompts: list[int]) -> list[dataplane.Ref]:
        part = partition(self.plane)
        return [self.respond(part, prompt) for prompt in prompts]

    def respond(self, part: dataplane.Partition, prompt: int) -> dataplane.Ref:
        rng = np.random.default_rng(prompt)
        tokens = [rng.integers(0, 150_000, rng.integers(200, 4_000)) for _ in range(GROUP_SIZE)]
        return part.put({"tokens": tokens}, group=f"prompt-{prompt}")


@ray.remote(num_cpus=0)
def reward() -> int:
    rows = 0
    with dataplane.connect() as plane:
        for batch in partition(plane).stream("reward", rows=32, min=1):
            batch.add(reward=[float(tokens[-1] % 2) for tokens in batch["tokens"]])
            rows += len(batch)
    return rows


@ray.remote(num_cpus=0)
class Trainer:
    def step(self) -> int:
        rows = 0
        with dataplane.connect() as plane:
            for batch in partition(plane).stream("train", groups=4, min=1):
                for group in batch.groups():
                    scores = np.array(group["reward"])
                    advantages = (scores - scores.mean()) / (scores.std() + 1e-6)
                    rows += len(advantages)
        return rows


def main() -> None:
    ray.init(log_to_driver=False)
    with dataplane.integrations.ray.start() as peers:
        rollouts = [Rollout.remote() for _ in range(2)]
        halves = [list(range(n, GROUPS, 2)) for n in range(2)]
        written = [one.generate.remote(half) for one, half in zip(rollouts, halves, strict=True)]
        scored, trained = reward.remote(), Trainer.remote().step.remote()
        refs = sum(ray.get(written), [])
        print(f"{peers}: {len(refs)} groups, {ray.get(scored)} rows scored,", end=" ")
        print(f"{ray.get(trained)} trained")
    ray.shutdown()


if __name__ == "__main__":
    main()
