"""The figures shown of one step, computed from events alone: who worked, and who waited for what.
No I/O.

Lanes and waits cover everything that happened while the step lasted, including work for other
steps: a worker that is busy with the next step is busy. Flow, groups and staleness cover the step's
own rows. Every list has a limit, so the picture of 64 hosts has about 50 KB.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np

from dataplane.events.merge import Event
from dataplane.timeline.causes import HEALTHY, Cause, Links, compared, rates
from dataplane.timeline.step import LeaseSpan, Step, is_whole_drop, leases
from dataplane.timeline.waits import PRODUCER, stages_of, waiting_stage, waits
from dataplane.timeline.why import explain
from dataplane.wire.events import Kind, Reason
from dataplane.wire.tables import Name

BINS = 96
"""The number of cells of a lane."""
STATES = "wrfams"
"""The letters of a cell: working, waiting for rows, waiting for space (full), waiting for
`admit`, moving bytes, stalled (a peer without processor time). A space means that nothing is
known."""
MAX_LANES = 512
MAX_LINKS = 16
MAX_SLOW = 8
MAX_WAITS = 96
MAX_STAGES = 12
MAX_LETTERS = 96
"""letters shown of a name that a user chose"""


class Lane(msgspec.Struct, frozen=True):
    """What the workers of a stage did on one host, over the time of the step."""

    stage: str
    host: str
    cells: str


class StageWait(msgspec.Struct, frozen=True):
    """Seconds that workers of a stage waited for one reason, summed over workers."""

    stage: str
    reason: str
    seconds: float


class Dwell(msgspec.Struct, frozen=True):
    """How long rows stayed in a state, as percentiles in seconds, and how many rows have left
    it."""

    rows: int = 0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0


class Flow(msgspec.Struct, frozen=True):
    """Rows of a stage: ready for it, leased by it, acked. `queue`: time from ready to leased.
    `lease`: time from leased to acked."""

    stage: str
    ready: int
    leased: int
    acked: int
    queue: Dwell
    lease: Dwell


class Link(msgspec.Struct, frozen=True):
    """Bytes that one host pulled from another. `share`: speed as a share of the fastest known
    pull of any link. It is 0 if no pull was large enough to measure."""

    source: str
    target: str
    nbytes: int
    per_s: float
    ratio: float


class Late(msgspec.Struct, frozen=True):
    """A group that ended late. Times are seconds after the step began; -1: not yet."""

    group: str
    put: float
    ready: float
    acked: float


class Pace(msgspec.Struct, frozen=True):
    """Rows a second of a stage's work at a host, and in terms of the median of the others."""

    stage: str
    host: str
    per_s: float
    ratio: float


class Picture(msgspec.Struct, frozen=True):
    """The figures of one step.

    - `begun`: groups that have rows. `unready`: groups of these that are not complete.
    - `staleness`: how many groups were acked, by the number of versions after their first put. None
      if no version is known.
    - `left_out`: how many lanes and links are not listed.
    """

    partition: str
    sentence: str
    cause: Cause
    healthy: bool
    finished: bool
    seconds: float
    idle_s: float
    lanes: list[Lane]
    waits: list[StageWait]
    begun: int
    unready: int
    complete: Dwell
    flow: list[Flow]
    links: list[Link]
    late: list[Late]
    paces: list[Pace]
    staleness: dict[int, int] | None
    left_out: dict[str, int]


class _Span(msgspec.Struct, frozen=True):
    stage: str
    host: str
    state: str
    begin: float
    end: float


def short(name: Name) -> str:
    """Cut a name that a user chose to the length that is shown."""
    text = str(name)
    return text if len(text) <= MAX_LETTERS else text[: MAX_LETTERS - 1] + "…"


def picture(
    events: Sequence[Event], partition: str, now: float = 0.0, generation: int = 0
) -> Picture:
    """Return the picture of this step. `events`: all events of the plane, the earliest first.
    `now`: when they were asked for. `generation`: of the partition; 0: the latest."""
    step = Step(events, partition, now, generation)
    why = explain(step)
    mine, begin, end = step.events, step.begin, max(step.begin, step.end)
    during = [e for e in events if e.at > begin and e.began < end]
    worked = leases(during, step.now, partly=True)
    spans = list(_spans(during, worked, begin))
    lanes = _lanes(spans, begin, end)
    sums = waits(during, begin, end)
    waited = [StageWait(short(stage), reason, seconds) for (stage, reason), seconds in sums.items()]
    waited.sort(key=lambda one: -one.seconds)
    links = Links(step)
    groups = _Groups(step)
    return Picture(
        short(partition),
        why.sentence,
        why.cause,
        why.cause in HEALTHY,
        why.finished,
        why.seconds,
        why.idle_s,
        lanes[:MAX_LANES],
        waited[:MAX_WAITS],
        len(groups.put),
        groups.unready,
        groups.complete,
        _flow(mine),
        _links(links),
        groups.late(begin),
        _paces(step),
        step.staleness(),
        {"lanes": max(0, len(lanes) - MAX_LANES), "links": max(0, len(links.nbytes) - MAX_LINKS)},
    )


