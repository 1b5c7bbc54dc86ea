"""A peer's ring of records, and one list of events of several rings."""

from __future__ import annotations

import math

import msgspec
import pytest

from dataplane.errors import ProtocolError
from dataplane.events.merge import merged
from dataplane.events.ring import LEAST_WAIT_S, Ring
from dataplane.wire import frames
from dataplane.wire.events import EventRecord, EventsDone, Kind, Reason
from dataplane.wire.messages import Reply
from dataplane.wire.tables import Owner


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def filled(size: int, many: int) -> Ring:
    """A ring of this size, to which so many records were added, a second apart."""
    clock = Clock()
    ring = Ring(size, clock)
    for nth in range(many):
        clock.now = 101.0 + nth
        ring.add(EventRecord(Kind.PUT, rows=nth))
    return ring


def rows(found: tuple[int, list[EventRecord]]) -> list[int]:
    return [record.rows for record in found[1]]


def test_a_ring_keeps_the_newest_records_under_their_numbers() -> None:
    assert rows(filled(4, 3).after(0, 0.0, 9)) == [0, 1, 2]
    ring = filled(4, 10)
    assert (ring.last, ring.kept, len(ring)) == (10, 7, 4)
    assert ring.after(0, 0.0, 9)[0] == 7
    assert rows(ring.after(0, 0.0, 9)) == [6, 7, 8, 9]
    assert ring.after(8, 0.0, 1)[0] == 9
    assert rows(ring.after(8, 0.0, 1)) == [8]
    assert ring.after(10, 0.0, 9) == (11, [])


def test_a_ring_gives_what_happened_after_a_time() -> None:
    for many in range(1, 12):
        ring = filled(4, many)
        for since in (100.5, 104.0, 108.5, 200.0):
            expected = [n for n in range(max(0, many - 4), many) if 101.0 + n > since]
            assert rows(ring.after(0, since, 9)) == expected


def test_a_short_wait_makes_no_record_and_longer_ones_are_summed() -> None:
    clock = Clock()
    ring = Ring(4, clock)
    ring.waited(EventRecord(Kind.CLAIM_WAIT, reason=Reason.FIELD), clock.now - LEAST_WAIT_S / 2)
    assert not len(ring)
    for seconds in (2.0, 3.0):
        ring.waited(EventRecord(Kind.CLAIM_WAIT, reason=Reason.FIELD), clock.now - seconds)
    assert ring.waits == {(Kind.CLAIM_WAIT, Reason.FIELD): [2, 5.0]}


def page(name: str, *records: EventRecord, **more: object) -> EventsDone:
    address = f"tcp://{name}:1"
    done = EventsDone(address, name, 1, 9.0, 1, 1, len(records), list(records), [], {}, [])
    return msgspec.structs.replace(done, **more)


def test_events_of_several_peers_are_on_the_clock_of_the_one_that_was_asked() -> None:
    near = page("a", EventRecord(Kind.PUT, 10.0), EventRecord(Kind.SEAL, 12.0))
    far = page("b", EventRecord(Kind.PULL, 1_011.0, by="tcp://a:1"), offset=1_000.0, uncertain=0.25)
    events = merged([near, far])
    assert [(e.kind, e.at, e.peer) for e in events] == [
        ("put", 10.0, "a"),
        ("pull", 11.0, "b"),
        ("seal", 12.0, "a"),
    ]
    assert (events[1].uncertain, events[1].offset) == (0.25, 1_000.0)
    assert events[1].by == "a"


def test_peers_of_one_name_are_told_apart() -> None:
    first, second = page("a", EventRecord(Kind.PUT, 1.0)), page("a", EventRecord(Kind.PUT, 2.0))
    second.address = "tcp://other:1"
    assert [e.peer for e in merged([first, second])] == ["a at tcp://a:1", "a at tcp://other:1"]


def test_a_peer_that_has_ended_keeps_its_name_in_earlier_events() -> None:
    """So do its clients. A peer that listens at its address now has a name of its own."""
    ended = Owner("tcp://c", 7)
    lost = EventRecord(Kind.LOST, 1.0, by="tcp://c", worker=ended.first_session + 1)
    (event,) = merged([page("a", lost), page("b", former={"c": ended})])
    assert (event.by, event.host) == ("c", "c")
    now = page("d", former={"c": ended})
    now.address = "tcp://c"
    (event,) = merged([page("a", lost), now])
    assert (event.by, event.host) == ("d", "c")


def test_clients_that_no_peer_can_name_are_told_apart() -> None:
    """A producer that only puts, at another host than the partition: all of them were one worker,
    which seemed to need next to no time for a put."""
    records = [EventRecord(Kind.PUT, float(n), worker=n) for n in (16, 17, 18, 0)]
    events = merged([page("a", *records, workers={18: "pid 7 on host a"})])
    assert [e.worker for e in events] == ["", "client 10", "client 11", "pid 7 on host a"]


def test_what_is_missing_is_an_event() -> None:
    wrapped = page("a", EventRecord(Kind.PUT, 10.0), kept=5, first=5, last=5)
    events = merged([wrapped], ["tcp://c:1"])
    assert [(e.kind, e.reason, e.peer) for e in events] == [
        ("missing", "overwritten", "a"),
        ("put", "", "a"),
        ("missing", "silent", "tcp://c:1"),
    ]


@pytest.mark.parametrize(
    "damage",
    [
        {"now": math.nan},
        {"offset": math.inf},
        {"uncertain": -math.inf},
        {"first": 7},
        {"first": -1},
        {"records": [EventRecord(Kind.PUT, math.nan)]},
        {"going_on": [EventRecord(Kind.PUT, 1.0, seconds=math.inf)]},
        {"records": [EventRecord(Kind.PUT, 1.0, client_s=math.inf)]},
    ],
)
def test_impossible_times_and_numbers_are_refused(damage: dict[str, object]) -> None:
    with pytest.raises(ProtocolError):
        merged([page("a", EventRecord(Kind.PUT, 1.0), **damage)])


@pytest.mark.parametrize(
    ("field", "value"),
    [("kind", "nap"), ("reason", "why not"), ("rows", -1), ("nbytes", -1), ("client_s", -1.0)],
)
def test_a_record_that_is_none_is_refused_where_it_comes_in(field: str, value: object) -> None:
    record = EventRecord(Kind.PUT)
    setattr(record, field, value)
    reply = frames.encode(Reply(1, page("a", record)))
    with pytest.raises(ProtocolError):
        frames.decode_reply(bytes(reply)[4:])
