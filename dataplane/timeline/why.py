"""Explain in one sentence why a step took as long as it did, from its events alone."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate

import msgspec

from dataplane.errors import counted, duration, nearest
from dataplane.events.merge import Event
from dataplane.timeline.backtrack import Backtrack
from dataplane.timeline.causes import NAMED_SHARE, Cause, Links, Share, shares, slow_at_the_end
from dataplane.timeline.step import Step
from dataplane.timeline.waits import PRODUCER, waits
from dataplane.wire.events import Kind

OF_ROWS = {Kind.PUT, Kind.READY, Kind.LEASE_BEGIN, Kind.LOST}
"""Not only puts, because their events may be lost with the peer that served the partition."""
IDLE_SHARE = 0.1
"""A stage that is idle for less than this share of the step is the bottleneck of the step."""
MAX_LINKS = 64
"""How many pairs of hosts have figures of their own."""


class Why(msgspec.Struct, frozen=True):
    """What the events say about one step.

    - `stage`: its last stage.
    - `shares`: the causes. Causes that are wrong and explain much of the idle time are first, then
    the others, each sorted by size.
    - `finished`: the step is over.
    - `missing`: peers whose events are missing.
    - `lost`: how many of its rows were lost, by the peer that had them.
    - `slow_end`: the first of the shares is a slow worker of the last stage itself.
    """

    partition: str
    seconds: float
    stage: str
    idle_s: float
    finished: bool
    shares: tuple[Share, ...] = ()
    missing: tuple[str, ...] = ()
    slow_end: bool = False
    lost: dict[str, int] = {}

    @property
    def cause(self) -> Cause:
        return self.shares[0].cause if self.shares else Cause.UNKNOWN

    @property
    def sentence(self) -> str:
        took = "took" if self.finished else "has taken"
        was = "was" if self.finished else "has been"
        said, found = f"{self.partition} {took} {duration(self.seconds)}", self.shares
        if self.slow_end:
            said += f", {duration(found[0].seconds)} of it {found[0].text}"
            found = found[1:]
        if not self.stage:
            return f"{said}; no stage has claimed any of its rows{self._incomplete}"
        if found and found[0].cause is Cause.LAST_STAGE:
            busy = 1 - self.idle_s / self.seconds if self.seconds else 1.0
            said += f"; {self.stage} {was} busy {busy:.0%} of it"
            bound = "" if self.slow_end else f", so {self.stage} itself bounds the step"
            return f"{said}{bound}{self._incomplete}"
        said += f"; {self.stage} {was} idle {duration(self.idle_s)} of it"
        for share in found[:2]:
            if share is found[0] or share.seconds >= NAMED_SHARE * self.idle_s:
                said += f", {duration(share.seconds)} {share.text}"
        return said + self._incomplete

    @property
    def _incomplete(self) -> str:
        said = "".join(
            f"; {counted(many, 'row was', 'rows were')} lost with peer {peer}"
            for peer, many in self.lost.items()
        )
        if not self.missing:
            return said
        return f"{said} (events of {', '.join(self.missing)} are missing, so this may be wrong)"


def steps(events: Iterable[Event]) -> list[str]:
    """Return the partitions that got rows, in the order of the first event of rows."""
    return list(dict.fromkeys(e.partition for e in events if e.kind in OF_ROWS))


def explain(step: Step) -> Why:
    """Return why this step took as long as it did."""
    seconds = max(0.0, step.end - step.begin)
    spent, workers = Backtrack(step).idle()
    idle_s = sum(one.seconds for one in spent) / max(1, workers)
    has_worked = any(one.stage == step.last for one in step.leases)
    if has_worked and idle_s < IDLE_SHARE * seconds:
        found = [Share(Cause.LAST_STAGE, seconds - idle_s, f"because {step.last} was busy")]
    else:
        found = shares(step, spent, max(1, workers))
    slow = slow_at_the_end(step)
    if slow is not None and slow.seconds < max(idle_s, NAMED_SHARE * seconds):
        slow = None
    found = [*([slow] if slow else []), *found]
    of = step.partition, seconds, step.last, idle_s, step.finished
    lost = Counter[str]()
    for e in step.losses:
        lost[e.by] += e.rows
    return Why(*of, tuple(found), tuple(step.missing()), slow is not None, dict(lost))


def figures(events: Sequence[Event], partition: str) -> dict[str, float | str]:
    """Return the explanation as figures for `plane.metrics()`, with the bytes that hosts pulled
    from each other and how long workers of each stage waited, by reason. Percentiles of staleness
    are there if versions are known."""
    step = Step(events, partition)
    if not step.events:
        near = nearest(partition, steps(events))
        hint = f": did you mean {near!r}?" if near else ""
        return {"step/why": f"no peer has an event of step {partition!r}{hint}"}
    why = explain(step)
    found: dict[str, float | str] = {
        "step/why": why.sentence,
        "step/seconds": why.seconds,
        "step/idle_s": why.idle_s,
        "step/idle_share": why.idle_s / why.seconds if why.seconds else 0.0,
    }
    if stale := step.staleness():
        counts = list(accumulate(stale.values()))
        for percent in (50, 90, 99):
            at = bisect_left(counts, counts[-1] * percent / 100)
            found[f"step/staleness_p{percent}"] = float(list(stale)[at])
    return found | _waited(step) | _moved(step)


def _waited(step: Step) -> dict[str, float]:
    """Return how long workers of the step's stages, and producers, waited while it lasted."""
    stages = {e.stage for e in step.events} - {""}
    found = dict[str, float]()
    during = [e for e in step.everything if step.overlaps(e)]
    for (stage, reason), seconds in waits(during, step.begin, step.end).items():
        if stage == PRODUCER:
            found[f"step/put/wait_s/{reason}"] = seconds
        elif stage in stages:
            found[f"step/stage/{stage}/wait_s/{reason}"] = seconds
    return found


def _moved(step: Step) -> dict[str, float]:
    """Return the bytes of each pair of hosts, and of all pairs but the largest together."""
    found, links = defaultdict[str, float](float), Links(step)
    for nth, link in enumerate(sorted(links.nbytes, key=lambda one: -links.nbytes[one])):
        name = "/".join(link) if nth < MAX_LINKS else "other"
        found[f"step/link/{name}/bytes"] += links.nbytes[link]
        if nth < MAX_LINKS:
            found[f"step/link/{name}/bytes_per_s"] = links.per_s[link]
    return dict(found)
