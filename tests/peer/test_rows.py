"""Few values are looked at one by one, many in columns: what comes of it is the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dataplane.errors import ProtocolError
from dataplane.memory.admission import Admission
from dataplane.memory.space import Space
from dataplane.peer import rows as rowset
from dataplane.peer.requests.puts import Committed, Grants
from dataplane.peer.requests.reads import Reading
from dataplane.wire.limits import ABSENT
from dataplane.wire.records import EXTENT, PLACE, PLACE_ABSENT, PLACE_INLINE, RANGE, VALUE
from dataplane.wire.tables import INLINE, Column, Owner, Rows, Table

ME = Owner("tcp://a", 7)
SESSION: Any = SimpleNamespace(id=9)
FEW, MANY = 1 << 20, -1

Value = tuple[int, int, int, int, int, int]


@pytest.fixture(params=[FEW, MANY], ids=["few", "many"])
def host(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(rowset, "FEW_BYTES", request.param)
    return SimpleNamespace(space=Space(1 << 20), owner=ME)


def records(*values: Value) -> bytes:
    return np.array(list(values), VALUE).tobytes()


def commit(host: Any, columns: list[Column], sizes: list[int], shared: Any = ()) -> Committed:
    """After so much was written as ranges of these sizes."""
    extents = np.zeros(len(sizes), EXTENT)
    if sizes:
        (start,) = host.space.grant(SESSION.id, Admission.OPEN, 1 << 16)["offset"].tolist()
        extents["offset"] = start + 4096 * np.arange(len(sizes))
        extents["length"] = sizes
    grants = Grants(host, None, None)  # type: ignore[arg-type]
    shared = np.array(list(shared), RANGE)
    return grants.commit(SESSION, columns, extents.tobytes(), shared.tobytes(), Admission.OPEN)


def resolved(host: Any, columns: list[Column], owners: list[Owner]) -> tuple[list[Column], int]:
    reading = object.__new__(Reading)
    reading.host = host
    table, pin = reading.resolve(Table(Rows(b""), columns, [], owners), SESSION.id)  # type: ignore[misc]
    assert table.owners == []
    return table.columns, pin


def test_values_of_a_clients_message_get_the_names_of_its_ranges(host: Any) -> None:
    known = commit(host, [Column("x", records((0, 0, 64, 0, 0, 0)))], [64]).ranges
    given = [
        Column("x", records((0, 0, 5, 3, 64, 0), (8, 0, 6, 3, 0, 1)), b"counts"),
        Column(
            "y",
            records((1, 0, 4096, 1, 0, 0)),
            leaves=records((0, 0, 7, 2, 0, 0), (2, 0, 9, 2, 0, 0)),
        ),
    ]
    made = commit(host, given, [128, 4096], known)
    assert made.owners == [ME, INLINE]
    assert made.counts.tolist() == [2, 1, 1]
    first, second, third = made.ranges.tolist()
    assert third == known.tolist()[0] and host.space.ranges.refs(known).tolist() == [2]
    assert made.columns == [
        Column("x", records((*first, 5, 3, 64, 0), (8, 0, 6, 3, 0, 1)), b"counts"),
        Column(
            "y",
            records((*second, 4096, 1, 0, 0)),
            leaves=records((*first, 7, 2, 0, 0), (*third, 9, 2, 0, 0)),
        ),
    ]


def test_values_that_all_lie_in_the_message_have_one_owner(host: Any) -> None:
    given = [Column("x", records((0, 0, 5, 3, 0, 1), (8, 0, 6, 3, 0, 1)))]
    made = commit(host, given, [])
    assert (made.owners, len(made.ranges)) == ([INLINE], 0)
    assert made.columns == [Column("x", records((0, 0, 5, 3, 0, 0), (8, 0, 6, 3, 0, 0)))]
    assert commit(host, [], []).owners == []


@pytest.mark.parametrize(
    "value",
    [
        (1, 0, 5, 0, 0, 0),  # there is no second range
        (0, 0, 65, 0, 0, 0),
        (0, 0, 5, 0, 60, 0),
        (0, 0, 1, 0, 65, 0),
        (0, 0, 1 << 63, 0, 1, 0),
        (0, 0, 5, 0, 0, 2),
        (0, 0, 5, 0, 0, ABSENT),
        (0, 0, 5, 0, 0, 257),
    ],
)
def test_a_value_that_is_nowhere_in_its_message_is_refused(host: Any, value: Value) -> None:
    with pytest.raises(ProtocolError):
        commit(host, [Column("x", records((0, 0, 64, 0, 0, 0), value))], [64])
    assert host.space.ranges.live == 0
    with pytest.raises(ProtocolError):
        commit(host, [Column("x", records(value))], [])
    with pytest.raises(ProtocolError):
        commit(host, [Column("x", b"no record")], [])


@pytest.mark.parametrize("inline", [0, 1])
def test_places_of_values_are_where_their_records_say(host: Any, inline: int) -> None:
    made = commit(host, [Column("x", records((0, 0, 64, 0, 0, 0), (1, 0, 9, 0, 0, 0)))], [64, 128])
    here, there = made.ranges.tolist()
    starts = host.space.ranges.offsets(made.ranges).tolist()
    owners = [INLINE, ME] if inline == 0 else [ME, INLINE]
    mine = 1 - inline
    columns = [
        Column("x", records((*here, 5, 3, 16, mine), (0, 0, 0, 0, 0, ABSENT)), b"counts"),
        Column("y", records((24, 0, 6, 4, 0, inline)), b"", records((*there, 9, 2, 0, mine))),
    ]
    found, pin = resolved(host, columns, owners)
    assert [one.field for one in found] == ["x", "y"] and found[0].leaf_counts == b"counts"
    raws = [raw for one in found for raw in (one.values, one.leaves)]
    assert [np.frombuffer(raw, PLACE).tolist() for raw in raws] == [
        [(starts[0] + 16, 5, 3, 0), (0, 0, 0, PLACE_ABSENT)],
        [],
        [(24, 6, 4, PLACE_INLINE)],
        [(starts[1], 9, 2, 0)],
    ]
    assert host.space.pinned(SESSION.id)[pin].tolist() == [here, there]


def test_nothing_is_pinned_for_values_in_the_message(host: Any) -> None:
    found, pin = resolved(host, [Column("x", records((8, 0, 6, 4, 0, 0)))], [INLINE])
    assert pin == 0 and not host.space.pinned(SESSION.id)
    assert np.frombuffer(found[0].values, PLACE).tolist() == [(8, 6, 4, PLACE_INLINE)]
