"""Fetched columns as a user sees them."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import msgspec
import numpy as np
import pytest

from dataplane.client.read.chunk_columns import ChunkForm
from dataplane.client.read.column_view import ColumnView, cut
from dataplane.client.read.table import (
    SHARED_RUNS,
    TableReader,
    TableShape,
    join_readers,
    shape_of_values,
)
from dataplane.client.write.chunks import pieces_of, plan
from dataplane.client.write.columns import prepare
from dataplane.errors import FieldUnknown, ProtocolError, ValueCorrupt
from dataplane.metadata.tables.bits import all_of, bits_of, bytes_of
from dataplane.wire import layouts
from dataplane.wire.layouts import ColumnSpec
from dataplane.wire.packed import EXTENT, KEY
from dataplane.wire.tables import INLINE, Chunk, Owner, Piece, Rows, Table, Values
from tests.same import equals, same


def test_arrays_are_read_only_and_lie_in_the_arena(arena: Any) -> None:
    for values in (np.arange(12.0).reshape(3, 4), [np.arange(5), np.arange(3)]):
        for entry in arena.view(values):
            assert np.shares_memory(entry, arena.memory)
            with pytest.raises(ValueError):
                entry.setflags(write=True)
            with pytest.raises(ValueError):
                entry[0] = 1


def test_rows_come_one_by_one_and_where_they_are_side_by_side_whole(arena: Any) -> None:
    rows = np.arange(40 * 1024).reshape(40, 1024)
    view = arena.view(rows)
    for order in (np.r_[3:20], np.r_[0:20, 25:40], np.r_[0:40:3], np.r_[3, 1, 4, 1, 5]):
        part = view.take(order)
        for entry, row in zip(part, order, strict=True):
            assert (entry == rows[row]).all() and np.shares_memory(entry, arena.memory)
        dense = part.dense()
        assert (dense is None) == bool((np.diff(order) != 1).any())
        assert dense is None or np.shares_memory(dense, arena.memory)


def test_chunks_that_are_side_by_side_are_one_array(arena: Any) -> None:
    rows = np.arange(4 * 65536.0).reshape(4, -1)  # of which two fit into a chunk
    view = arena.view(rows)
    assert len(view.runs) > 1
    dense = view.dense()
    assert same(np.array(dense), rows) and np.shares_memory(dense, arena.memory)
    assert not dense.flags.writeable
    assert view.take([0, 1, 3]).dense() is None


def test_leaves_of_objects_are_views_and_texts_are_copies(arena: Any) -> None:
    view = arena.view([{"image": np.arange(6), "text": "abc"}, {"text": "d"}])
    assert np.shares_memory(view[0]["image"], arena.memory)
    assert not view[0]["image"].flags.writeable
    text = view[0]["text"]
    arena.memory[:] = 0
    assert text == "abc"


def pin_of(view: ColumnView) -> Any:
    chunk = view.runs[0][0]
    assert chunk is not None and isinstance(chunk.memory, np.ndarray)
    assert chunk.memory.base is not None
    return chunk.memory.base.base


def test_the_pin_goes_with_the_last_view(arena: Any) -> None:
    view = arena.view([np.arange(5), {"a": [np.arange(3)]}])
    gone = weakref.ref(pin_of(view))
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
    gone = weakref.ref(pin_of(view))
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
        ([{"role": "user"}, None], "2 rows, NoneType and dict, first {'role': 'user'}"),
        ([None, 3], "2 rows, NoneType and int, first None"),
    ):
        assert told in repr(arena.view(values)), repr(arena.view(values))
    assert repr(arena.view([1, 2]).take([])) == "<x: 0 rows, no values>"


def test_rows_may_be_taken_in_any_order_with_their_leaves(arena: Any) -> None:
    values = [[np.full(k, k)] * k for k in range(5)]
    view = arena.view(values)
    for rows in ([4, 0, 2, 2], [], [1]):
        assert equals(view.take(rows), [values[row] for row in rows])
    assert view.take([3, 1]).take([1])[0][0].tolist() == [1]
    assert equals(view.take([3, 1])[::-1], [values[1], values[3]])


def absent(view: ColumnView, row: int, keys: list[str] | None = None) -> ColumnView:
    """The same column where a row lacks the field."""
    rows = [(0, row), (-1, 0), (row + 1, len(view))]
    return ColumnView("x", cut(view.runs, rows), keys.__getitem__ if keys else None)


def test_a_row_that_lacks_the_field_says_which(arena: Any) -> None:
    view = absent(arena.view(["a", "b", "c"]), 1, ["k0", "k1", "k2"])
    assert [view.present(row) for row in range(3)] == [True, False, True]
    assert view[0] == "a" and view[2] == "c"
    with pytest.raises(FieldUnknown, match="row 'k1' has no field 'x'"):
        view[1]
    with pytest.raises(FieldUnknown, match="row 'k1' has no field 'x'"):
        list(view)
    with pytest.raises(FieldUnknown, match="row 'k1'"):
        view[1:][0]
    with pytest.raises(FieldUnknown, match="row 1 "):
        absent(arena.view(np.zeros(3)), 1)[1]


def test_equality_is_to_the_last_bit(arena: Any) -> None:
    view = arena.view([1.0, math.nan, {"a": np.zeros(2)}])
    assert equals(view, [1.0, math.nan, {"a": np.zeros(2)}])
    assert not equals(view, [1, math.nan, {"a": np.zeros(2)}])
    assert not equals(view, [1.0, math.nan])
    assert not same(np.zeros(2), np.zeros((2, 1))) and not same(0.0, -0.0)
    assert not same({"a": 1, "b": 2}, {"b": 2, "a": 1}) and not same([1], (1,))


# what does not fit together

INT = ColumnSpec("array", "int64")
GOOD = Values(
    ["x"],
    [Owner("p", 1), INLINE],
    [layouts.encode((INT,))],
    [Chunk(0, 1, 4, 32, 0)],
    [Piece(0, (0,), 0, b"\x0f")],
)


def read(arena: Any, values: Values, places: list[tuple[int, int]], rows: int = 4) -> ColumnView:
    raw = np.array(places, EXTENT).tobytes()
    reader = TableReader(Table(Rows(bytes(KEY.itemsize * rows)), values, {}, raw), arena.base())
    return reader.view("x")


def changed(**parts: Any) -> Values:
    return msgspec.structs.replace(GOOD, **parts)


def test_pieces_say_which_rows_have_a_value(arena: Any) -> None:
    arena.memory[:32] = np.arange(4).view(np.uint8)
    numbers = [
        Piece(0, (0,), 1, b"\x05", 2),  # rows 1 and 3 have the chunk's 2 and 3
        Piece(0, (0,), 5, b"\x03", 0, np.array([1, 0], "<u4").tobytes()),
    ]
    view = read(arena, changed(pieces=numbers[::-1]), [(0, 32)], rows=8)
    there = {row: int(view[row]) for row in range(8) if view.present(row)}
    assert there == {1: 2, 3: 3, 5: 1, 6: 0}
    both = read(
        arena,
        changed(pieces=[Piece(0, (0,), 0, b"\x03"), Piece(0, (0,), 2, b"\x03", 2)]),
        [(0, 32)],
    )
    assert len(both.runs) == 2 and same(np.array(both.dense()), np.arange(4))


def test_every_field_of_rows_in_many_runs_is_read(arena: Any) -> None:
    rows, there = 2 * SHARED_RUNS, SHARED_RUNS
    given = np.packbits([1, 0] * there, bitorder="little").tobytes()  # every second row
    memory = np.concatenate((np.arange(there), -np.arange(there))).view(np.uint8)
    arena.memory[: len(memory)] = memory
    values = Values(
        ["x", "y"],
        [Owner("p", 1)],
        [layouts.encode((INT, INT))],
        [Chunk(0, 1, there, len(memory), 0)],
        [Piece(0, (0, 1), 0, given)],
    )
    raw = np.array([(0, len(memory))], EXTENT).tobytes()
    reader = TableReader(Table(Rows(bytes(KEY.itemsize * rows)), values, {}, raw), arena.base())
    for reading in (reader, reader.part(np.arange(rows))):
        for field, sign in (("x", 1), ("y", -1)):
            view = reading.view(field)
            assert [row for row in range(rows) if view.present(row)] == list(range(0, rows, 2))
            found = [int(view[row]) for row in range(0, rows, 2)]
            assert found == [sign * n for n in range(there)]


def test_tables_share_small_shapes_and_not_those_that_would_fill_the_memory() -> None:
    def shape(fields: list[str], rows: int, given: int) -> TableShape:
        piece = Piece(0, tuple(range(len(fields))), 0, bytes_of(given))
        values = Values(fields, [], [b"layout"], [Chunk(0, 1, rows, 8, 0)], [piece])
        return shape_of_values(values, rows)

    def both(fields: list[str], rows: int, given: int) -> tuple[TableShape, TableShape]:
        return shape(list(fields), rows, given), shape(list(fields), rows, given)

    one, other = both(["a", "b"], 8, all_of(8))
    assert one is other and one.runs("a") is one.runs("a")
    assert [len(one.runs(field)) for field in "ab"] == [1, 1]
    rows = SHARED_RUNS  # of which every second one has both fields
    one, other = both(["a", "b"], rows, bits_of(range(0, rows, 2)))
    assert one is other and one.runs("b") is one.runs("b") and len(one.runs("b")) == rows
    assert one.runs("a") is not one.runs("a") and one.runs("a") == one.runs("a")
    assert {column for chunk, column, _, _ in one.runs("a") if chunk == 0} == {0}
    one, other = both([letter * 500 for letter in "abc"], 8, all_of(8))  # over SHARED_BYTES
    assert one is not other and one.runs("c" * 500) == other.runs("c" * 500)


@pytest.mark.parametrize("place", [(1 << 40, 32), (0, 1 << 40), (64, 2**64 - 32), (0, 31), (0, 40)])
def test_places_outside_the_arena_are_refused(arena: Any, place: tuple[int, int]) -> None:
    with pytest.raises(ProtocolError):
        read(arena, GOOD, [place])


@pytest.mark.parametrize(
    "values",
    [
        changed(chunks=[Chunk(0, 1, 4, 32, 1)]),
        changed(chunks=[Chunk(0, 1, -1, 32, 0)]),
        changed(pieces=[Piece(1, (0,), 0, b"\x0f")]),
        changed(pieces=[Piece(-1, (0,), 0, b"\x0f")]),
        changed(pieces=[Piece(0, (1,), 0, b"\x0f")]),
        changed(pieces=[Piece(0, (-2,), 0, b"\x0f")]),
        changed(pieces=[Piece(0, (0, 0), 0, b"\x0f")]),
        changed(pieces=[Piece(0, (0,), 0, b"")]),
        changed(pieces=[Piece(0, (0,), 1, b"\x0f")]),
        changed(pieces=[Piece(0, (0,), -1, b"\x0f")]),
        changed(pieces=[Piece(0, (0,), 1 << 60, b"\x0f")]),
        changed(pieces=[Piece(0, (0,), 0, b"\x0f", 1)]),
        changed(pieces=[Piece(0, (0,), 0, b"\x0f", -1)]),
        changed(pieces=[Piece(0, (0,), 0, b"\x0f", 0, b"\0" * 12)]),
        changed(pieces=[Piece(0, (0,), 0, b"\x01", 0, b"\xff" * 4)]),
        changed(pieces=[Piece(0, (0,), 0, b"\x03"), Piece(0, (0,), 1, b"\x01")]),
    ],
)
def test_values_that_do_not_fit_together_are_refused(arena: Any, values: Values) -> None:
    assert len(read(arena, GOOD, [(0, 32)])) == 4
    with pytest.raises(ProtocolError):
        read(arena, values, [(0, 32)])


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (changed(chunks=[Chunk(0, 1, 1 << 40, 32, 0)]), "the columns of its chunk take"),
        (changed(chunks=[Chunk(0, 1, 5, 32, 0)]), "take 40 bytes, but the chunk has 32"),
        (changed(chunks=[Chunk(1, 0, 4, 32, 0, bytes(31))]), "but the chunk has 31"),
        (changed(layouts=[b"no layout"]), "its layout cannot be decoded"),
        (changed(layouts=[layouts.encode((ColumnSpec("array", "int64", (2,)),))]), "take 64 bytes"),
        (
            changed(layouts=[layouts.encode((ColumnSpec("array", "int65"),))]),
            "dtype 'int65' is not",
        ),
        (changed(layouts=[layouts.encode((INT, INT))]), "its layout has 2 columns"),
    ],
)
def test_a_chunk_that_does_not_fit_its_layout_is_corrupt(
    arena: Any, values: Values, why: str
) -> None:
    with pytest.raises(ValueCorrupt, match=why) as corrupt:
        read(arena, values, [(0, 32)])
    inline = not values.chunks[0].number
    assert corrupt.value.details["writer"] == ("" if inline else values.owners[0].peer)


def test_a_shape_that_numpy_does_not_have_is_refused() -> None:
    spec = ColumnSpec("array", "int64", (1 << 40, 1 << 40, 0))
    (column,) = ChunkForm((spec,), 1).columns(np.zeros(0, np.uint8))
    view = ColumnView("x", [(column, 0, 1)])
    for read_it in (lambda: view[0], lambda: list(view), view.dense):
        with pytest.raises(ValueCorrupt, match="shape"):
            read_it()


def test_rows_of_several_replies_are_one_table(arena: Any) -> None:
    pages = []
    for columns in ({"x": [1, 2]}, {"x": [3], "y": ["a"]}, {"y": ["b", "c"]}):
        (units,) = plan(prepare(columns), inline=True)
        pages.append(arena.reader(pieces_of(units)))
    whole = join_readers(pages)
    assert whole.fields == ["x", "y"] and whole.volume == sum(page.volume for page in pages)
    order = np.array([4, 2, 0])
    for reader, rows in ((whole, range(5)), (whole.part(order), order)):
        for field, values in (("x", [1, 2, 3]), ("y", [None, None, "a", "b", "c"])):
            view = reader.view(field)
            assert len(view) == len(rows)
            for at, row in enumerate(rows):
                expected = values[row] if row < len(values) else None
                assert (view[at] if view.present(at) else None) == expected
    with pytest.raises(FieldUnknown, match="row 3 has no field 'x'"):
        whole.view("x")[3]
