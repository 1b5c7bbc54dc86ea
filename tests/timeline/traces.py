"""A trace, read as Perfetto's trace processor reads it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackDescriptor, TrackEvent


@dataclass
class Slice:
    """end: None if it did not end. parent: the slice that it is in."""

    name: str
    category: str
    track: str
    begin: int
    end: int | None
    parent: Slice | None
    about: dict[str, object]
    flows: list[int] = field(default_factory=list)


@dataclass
class Read:
    """arrows: flow → names of slices from one to the next."""

    processes: dict[str, TrackDescriptor]
    threads: dict[str, list[str]]
    """by process"""
    slices: list[Slice]
    counters: dict[tuple[str, str], list[tuple[int, int]]]
    """by process ("": none) and name"""
    arrows: dict[int, list[Slice]]
    unended: set[int]
    """flows that have not ended"""
    snapshots: list[dict[int, int]]

    def of(self, category: str) -> list[Slice]:
        return [one for one in self.slices if one.category == category]


def read(data: bytes) -> Read:
    """The trace, which is checked: tracks are described before they are used, times of each track
    only increase, an end has a begin, and a flow that ends has begun."""
    trace = Trace.FromString(data)
    tracks = dict[int, TrackDescriptor]()
    processes = dict[str, TrackDescriptor]()
    threads = defaultdict[str, list[str]](list)
    names, owners = dict[int, str](), dict[int, str]()
    stacks = defaultdict[int, list[Slice]](list)
    last = defaultdict[int, int](int)
    slices = list[Slice]()
    counters = defaultdict[tuple[str, str], list[tuple[int, int]]](list)
    arrows = defaultdict[int, list[Slice]](list)
    active, snapshots, before = set[int](), list[dict[int, int]](), 0
    by_pid = dict[int, str]()
    for packet in trace.packet:
        assert packet.trusted_packet_sequence_id
        if packet.HasField("clock_snapshot"):
            snapshots.append({one.clock_id: one.timestamp for one in packet.clock_snapshot.clocks})
        if packet.HasField("track_descriptor"):
            track = packet.track_descriptor
            assert track.uuid not in tracks
            assert not track.parent_uuid or track.parent_uuid in tracks
            tracks[track.uuid] = track
            names[track.uuid] = track.name or track.thread.thread_name
            owners[track.uuid] = ""
            if track.parent_uuid:
                owners[track.uuid] = names[track.parent_uuid]
            if track.HasField("process"):
                assert track.name not in processes
                assert track.process.pid not in by_pid
                processes[track.name] = track
                by_pid[track.process.pid] = track.name
            if track.HasField("thread"):
                process = by_pid[track.thread.pid]
                assert process == names[track.parent_uuid]
                threads[process].append(track.thread.thread_name)
        if not packet.HasField("track_event"):
            continue
        event, uuid = packet.track_event, packet.track_event.track_uuid
        assert uuid in tracks
        assert packet.timestamp >= before, "packets are not in order"
        before = packet.timestamp
        if event.type == TrackEvent.TYPE_COUNTER:
            counters[owners[uuid], names[uuid]].append((packet.timestamp, event.counter_value))
            continue
        assert packet.timestamp >= last[uuid]
        last[uuid] = packet.timestamp
        stack = stacks[uuid]
        if event.type == TrackEvent.TYPE_SLICE_END:
            stack.pop().end = packet.timestamp
            continue
        is_instant = event.type == TrackEvent.TYPE_INSTANT
        one = Slice(
            event.name,
            event.categories[0],
            names[uuid],
            packet.timestamp,
            packet.timestamp if is_instant else None,
            stack[-1] if stack else None,
            {a.name: getattr(a, a.WhichOneof("value")) for a in event.debug_annotations},
        )
        slices.append(one)
        if not is_instant:
            stack.append(one)
        for flow in event.flow_ids:
            active.add(flow)
            arrows[flow].append(one)
        for flow in event.terminating_flow_ids:
            assert flow in active, "a flow ends that has not begun"
            active.remove(flow)
            arrows[flow].append(one)
    return Read(processes, dict(threads), slices, dict(counters), dict(arrows), active, snapshots)