def _spans(events: Sequence[Event], worked: Iterable[LeaseSpan], begin: float) -> Iterator[_Span]:
    """Return what each worker did and when."""
    stage_of = stages_of(events)
    for lease in worked:
        if lease.host:  # the ranks of a plan have their own leases
            yield _Span(lease.stage, lease.host, "w", lease.began, lease.ended)
    before = dict[str, float]()
    for e in events:
        if e.kind is Kind.CLAIM_WAIT:
            yield _Span(e.stage, e.host, "r", e.began, e.at)
        elif e.kind is Kind.ROOM_WAIT:
            yield _Span(waiting_stage(e, stage_of), e.host or e.peer, "f", e.began, e.at)
        elif e.kind is Kind.ADMIT_WAIT:
            yield _Span(PRODUCER, e.host, "a", e.began, e.at)
        elif e.kind is Kind.PULL:
            yield _Span(e.stage, e.peer, "m", e.began, e.at)
        elif e.kind is Kind.STALL:
            for stage in {PRODUCER, *stage_of.values()}:
                yield _Span(stage, e.peer, "s", e.began, e.at)
        elif e.kind is Kind.PUT:
            yield _Span(PRODUCER, e.host, "w", before.get(e.worker, begin), e.at)
            before[e.worker] = e.at


def _lanes(spans: Iterable[_Span], begin: float, end: float) -> list[Lane]:
    """Return one lane for each stage and host. Stages are in the order in which they work."""
    cell_s = max(end - begin, 1e-9) / BINS
    times = dict[tuple[str, str], np.ndarray[tuple[int, int], np.dtype[np.float64]]]()
    first = dict[str, float]()
    for span in spans:
        if span.state == "s" and (span.stage, span.host) not in times:
            continue
        a, b = max(span.begin, begin) - begin, min(span.end, end) - begin
        if b <= a:
            continue
        cells = times.setdefault((span.stage, span.host), np.zeros((len(STATES), BINS)))
        row = cells[STATES.index(span.state)]
        low, high = min(BINS - 1, int(a / cell_s)), min(BINS - 1, int(b / cell_s))
        row[low : high + 1] += cell_s
        row[low] -= a - low * cell_s
        row[high] -= max(0.0, (high + 1) * cell_s - b)
        if span.state == "w":
            first[span.stage] = min(a, first.get(span.stage, a))
    # A pull or a wait for space is a part of a lease. If it is as long as the lease, it is shown.
    order = [STATES.index(state) for state in "sfamrw"]
    found = []
    for (stage, host), cells in times.items():
        stalled = cells[STATES.index("s")] > cell_s / 2
        most = np.array(order)[cells[order].argmax(axis=0)]
        most[stalled] = STATES.index("s")
        known = cells.max(axis=0) > 0.02 * cell_s
        letters = (
            STATES[kind] if is_known else " " for kind, is_known in zip(most, known, strict=True)
        )
        found.append(Lane(short(stage), short(host), "".join(letters)))
    rank = {short(stage): (stage != PRODUCER, at) for stage, at in first.items()}
    return sorted(found, key=lambda one: (rank.get(one.stage, (True, end)), one.stage, one.host))


def _dwell(times: list[tuple[float, int]]) -> Dwell:
    """Return the percentiles of `times`: pairs of seconds and the number of rows that took them."""
    rows = sum(many for _, many in times)
    if not rows:
        return Dwell()
    times.sort()
    sums, so_far = [], 0
    for _, many in times:
        so_far += many
        sums.append(so_far)
    p50, p90, p99 = (times[bisect_left(sums, share * rows)][0] for share in (0.5, 0.9, 0.99))
    return Dwell(rows, p50, p90, p99)


