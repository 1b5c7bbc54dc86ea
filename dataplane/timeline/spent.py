"""What a worker spent its time on: it worked, received bytes, waited for space or for `admit`, or a
peer did not run.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Literal

import msgspec

from dataplane.events.merge import Event
from dataplane.wire.events import Kind

HINDRANCES = {Kind.PULL, Kind.ROOM_WAIT, Kind.ADMIT_WAIT, Kind.STALL}

What = Literal[
    "",
    "work",
    "put",
    "pull",
    "room",
    "admit",
    "stall",
    "held",
    "seal",
    "filter",
    "absent",
    "other",
    "unput",
]
"""What time was spent on.

- `work`: a stage worked. `put`: rollout worked.
- `held`: rows were leased, and were returned or never will be.
- `seal`: no more rows came, and the partition was not sealed.
- `absent`: rows were ready for a stage, but none of its workers claimed or held any.
- `other`: its workers held rows of other steps.
- `unput`: all rows that were put were done, and rollout was still putting.
- "": unknown.
"""


class Spent(msgspec.Struct, frozen=True):
    """A stretch of time, and what it was spent on.

    `by`: the peer that sent the bytes, the holder of the arena's space, or the peer that waited
    for its stalled backup. `queued`: other rows waited for that worker in this time.
    """

    begin: float
    end: float
    what: What = ""
    stage: str = ""
    worker: str = ""
    host: str = ""
    by: str = ""
    queued: bool = False

    @property
    def seconds(self) -> float:
        return self.end - self.begin


class Hindrances:
    """Events of the kinds HINDRANCES, by the peer or worker that they hindered. `served_by`: the
    peer that has the partition's metadata; "" if its stalls hinder no worker. `backups`: its events
    of kind BACKUP."""

    def __init__(
        self, events: Iterable[Event], served_by: str = "", backups: Sequence[Event] = ()
    ) -> None:
        self.served_by = served_by
        self.backups = backups
        self._longest_s = 0.0
        self._of = defaultdict[tuple[Kind, str], list[Event]](list)
        for e in sorted(events, key=lambda one: one.at):
            of = e.peer if e.kind in (Kind.PULL, Kind.STALL) else e.worker
            self._of[e.kind, of].append(e)
            self._longest_s = max(self._longest_s, e.seconds)

    def within(self, kind: Kind, of: str, begin: float, end: float) -> list[Event]:
        """Return the events that overlap [begin, end]. `of`: the peer of a pull or stall, or the
        worker of a wait; for "" there are none."""
        known, found = self._of.get((kind, of), []) if of else [], list[Event]()
        for e in islice(known, bisect_right(known, begin, key=lambda one: one.at), None):
            if e.at > end + self._longest_s:
                break
            if e.began < end:
                found.append(e)
        return found


def busy(hindrances: Hindrances, work: Spent) -> list[Spent]:
    """Return how a worker spent the time of `work` under a lease: it received bytes, waited for
    space, or worked."""
    pulled = list[Spent]()
    for e in hindrances.within(Kind.PULL, work.host, work.begin, work.end):
        if e.stage == work.stage:
            pull = Spent(e.began, e.at, "pull", e.stage, host=e.peer, by=e.by)
            stalls = hindrances.within(Kind.STALL, e.by, e.began, e.at)  # the link is not slow
            pulled += carved(pull, [Spent(one.began, one.at, "stall", host=e.by) for one in stalls])
    return carved(work, [*pulled, *hindered(hindrances, work)])


def hindered(hindrances: Hindrances, of: Spent) -> list[Spent]:
    """Return when the worker waited for space, or when the peer of its host, the partition's
    peer or that peer's backup did not run."""
    rooms = hindrances.within(Kind.ROOM_WAIT, of.worker, of.begin, of.end)
    stalls = [
        e
        for peer in {of.host, hindrances.served_by}
        for e in hindrances.within(Kind.STALL, peer, of.begin, of.end)
    ]
    return [
        *(Spent(e.began, e.at, "room", worker=e.worker, host=e.peer, by=e.by) for e in rooms),
        *(Spent(e.began, e.at, "stall", host=e.peer) for e in stalls),
        *_stalls_of_backups(hindrances, of),
    ]


def _stalls_of_backups(hindrances: Hindrances, of: Spent) -> Iterator[Spent]:
    """Return when the partition's peer waited for a backup that did not run."""
    for backup in hindrances.backups:
        begin, end = max(of.begin, backup.began), min(of.end, backup.at)
        for e in hindrances.within(Kind.STALL, backup.by, begin, end):
            stalled = max(begin, e.began), min(end, e.at)
            yield Spent(*stalled, "stall", host=e.peer, by=hindrances.served_by)


def admitted(hindrances: Hindrances, of: Spent, partition: str) -> list[Spent]:
    """Return the waits of this worker for `admit` to the partition that ended before `of` did."""
    return [
        Spent(e.began, e.at, "admit", worker=e.worker)
        for e in hindrances.within(Kind.ADMIT_WAIT, of.worker, of.begin, of.end)
        if e.partition == partition and e.at <= of.end
    ]


def carved(rest: Spent, taken: Iterable[Spent]) -> list[Spent]:
    """Cut `taken` out of `rest`. Return what is left of it and the parts of `taken` inside it,
    without overlap."""
    parts, at = list[Spent](), rest.begin
    for one in sorted(taken, key=lambda one: one.begin):
        begin, end = max(at, one.begin), min(one.end, rest.end)
        if end <= begin:
            continue
        if begin > at:
            parts.append(msgspec.structs.replace(rest, begin=at, end=begin))
        parts.append(msgspec.structs.replace(one, begin=begin, end=end))
        at = end
    if rest.end > at:
        parts.append(msgspec.structs.replace(rest, begin=at))
    return parts
