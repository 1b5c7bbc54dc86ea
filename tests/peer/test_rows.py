"""Columns of values that all live in the shard, told by the bytes of their records."""

from __future__ import annotations

import numpy as np
import pytest

from dataplane.peer.rows import all_inline, inline_places
from dataplane.wire.limits import ABSENT
from dataplane.wire.records import PLACE, PLACE_ABSENT, PLACE_INLINE, VALUE
from dataplane.wire.tables import Column


def records(owners: list[int]) -> np.ndarray:
    made = np.zeros(len(owners), VALUE)
    made["range"], made["nbytes"] = np.arange(len(owners)) * 8, 7
    made["spec"], made["delta"], made["owner"] = 3, 5, owners
    return made


@pytest.mark.parametrize("number", [0, 1, 7])
def test_places_of_values_in_the_message_are_where_their_records_say(number: int) -> None:
    values, leaves = records([number, ABSENT, number]), records([number, number])
    given = Column("x", values.tobytes(), b"counts", leaves.tobytes())
    found = inline_places([given, Column("y", values[:1].tobytes())], number)
    assert found is not None and [one.field for one in found] == ["x", "y"]
    assert found[0].leaf_counts == b"counts" and found[1].leaves == b""
    for raw, of in ((found[0].values, values), (found[0].leaves, leaves)):
        places = np.frombuffer(raw, PLACE)
        there = of["owner"] == number
        assert places["flags"].tolist() == np.where(there, PLACE_INLINE, PLACE_ABSENT).tolist()
        assert places["offset"].tolist() == of["range"].tolist()
        assert places["nbytes"].tolist() == of["nbytes"].tolist()
        assert places["spec"].tolist() == of["spec"].tolist()


@pytest.mark.parametrize("other", [0, 2, 255, 256, 257, 511, ABSENT - 1, ABSENT & 0xFF00])
def test_columns_with_a_value_of_another_owner_are_left_to_others(other: int) -> None:
    columns = [Column("x", records([1, other]).tobytes())]
    assert inline_places(columns, 1) is None
    assert all_inline(columns) is None
    assert all_inline([Column("x", records([1]).tobytes(), leaves=columns[0].values)]) is None


def test_small_values_of_a_clients_message_get_the_only_owner_that_it_then_has() -> None:
    given = Column("x", records([1, 1]).tobytes(), b"counts", records([1]).tobytes())
    wanted = Column("x", records([0, 0]).tobytes(), b"counts", records([0]).tobytes())
    assert all_inline([given]) == [wanted]
    assert all_inline([]) == []
