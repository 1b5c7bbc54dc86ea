"""Columns as one numpy array, and as Arrow tables."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow as pa
import pytest

from dataplane.client.read.column_view import ColumnView, cut
from dataplane.client.read.convert import to_arrow, to_numpy
from dataplane.client.read.tensors import to_torch
from dataplane.errors import InvalidValue
from tests.same import same


def without(view: ColumnView, row: int) -> ColumnView:
    return ColumnView("x", cut(view.runs, [(0, row), (-1, 0), (row + 1, len(view))]))


def test_a_column_is_a_private_copy_and_a_view_where_that_is_asked_for(arena: Any) -> None:
    values = np.arange(60, dtype=np.float32).reshape(20, 3)
    view = arena.view(values)
    dense = to_numpy(view, view=True)
    assert isinstance(dense, np.ndarray)
    assert np.shares_memory(dense, arena.memory) and not dense.flags.writeable
    own = to_numpy(view)
    assert isinstance(own, np.ndarray)
    assert not np.shares_memory(own, arena.memory) and own.flags.writeable
    assert same(dense, values) and same(own, values)
    rows = [3, 1, 4, 15, 9, 2, 6]
    packed = to_numpy(view.take(rows), view=True)
    assert isinstance(packed, np.ndarray)
    assert not np.shares_memory(packed, arena.memory) and packed.flags.writeable
    assert same(packed, values[rows])


def test_rows_that_share_one_value_are_one_view(arena: Any) -> None:
    image = np.arange(5000)
    view = arena.view([image, image * 2])
    assert same(to_numpy(view.take([1, 1, 1])), np.stack([image * 2] * 3))


def test_large_rows_are_packed_in_the_order_asked(arena: Any) -> None:
    values = np.arange(5 * 20_000).reshape(5, 20_000)
    assert same(to_numpy(arena.view(values).take([4, 0, 3])), values[[4, 0, 3]])


def test_ragged_columns_are_lists(arena: Any) -> None:
    values = [np.arange(3), np.arange(5)]
    result = to_numpy(arena.view(values))
    assert type(result) is list and all(map(same, result, values))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 2, -3], np.array([1, 2, -3], np.int64)),
        ([0.5, 1.5], np.array([0.5, 1.5])),
        ([1, 0.5], np.array([1.0, 0.5])),
        ([True, False], np.array([True, False])),
        ([np.float32(1), np.float32(2)], np.array([1, 2], np.float32)),
    ],
)
def test_numbers_become_one_array(arena: Any, values: list[Any], expected: np.ndarray) -> None:
    assert same(to_numpy(arena.view(values)), expected)


@pytest.mark.parametrize(
    "values",
    [
        ["a", "b"],
        [1, None],
        [True, 1],
        [1 << 63, 1],
        [(1 << 53) + 1, 0.5],
        [np.float32(1), np.float64(1)],
        [1.5, np.float64(1)],
        [{"a": 1}, {}],
        [np.arange(2), "x"],
    ],
)
def test_other_objects_stay_a_list(arena: Any, values: list[Any]) -> None:
    result = to_numpy(arena.view(values))
    assert type(result) is list and all(map(same, result, values))


def test_rows_without_the_field_are_none(arena: Any) -> None:
    result = to_numpy(without(arena.view(np.array([1, 2, 3])), 1))
    assert [None if value is None else int(value) for value in result] == [1, None, 3]


# Arrow


def test_a_table_has_keys_fields_and_tags(arena: Any) -> None:
    fields = {
        "dense": arena.view(np.arange(6, dtype=np.int16).reshape(2, 3)),
        "number": arena.view(np.array([1.5, 2.5])),
        "ragged": arena.view([np.arange(2, dtype=np.int32), np.arange(0, dtype=np.int32)]),
        "grid": arena.view([np.arange(4).reshape(2, 2), np.arange(3).reshape(1, 3)]),
        "text": arena.view(["a", "b"]),
        "chat": arena.view([{"images": [np.arange(2)], "n": 1}, {"images": [], "n": 2}]),
    }
    table = to_arrow(fields, ["k0", "k1"], {"version": [6, 7], "text": [True, False]})
    assert table.column_names == ["key", *fields, "version", "tag.text"]
    assert table["dense"].type == pa.fixed_shape_tensor(pa.int16(), [3])
    assert table["ragged"].type == pa.list_(pa.int32())
    assert table["grid"].type == pa.list_(pa.list_(pa.int64()))
    assert table.drop_columns(["dense"]).to_pydict() == {
        "key": ["k0", "k1"],
        "number": [1.5, 2.5],
        "ragged": [[0, 1], []],
        "grid": [[[0, 1], [2, 3]], [[0, 1, 2]]],
        "text": ["a", "b"],
        "chat": [{"images": [[0, 1]], "n": 1}, {"images": [], "n": 2}],
        "version": [6, 7],
        "tag.text": [True, False],
    }
    tensor = table["dense"].combine_chunks().to_numpy_ndarray()
    assert tensor.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_field_named_like_the_key_column_gets_another_name(arena: Any) -> None:
    table = to_arrow({"key": arena.view([1, 2])}, ["a", "b"])
    assert table.to_pydict() == {"key": ["a", "b"], "field.key": [1, 2]}


def test_times_without_a_unit_are_refused_though_numpy_cannot_print_them(arena: Any) -> None:
    times = np.arange(1, 3).view("M8")
    for column in (times, list(times), [times, times], [{"at": times}]):
        with pytest.raises(InvalidValue, match=r"'x': row 0 .* does not fit in an Arrow column"):
            to_arrow({"x": arena.view(column)})
        with pytest.raises(InvalidValue, match="torch"):
            to_torch(arena.view(column), "dense")


def test_keys_and_tags_of_two_types_are_not_made_one(arena: Any) -> None:
    field = {"x": arena.view([1, 2, 3])}
    with pytest.raises(InvalidValue, match=r"key: row 2 \('1'\) does not fit in an Arrow column"):
        to_arrow(field, [1, 2, "1"])
    with pytest.raises(InvalidValue, match=r"tag 't': row 1 \(True\)") as caught:
        to_arrow(field, tags={"t": [1, True, 2]})
    assert caught.value.details == {"row": 1, "tag": "t"}
    with pytest.raises(InvalidValue, match="tag 't': row 1"):
        to_arrow(field, tags={"t": [2**53 + 1, 0.5, 1]})


def test_what_to_do_about_a_key_or_tag_fits_what_is_wrong_with_it(arena: Any) -> None:
    field = {"x": arena.view([1, 2])}
    with pytest.raises(InvalidValue, match="two calls"):
        to_arrow(field, [1, "1"])
    with pytest.raises(InvalidValue, match="read them with the keys attribute"):
        to_arrow(field, [1, 2**64 - 1])
    with pytest.raises(InvalidValue, match="set tags of one type"):
        to_arrow(field, tags={"t": [1, "1"]})
    with pytest.raises(InvalidValue, match="read it with the tags attribute"):
        to_arrow(field, tags={"t": [None, 2**64 - 1]})


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.array([1, 2.5], ml_dtypes.bfloat16), [1.0, 2.5]),
        (np.array([[1], [2]], ml_dtypes.float8_e4m3fn), [[1.0], [2.0]]),
        (np.array([1, -2], ml_dtypes.int4), [1, -2]),
        (np.array([1, 2], ml_dtypes.uint2), [1, 2]),
        (np.array([[True], [False]]), [[True], [False]]),
        (np.zeros((2, 0, 3)), [[], []]),
        (np.zeros((2, 1, 0)), [[[]], [[]]]),
        ([np.arange(2), np.array([1], np.float32)], [[0, 1], [1]]),
        ([np.arange(2), np.zeros((1, 1), int)], None),
        ([{"a": np.zeros((1, 2))}, {}], [{"a": [[0.0, 0.0]]}, {"a": None}]),
        ([np.float32(0.5), None], [0.5, None]),
        ([1, "a"], None),
        (["a", b"a"], None),
        ([{b"a": 1}], None),
        ([{1: 2}], None),
        ([1, True], None),
        ([2**53 + 1, 0.5], None),
        (np.array([1500], "M8[ps]"), None),
        (np.array([2**62], "M8[Y]"), None),
        (np.array([3], "m8[M]"), None),
        (np.array([3]).view("m8"), None),
        ([{"at": np.datetime64(1500, "ps")}], None),
        ([{"at": [np.datetime64(1, "s"), np.datetime64(1, "ns")]}], None),
        (np.zeros(2, np.complex64), None),
        (np.array([1 + 2j], ml_dtypes.complex32), None),
        ([np.zeros(2, ml_dtypes.complex32), np.zeros(1, ml_dtypes.complex32)], None),
        ([{"a": np.array([1 + 2j], ml_dtypes.bcomplex32)}], None),
        (np.zeros(2, np.longdouble), None),
        ([(-1.5, False)], None),
        ([{"a": 1}, {"a": True}], None),
    ],
)
def test_values_become_arrow_or_say_why_not(arena: Any, values: Any, expected: Any) -> None:
    fields = {"x": arena.view(values)}
    if expected is None:
        with pytest.raises(InvalidValue, match=r"'x': row \d .* does not fit in an Arrow column"):
            to_arrow(fields)
    else:
        assert to_arrow(fields)["x"].to_pylist() == expected


def test_times_keep_their_meaning(arena: Any) -> None:
    for unit in ("s", "ms", "us", "ns", "D", "h", "25s", "10ms", "Y", "M"):
        values = np.array(["2020-01-02", "2021-03-04", "1970-01-01"], f"M8[{unit}]")
        values[2] += np.array(1, f"m8[{unit}]")
        stored = to_arrow({"x": arena.view(values)})["x"].to_numpy()
        assert (stored == values).all(), unit
    inside = [{"at": np.datetime64(1500, "ns"), "for": np.timedelta64(3, "h")}]
    stored = to_arrow({"x": arena.view(inside)})["x"].combine_chunks()
    assert stored.field("at").to_numpy(zero_copy_only=False)[0] == np.datetime64(1500, "ns")
    assert stored.field("for").to_numpy(zero_copy_only=False)[0] == np.timedelta64(3, "h")


def test_a_row_that_lacks_the_field_is_null(arena: Any) -> None:
    view = without(arena.view([np.arange(2), np.arange(3), np.arange(1)]), 1)
    assert to_arrow({"x": view})["x"].to_pylist() == [[0, 1], None, [0]]


def test_nothing_is_imported_before_it_is_used() -> None:
    code = (
        "import sys, dataplane.client.read.convert, dataplane.client.write.chunks, "
        "dataplane.client.write.columns\n"
        "assert not {'torch', 'pyarrow', 'cupy', 'jax'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
