"""Fetched columns as a user sees them."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import numpy as np
import pytest

from dataplane.client.read.views import ColumnView, same
from dataplane.errors import FieldUnknown, ProtocolError
from dataplane.wire.records import PLACE, PLACE_ABSENT
from dataplane.wire.tables import Column, Spec


def test_arrays_are_read_only_and_lie_in_the_arena(arena: Any) -> None:
    for values in (np.arange(12.0).reshape(3, 4), [np.arange(5), np.arange(3)]):
        for entry in arena.view(values):
            assert np.shares_memory(entry, arena.memory)
            with pytest.raises(ValueError):
                entry.setflags(write=True)
            with pytest.raises(ValueError):
                entry[0] = 1


def test_rows_at_irregular_distances_come_one_by_one_and_whole(arena: Any) -> None:
    rows = np.arange(40 * 1024).reshape(40, 1024)
    view = arena.view(rows)
    for order in (np.r_[0:20, 25:40], np.r_[0:40:3], np.r_[5:0:-1], np.r_[3, 1, 4, 1, 5]):
        part = view.take(order)
        for entry, row in zip(part, order, strict=True):
            assert (entry == rows[row]).all() and np.shares_memory(entry, arena.memory)
        dense = part.dense()
        assert (dense is None) == (len(set(np.diff(order))) > 1 or order[0] > order[-1])


def test_leaves_of_objects_are_views_and_texts_are_copies(arena: Any) -> None:
    view = arena.view([{"image": np.arange(6), "text": "abc"}, {"text": "d"}])
    assert np.shares_memory(view[0]["image"], arena.memory)
    assert not view[0]["image"].flags.writeable
    text = view[0]["text"]
    arena.memory[:] = 0
    assert text == "abc"


def test_the_pin_goes_with_the_last_view(arena: Any) -> None:
    view = arena.view([np.arange(5), {"a": [np.arange(3)]}])
    gone = weakref.ref(view._base.base)
    leaf = view[1]["a"][0]
    row = view[0][1:3]
    sliced = view[:1]
    del view
    gc.collect()
    assert gone() is not None
    del sliced, leaf
    assert gone() is not None
    del row
    assert gone() is None


def test_a_dense_column_keeps_the_pin_too(arena: Any) -> None:
    view = arena.view(np.arange(12).reshape(3, 4))
    gone = weakref.ref(view._base.base)
    rows = list(view)
    del view
    assert gone() is not None
    del rows
    assert gone() is None


def test_numbers_of_an_array_column_are_0d_arrays_in_every_way_of_reading(arena: Any) -> None:
    view = arena.view(np.array([1.5, 2.5], np.float32))
    for entry in (view[0], next(iter(view)), view[:1][0], list(view)[0]):
        assert type(entry) is np.ndarray and entry.shape == () and entry == 1.5


def test_a_column_is_a_sequence(arena: Any) -> None:
    words = ["a", "b", "c", "d"]
    view = arena.view(words)
    assert len(view) == 4 and list(view) == words and view[-1] == "d" and "c" in view
    assert view.index("b") == 1 and list(reversed(view)) == words[::-1]
    assert list(view[1:3]) == ["b", "c"] and list(view[::-2]) == ["d", "b"] and len(view[9:]) == 0
    with pytest.raises(IndexError):
        view[4]
    assert repr(view) == "<x: 4 rows, str, first 'a'>"
    for values, told in (
        (np.zeros((2, 3), np.int8), "2 rows, int8[3], first [0, 0, 0]"),
        (np.array([1.5, 2]), "2 rows, float64, first 1.5"),
        ([[1, 2, 3, 4, 5], []], "2 rows, int64[*] of length 0 to 5, first [1, 2, 3, 4, …]"),
        ([np.ones((1, 2)), np.ones((3, 2))], "float64[*,2] of length 1 to 3, first [1.0, 1.0]"),
        ([np.ones(1), np.ones(1, np.int8)], "2 rows, arrays of float64 and int8, first [1.0]"),
        (["a" * 1000, "b"], f"2 rows, str, first '{'a' * 12}...{'a' * 13}'"),
        ([{"role": "user"}, None], "2 rows, dict, first {'role': 'user'}"),
        ([None, 3], "2 rows, NoneType, first None"),
    ):
        assert told in repr(arena.view(values)), repr(arena.view(values))
    assert repr(arena.view([1, 2]).take([])) == "<x: 0 rows, no values>"


def test_rows_may_be_taken_in_any_order_with_their_leaves(arena: Any) -> None:
    values = [[np.full(k, k)] * k for k in range(5)]
    view = arena.view(values)
    for rows in ([4, 0, 2, 2], [], [1]):
        assert view.take(rows).equals([values[row] for row in rows])
    assert view.take([3, 1]).take([1])[0][0].tolist() == [1]
    assert view.take([3, 1])[::-1].equals([values[1], values[3]])


def absent(view: ColumnView, rows: list[int], keys: list[str] | None = None) -> ColumnView:
    """The same column where some rows lack the field."""
    places = view.places.copy()
    places["flags"][rows] = PLACE_ABSENT
    places["spec"][rows] = 0xFFFF_FFFF
    specs = [f if isinstance(f, Spec) else f.spec for f in view._forms]
    return ColumnView(Column("x", places.tobytes()), specs, view._base, keys and keys.__getitem__)


def test_a_row_that_lacks_the_field_says_which(arena: Any) -> None:
    view = absent(arena.view(["a", "b", "c"]), [1], ["k0", "k1", "k2"])
    assert [view.present(row) for row in range(3)] == [True, False, True]
    assert view[0] == "a" and view[2] == "c"
    with pytest.raises(FieldUnknown, match="row 'k1' has no field 'x'"):
        view[1]
    with pytest.raises(FieldUnknown, match="row 'k1' has no field 'x'"):
        list(view)
    with pytest.raises(FieldUnknown, match="row 'k1'"):
        view[1:][0]
    with pytest.raises(FieldUnknown, match="row 1 "):
        absent(arena.view(np.zeros(3)), [1])[1]


def test_equality_is_to_the_last_bit(arena: Any) -> None:
    view = arena.view([1.0, math.nan, {"a": np.zeros(2)}])
    assert view.equals([1.0, math.nan, {"a": np.zeros(2)}])
    assert not view.equals([1, math.nan, {"a": np.zeros(2)}])
    assert not view.equals([1.0, math.nan])
    assert not same(np.zeros(2), np.zeros((2, 1))) and not same(0.0, -0.0)
    assert not same({"a": 1, "b": 2}, {"b": 2, "a": 1}) and not same([1], (1,))


@pytest.mark.parametrize(
    ("place", "specs"),
    [
        ((1 << 40, 8, 0, 0), [Spec("object")]),
        ((0, 1 << 40, 0, 0), [Spec("object")]),
        ((64, 2**64 - 32, 0, 0), [Spec("object")]),
        ((0, 8, 1, 0), [Spec("object")]),
    ],
)
def test_places_outside_the_arena_are_refused(arena: Any, place: Any, specs: list[Spec]) -> None:
    column = Column("x", np.array([place], PLACE).tobytes())
    with pytest.raises(ProtocolError):
        ColumnView(column, specs, arena.base())


@pytest.mark.parametrize(
    "spec",
    [
        Spec("array", "float32", (-1, 3)),
        Spec("array", "float32", (3,)),
        Spec("array", "float32", ()),
        Spec("array", "float32", (-1, -1)),
        Spec("array", "float32", (-1, 0)),
        Spec("array", "float32", (2, *(1,) * 16)),
        Spec("array", "object", (-1,)),
        Spec("array", "V8", (-1,)),
        Spec("array", "datetime64[parsec]", (-1,)),
    ],
)
def test_specs_that_do_not_fit_the_bytes_are_refused(arena: Any, spec: Spec) -> None:
    column = Column("x", np.array([(0, 8, 0, 0)], PLACE).tobytes())
    with pytest.raises(ProtocolError):
        ColumnView(column, [spec], arena.base())[0]


def test_columns_whose_parts_do_not_fit_are_refused(arena: Any) -> None:
    place = np.array([(0, 1, 0, 0)], PLACE).tobytes()
    counts = np.array([2], "<u4").tobytes()
    for column in (
        Column("x", place[:-1]),
        Column("x", place, counts, place),
        Column("x", place, counts + counts),
    ):
        with pytest.raises(ProtocolError):
            ColumnView(column, [Spec("object")], arena.base())
