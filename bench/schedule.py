"""When a rollout worker has what to put, in recorded seconds after the step's start.

Pure: from a trace to a list in order of time. All rows of a worker are written at once, as an
engine with continuous batching does, so the worker puts each when it is finished.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from bench.planes.base import Job
from bench.traces import Prompt

Kind = Literal["group", "open", "grow", "row", "abort"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Something to put: a whole group; or its opening, a first turn, a finished row, its abort."""

    at: float
    prompt: Prompt
    kind: Kind
    samples: tuple[int, ...] = ()


def in_pieces(job: Job, takes_pieces: bool) -> bool:
    """Whether groups of this run grow row by row: sessions do, and what may be cancelled."""
    sessions = any(len(sample.turns) > 1 for prompt in job.generate() for sample in prompt.samples)
    return takes_pieces and (sessions or job.abort > 0)


def schedule(job: Job, prompts: Sequence[Prompt], takes_pieces: bool) -> list[Piece]:
    """The pieces of these prompts in order of time."""
    pieces: list[Piece] = []
    growing = in_pieces(job, takes_pieces)
    for prompt in prompts:
        aborts = job.fate(prompt) == "aborted"
        if growing:
            pieces += _growing(prompt, aborts)
        elif aborts:
            pieces.append(Piece(_ends(prompt)[0], prompt, "abort"))
        else:
            pieces.append(Piece(_ends(prompt)[-1], prompt, "group"))
    return sorted(pieces, key=lambda piece: piece.at)  # stable: a group's own order stays


def _ends(prompt: Prompt) -> list[float]:
    return sorted(sample.rollout_seconds for sample in prompt.samples)


def _growing(prompt: Prompt, aborts: bool) -> Iterator[Piece]:
    """The opening with the prompt's media, first turns as far as they are, rows as they finish.

    A group that is cancelled is so at its first finished row: the others come too late.
    """
    everyone = tuple(range(len(prompt.samples)))
    yield Piece(0.0, prompt, "open", everyone)
    for number, sample in enumerate(prompt.samples):
        if len(sample.turns) > 1:
            first = sample.turns[0]
            yield Piece(first.seconds + first.tool_seconds, prompt, "grow", (number,))
    by_end = sorted(everyone, key=lambda number: prompt.samples[number].rollout_seconds)
    for place, number in enumerate(by_end):
        yield Piece(prompt.samples[number].rollout_seconds, prompt, "row", (number,))
        if aborts and place == 0:
            yield Piece(prompt.samples[number].rollout_seconds, prompt, "abort", everyone)
