"""What things cost: processor seconds as sums of a few measured parts, and what a place offers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from bench.columns import ADDED, Field, all_fields, group_bytes, rollout_fields
from bench.planes.base import Job
from bench.traces import Prompt


class Work(msgspec.Struct, frozen=True):
    """What an activity deals with at a time."""

    rows: int = 0
    text_bytes: int = 0
    media_bytes: int = 0

    @property
    def nbytes(self) -> int:
        return self.text_bytes + self.media_bytes

    def __add__(self, other: Work) -> Work:
        return Work(
            self.rows + other.rows,
            self.text_bytes + other.text_bytes,
            self.media_bytes + other.media_bytes,
        )


class Price(msgspec.Struct, frozen=True):
    """Processor seconds: once a time, of a row, of a byte of text and of media."""

    once: float = 0.0
    row: float = 0.0
    text_byte: float = 0.0
    media_byte: float = 0.0

    def of(self, work: Work) -> float:
        return (
            self.once
            + self.row * work.rows
            + self.text_byte * work.text_bytes
            + self.media_byte * work.media_bytes
        )


class Costs(msgspec.Struct, frozen=True):
    """Of one design, in processor seconds. `activities`: by role and activity of its workers.
    Of the peers or the controller: an `operation`, a `crossing` (what a claim that another host
    meets takes of each peer that has a part in it, beside its operations), a byte that is moved, a
    byte of arena that is touched for the first time. `idle`: the share of a core that a service
    takes for nothing, `watch`: the share that the bench takes to watch the run. `delay_s`: nobody's
    processor, of a hand-over; `crossing_delay_s`: of one between hosts, beside that, after the part
    of each peer."""

    activities: dict[str, dict[str, Price]]
    operation: float
    crossing: float
    moved_byte: float
    touched_byte: float
    idle: float
    watch: float
    delay_s: float = 0.0
    crossing_delay_s: float = 0.0
    factor: float = 1.0  # on all processor seconds, for a band

    def of(self, role: str, names: tuple[str, ...], work: Work) -> float:
        """Processor seconds of these activities of a worker, for one batch."""
        prices = self.activities[role]
        return self.factor * sum(prices[name].of(work) for name in names if name in prices)

    def service(self, operations: int, nbytes: float = 0) -> float:
        return self.factor * (operations * self.operation + nbytes * self.moved_byte)

    def crossed(self) -> float:
        """Of one claim between hosts, of one peer that has a part in it."""
        return self.factor * self.crossing


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run happens. One machine: all hosts share `cores` and have no links. A cluster:
    each host has its own cores and link; a service's operations share one core (one loop), its
    copies `copiers` cores."""

    cores: float
    one_machine: bool
    rivals: float = 0.0  # strangers who want a core of one machine all the time
    link_bytes_s: float = 0.0
    round_trip_s: float = 0.0
    copiers: int = 1
    crowd: float = float("inf")  # senders that a link takes at a time without loss
    crowded: float = 1.0  # share of the link that is left of it with more

    def less(self, background: float) -> Place:
        """Without what somebody takes of the cores all the time."""
        return replace(self, cores=max(0.25, self.cores - background))


def written(job: Job, prompt: Prompt) -> Work:
    """What a rollout worker puts of a group."""
    return _work(rollout_fields(job.task, job.columns), prompt, job.dedup)


def read(job: Job, stage: str, prompt: Prompt) -> Work:
    """What a stage is sent of a group."""
    names = set(job.stages()[stage])
    fields = tuple(f for f in all_fields(job.task, job.columns) if f.name in names)
    return _work(fields, prompt, job.dedup)


def added(job: Job, stage: str, prompt: Prompt) -> Work:
    """What a stage adds to a group."""
    return _work(ADDED.get(stage, ()), prompt, job.dedup)


def _work(fields: tuple[Field, ...], prompt: Prompt, dedup: bool) -> Work:
    media = tuple(field for field in fields if field.shared)
    media_bytes = group_bytes(media, prompt, dedup)
    text_bytes = group_bytes(fields, prompt, dedup) - media_bytes
    return Work(len(prompt.samples), text_bytes, media_bytes)
