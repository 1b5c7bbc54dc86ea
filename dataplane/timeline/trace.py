"""Write the events of a plane as a trace in Perfetto's format, for ui.perfetto.dev. No I/O.

Each host is a process. Its threads are: the puts of each worker, the rows that became ready for
each stage, each worker of a stage, the pulls from each other host, the waits for space, and the
peer itself. Needs the package `perfetto`.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise

import msgspec
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import (
    CounterDescriptor,
    Trace,
    TracePacket,
    TrackDescriptor,
    TrackEvent,
)

from dataplane.errors import counted, duration
from dataplane.events.merge import Event
from dataplane.timeline.step import NEAR_S, Step, is_whole_drop
from dataplane.timeline.why import Why, explain
from dataplane.wire.events import Kind, Reason
from dataplane.wire.tables import Name

UNKNOWN_HOST = "unknown host"
"""host of a worker whose peer did not answer"""
SEQUENCE = 1
BOOTTIME, MONOTONIC, REALTIME = 6, 3, 1
"""Perfetto's clock numbers"""
_ORDER = ("put", "ready", "stage", "link", "room", "peer")
"""The kinds of threads in the order shown. Events at the same time are in this order."""
_AT_PEER = {Kind.SEAL, Kind.DROP, Kind.LOST, Kind.ADVANCE, Kind.MISSING}
_QUEUED = {Kind.READY, Kind.LEASE_BEGIN, Kind.LEASE_END, Kind.DROP, Kind.LOST}
_BACK = {Reason.RELEASE, Reason.DIED, Reason.EXPIRED}
"""Reasons with which rows leave a lease and become ready again."""
_SHOWN = (
    *("partition", "stage", "rows", "nbytes", "seconds", "worker", "lease", "field"),
    *("by", "transport", "version", "uncertain"),
)
"""Fields of an event that its slice shows if they are set."""


@dataclass(slots=True)
class _Slice:
    """`end`: None if the slice has not ended. `passing`, `ending`: flows that pass through it,
    or end in it. `inside`: instants, in order."""

    name: str
    category: str
    begin: float
    end: float | None
    about: dict[str, Name | float]
    is_instant: bool = False
    passing: list[int] = field(default_factory=list)
    ending: list[int] = field(default_factory=list)
    inside: list[_Slice] = field(default_factory=list)


@dataclass(slots=True)
class _Lease:
    stage: str
    worker: str
    host: str
    slice: _Slice
    groups: set[Name] = field(default_factory=set)
    ends: defaultdict[Name, list[_Slice]] = field(default_factory=lambda: defaultdict(list))
    """when rows of each group left the lease"""


Threads = defaultdict[tuple[str, str, str], list[_Slice]]
"""(kind, host, name) → what happened there"""
_Group = tuple[str, Name]


def encode(events: Sequence[Event], names: Sequence[str], unix_s: float | None = None) -> bytes:
    """Return the trace of these steps in Perfetto's format.

    `events`: all events of the plane, as `merged` returns them. `names`: names of partitions, each
    in its latest generation. `unix_s`: seconds to add to a time of these events to get Unix time.
    """
    found = [Step(events, name) for name in names]
    steps = [(step, explain(step)) for step in found]
    return _Trace(_chosen(events, found), steps, unix_s).encode()


def _chosen(events: Sequence[Event], steps: Sequence[Step]) -> list[Event]:
    """Return the events of these steps, and those in the same time that belong to no partition."""
    wanted = {(step.partition, step.generation) for step in steps}
    mine = [e for e in events if (e.partition, e.generation) in wanted]
    begin = min((e.began for e in mine), default=0.0)
    end = max((e.at for e in mine), default=0.0)
    meanwhile = list[Event]()
    arenas = dict[str, Event]()
    for e in events:
        if e.kind is Kind.ARENA and e.at < begin:
            arenas[e.peer] = msgspec.structs.replace(e, at=begin)  # valid until the next one
        elif not e.partition and e.at >= begin and (e.began <= end or e.kind is Kind.MISSING):
            meanwhile.append(e)
    return sorted([*arenas.values(), *mine, *meanwhile], key=lambda e: e.at)