class _Queue:
    """Rows of one stage that are ready or leased. Rows of a group leave in the order in which they
    arrived."""

    def __init__(self) -> None:
        self.ready = defaultdict[Name, deque[list[float]]](deque)
        self.leased, self.acked = Counter[Name](), 0
        self.queued, self.held = list[tuple[float, int]](), list[tuple[float, int]]()

    def came(self, group: Name, at: float, rows: int) -> None:
        self.ready[group].append([at, rows])

    def begins(self, group: Name, at: float, rows: int) -> None:
        line = self.ready[group]
        self.leased[group] += rows
        while rows and line:
            many = min(rows, int(line[0][1]))
            self.queued.append((max(0.0, at - line[0][0]), many))
            line[0][1] -= many
            rows -= many
            if not line[0][1]:
                line.popleft()

    def ends(self, event: Event) -> None:
        self.leased[event.group] -= min(self.leased[event.group], event.rows)
        if event.reason is Reason.ACK:
            self.acked += event.rows
            self.held.append((event.seconds, event.rows))
        elif event.reason is not Reason.DROP:
            self.came(event.group, event.at, event.rows)

    def gone(self, group: Name, rows: int) -> None:
        """Rows were dropped or lost: those that are ready first, then those that are leased."""
        line = self.ready[group]
        while rows and line:
            many = min(rows, int(line[0][1]))
            line[0][1] -= many
            rows -= many
            if not line[0][1]:
                line.popleft()
        self.leased[group] -= min(self.leased[group], rows)

    def flow(self, stage: str) -> Flow:
        ready = sum(int(rows) for line in self.ready.values() for _, rows in line)
        queued, held = _dwell(self.queued), _dwell(self.held)
        leased = self.leased.total()
        return Flow(short(stage), ready, leased, self.acked, queued, held)


def _flow(events: Iterable[Event]) -> list[Flow]:
    queues = defaultdict[str, _Queue](_Queue)
    # Clocks of peers differ a little: at equal times, ready rows come before leases.
    for e in events:
        if e.kind is Kind.READY:
            queues[e.stage].came(e.group, e.at, e.rows)
        elif e.kind is Kind.LEASE_BEGIN and not e.going_on:
            queues[e.stage].begins(e.group, e.at, e.rows)
        elif e.kind is Kind.LEASE_END:
            queues[e.stage].ends(e)
        elif is_whole_drop(e):
            for queue in queues.values():
                queue.ready.clear()
                queue.leased.clear()
        elif e.kind in (Kind.DROP, Kind.LOST):
            for queue in queues.values():
                queue.gone(e.group, e.rows)
    return [queue.flow(stage) for stage, queue in queues.items()][:MAX_STAGES]


class _Groups:
    """When each group of a step began, when it was complete, when it was ready for the last stage,
    and when it was acked by it."""

    def __init__(self, step: Step) -> None:
        self.put, self.ready = dict[Name, float](), dict[Name, float]()
        self.whole, self.acked = dict[Name, float](), dict[Name, float]()
        self._first = dict[Name, str]()
        for e in step.events:
            if e.group == "":  # a group may be called 0
                continue
            if e.kind is Kind.PUT:
                self.put.setdefault(e.group, e.at)
            elif e.kind is Kind.READY:
                # All stages get all rows of a group. The first stage's last rows complete it.
                if self._first.setdefault(e.group, e.stage) == e.stage:
                    self.whole[e.group] = e.at
                if e.stage == step.last:
                    self.ready[e.group] = e.at
            elif e.kind is Kind.LEASE_END and e.stage == step.last and e.reason is Reason.ACK:
                self.acked[e.group] = e.at
        for group in step.open_groups:
            self.whole.pop(group, None)

    @property
    def unready(self) -> int:
        return len(self.put.keys() - self.whole.keys())

    @property
    def complete(self) -> Dwell:
        """Times from the first put of a group until all of it was ready for some stage."""
        both = self.put.keys() & self.whole.keys()
        return _dwell([(max(0.0, self.whole[one] - self.put[one]), 1) for one in both])

    def late(self, begin: float) -> list[Late]:
        def end(group: Name) -> float:
            return self.acked.get(group, float("inf"))

        def after(times: dict[Name, float], group: Name) -> float:
            return times[group] - begin if group in times else -1.0

        slowest = sorted(self.put, key=lambda one: (end(one), self.put[one]), reverse=True)
        return [
            Late(short(one), *(after(times, one) for times in (self.put, self.ready, self.acked)))
            for one in slowest[:MAX_SLOW]
        ]


def _links(links: Links) -> list[Link]:
    """Return the links with the most bytes."""
    most = sorted(links.nbytes, key=lambda link: -links.nbytes[link])[:MAX_LINKS]
    return [
        Link(
            short(source),
            short(target),
            links.nbytes[source, target],
            links.per_s[source, target],
            links.compared((source, target)) or 0.0,
        )
        for source, target in most
    ]


def _paces(step: Step) -> list[Pace]:
    """Return the slowest hosts of each stage, compared with its other hosts."""
    found = []
    for stage in dict.fromkeys(lease.stage for lease in step.leases):
        hosts = rates(step, (lease for lease in step.leases if lease.stage == stage), "host")
        for host, rate in hosts.items():
            ratio = compared(hosts, host)
            if ratio is not None:
                found.append(Pace(short(stage), short(host), rate, ratio))
    return sorted(found, key=lambda one: one.ratio)[:MAX_SLOW]
