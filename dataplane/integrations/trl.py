"""TRL's `GRPOTrainer` with rollouts from other processes: a `rollout_func` over a plane
(docs/trl.md).

    rollouts = Rollouts(plane)
    GRPOTrainer(..., rollout_func=rollouts)                 # in every rank
    for batch in Rollouts(plane).requests(rows=8):          # in every rollout worker
        batch.add(**generate(batch["prompt"]))

A rank puts its prompts as rows. Rollout workers are a stage that adds completions, and the rank is
the stage that gets them back. This module does not import trl.
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
"""The results that trl requires of a rollout function: lists of token ids, and of their
log-probabilities."""


class Rollouts:
    """The completions that one training run requests. Pass the same arguments in every rank and
    every worker.

    - `fields`: the fields that workers add to `prompt_ids`, `completion_ids` and `logprobs`.
      TRL passes them to reward functions, and uses `env_mask` itself.
    - `stages`: other stages that produce some of the fields, each with the fields that it needs,
      such as {"score": ["completion_ids"]}.
    - `timeout`: how many seconds a rank waits for all completions of a request. If None, a rank
      waits without a limit and logs what is missing.
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
        """TRL's `rollout_func`: return one completion per prompt, in order. A prompt that needs
        several completions occurs several times in the list.

        Each row has the tags `version` (the trainer's step) and `eval`. They tell a worker which
        weights to use and how to sample.
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
        """Return the stream of prompts for a rollout worker. Each batch has at most `rows`
        prompts, in `batch["prompt"]`. The stream ends when training ends. Answer each batch with
        `batch.add(prompt_ids=…, completion_ids=…, logprobs=…)`. If a worker dies, other workers
        get its prompts."""
        return self.partition.stream("rollout", rows=rows, min=1, where=where, timeout=timeout)

    def end(self) -> None:
        """End the streams of prompts, so that the workers' loops finish."""
        self.partition.seal()


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value
