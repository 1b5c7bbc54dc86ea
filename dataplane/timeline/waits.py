"""How long workers waited during a step, by reason, for the page and for loggers.

Work for other steps counts too: a worker that waits while the step lasts is idle.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from dataplane.events.merge import Event
from dataplane.wire.events import Kind, Reason

PRODUCER = ""
"""The stage of workers that put rows of new groups."""


def stages_of(events: Iterable[Event]) -> dict[str, str]:
    """Return the stage that each worker leases rows for."""
    return {e.worker: e.stage for e in events if e.kind is Kind.LEASE_BEGIN and e.worker}


def waiting_stage(wait: Event, stage_of: dict[str, str]) -> str:
    """Return the stage of the worker that waited. `stage_of`: as `stages_of` returns it."""
    if wait.kind is Kind.ROOM_WAIT and wait.reason not in (Reason.OPEN, Reason.METADATA):
        return wait.stage or stage_of.get(wait.worker, PRODUCER)
    return wait.stage if wait.kind is Kind.CLAIM_WAIT else PRODUCER


def waits(events: Iterable[Event], begin: float, end: float) -> dict[tuple[str, str], float]:
    """Return how many seconds of [begin, end] workers waited, by stage and reason, summed over
    workers. Reasons of waits for space begin with `room_`."""
    events = list(events)
    stage_of, sums = stages_of(events), defaultdict[tuple[str, str], float](float)
    for e in events:
        if e.kind in (Kind.CLAIM_WAIT, Kind.ROOM_WAIT, Kind.ADMIT_WAIT):
            reason = f"room_{e.reason}" if e.kind is Kind.ROOM_WAIT else str(e.reason) or "unknown"
            seconds = min(e.at, end) - max(e.began, begin)
            if seconds > 0:
                sums[waiting_stage(e, stage_of), reason] += seconds
    return sums
