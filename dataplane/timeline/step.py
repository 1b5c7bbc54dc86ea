"""One step, as the events of a plane show it: puts, leases, waits and transfers, with their times.

A step is a partition. It ends with the last ack of its last stage. This module only collects; it
draws no conclusions.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import cached_property

import msgspec

from dataplane.events.merge import Event
from dataplane.timeline.spent import HINDRANCES, Hindrances
from dataplane.wire.events import Kind, Reason
from dataplane.wire.tables import Name

NEAR_S = 0.05
"""Events of one call are at most this many seconds apart. The uncertainty of the peers' clocks
comes on top."""


def _latest(events: Sequence[Event], partition: str) -> int:
    """Return the generation that began last. The clocks of several hosts make the numbers, so a
    later generation may have a lower number."""
    began: dict[int, float] = {}
    for e in events:
        if e.partition == partition:
            began[e.generation] = min(e.began, began.get(e.generation, e.began))
    return max(began, key=began.__getitem__, default=0)


class LeaseSpan(msgspec.Struct, eq=False):
    """Rows that a worker had from `began` to `ended`, or still has if the lease `is_open`.
    `plan`: the lease is a rank's part of a plan. It has the groups of the whole plan and an even
    share of its rows."""

    stage: str
    worker: str
    host: str
    began: float
    ended: float
    rows: int = 0
    left: int = 0
    reason: Reason = Reason.NONE
    groups: set[Name] = set()
    is_open: bool = True
    plan: bool = False
    partition: str = ""
    gone: int = 0
    """at most this many of the remaining rows were dropped by other clients, or lost"""

    @property
    def seconds(self) -> float:
        return self.ended - self.began


class Step:
    def __init__(
        self, events: Sequence[Event], partition: str, now: float = 0.0, generation: int = 0
    ) -> None:
        """`events`: all events of the plane, as `merged` returns them. `now`: when the events were
        requested, on the same clock; default: the time of the last one. `generation`: of the
        partition; 0: the latest."""
        self.partition = partition
        self.everything = events
        generation = self.generation = generation or _latest(events, partition)
        self.events = [e for e in events if e.partition == partition and e.generation == generation]
        dropped = any(is_whole_drop(e) for e in self.events)
        latest = max((e.at for e in events if e.kind is not Kind.MISSING), default=0.0)
        self.now = latest if dropped else max(now, latest)
        self.near_s = NEAR_S + max((e.uncertain for e in events), default=0.0)
        self.puts = self._of(Kind.PUT)
        self.ready = self._of(Kind.READY)
        self.waits = self._of(Kind.CLAIM_WAIT)
        self.seals = self._of(Kind.SEAL)
        self.losses = self._of(Kind.LOST)
        self.served_by = self.puts[-1].peer if self.puts else ""
        """the peer that has the partition's metadata"""
        self.leases = leases(self.events, self.now)
        self.by_worker = defaultdict[tuple[str, str], list[LeaseSpan]](list)
        """by stage and worker"""
        for one in self.leases:
            self.by_worker[one.stage, one.worker].append(one)
        self.other = [e for e in events if e.kind in HINDRANCES]
        """pulls, stalls, and waits for space and for `admit`"""
        backups = [e for e in events if e.kind is Kind.BACKUP and e.peer == self.served_by]
        self.hindrances = Hindrances(self.other, self.served_by, backups)
        self.came = defaultdict[tuple[str, Name], list[Event]](list)
        """by stage and group: events in which rows became ready or were returned by a lease"""
        for e in self.events:
            given_back = e.kind is Kind.LEASE_END and e.reason not in (Reason.ACK, Reason.DROP)
            if e.kind is Kind.READY or given_back:
                self.came[e.stage, e.group].append(e)
        self.last = self._last_stage()
        mine = [one for one in self.leases if one.stage == self.last]
        waits = [wait for wait in self.waits if wait.stage == self.last]
        self.finished = bool(mine) and not (
            any(wait.going_on for wait in waits) or any(one.is_open for one in self.leases)
        )
        self.begin = min([e.began for e in (*waits, *self.puts)], default=self.now)
        self.end = max(one.ended for one in mine) if self.finished else self.now

    def _of(self, kind: Kind) -> list[Event]:
        return [event for event in self.events if event.kind is kind]

    def _last_stage(self) -> str:
        """Return the stage whose fields no other stage needs. If there are several, return the
        one that is busy last."""
        adders = {e.by for e in self.everything if e.kind is Kind.READY}
        lacks = {w.stage for w in self.waits if w.going_on and w.reason is Reason.FIELD}
        latest = dict[str, float]()
        for stage, at in [
            *((one.stage, one.ended) for one in self.leases),
            *((wait.stage, wait.at) for wait in self.waits),
        ]:
            latest[stage] = max(at, latest.get(stage, 0.0))
        last = [stage for stage in latest if stage not in adders]
        if not last:  # a later stage got rows, and no client has claimed from it
            last = [e.stage for e in self.ready if e.stage not in adders] or list(latest)
            latest |= {stage: latest.get(stage, 0.0) for stage in last}
        begun = Counter({one.stage: one.began for one in self.leases})
        return max(last, key=lambda s: (s in lacks, latest[s], begun[s]), default="")

    def first_ready(self, stage: str) -> float:
        """Return when the first rows became ready for a stage."""
        return min([e.at for e in self.ready if e.stage == stage], default=self.end)

    @cached_property
    def gone(self) -> set[Name]:
        """The groups whose rows were all dropped or lost and not put again."""
        came, gone = defaultdict[Name, Counter[str]](Counter), set[Name]()
        for e in self.events:
            if e.group == "":
                continue
            if e.kind in (Kind.PUT, Kind.READY):
                came[e.group][e.stage] += e.rows
                gone.discard(e.group)
            elif e.kind in (Kind.DROP, Kind.LOST) or e.reason is Reason.DROP:
                rows = came[e.group]
                rows.subtract(dict.fromkeys(rows, e.rows))
                if e.kind is Kind.LOST or max(rows.values(), default=0) <= 0:
                    gone.add(e.group)
                    del came[e.group]
        return gone

    @cached_property
    def open_groups(self) -> dict[Name, int]:
        """The rows of each group of which no stage got any and that has fewer than others."""
        taken = {e.group for e in self.events if e.kind is Kind.LEASE_BEGIN} | {""}
        ready = {e.group for e in self.ready}
        came, found = Counter[tuple[str, Name]](), dict[Name, int]()
        for e in (*self.puts, *self.ready):
            if e.stage or e.group not in ready:  # a put of further fields counts rows again
                came[e.stage, e.group] += e.rows
        for (_, group), rows in came.items():
            found[group] = max(rows, found.get(group, 0))
        most, taken = max(found.values(), default=0), taken | self.gone
        return {group: n for group, n in found.items() if n < most and group not in taken}

    @cached_property
    def all_leases(self) -> list[LeaseSpan]:
        """The leases of all steps."""
        return leases(self.everything, self.now)

    def overlaps(self, event: Event) -> bool:
        """Return whether an event overlaps the step."""
        return event.at > self.begin and event.began < self.end

    def arrived(self, stage: str, begin: float, end: float) -> bool:
        """Return whether rows became ready for a stage in this time."""
        return any(r.stage == stage and begin < r.at <= end for r in self.ready)

    @cached_property
    def versions(self) -> list[tuple[float, int]]:
        """When the trainer's version was seen to increase, and to what: by `advance`, or by a put
        under the new version."""
        found = list[tuple[float, int]]()
        for e in self.events:
            known = e.kind in (Kind.ADVANCE, Kind.PUT)
            if known and e.version > (found[-1][1] if found else 0):
                found.append((e.at, e.version))
        return found

    @cached_property
    def lags(self) -> list[tuple[float, int]]:
        """When the last stage acked each group for good, and by how many versions the trainer had
        advanced since the group started. Empty if no version is known."""
        begun, acked = dict[Name, int](), dict[Name, float]()
        for e in self.events:
            if e.group == "":
                continue
            if e.kind is Kind.PUT:
                begun.setdefault(e.group, e.version)
            elif e.kind is Kind.LEASE_END and e.stage == self.last and e.reason is Reason.ACK:
                acked[e.group] = e.at
        if not self.versions:
            return []
        times, found = [at for at, _ in self.versions], list[tuple[float, int]]()
        for group, at in sorted(acked.items(), key=lambda one: one[1]):
            if group in begun:
                nth = bisect_right(times, at)
                trained = self.versions[nth - 1][1] if nth else 0
                found.append((at, max(0, trained - begun[group])))
        return found

    def staleness(self) -> dict[int, int] | None:
        """Return how many groups the last stage acked, by the number of versions between their
        start and that ack. None if no version is known."""
        if not self.versions:
            return None
        return dict(sorted(Counter(lag for _, lag in self.lags).items()))

    def missing(self) -> list[str]:
        """Return the peers that did not answer, whose events begin after the step did, or with
        which rows of the step were lost."""
        first = min([self.begin, *(e.began for e in self.events)])
        return sorted(
            {
                e.peer
                for e in self.everything
                if e.kind is Kind.MISSING
                and (e.reason is Reason.SILENT or e.at > first - self.near_s)
            }
            | {e.by for e in self.losses}
        )


