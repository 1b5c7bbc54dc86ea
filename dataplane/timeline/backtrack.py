"""Find out what the last stage of a step spent its idle time on.

For each interval in which a worker of that stage waited, the search goes back to the input that
arrived last, and to the worker that made it. It continues with what that worker waited for, until
it finds a worker that was busy. Time that the events do not explain is reported as unknown.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import cached_property
from itertools import pairwise

from dataplane.events.merge import Event
from dataplane.timeline.spent import Spent, What, admitted, busy, carved, hindered
from dataplane.timeline.step import LeaseSpan, Step
from dataplane.wire.events import Kind, Reason

UNACKED = 5.0
"""A lease counts as forgotten if it lasts this many times longer than any other of its stage."""
FEW = 3
"""A step with fewer ended leases than this is compared with the other steps."""
QUIET = 3.0
"""A producer counts as finished after a silence this many times as long as its longest pause."""
LEAST_S = 1.0
"""UNACKED and QUIET apply only after this many seconds."""
MAX_WALK = 10_000


class Backtrack:
    def __init__(self, step: Step) -> None:
        self.step = step

    def idle(self) -> tuple[list[Spent], int]:
        """Return what the idle time of the last stage's workers was spent on, and how many workers
        there are."""
        step, spent = self.step, list[Spent]()
        workers = {one.worker for one in step.leases if one.stage == step.last}
        for wait in step.waits:
            if wait.stage != step.last:
                continue
            begin, end = max(wait.began, step.begin), min(wait.at, step.end)
            lease = self._lease_at(step.last, wait.worker, end)
            if end <= begin or (lease is None and self._was_the_last(wait, begin, end)):
                continue
            workers.add(wait.worker)
            if wait.going_on:
                spent += self._going_on(wait, begin, end)
            elif lease is not None:
                spent += self._before(lease, begin, end)
            else:
                spent.append(Spent(begin, end))
        if not workers and step.ready:
            since = min(e.at for e in step.ready if e.stage == step.last)
            missed = self._unclaimed(step.last, since, step.end)
            return self._with_rest(missed, step.begin) or [Spent(step.begin, step.end)], 1
        for lease in step.leases:
            if lease.stage == step.last:
                done = busy(step.hindrances, under(lease, lease.began, min(lease.ended, step.end)))
                spent += [one for one in done if one.what in ("pull", "room", "stall")]
                spent += self._unanswered(lease)
        return spent, len(workers)

    def _was_the_last(self, wait: Event, begin: float, end: float) -> bool:
        """Return whether a claim waited for rows after the stage had received its last ones."""
        step = self.step
        return not wait.going_on and step.finished and not step.arrived(step.last, begin, end)

    def _unanswered(self, lease: LeaseSpan) -> list[Spent]:
        """Return the time between a lease and the worker's next one in which a stalled peer delayed
        an answer: that of the ack, or of another call that returned as the stall ended."""
        begins = self._begins[lease.worker]
        following = bisect_right(begins, max(lease.began, lease.ended - self.step.near_s))
        if lease.is_open or following == len(begins):
            return []
        rest = Spent(lease.ended, begins[following], host=lease.host)
        done = carved(rest, hindered(self.step.hindrances, rest))
        return [
            one
            for one in done
            if one.what == "stall"
            and (one.begin == rest.begin or rest.end - one.end < self.step.near_s)
        ]

    @cached_property
    def _begins(self) -> dict[str, list[float]]:
        """By worker of the last stage: when its leases and waits began, in order."""
        found = defaultdict[str, list[float]](list)
        begun = [(one.stage, one.worker, one.began) for one in self.step.leases]
        begun += [(wait.stage, wait.worker, wait.began) for wait in self.step.waits]
        for stage, worker, began in begun:
            if stage == self.step.last:
                found[worker].append(began)
        return {worker: sorted(begins) for worker, begins in found.items()}

    # back from a wait

    def _lease_at(self, stage: str, worker: str, at: float) -> LeaseSpan | None:
        """Return the lease that ended a wait of this worker at this time."""
        found = [
            one
            for one in self.step.by_worker[stage, worker]
            if abs(one.began - at) < self.step.near_s
        ]
        return min(found, key=lambda one: abs(one.began - at), default=None)

    def _before(self, lease: LeaseSpan, begin: float, end: float) -> list[Spent]:
        """Return how [begin, end] was spent. At its end, a waiting worker got this lease."""
        step, spent = self.step, list[Spent]()
        if lease.plan and (late := self._sealed_late(lease, begin, end)) is not None:
            spent, end = [late], late.begin
        for _ in range(MAX_WALK):
            source = self._input(lease, end)
            if source is None or source.at <= begin:
                return [*spent, Spent(begin, end)]
            if end - source.at > step.near_s:
                gap = Spent(source.at, end, host=lease.host)
                missed = self._unclaimed(lease.stage, source.at, end)
                spent += carved(gap, [*hindered(step.hindrances, gap), *missed])
            end = source.at
            if source.kind is Kind.LEASE_END:  # its holder released the rows
                held = max(begin, source.began)
                spent.append(Spent(held, end, "held", source.stage, source.worker, source.host))
                return spent + ([Spent(begin, held)] if held > begin else [])
            if not source.by:
                work = Spent(begin, end, "put", worker=source.worker, host=source.host)
                return spent + produced(step, work)
            maker = self._maker(source)
            if maker is None:
                return [*spent, Spent(begin, end)]
            more, end, lease = self._made(maker, begin, end)
            spent += more
            if end <= begin:
                return spent
        return spent

    def _sealed_late(self, lease: LeaseSpan, begin: float, end: float) -> Spent | None:
        """Return the time in which a plan waited for the seal and for nothing else."""
        source = self._input(lease, end)
        if source is None or not self.step.seals:
            return None
        since, sealed = max(begin, source.at), min(end, self.step.seals[0].at)
        return Spent(since, end, "seal", lease.stage) if sealed > since else None

    def _input(self, lease: LeaseSpan, end: float) -> Event | None:
        """Return the last event that made rows of a lease ready: a write, or the return by another
        lease."""
        step = self.step
        until = min(end, lease.began) + step.near_s
        came = [e for group in lease.groups for e in step.came[lease.stage, group] if e.at <= until]
        return max(came, key=lambda e: e.at, default=None)

    def _maker(self, ready: Event) -> LeaseSpan | None:
        """Return the lease under which a stage added the field that arrived last."""
        found = [
            one
            for one in self.step.by_worker[ready.by, ready.worker]
            if ready.group in one.groups and one.began <= ready.at
        ]
        return max(found, key=lambda one: one.began, default=None)

    def _made(
        self, lease: LeaseSpan, begin: float, end: float
    ) -> tuple[list[Spent], float, LeaseSpan]:
        """Return (spent, since when, lease): what a stage's worker did, back to `begin` or to
        the end of its last wait, and the lease that ended this wait."""
        step, spent, queued = self.step, list[Spent](), False
        for _ in range(MAX_WALK):
            since = max(begin, lease.began)
            spent += busy(step.hindrances, under(lease, since, end, queued))
            if lease.began <= begin or self._waited(lease):
                return spent, since, lease
            before = [
                one
                for one in step.by_worker[lease.stage, lease.worker]
                if one.began < lease.began and one.ended <= lease.began + step.near_s
            ]
            source = self._input(lease, lease.began)
            if not before or source is None or lease.began - source.at < step.near_s:
                return spent, since, lease
            queued, previous = True, max(before, key=lambda one: one.ended)
            end = since
            if previous.ended < since:  # the worker also works between two leases
                end = max(begin, previous.ended)
                spent.append(under(lease, end, since, queued=True))
            lease = previous
            if end <= begin:
                return spent, begin, lease
        return spent, end, lease

    def _waited(self, lease: LeaseSpan) -> bool:
        """Return whether the worker waited for this lease."""
        return any(
            wait.stage == lease.stage
            and wait.worker == lease.worker
            and not wait.going_on
            and abs(wait.at - lease.began) < self.step.near_s
            for wait in self.step.waits
        )

    # a wait that has not ended

    def _going_on(self, wait: Event, begin: float, end: float) -> list[Spent]:
        """Return the cause of a wait that has not ended, if it is known."""
        if wait.reason is Reason.FILTER:
            return [Spent(begin, end, "filter", wait.stage, wait.worker)]
        for e in self.step.other:
            if e.going_on and e.kind in (Kind.ROOM_WAIT, Kind.ADMIT_WAIT):
                if e.kind is Kind.ADMIT_WAIT and e.partition != self.step.partition:
                    continue
                what: What = "room" if e.kind is Kind.ROOM_WAIT else "admit"
                one = Spent(max(begin, e.began), end, what, worker=e.worker, host=e.peer, by=e.by)
                return _after(one, begin)
        forgotten = [one for one in self.step.leases if self._is_forgotten(one, wait)]
        if forgotten:
            lease = min(forgotten, key=lambda one: one.began)
            of = lease.stage, lease.worker, lease.host
            return _after(Spent(max(begin, lease.began), end, "held", *of), begin)
        if self._nothing_comes(wait):
            since = max(begin, max(put.at for put in self.step.puts))
            return _after(Spent(since, end, "seal", wait.stage), begin)
        if missed := self._idle_ready_rows(wait, begin, end):
            return self._with_rest(missed, begin)
        at_work = [one for one in self.step.leases if one.is_open and one.stage != wait.stage]
        if at_work:
            lease = min(at_work, key=lambda one: one.began)
            more, since, _ = self._made(lease, begin, end)
            return [*more, *([Spent(begin, since)] if since > begin else [])]
        if self._is_putting() and wait.reason not in (Reason.BEHIND, Reason.LEASED):
            return [Spent(begin, end, "unput")]
        return [Spent(begin, end)]

    def _is_forgotten(self, lease: LeaseSpan, wait: Event) -> bool:
        """Return whether an open lease has lasted far longer than any that ended."""
        if not lease.is_open or (lease.stage, lease.worker) == (wait.stage, wait.worker):
            return False
        others = self._ended(self.step.leases, lease.stage)
        if len(others) < FEW:
            others = self._ended(self.step.all_leases, lease.stage)
        if not others:
            return False
        longest_s = max(one.seconds / max(1, one.rows) for one in others) * max(1, lease.rows)
        return lease.seconds > max(LEAST_S, UNACKED * longest_s)

    @staticmethod
    def _ended(leases: Iterable[LeaseSpan], stage: str) -> list[LeaseSpan]:
        return [one for one in leases if one.stage == stage and not one.is_open]

    def _nothing_comes(self, wait: Event) -> bool:
        """Return whether no more rows will come: every group that was put is ready, the
        producers have been silent for long, and the partition is not sealed."""
        step = self.step
        if step.seals or not step.puts or any(one.is_open for one in step.leases):
            return False
        is_for_more = wait.reason in (Reason.NO_ROWS, Reason.TOO_FEW, Reason.PLAN)
        is_for_rest = wait.reason in (Reason.OPEN_GROUP, Reason.FIELD) and step.open_groups
        if not is_for_more and not is_for_rest:
            return False
        if len(step.puts) < 2 or self._is_putting():
            return False
        ready = {e.group for e in step.ready if e.stage == wait.stage}
        return {put.group for put in step.puts} - step.open_groups.keys() - step.gone <= ready

    def _is_putting(self) -> bool:
        """Return whether more rows may come: the partition is not sealed, and its producers have
        not been silent for long."""
        step = self.step
        if step.seals or not step.puts:
            return False
        times = sorted(put.at for put in step.puts)
        pause_s = max([b - a for a, b in pairwise(times)], default=0.0)
        return step.now - times[-1] < max(LEAST_S, QUIET * pause_s)

    # rows that no stage claims

    def _idle_ready_rows(self, wait: Event, begin: float, end: float) -> list[Spent]:
        """Return when rows were ready for a stage that comes before the waiting one, and none of
        its workers claimed or held rows."""
        step, rows = self.step, Counter[str]()
        for e in step.events:
            if e.group in step.gone:
                continue
            if e.kind is Kind.READY:
                rows[e.stage] += e.rows
            elif e.kind is Kind.LEASE_END and e.reason in (Reason.ACK, Reason.DROP):
                rows[e.stage] -= e.rows
        for stage in {e.stage: None for e in step.ready if e.stage != wait.stage}:
            missed = self._unclaimed(stage, max(begin, step.first_ready(stage)), end)
            if rows[stage] > 0 and missed and missed[-1].end >= end - step.near_s:
                return missed
        return []

    def _unclaimed(self, stage: str, begin: float, end: float) -> list[Spent]:
        """Return the times in [begin, end] in which no worker of the stage claimed or held rows of
        the step, except for moments."""
        step = self.step
        if end - begin <= LEAST_S:
            return []
        mine = [Spent(one.began, one.ended, "work") for one in step.leases if one.stage == stage]
        mine += [Spent(w.began, w.at, "work") for w in step.waits if w.stage == stage]
        others = [
            Spent(one.began, one.ended, "other", stage)
            for one in step.all_leases
            if one.stage == stage and one.partition != step.partition
        ]
        gaps = [
            one for one in carved(Spent(begin, end, "absent", stage), mine) if one.what != "work"
        ]
        found = [part for gap in gaps for part in carved(gap, others)]
        return [one for one in found if one.what == "other" or one.seconds > LEAST_S]

    @staticmethod
    def _with_rest(known: list[Spent], begin: float) -> list[Spent]:
        """Return the known parts, with unknown parts between `begin` and the first, and in the
        gaps."""
        if not known:
            return []
        return carved(Spent(begin, max(one.end for one in known)), known)


def under(lease: LeaseSpan, begin: float, end: float, queued: bool = False) -> Spent:
    """Return [begin, end] as work under this lease."""
    return Spent(begin, end, "work", lease.stage, lease.worker, lease.host, queued=queued)


def produced(step: Step, work: Spent) -> list[Spent]:
    """Return how a producer spent the time of `work`: it waited for `admit` or for space, or it
    worked."""
    waited = admitted(step.hindrances, work, step.partition)
    return carved(work, [*waited, *hindered(step.hindrances, work)])


def _after(one: Spent, begin: float) -> list[Spent]:
    """Return `one`, after an unknown part from `begin` until it starts."""
    return [*([Spent(begin, one.begin)] if one.begin > begin else []), one]
