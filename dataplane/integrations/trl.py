"""TRL's `GRPOTrainer` with rollouts made elsewhere: its `rollout_func`, over a plane (docs/trl.md).

    rollouts = Rollouts(plane)
    GRPOTrainer(..., rollout_func=rollouts)                 # in every rank
    for batch in Rollouts(plane).requests(rows=8):          # in every rollout worker
        batch.add(**generate(batch["prompt"]))

A rank's prompts are rows, rollout workers a stage that adds to them, the rank the stage that gets
them back. trl is not imported here.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import dataplane

__all__ = ["Rollouts"]

PROMPT, REQUEST, VERSION, EVAL = "prompt", "request", "version", "eval"
RESULT = ("prompt_ids", "completion_ids", "logprobs")
"""What trl requires of a rollout function: lists of token ids, and of their log-probabilities."""


class Rollouts:
    """Requests for completions and the completions, of one training run. The same arguments in
    ranks and workers.

    fields: what workers add beside `prompt_ids`, `completion_ids` and `logprobs`, and trl forwards
    to reward functions (or, `env_mask`, uses itself). stages: further ones that make some of it,
    such as {"score": ["completion_ids"]}. timeout: seconds that a rank waits for all of a
    request's completions; None for as long as it takes, saying in the log what is missing.
    """

    def __init__(
        self,
        plane: dataplane.Plane,
        *,
        fields: Sequence[str] = (),
        stages: Mapping[str, Sequence[str]] | None = None,
        name: str = "rollouts",
        timeout: float | None = None,
    ) -> None:
        self._fields = [*RESULT, *fields]
        self._timeout = timeout
        self.partition = plane.partition(
            name, stages={"rollout": [PROMPT], **(stages or {}), "train": self._fields}
        )

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """trl's `rollout_func`: one completion for each prompt, in order. A prompt that is to have
        several is in the list as often.

        Rows have the tags `version`, the trainer's step, and `eval`, so that a worker knows whose
        weights are wanted, and how to sample.
        """
        request = uuid.uuid4().hex
        keys = [f"{request}-{place}" for place in range(len(prompts))]
        tags = {
            REQUEST: request,
            VERSION: int(trainer.state.global_step),
            EVAL: not trainer.model.training,
        }
        self.partition.put(
            {PROMPT: [dataplane.object(one) for one in prompts]}, key=keys, tags=tags
        )
        batch = self.partition.claim(
            "train",
            rows=len(keys),
            where=dataplane.tag(REQUEST) == request,
            timeout=self._timeout,
        )
        with batch:
            places = {key: place for place, key in enumerate(batch.keys)}
            order = [places[key] for key in keys]
            columns = {name: batch[name] for name in self._fields}
            return {
                name: [_plain(column[place]) for place in order] for name, column in columns.items()
            }

    def requests(
        self, rows: int, *, where: dataplane.Where | None = None, timeout: float | None = None
    ) -> dataplane.Stream:
        """For a rollout worker: batches of at most so many prompts, `batch["prompt"]`, until
        training ends. `batch.add(prompt_ids=…, completion_ids=…, logprobs=…)` answers. A worker
        that dies gives its prompts back to the others."""
        return self.partition.stream("rollout", rows=rows, min=1, where=where, timeout=timeout)

    def end(self) -> None:
        """No more requests: the workers' loops end."""
        self.partition.seal()


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value