def is_whole_drop(event: Event) -> bool:
    """Return whether the whole partition was dropped."""
    return event.kind is Kind.DROP and event.group == "" and bool(event.nbytes or not event.rows)


def leases(events: Iterable[Event], now: float, partly: bool = False) -> list[LeaseSpan]:
    """Return the leases whose begin is among these events. partly: also leases without their begin,
    whose later events say how long they have lasted."""
    found = dict[tuple[str, int, str, int], LeaseSpan]()
    of_group = defaultdict[tuple[str, int, Name], list[LeaseSpan]](list)
    for e in events:
        key = e.stage, e.lease, e.partition, e.generation
        begins = e.kind is Kind.LEASE_BEGIN and not e.going_on
        if begins or (partly and e.kind in (Kind.LEASE_BEGIN, Kind.LEASE_END)):
            lease = LeaseSpan(e.stage, e.worker, e.host, e.began, now, groups=set())
            lease.partition = e.partition
            lease = found.setdefault(key, lease)
        if begins:
            lease.groups.add(e.group)
            of_group[e.partition, e.generation, e.group].append(lease)
            lease.rows += e.rows
            lease.left += e.rows
        elif e.kind is Kind.LEASE_END and key in found:
            lease = found[key]
            lease.left -= e.rows
            lease.reason = e.reason
            if lease.left <= lease.gone:
                lease.ended, lease.is_open = e.at, False
        elif is_whole_drop(e):
            for (_, _, *of), lease in found.items():
                if lease.is_open and of == [e.partition, e.generation]:
                    lease.ended, lease.is_open, lease.reason = e.at, False, Reason.DROP
        elif e.kind in (Kind.DROP, Kind.LOST):
            group = e.partition, e.generation, e.group
            of_group[group] = [lease for lease in of_group[group] if lease.is_open]
            for lease in of_group[group]:
                lease.gone += e.rows
    return _of_plans(list(found.values()))


def _of_plans(found: Sequence[LeaseSpan]) -> list[LeaseSpan]:
    """Replace each plan's lease, which no worker holds, by the leases of its ranks."""
    ranks = [one for one in found if not one.rows]
    plans = list[LeaseSpan]()
    for plan in [one for one in found if one.rows and not one.worker]:
        mine = [
            one
            for one in ranks
            if one.stage == plan.stage and plan.began <= one.began <= plan.ended
        ]
        for one in mine:
            one.groups, one.rows, one.plan = plan.groups, max(1, plan.rows // len(mine)), True
            one.left = one.rows if one.is_open else 0
        if mine:
            plans.append(plan)
    return [one for one in found if one not in plans]
