"""What a partition says of what happens to it, for people."""

from __future__ import annotations

import pytest

from dataplane.metadata.shard.store import Store
from dataplane.wire.events import EventRecord, Kind
from dataplane.wire.messages import Finish, Want
from dataplane.wire.tables import Shape
from tests.metadata.stores import OWNERS, Column, brought, named, put, store, take, values, wrote

GROUPS = Want("groups", 1, 1)


def noted(**definition: object) -> tuple[Store, list[EventRecord]]:
    """A store, and the records of what happens to it."""
    records: list[EventRecord] = []
    found = store(**definition)
    found.note = lambda record, since: records.append(record)
    return found, records


def of(records: list[EventRecord], kind: Kind) -> list[EventRecord]:
    return [record for record in records if record.kind is kind]


def test_a_put_and_what_became_ready_are_noted_once_for_each_group_and_stage() -> None:
    s, records = noted(group_size=2)
    rows = named(["a", "b", "c", "d"], ["g", "g", "h", "h"])
    s.put(wrote(rows, [Column("tokens", values(4, 100))], OWNERS, holder=7))
    assert [(r.group, r.rows, r.nbytes, r.worker) for r in of(records, Kind.PUT)] == [
        ("g", 2, 200, 7),
        ("h", 2, 200, 7),
    ]
    assert [
        (r.stage, r.group, r.rows, r.field, r.by, r.worker) for r in of(records, Kind.READY)
    ] == [
        ("reward", "g", 2, "tokens", "", 7),
        ("reward", "h", 2, "tokens", "", 7),
    ]
    assert len(records) == 4


def test_ready_names_the_field_that_came_last_and_the_stage_that_added_it() -> None:
    s, records = noted(group_size=2)
    put(s, ["a", "b"], ["g", "g"])
    lease = take(s, "reward", GROUPS).lease
    assert lease is not None
    columns = [Column("reward", values(2))]
    s.finish(Finish(lease, "ack", values=brought(columns)))
    ready = of(records, Kind.READY)[-1]
    assert (ready.stage, ready.field, ready.by, ready.worker) == ("train", "reward", "reward", 1)


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        ("ack", "ack"),
        ("release", "release"),
        ("drop", "drop"),
        ("abandon", "died"),
        ("expire", "expired"),
    ],
)
def test_a_lease_begins_and_ends_with_a_reason(outcome: str, reason: str) -> None:
    s, records = noted(group_size=2)
    put(s, ["a", "b"], ["g", "g"])
    lease = take(s, "reward", GROUPS).lease
    assert lease is not None
    s.finish(Finish(lease, outcome))  # type: ignore[arg-type]
    (begin,), (end,) = of(records, Kind.LEASE_BEGIN), of(records, Kind.LEASE_END)
    assert (begin.group, begin.rows, begin.lease) == (end.group, end.rows, end.lease)
    assert (begin.group, begin.rows, begin.worker) == ("g", 2, 1)
    assert end.reason == reason


def test_the_leases_of_a_peer_that_is_gone_end_as_those_of_the_dead() -> None:
    s, records = noted()
    put(s, ["a"])
    take(s, "reward", Want("rows", 1, 1))
    s.release_holder(1)
    assert [r.reason for r in of(records, Kind.LEASE_END)] == ["died"]


def test_each_rank_of_a_plan_has_a_lease_that_begins_and_ends() -> None:
    s, records = noted()
    put(s, ["a", "b"])
    s.seal()
    records.clear()
    first, second = (s.join("reward", Shape(ranks=2), n, 7 + n, 0.0) for n in range(2))
    assert first is not None and second is not None
    for member in (first, second):
        s.finish(Finish(member.number, "ack"))
    assert [(r.kind, r.rows, r.worker, r.reason) for r in records if r.stage == "reward"] == [
        ("lease_begin", 2, 0, ""),
        ("lease_begin", 0, 7, ""),
        ("lease_begin", 0, 8, ""),
        ("lease_end", 0, 7, "ack"),
        ("lease_end", 0, 8, "ack"),
        ("lease_end", 2, 0, "ack"),
    ]
    assert [r.lease for r in records if r.worker == 8] == [second.number] * 2


def test_a_plan_that_a_rank_leaves_ends_for_all_of_them() -> None:
    s, records = noted()
    put(s, ["a", "b"])
    s.seal()
    members = [s.join("reward", Shape(ranks=2), n, 7 + n, 0.0) for n in range(2)]
    assert members[0] is not None
    s.finish(Finish(members[0].number, "abandon"))
    ends = [(r.worker, r.rows, r.reason) for r in of(records, Kind.LEASE_END)]
    assert ends == [(7, 0, "died"), (8, 0, "release"), (0, 2, "died")]


def test_a_group_that_is_closed_by_name_or_seal_is_noted_without_a_field() -> None:
    s, records = noted()
    put(s, ["a"], ["g"])
    put(s, ["b"], ["h"])
    records.clear()
    s.close("g", 1)
    s.seal()
    assert [(r.kind, r.group, r.field) for r in records] == [
        ("ready", "g", ""),
        ("seal", "", ""),
        ("ready", "h", ""),
    ]


def test_drops_losses_and_versions_are_noted() -> None:
    s, records = noted(group_size=2)
    put(s, ["a", "b", "c", "d", "e", "f"], ["g", "g", "h", "h", "i", "i"])
    records.clear()
    s.drop(groups=["g", "nobody"])
    s.lost(OWNERS[0])
    s.advance(3)
    assert [(r.kind, r.group, r.rows, r.by, r.version) for r in records] == [
        ("drop", "g", 2, "", 0),
        ("lost", "h", 2, "a", 0),
        ("lost", "i", 2, "a", 0),
        ("advance", "", 0, "", 3),
    ]


def test_a_put_says_at_which_version_of_the_trainer_its_group_was_begun() -> None:
    s, records = noted(group_size=2)
    s.advance(1)
    put(s, ["a"], ["g"])
    s.admit(1, 7, 1, max_lag=4, per_version=1)
    s.advance(3)
    put(s, ["b"], ["g"])
    s.put(wrote(named(["c"], ["h"]), [Column("tokens", values(1))], OWNERS, holder=7))
    told = [(r.group, r.version) for r in of(records, Kind.PUT)]
    assert told == [("g", 1), ("g", 1), ("h", 1)]


def test_a_store_that_nobody_watches_notes_nothing() -> None:
    s = store()
    put(s, ["a"])
    assert s.note is None