class _Trace:
    def __init__(
        self,
        events: Sequence[Event],
        steps: Sequence[tuple[Step, Why]],
        unix_s: float | None,
    ) -> None:
        self.events = events
        self.of = defaultdict[str, list[Event]](list)
        """events by the peer that recorded them"""
        self.steps = steps
        self.plans = {
            (e.partition, e.stage) for e in events if e.kind is Kind.LEASE_BEGIN and not e.rows
        }
        """stages with plans. Only a rank of a plan has a lease without rows"""
        self.queues, self.incomplete = _queues(events)
        self.unix_s = unix_s
        self.zero = min([0.0, *(e.began for e in events)])
        self.threads: Threads = defaultdict(list)
        self.leases = dict[tuple[str, str, int], _Lease]()
        self.puts = defaultdict[_Group, list[tuple[float, _Slice]]](list)
        self.ready = defaultdict[tuple[_Group, str], list[tuple[Event, _Slice]]](list)
        self.numbers = count(1)
        """numbers of tracks and flows. None may be 0"""
        self.trace = Trace()
        self.timed = list[tuple[int, TracePacket]]()

    def encode(self) -> bytes:
        for event in self.events:
            self.of[event.peer].append(event)
            self._enter(event)
        for lease in self.leases.values():
            self._add("stage", lease.host, f"{lease.stage}: {lease.worker}", lease.slice)
        self._fit()
        self._tie()
        self._clocks()
        self._steps()
        self._counters()
        self._hosts()
        for _, packet in sorted(self.timed, key=lambda one: one[0]):
            self.trace.packet.append(packet)
        encoded: bytes = self.trace.SerializeToString()
        return encoded

    # events by track

    def _enter(self, e: Event) -> None:
        worker, host = e.worker or "unknown worker", e.host or UNKNOWN_HOST
        group = e.partition, e.group
        if e.kind is Kind.PUT:
            slice = self._add("put", host, worker, _instant(e))
            if e.group != "":
                self.puts[group].append((e.at, slice))
        elif e.kind is Kind.READY:
            slice = self._add("ready", e.peer, e.stage, _instant(e))
            if e.group != "":
                self.ready[group, e.stage].append((e, slice))
        elif e.kind in (Kind.LEASE_BEGIN, Kind.LEASE_END):
            self._lease(e, worker, host)
        elif e.kind is Kind.CLAIM_WAIT:
            self._add("stage", host, f"{e.stage}: {worker}", _slice(e))
        elif e.kind is Kind.ADMIT_WAIT:
            self._add("put", host, worker, _slice(e))
        elif e.kind is Kind.PULL:
            self._add("link", e.peer, f"from {e.by}", _slice(e, e.transport))
        elif e.kind is Kind.ROOM_WAIT:
            self._add("room", e.peer, "", _slice(e))
        elif e.kind is Kind.STALL:
            self._add("peer", e.peer, "", _slice(e))
        elif e.kind in _AT_PEER:
            self._add("peer", e.peer, "", _instant(e))
            if is_whole_drop(e):
                for (partition, *_), lease in self.leases.items():
                    if partition == e.partition and lease.slice.end is None:
                        lease.slice.end = e.at

    def _add(self, kind: str, host: str, name: str, slice: _Slice) -> _Slice:
        self.threads[kind, host, name].append(slice)
        return slice

    def _lease(self, e: Event, worker: str, host: str) -> None:
        """Draw a lease as one slice. Rows leave it group by group: each group is an instant
        inside it. If the begin of the lease is not known, or it has not ended, the events say
        how long it has lasted. A plan's lease has no worker, so it is drawn on the peer that
        serves it."""
        key = e.partition, e.stage, e.lease
        if e.rows and not e.worker and key[:2] in self.plans:
            worker, host = "plan", e.peer
        if key not in self.leases:
            about: dict[str, Name | float] = {"stage": e.stage, "lease": e.lease}
            slice = _Slice(e.partition, "lease", e.began, None, about)
            self.leases[key] = _Lease(e.stage, worker, host, slice)
        lease = self.leases[key]
        if e.going_on:
            lease.slice.end = None
            return
        lease.groups.add(e.group)
        if e.kind is Kind.LEASE_BEGIN:
            lease.slice.about["rows"] = e.rows + int(lease.slice.about.get("rows", 0))
        else:
            left = _instant(e, str(e.reason))
            lease.ends[e.group].append(left)
            lease.slice.inside.append(left)
            lease.slice.end = e.at

    def _fit(self) -> None:
        """Remove overlaps of a moment between what a worker did one after another. A stream
        claims its next batch together with the ack of the last one, and a wait is recorded after
        the lease that ended it. Longer overlaps stay."""
        for (kind, _, _), slices in self.threads.items():
            if kind == "stage":
                leases = [one for one in slices if one.category == "lease"]
                leases.sort(key=lambda one: one.begin)
                for last, one in pairwise(leases):
                    _begin_after(one, last)
                begins = [one.begin for one in leases]
                ends = sorted(one.end for one in leases if one.end is not None)
                for one in slices:
                    if one.category == Kind.CLAIM_WAIT:
                        _fit_wait(one, begins, ends)

    # arrows

    def _tie(self) -> None:
        """Draw one flow for each group and stage. It goes from the put, or from the lease under
        which another stage added the last field, to the ready event, the claim and the ack."""
        of = defaultdict[tuple[_Group, str], list[_Lease]](list)
        for (partition, stage, _), lease in self.leases.items():
            for name in lease.groups - {""}:
                of[(partition, name), stage].append(lease)
        for (group, stage), ready in self.ready.items():
            points = list[tuple[float, int, _Slice]]()
            for e, slice in ready:
                points.append((e.at, 1, slice))
                points += [(one.begin, 0, one) for one in self._made(e, group, of)]
            for lease in of[group, stage]:
                points.append((lease.slice.begin, 2, lease.slice))
                points += [(one.begin, 3, one) for one in lease.ends[group[1]]]
            unique = {id(slice): (at, rank, slice) for at, rank, slice in points}
            ordered = sorted(unique.values(), key=lambda one: one[:2])
            if len(ordered) < 2:
                continue
            flow = next(self.numbers)
            *before, (_, _, last) = ordered
            for _, _, slice in before:
                slice.passing.append(flow)
            (last.ending if last.name == Reason.ACK else last.passing).append(flow)

    def _made(
        self, e: Event, group: _Group, of: dict[tuple[_Group, str], list[_Lease]]
    ) -> Iterator[_Slice]:
        """Return the slice that added the last field of ready rows."""
        if not e.by:
            yield from [slice for at, slice in self.puts.get(group, ()) if at <= e.at]
            return
        makers = [
            one
            for one in of.get((group, e.by), ())
            if one.worker == e.worker and one.slice.begin <= e.at
        ]
        if makers:
            yield max(makers, key=lambda one: one.slice.begin).slice

    # tracks

    def _clocks(self) -> None:
        """Write what the times of the trace are in Unix time."""
        packet = self.trace.packet.add()
        packet.trusted_packet_sequence_id = SEQUENCE
        packet.sequence_flags = TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
        if self.unix_s is None:
            return
        first = min((e.began for e in self.events), default=0.0)
        packet.timestamp = self._ns(first)
        unix = first + self.unix_s + self.zero
        clocks = ((BOOTTIME, first), (MONOTONIC, first), (REALTIME, unix))
        for clock, at in clocks:
            one = packet.clock_snapshot.clocks.add()
            one.clock_id, one.timestamp = clock, self._ns(at)

    def _steps(self) -> None:
        """Draw the steps above all hosts, each with the reason why it took so long."""
        slices = []
        for step, why in self.steps:
            about: dict[str, Name | float] = {"why": why.sentence, "idle_s": why.idle_s}
            if step.partition in self.incomplete:
                about["not_shown"] = self.incomplete[step.partition]
            end = max(step.begin, step.end) if step.finished else None
            if step.events:
                slices.append(_Slice(step.partition, "step", step.begin, end, about))
        for lane in _lanes(slices):
            self._slices(self._track("steps").uuid, lane)

    def _hosts(self) -> None:
        hosts = {e.peer for e in self.events} | {host for _, host, _ in self.threads}
        names = sorted(hosts, key=lambda name: (name == UNKNOWN_HOST, name))
        pids = {name: pid for pid, name in enumerate(names, 1)}
        tids, tracks = count(len(pids) + 1), dict[str, int]()
        for name, pid in pids.items():
            track = self._track(name)
            track.process.pid, track.process.process_name = pid, f"host {name}"
            tracks[name] = track.uuid
            self._clock(name, track)
            self._arena(name, track.uuid)
        for (kind, host, name), slices in sorted(self.threads.items(), key=_in_order):
            for nth, lane in enumerate(_lanes(slices)):
                track = self._track("", tracks[host])
                track.thread.pid, track.thread.tid = pids[host], next(tids)
                label = name if kind == "stage" else f"{kind} {name}".strip()
                track.thread.thread_name = f"{label} ({nth + 1})" if nth else label
                self._slices(track.uuid, lane)

    def _clock(self, host: str, track: TrackDescriptor) -> None:
        """Write the offset of a host's clock, in words and, for SQL, as an event of the host's
        process."""
        mine = self.of[host]
        known = [e for e in mine if e.kind is not Kind.MISSING]
        said = "This host recorded nothing, so its clock is unknown."
        if known:
            offset, uncertain = known[-1].offset, max(e.uncertain for e in known)
            about: dict[str, Name | float] = {"offset_s": offset, "uncertain_s": uncertain}
            at = min(e.began for e in self.events)
            self._slices(track.uuid, [_Slice("clock", "clock", at, at, about, is_instant=True)])
            said = "All times in this trace are on this host's clock."
            if uncertain:
                said = (
                    f"This host's clock is {abs(offset):.6f} s "
                    f"{'ahead of' if offset >= 0 else 'behind'} the clock of this trace, with an "
                    f"error of at most {duration(uncertain)}. Its times are corrected."
                )
        for e in mine:
            if e.kind is Kind.MISSING and e.reason is Reason.SILENT:
                said += " It did not answer, so its events are missing."
            elif e.kind is Kind.MISSING:
                said += f" Newer events replaced its {counted(e.rows, 'oldest event')}."
        track.description = said

    def _track(self, name: str, parent: int = 0) -> TrackDescriptor:
        packet = self.trace.packet.add()
        packet.trusted_packet_sequence_id = SEQUENCE
        track = packet.track_descriptor
        track.uuid = next(self.numbers)
        if name:
            track.name = name
        if parent:
            track.parent_uuid = parent
        return track

    # counters

    def _counters(self) -> None:
        for stage, values in sorted(self.queues.items()):
            says = f"Rows that are ready for stage {stage} and not leased, in the steps shown."
            self._counter(f"{stage}: rows ready", says, values)
        for step, _ in self.steps:
            self._counter(f"{step.partition}: version", "The trainer's version.", step.versions)
            says = f"Versions between the start of a group and its ack by {step.last}, at each ack."
            self._counter(f"{step.partition}: lag", says, step.lags)

    def _counter(
        self,
        name: str,
        says: str,
        values: Sequence[tuple[float, int]],
        unit: CounterDescriptor.Unit = CounterDescriptor.UNIT_COUNT,
        parent: int = 0,
    ) -> None:
        if values:
            track = self._track(name, parent)
            track.description = says
            track.counter.unit = unit
            for at, value in values:
                event = self._event(track.uuid, TrackEvent.TYPE_COUNTER, at)
                event.counter_value = value

    def _arena(self, host: str, process: int) -> None:
        values = [(e.at, e.nbytes) for e in self.of[host] if e.kind is Kind.ARENA]
        says = "Bytes in use in the host's arena, sampled whenever they change by 1% of the arena."
        self._counter("arena", says, values, CounterDescriptor.UNIT_SIZE_BYTES, process)

    # packets

    def _slices(self, uuid: int, lane: Iterable[_Slice]) -> None:
        """Draw the slices of one track."""
        for one in lane:
            kind = TrackEvent.TYPE_INSTANT if one.is_instant else TrackEvent.TYPE_SLICE_BEGIN
            event = self._event(uuid, kind, one.begin)
            event.name = one.name
            event.categories.append(one.category)
            event.flow_ids.extend(one.passing)
            event.terminating_flow_ids.extend(one.ending)
            for name, value in one.about.items():
                _annotate(event, name, value)
            self._slices(uuid, one.inside)
            if not one.is_instant and one.end is not None:
                self._event(uuid, TrackEvent.TYPE_SLICE_END, one.end)

    def _event(self, uuid: int, kind: TrackEvent.Type, at: float) -> TrackEvent:
        packet = TracePacket()
        packet.timestamp = self._ns(at)
        packet.trusted_packet_sequence_id = SEQUENCE
        packet.track_event.type = kind
        packet.track_event.track_uuid = uuid
        self.timed.append((packet.timestamp, packet))
        return packet.track_event

    def _ns(self, at: float) -> int:
        return round(1e9 * (at - self.zero))


