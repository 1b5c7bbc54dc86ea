"""What a job did, step by step, derived from the events of a plane while it runs. No I/O. A step's
record has the size of its groups, when each was put, and how long each stage worked on it. It has
no values, keys or names of groups, workers and hosts. A step is a partition. A step with missing
events is left out and named, never completed by a guess.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable
from statistics import median

import msgspec

from dataplane.errors import counted
from dataplane.events.follow import NewEvents
from dataplane.events.merge import Event
from dataplane.latest import Latest
from dataplane.timeline.spent import Hindrances, Spent, busy, carved, hindered
from dataplane.wire.events import Kind, Reason
from dataplane.wire.tables import Name

MAX_GROUPS = 65_536
"""Groups of unfinished steps in memory. Beyond this, the oldest step ends."""
MAX_WAITS = 65_536
"""The latest pulls and waits for space in memory."""
MAX_WORKERS = 65_536
"""Workers whose last work the recorder remembers, the latest."""
MAX_OVER = 100
"""The latest finished steps. The recorder ignores late events of these."""
MAX_LEFT_OUT = 100
"""Left-out steps that are named. Further ones are only counted."""
_DONE = (Reason.ACK, Reason.DROP)

_OF_SHARD = (Kind.PUT, Kind.READY, Kind.LEASE_BEGIN, Kind.LEASE_END, Kind.SEAL, Kind.DROP)
"""Kinds of events that only the peer with the partition's shard records."""

_Key = tuple[str, int]
"""A partition and its generation."""


class RecordedGroup(msgspec.Struct, frozen=True):
    """A group of a step; without groups, the rows of one put.

    put_s: when the put that completed it was called, in seconds after the step began. host: the
    number of the host that last put rows of it. stage_s: how long each stage worked on it, in
    seconds, without calls of the plane, waits and pulls. trained: the last stage has acked all its
    rows.
    """

    rows: int
    nbytes: int
    put_s: float
    host: int
    trained: bool
    stage_s: dict[str, float]


class RecordedStep(msgspec.Struct, frozen=True):
    """A finished step. Times are seconds after the first recorded step began.

    - `number`: counts all steps, left-out ones too.
    - `began`: its first claim or put. `first_put`, `last_put`. `first_lease`: of any stage.
      `ended`: when its last stage last acked or dropped rows.
    - `pause_s`: how long a worker of the last stage neither worked nor waited for rows before it
    first claimed from this step: the median over these workers. -1: unknown.
    - `workers`: how many workers each stage had; the ranks of a plan are one. `hosts`: how many
      hosts had workers.
    - `claims`: how many groups a lease of each stage had, (at least, at most). The least leaves out
      the last lease of each worker, which may have had to take fewer.
    - `stages`: in the order in which they began; the last one is `last_stage`.
    """

    number: int
    partition: str
    began: float
    first_put: float
    last_put: float
    first_lease: float
    ended: float
    pause_s: float
    hosts: int
    workers: dict[str, int]
    claims: dict[str, tuple[int, int]]
    stages: list[str]
    last_stage: str
    groups: list[RecordedGroup]


class _OpenGroup:
    __slots__ = (
        *("acked", "at", "dropped", "host", "nbytes", "put_rows", "ready", "stage_s", "worker"),
    )

    def __init__(self) -> None:
        self.put_rows = self.nbytes = self.dropped = 0
        self.at = -math.inf
        self.host = self.worker = ""
        self.ready: dict[str, int] = {}
        self.acked: dict[str, int] = {}
        self.stage_s: dict[str, float] = {}


class _Work:
    __slots__ = ("host", "rows", "spans", "stage", "worker")

    def __init__(self, event: Event) -> None:
        self.stage, self.worker, self.host = event.stage, event.worker, event.host
        self.spans: list[Spent] = []
        """times in which its worker had it and no other lease of the stage"""
        self.rows: dict[Name, int] = {}
        """finished rows, by group"""


