"""The first stage: rollout workers make groups and put them, whole or as they grow."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from bench.columns import Field, opening_fields, rollout_fields
from bench.events import emit
from bench.media import Source
from bench.planes.base import Array, Cancelled
from bench.schedule import Piece, schedule
from bench.traces import Prompt
from bench.work import Work, digests


def rollout(work: Work) -> Iterator[None]:
    """Every host's worker makes the groups of its share of the prompts.

    A step starts when the trainers are at most `staleness` steps behind it.
    """
    job = work.job
    mine = [p for p in job.generate() if p.index % job.hosts == work.worker.rank]
    fields = {field.name for field in rollout_fields(job.task, job.columns)}
    media = {name: size for name, size in _largest_media(mine).items() if name in fields}
    source = Source(job.seed, media)
    steps = [
        schedule(job, [p for p in mine if p.step == step], work.pieces) for step in range(job.steps)
    ]
    yield
    for step, pieces in enumerate(steps):
        with work.clock.timing("policy"):
            work.orders.wait_for_policy(step - job.staleness)
        work.pace.restart()
        emit("rolling", step=step, at=time.monotonic())
        writer = _Writer(work, step, source)
        for piece in pieces:
            with work.clock.timing("rollout"):
                work.pace.until(piece.at)
            writer.put(piece)
        with work.clock.timing("finish"):
            work.endpoint.finish(step)
        emit("rolled", step=step)


class _Writer:
    """Puts the pieces of one step."""

    def __init__(self, work: Work, step: int, source: Source) -> None:
        self._work = work
        self._step = step
        self._source = source
        self._fields = rollout_fields(work.job.task, work.job.columns)
        self._opening = opening_fields(work.job.task, work.job.columns)
        self._finished = tuple(f for f in self._fields if f not in self._opening)
        self._cancelled: set[int] = set()

    def put(self, piece: Piece) -> None:
        match piece.kind:
            case "group":
                self._whole(piece.prompt)
            case "open":
                self._part(piece, self._opening)
            case "grow" | "row":
                self._late(piece)
            case "abort":
                self._abort(piece)

    def _whole(self, prompt: Prompt) -> None:
        with self._work.clock.timing("generate"):
            columns = {field.name: self._source.column(field, prompt) for field in self._fields}
        told = self._digests(columns)
        with self._work.clock.timing("put"):
            self._work.endpoint.put(self._step, prompt.index, columns)
        self._produced(prompt, range(len(prompt.samples)), told)

    def _part(self, piece: Piece, fields: Sequence[Field]) -> None:
        prompt, samples = piece.prompt, piece.samples
        with self._work.clock.timing("generate"):
            columns = {field.name: self._values(field, piece) for field in fields}
        told = self._digests(columns)
        with self._work.clock.timing("put"):
            self._work.endpoint.put_rows(self._step, prompt.index, samples, columns)
        self._produced(prompt, samples, told)

    def _values(self, field: Field, piece: Piece) -> list[Array]:
        if field.shared:
            return [self._source.value(field, piece.prompt, 0)] * len(piece.samples)
        values = [self._source.value(field, piece.prompt, sample) for sample in piece.samples]
        if piece.kind == "grow":  # as far as the first turn came, its tool's answer included
            turns = (piece.prompt.samples[sample].turns[0] for sample in piece.samples)
            lengths = [turn.tokens + turn.tool_tokens for turn in turns]
            values = [value[:length] for value, length in zip(values, lengths, strict=True)]
        return values

    def _late(self, piece: Piece) -> None:
        """Rows of a group that is there: somebody may have dropped it meanwhile."""
        index = piece.prompt.index
        if index in self._cancelled:
            return  # whoever was told has stopped
        growing = [field for field in self._finished if field.name == "responses"]
        try:
            self._part(piece, growing if piece.kind == "grow" else self._finished)
        except Cancelled:
            self._cancelled.add(index)
            emit("aborted", prompt=index)

    def _abort(self, piece: Piece) -> None:
        """Somebody else decides it, so that the plane alone can tell this worker."""
        index = piece.prompt.index
        if self._work.pieces:
            emit("cancel", step=self._step, prompt=index)
            self._work.orders.wait_for_cancelled(index)
        else:  # nothing of it was put
            emit("aborted", prompt=index)

    def _digests(self, columns: dict[str, list[Array]]) -> dict[str, list[int]]:
        with self._work.clock.timing("digest"):
            return {name: digests(values) for name, values in columns.items()}

    def _produced(self, prompt: Prompt, samples: Sequence[int], told: dict[str, list[int]]) -> None:
        emit("produced", rows=[(prompt.index, sample) for sample in samples], digests=told)


def _largest_media(prompts: Sequence[Prompt]) -> dict[str, int]:
    """Bytes of the largest media of a prompt, by field."""
    pixels = (sum(m.pixel_bytes for m in prompt.media) for prompt in prompts)
    frames = (sum(m.frame_bytes for m in prompt.media) for prompt in prompts)
    return {"pixel_values": max(pixels, default=0), "raw_frames": max(frames, default=0)}