def _instant(e: Event, name: str = "") -> _Slice:
    return _Slice(name or str(e.kind), str(e.kind), e.at, e.at, _about(e), is_instant=True)


def _slice(e: Event, detail: str = "") -> _Slice:
    """Return the slice of an event, named by its kind and reason."""
    detail = detail or str(e.reason)
    name = f"{e.kind}: {detail}" if detail else str(e.kind)
    return _Slice(name, str(e.kind), e.began, None if e.going_on else e.at, _about(e))


def _begin_after(one: _Slice, last: _Slice) -> None:
    """Move the begin of a lease to the end of the worker's last lease, if it began a moment
    before that."""
    if last.end is None:
        return
    overlap = last.end - one.begin
    first = min([slice.begin for slice in one.inside], default=math.inf)
    if 0 < overlap < NEAR_S and one.begin + 2 * overlap <= first:
        one.begin = last.end
        one.about["overlap_s"] = overlap


def _fit_wait(wait: _Slice, begins: Sequence[float], ends: Sequence[float]) -> None:
    """Move the begin of a wait to the end of its worker's last lease, and its end to the begin
    of the next lease, if they are a moment apart."""
    at = bisect_left(ends, wait.begin)
    if at < len(ends) and ends[at] < wait.begin + NEAR_S:
        wait.begin = ends[at] if wait.end is None else min(ends[at], wait.end)
    if wait.end is not None:
        at = bisect_right(begins, wait.end) - 1
        if at >= 0 and begins[at] > wait.end - NEAR_S:
            wait.end = max(begins[at], wait.begin)