class _OpenStep:
    def __init__(self, number: int, name: str) -> None:
        self.number, self.name = number, name
        self.began, self.first_put, self.last_put = math.inf, math.inf, -math.inf
        self.first_lease = math.inf
        self.ended = dict[str, float]()
        """when each stage last acked or dropped rows under a lease"""
        self.groups: dict[Name, _OpenGroup] = {}
        self.loose: list[_OpenGroup] = []
        """puts of rows without a group; `groups[""]` has the state of all these rows"""
        self.leases: dict[int, _Work] = {}
        self.stages: dict[str, None] = {}
        self.adders: set[str] = set()
        self.holders = defaultdict[str, set[str]](set)
        """workers of a stage that leased rows; "" for the plan of several ranks"""
        self.claimed = defaultdict[str, dict[str, float]](dict)
        """when each worker of a stage first asked for rows"""
        self.before: dict[tuple[str, str], float] = {}
        """by stage and worker, when it last worked on other steps or waited for their rows"""
        self.sealed = self.dropped = False
        self.peer = ""
        """the peer that has its shard"""
        self.before_peer: dict[str, float] = {}
        """by former peer of the shard, when another peer had taken the shard over"""
        self.wrong = ""

    @property
    def last_stage(self) -> str:
        """The stage whose fields no other stage needs. If there are several, the one that ended
        last."""
        last = [one for one in self.ended if one not in self.adders] or list(self.ended)
        return max(last, key=lambda one: self.ended[one], default="")

    @property
    def size(self) -> int:
        return len(self.groups) + len(self.loose)

    @property
    def loose_rows(self) -> int:
        return sum(one.put_rows for one in self.loose)

    @property
    def is_over(self) -> bool:
        return self.dropped or (self.sealed and self.is_acked)

    @property
    def is_acked(self) -> bool:
        """Return whether every row that became ready for a stage was acked there, or dropped."""
        return bool(self.ended) and all(
            group.acked.get(stage, 0) + group.dropped >= rows
            for group in self.groups.values()
            for stage, rows in group.ready.items()
        )


class Recorder:
    """Takes events and returns finished steps. `lost` counts the events that were overwritten
    before the recorder got them. `left_out` names the steps with missing events, and why.
    """

    def __init__(self) -> None:
        self.lost = 0
        self.left_out: list[str] = []
        self.more_left_out = 0
        self._steps: dict[_Key, _OpenStep] = {}
        self._over = Latest[_Key, None](MAX_OVER)
        """the latest finished steps, whose late events are ignored"""
        self._number = 0
        self._origin: float | None = None
        self._heard: dict[str, float] = {}
        """when the last event of each peer happened"""
        self._suspect: dict[str, str] = {}
        """peers whose next step may have begun in a gap of events, and the gap"""
        self._hosts: dict[str, int] = {}
        self._worked = Latest[tuple[str, str], float](MAX_WORKERS)
        """when a worker last worked, by stage and worker"""
        self._asked = Latest[tuple[str, str], float](MAX_WORKERS)
        """when a worker last worked or waited for rows, by stage and worker"""
        self._waits = deque[Event](maxlen=MAX_WAITS)
        self.latest = -math.inf
        """when the last event of a step happened"""

    @property
    def begun(self) -> int:
        """The number of steps seen, unfinished ones too."""
        return self._number

    def take(self, look: NewEvents) -> list[RecordedStep]:
        """Add the events of a follower's look. Return the steps that are now finished."""
        for event in look.events:
            if event.kind is Kind.MISSING:
                self._missing(event)
                continue
            self._heard[event.peer] = event.at
            if event.partition:
                self.latest = max(self.latest, event.at)
                self._note(event)
            elif event.kind in (Kind.PULL, Kind.ROOM_WAIT):
                self._waits.append(event)
        found = [
            self._ended(key, one)
            for key, one in list(self._steps.items())
            if one.is_over and max(one.ended.values(), default=-math.inf) < look.until
        ]
        while sum(one.size for one in self._steps.values()) > MAX_GROUPS:
            key, one = next(iter(self._steps.items()))
            if not one.is_acked:
                one.wrong = one.wrong or f"over {MAX_GROUPS:,} groups were not done"
            found.append(self._ended(key, one))
        return [one for one in found if one is not None]

    def finish(self) -> list[RecordedStep]:
        """End the recording. Unsealed steps whose rows are all acked count as finished; others are
        left out."""
        found = []
        for key, one in list(self._steps.items()):
            if not one.is_acked:
                one.wrong = one.wrong or "it had not ended"
            found.append(self._ended(key, one))
        return [one for one in found if one is not None]

    # events

    def _missing(self, gap: Event) -> None:
        """Mark the steps that may lack events. If a peer overwrote events, these are all steps that
        have begun, and the step of the peer's next event. If a peer restarted, these are the steps
        whose shard it had."""
        restarted = gap.reason is Reason.RESTARTED
        why = f"peer {gap.peer} restarted"
        if not restarted:
            many = counted(gap.rows, "event was", "events were")
            why = f"{many} overwritten at peer {gap.peer}"
            self._suspect[gap.peer] = why
            self.lost += gap.rows if gap.peer in self._heard else 0
        for one in self._steps.values():
            had_shard = gap.peer == one.peer or gap.peer in one.before_peer
            if had_shard if restarted else not one.is_over:
                one.wrong = one.wrong or why

    def _step(self, event: Event) -> _OpenStep | None:
        key = event.partition, event.generation
        if key in self._over:
            return None
        if key not in self._steps:
            self._steps[key] = _OpenStep(self._number, event.partition)
            self._number += 1
        return self._steps[key]

    def _note(self, event: Event) -> None:
        step = self._step(event)
        if step is None:
            return
        if why := self._suspect.pop(event.peer, ""):
            step.wrong = step.wrong or why
        if event.kind in _OF_SHARD:
            if step.peer not in ("", event.peer):
                step.before_peer[step.peer] = event.at + event.uncertain
            step.peer = event.peer
        match event.kind:
            case Kind.PUT:
                self._put(step, event)
            case Kind.READY:
                group = self._group(step, event)
                group.ready[event.stage] = group.ready.get(event.stage, 0) + event.rows
                step.stages.setdefault(event.stage)
                if event.by:
                    step.adders.add(event.by)
            case Kind.CLAIM_WAIT:
                step.began = min(step.began, event.began)
                self._claimed(step, event, event.began)
                self._asked[event.stage, event.worker] = event.at
            case Kind.LEASE_BEGIN:
                self._claimed(step, event, event.at)
                if event.rows:
                    step.holders[event.stage].add(event.worker)
                step.first_lease = min(step.first_lease, event.at)
                if event.lease not in step.leases:
                    step.leases[event.lease] = _Work(event)
            case Kind.LEASE_END:
                self._left(step, event)
            case Kind.SEAL:
                step.sealed = True
            case Kind.DROP if event.group != "":
                self._group(step, event).dropped += event.rows
            case Kind.DROP if event.nbytes or not event.rows or "" not in step.groups:
                step.dropped = True
            case Kind.DROP:
                self._group(step, event).dropped += event.rows
            case Kind.LOST:
                step.wrong = step.wrong or "rows were lost with a peer"

    def _group(self, step: _OpenStep, event: Event) -> _OpenGroup:
        group = step.groups.get(event.group)
        if group is None:
            group = step.groups[event.group] = _OpenGroup()
        return group

    def _put(self, step: _OpenStep, event: Event) -> None:
        step.began = min(step.began, event.at)
        step.first_put = min(step.first_put, event.at)
        step.last_put = max(step.last_put, event.at)
        if event.host:
            self._hosts.setdefault(event.host, len(self._hosts))
        group = self._group(step, event)
        if event.group == "":
            group.put_rows += event.rows
            group = _OpenGroup()
            step.loose.append(group)
        group.put_rows += event.rows
        group.nbytes += event.nbytes
        called = event.at - event.client_s
        group.at, group.host, group.worker = called, event.host, event.worker

    def _claimed(self, step: _OpenStep, event: Event, at: float) -> None:
        """Note that a stage's worker claims from the step. Its first claim ends its earlier
        work."""
        step.stages.setdefault(event.stage)
        if event.host:
            self._hosts.setdefault(event.host, len(self._hosts))
        if event.worker:
            claimed, who = step.claimed[event.stage], (event.stage, event.worker)
            if event.worker not in claimed and who in self._asked:
                step.before[who] = self._asked[who]
            claimed[event.worker] = min(at, claimed.get(event.worker, at))

    def _left(self, step: _OpenStep, event: Event) -> None:
        who = event.stage, event.worker
        got = event.at - event.client_s if event.client_s else event.began
        began = max(event.began, got, self._worked.get(who, -math.inf))
        self._worked[who] = self._asked[who] = event.at
        lease = step.leases.setdefault(event.lease, _Work(event))
        if event.at > began:
            of = lease.stage, lease.worker, lease.host
            lease.spans.append(Spent(began, event.at, "work", *of))
        if event.reason not in _DONE:
            return
        step.ended[event.stage] = max(event.at, step.ended.get(event.stage, event.at))
        if not event.rows:
            return
        lease.rows[event.group] = lease.rows.get(event.group, 0) + event.rows
        group = self._group(step, event)
        if event.reason is Reason.DROP:  # for all stages
            group.dropped += event.rows
        else:
            group.acked[event.stage] = group.acked.get(event.stage, 0) + event.rows

    # finished steps

    def _ended(self, key: _Key, one: _OpenStep) -> RecordedStep | None:
        del self._steps[key]
        self._over[key] = None
        if not one.wrong and one.first_put == math.inf:
            one.wrong = "no rows were put"
        acked = any(group.acked for group in one.groups.values())
        if not one.wrong and (not acked or one.first_lease == math.inf):
            one.wrong = "no stage acked any of its rows"
        if not one.wrong and any(
            (group.acked or group.dropped) and not group.put_rows for group in one.groups.values()
        ):
            one.wrong = "it began before the recorded events"
        for peer, until in one.before_peer.items():
            if self._heard[peer] <= until:
                why = (
                    f"peer {peer} served its shard, but sent no events after peer {one.peer} took "
                    "over"
                )
                one.wrong = one.wrong or why
        if one.wrong:
            self._leave_out(f"{one.name}: {one.wrong}")
            return None
        if self._origin is None:
            self._origin = one.began
        waits, last = Hindrances(self._waits), one.last_stage
        self._share_out(one, waits)
        groups = [self._made(one, group, waits) for name, group in one.groups.items() if name != ""]
        groups += [self._made(one, group, waits, one.groups[""]) for group in one.loose]
        groups.sort(key=lambda group: group.put_s)
        pauses = [
            max(0.0, at - one.before[last, worker])
            for worker, at in one.claimed[last].items()
            if (last, worker) in one.before
        ]
        return RecordedStep(
            one.number,
            one.name,
            one.began - self._origin,
            one.first_put - self._origin,
            one.last_put - self._origin,
            one.first_lease - self._origin,
            one.ended[last] - self._origin,
            median(pauses) if pauses else -1.0,
            max(1, len(self._hosts)),
            {stage: len(workers) for stage, workers in one.holders.items()},
            _claims(one),
            list(one.stages),
            last,
            groups,
        )

    def _leave_out(self, why: str) -> None:
        if len(self.left_out) < MAX_LEFT_OUT:
            self.left_out.append(why)
        else:
            self.more_left_out += 1

    def _share_out(self, step: _OpenStep, waits: Hindrances) -> None:
        """Divide each lease's time among its groups, in proportion to their rows."""
        for lease in step.leases.values():
            rows = sum(lease.rows.values())
            seconds = sum(_worked_s(busy(waits, work)) for work in lease.spans)
            for name, many in lease.rows.items():
                spent = step.groups[name].stage_s
                spent[lease.stage] = spent.get(lease.stage, 0.0) + seconds * many / rows

    def _made(
        self,
        step: _OpenStep,
        group: _OpenGroup,
        waits: Hindrances,
        pool: _OpenGroup | None = None,
    ) -> RecordedGroup:
        """`pool`: the state of all rows without a group, which include these."""
        rows, of = (group.put_rows, pool) if pool else (_rows(group), group)
        share = rows / max(1, pool.put_rows) if pool else 1.0
        made = Spent(step.began, group.at, "put", worker=group.worker)
        return RecordedGroup(
            rows,
            group.nbytes,
            _worked_s(carved(made, hindered(waits, made))),
            self._hosts.get(group.host, 0),
            of.acked.get(step.last_stage, 0) >= (of.put_rows if pool else rows),
            {stage: seconds * share for stage, seconds in of.stage_s.items()},
        )


def _claims(step: _OpenStep) -> dict[str, tuple[int, int]]:
    """The number of groups in the leases of each stage, as (least, most)."""
    of = defaultdict[str, dict[str, list[int]]](lambda: defaultdict(list))
    for lease in step.leases.values():
        if lease.rows:
            # Rows without a group count as the number of their puts.
            loose = lease.rows.get("", 0) * len(step.loose) / max(1, step.loose_rows)
            many = len(lease.rows.keys() - {""}) + round(loose)
            of[lease.stage][lease.worker].append(max(1, many))
    found = dict[str, tuple[int, int]]()
    for stage, workers in of.items():
        every = [many for mine in workers.values() for many in mine]
        found[stage] = min([m for mine in workers.values() for m in mine[:-1]] or every), max(every)
    return found


def _worked_s(spent: Iterable[Spent]) -> float:
    return sum(one.seconds for one in spent if one.what in ("work", "put"))


def _rows(group: _OpenGroup) -> int:
    """The number of rows of a group. `put_rows` counts a row again when a put adds fields to it."""
    return max(group.ready.values(), default=0) or group.put_rows