def _about(e: Event) -> dict[str, Name | float]:
    about = {name: value for name in _SHOWN if (value := getattr(e, name))}
    return about | ({"group": e.group} if e.group != "" else {})  # a group may be called 0


def _annotate(event: TrackEvent, name: str, value: Name | float) -> None:
    one = event.debug_annotations.add()
    one.name = name
    if isinstance(value, str):
        one.string_value = value
    elif isinstance(value, float):
        one.double_value = value
    elif -(2**63) <= value < 2**63:
        one.int_value = value
    else:
        one.string_value = str(value)


def _in_order(thread: tuple[tuple[str, str, str], list[_Slice]]) -> tuple[int, str, str]:
    (kind, host, name), _ = thread
    return _ORDER.index(kind), host, name


def _lanes(slices: Iterable[_Slice]) -> list[list[_Slice]]:
    """Return the slices in as few lanes as hold them without overlap, because the slices of one
    thread must nest."""
    lanes = list[list[_Slice]]()
    for one in sorted(slices, key=lambda one: (one.begin, one.end or math.inf)):
        for lane in lanes:
            end = lane[-1].end
            if end is not None and end <= one.begin:
                lane.append(one)
                break
        else:
            lanes.append([one])
    return lanes


def _queues(
    events: Sequence[Event],
) -> tuple[dict[str, list[tuple[float, int]]], dict[str, str]]:
    """Return (how many rows were ready for each stage and not leased, in all steps together;
    steps that are left out because events are missing, and why)."""
    incomplete = dict[str, str]()
    steps = defaultdict[str, list[Event]](list)
    for e in events:
        if e.partition and e.kind in _QUEUED:
            steps[e.partition].append(e)
    changes = list[tuple[float, str, int]]()
    for partition, mine in steps.items():
        gaps = [
            e.peer
            for e in events
            if e.kind is Kind.MISSING and (e.reason is Reason.SILENT or e.at >= mine[0].at)
        ]
        found = _queue(mine)
        if gaps:
            incomplete[partition] = f"rows ready: events of {', '.join(gaps)} are missing"
        elif found is None:
            incomplete[partition] = "rows ready: the events do not show all rows that were ready"
        else:
            changes += found
    queues, total = defaultdict[str, list[tuple[float, int]]](list), Counter[str]()
    for at, stage, change in sorted(changes, key=lambda one: one[0]):
        total[stage] += change
        if queues[stage] and queues[stage][-1][0] == at:
            queues[stage].pop()
        queues[stage].append((at, total[stage]))
    return queues, incomplete


def _queue(events: Iterable[Event]) -> list[tuple[float, str, int]] | None:
    """Return (when, stage, change): how the number of ready rows of one step changed. None if
    rows were lost, or if more rows were leased than became ready, so that events are missing."""
    ready = defaultdict[tuple[str, Name], int](int)
    changes = list[tuple[float, str, int]]()

    def change(e: Event, stage: str, group: Name, by: int) -> None:
        if by:
            ready[stage, group] += by
            changes.append((e.at, stage, by))

    for e in events:
        came_back = e.kind is Kind.LEASE_END and e.reason in _BACK
        if e.kind is Kind.READY or came_back:
            change(e, e.stage, e.group, e.rows)
        elif e.kind is Kind.LEASE_BEGIN and not e.going_on:
            change(e, e.stage, e.group, -e.rows)
            if ready[e.stage, e.group] < 0:
                return None
        elif e.kind is Kind.DROP:
            is_all = e.nbytes > 0  # only the drop of a partition says so
            for stage, group in list(ready):
                if is_all or group == e.group:
                    change(e, stage, group, -min(e.rows, ready[stage, group]))
        elif e.kind is Kind.LOST:
            return None
    return changes
