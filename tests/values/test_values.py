"""Columns of a put in travelling form, and what is wrong with those that are not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dataplane.client.write.columns import prepare
from dataplane.errors import FieldUnknown, InvalidRows, InvalidValue, LimitExceeded
from dataplane.wire.layouts import ColumnSpec
from dataplane.wire.limits import MAX_FIELDS
from dataplane.wire.packed import U4
from tests.same import same


def test_arrays_are_not_copied() -> None:
    dense, row = np.arange(10.0).reshape(2, 5), np.arange(3)
    whole, ragged = prepare({"dense": dense, "ragged": [row, row[:2]]})
    assert np.shares_memory(whole.source, dense)
    assert ragged.source[0] is row


def test_large_contiguous_rows_of_a_strided_array_are_not_copied() -> None:
    array = np.zeros((4, 2, 5000), np.uint8)[:, 0]
    (column,) = prepare({"x": array})
    assert np.shares_memory(column.source[1], array)


def test_specs_are_open_where_rows_differ() -> None:
    rows = [np.zeros(n, np.int64) for n in (3, 0, 5)]
    columns = {
        "tokens": rows,
        "image": [np.zeros((n, 4, 2), np.uint8) for n in (1, 2, 0)],
        "mrope": [np.zeros((3, n), np.int64) for n in (1, 2, 2)],
        "grid": [np.zeros((n, 7, n), np.int8) for n in (1, 2, 2)],
        "text": ["a", "b", "é"],
        "raw": [b"", b"a", b"bc"],
        "object": ["a", b"b", None],
    }
    prepared = {column.field: column for column in prepare(columns)}
    assert {name: column.spec for name, column in prepared.items()} == {
        "tokens": ColumnSpec("array", "int64", (-1,), loose=True),
        "image": ColumnSpec("array", "uint8", (-1, 4, 2), loose=True),
        "mrope": ColumnSpec("array", "int64", (3, -1), loose=True),
        "grid": ColumnSpec("array", "int8", (-1, 7, -1), loose=True),
        "text": ColumnSpec("text"),
        "raw": ColumnSpec("bytes"),
        "object": ColumnSpec("object"),
    }
    lengths = {
        name: np.frombuffer(column.lengths, U4).tolist() for name, column in prepared.items()
    }
    assert lengths["tokens"] == [3, 0, 5]
    assert lengths["grid"] == [1, 1, 2, 2, 2, 2]
    assert lengths["text"] == [1, 1, 2]


def test_rows_that_are_alike_need_no_lengths_but_vectors_that_came_one_by_one() -> None:
    columns = {
        "a": [np.zeros((3, 0))] * 2,
        "b": np.zeros(2),
        "c": np.zeros((2, 0, 4)),
        "d": [np.zeros(2)] * 2,
    }
    prepared = prepare(columns)
    assert [column.spec for column in prepared] == [
        ColumnSpec("array", "float64", (3, 0), loose=True),
        ColumnSpec("array", "float64", ()),
        ColumnSpec("array", "float64", (0, 4)),
        ColumnSpec("array", "float64", (-1,), loose=True),
    ]
    assert [len(column.lengths) // U4.itemsize for column in prepared] == [0, 0, 0, 2]


def test_arrays_of_several_dtypes_or_ranks_are_objects(arena: Any) -> None:
    dtypes, ranks = [np.zeros(2, np.int8), np.zeros(2)], [np.zeros(2), np.zeros((2, 2))]
    assert {column.spec.kind for column in prepare({"a": dtypes, "b": ranks})} == {"object"}
    put = arena.put({"a": dtypes, "b": ranks})
    assert all(map(same, put["a"], dtypes)) and all(map(same, put["b"], ranks))


def test_columns_of_different_lengths_are_named() -> None:
    with pytest.raises(InvalidRows, match="tokens: 3, reward: 2") as caught:
        prepare({"tokens": np.zeros((3, 2)), "reward": [1, 2]})
    assert caught.value.details["lengths"] == {"tokens": 3, "reward": 2}
    with pytest.raises(InvalidRows, match=r"key= names 4 rows, .*\(tokens: 3\)"):
        prepare({"tokens": [1, 2, 3]}, 4)


@pytest.mark.parametrize("columns", [{}, {"x": []}, {"x": np.zeros((0, 3))}])
def test_an_empty_put_is_refused(columns: dict[str, Any]) -> None:
    with pytest.raises(InvalidRows, match="to write"):
        prepare(columns)


@pytest.mark.parametrize("column", ["text", b"bytes", {"a": 1}, {1, 2}, 3, None, np.float32(1)])
def test_a_column_that_is_one_value_is_refused(column: object) -> None:
    with pytest.raises(InvalidRows, match="field 'x': expected a list or an array"):
        prepare({"x": column})
    with pytest.raises(InvalidRows, match="field 'x': expected a list or an array"):
        prepare({"x": np.zeros(())})


def test_a_value_that_cannot_travel_is_named_by_field_and_row() -> None:
    with pytest.raises(InvalidValue, match=r'^prompt\[3\]\["image"\]: ') as caught:
        prepare({"prompt": ["a", "b", "c", {"image": object()}]})
    assert caught.value.details["field"] == "prompt" and caught.value.details["row"] == 3
    with pytest.raises(InvalidValue, match=r"^tokens\[1\]: .*it holds text") as caught:
        prepare({"tokens": [np.zeros(2), np.array(["x"])]})
    assert caught.value.details["row"] == 1
    with pytest.raises(InvalidValue, match=r"^field 'text': .*pass array\.tolist\(\)"):
        prepare({"text": np.array(["a", "b"])})
    with pytest.raises(InvalidValue, match=r"^text\[1\]: .* is not valid text"):
        prepare({"text": ["a", "\ud800"]})


def test_names_of_fields_are_checked() -> None:
    for name in ("", 3, "x" * 1000):
        with pytest.raises(InvalidRows, match="invalid field name .*: expected a str"):
            prepare({name: [1]})  # type: ignore[dict-item]
    with pytest.raises(InvalidRows, match=r"'train~x' contains '~', which is reserved for"):
        prepare({"train~x": [1]})
    with pytest.raises(LimitExceeded, match="fields"):
        prepare({f"f{index}": [1] for index in range(MAX_FIELDS + 1)})
    with pytest.raises(FieldUnknown, match="dedup= names field 'y'"):
        prepare({"x": [1]}, dedup=["y"])


class Interface:
    """An array of another library, by `__array_interface__`."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array
        self.__array_interface__ = array.__array_interface__


class OnDevice:
    """Like a cupy array: copied to the host by `get` alone."""

    __cuda_array_interface__ = {"shape": (2,), "typestr": "<f4", "data": (0, False), "version": 3}

    def get(self) -> np.ndarray:
        return np.array([1, 2], np.float32)

    def __array__(self, *_: object, **__: object) -> np.ndarray:
        raise TypeError("implicit conversion to a NumPy array is not allowed")


class OverDlpack:
    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self._array.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()


class Refusing:
    def __array__(self, *_: object, **__: object) -> np.ndarray:
        raise TypeError("is on another device")


def test_arrays_of_other_libraries_are_taken(arena: Any) -> None:
    array = np.arange(4, dtype=np.int16)
    put = arena.put({"x": [Interface(array)], "y": [OnDevice()], "z": [OverDlpack(array)]})
    assert put["x"][0].tolist() == put["z"][0].tolist() == [0, 1, 2, 3]
    assert put["y"][0].tolist() == [1, 2] and put["y"][0].dtype == np.float32
    dense = arena.put({"x": Interface(array), "y": OverDlpack(array)})
    assert [int(value) for value in dense["x"]] == [0, 1, 2, 3]
    with pytest.raises(
        InvalidValue, match=r"x\[0\]: .*Refusing cannot be converted .* another device"
    ):
        arena.put({"x": [Refusing()]})


class Quantity(np.ndarray):
    """Numbers with a unit, as astropy and unyt have them."""

    unit = "m / s"


class Measured:
    """The same as pint has it."""

    units = "ms"

    def __array__(self, *_: object, **__: object) -> np.ndarray:
        return np.ones(2)


SECONDS = np.ones(2).view(Quantity)
NULLS = [1, None]
RUNS = pa.RunEndEncodedArray.from_arrays(pa.array([1, 3], pa.int32()), pa.array(NULLS))
INTERVALS = pa.array([(1, 2, 3)], pa.month_day_nano_interval())
"""NumPy ends the process if it is asked for these."""
CODED = pa.DictionaryArray.from_arrays(pa.array([0, 1]), pa.array(NULLS))


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (SECONDS, "Quantity has the unit 'm / s', which a NumPy array cannot hold"),
        (Measured(), "Measured has the unit 'ms'"),
        (pa.table({"a": [2**53 + 1], "b": [0.5]}), "would lose the names and types of its columns"),
        (pa.record_batch({"a": NULLS}), "would lose the names and types of its columns"),
        (RUNS, "contains nulls"),
        (CODED, "contains nulls"),
        (pa.chunked_array([CODED]), "contains nulls"),
        (np.array(["a", "b"], np.dtypes.StringDType()), "it holds text"),
        (INTERVALS, "the Arrow type month_day_nano_interval"),
        (pa.chunked_array([INTERVALS]), "the Arrow type month_day_nano_interval"),
        (pa.StructArray.from_arrays([INTERVALS], ["a"]), "pass the months, days and nanoseconds"),
    ],
)
def test_what_an_array_would_lose_is_refused_at_every_depth(value: Any, why: str) -> None:
    for column in (value, [value], [{"a": value}], [[value]]):
        with pytest.raises(InvalidValue, match=why):
            prepare({"x": column})


def test_byte_order_and_strides_are_made_plain(arena: Any) -> None:
    array = np.arange(12, dtype=">i4").reshape(3, 4)
    put = arena.put({"dense": array.T, "rows": list(array.T), "leaf": [[array]] * 4})
    for row, (dense, alone) in enumerate(zip(put["dense"], put["rows"], strict=True)):
        assert dense.dtype == np.dtype("<i4") and dense.tolist() == array.T[row].tolist()
        assert alone.tolist() == dense.tolist()
    assert put["leaf"][0][0].dtype.isnative


@pytest.mark.parametrize("kind", ["M8[s]", "M8", "m8[25s]", "m8", "c16", "f8", "i4", "g"])
def test_arrays_of_any_byte_order_layout_and_metadata_come_back_native(
    new_arena: Any, kind: str
) -> None:
    numbers = np.arange(1, 9)
    native = numbers.view(kind) if kind[0] in "mM" else numbers.astype(kind)
    swapped = native.byteswap().view(native.dtype.newbyteorder())
    for array in (swapped, native.view(np.dtype(native.dtype, metadata={"unit": "m"}))):
        wide = np.zeros((8, 9000), array.dtype)[:, :8000]  # large rows with gaps between them
        wide[...] = array[:, None]
        put = new_arena(4 << 20).put(
            {
                "back": array[::-1],
                "columns": np.stack([array, array]).T,
                "leaves": [[row] for row in array.reshape(8, 1)],
                "rows": list(np.stack([array, array]).T),
                "wide": wide,
            }
        )
        assert all(same(put["back"][at], native[7 - at, ...]) for at in range(8))
        twice = np.stack([native, native], axis=1)
        assert all(map(same, put["columns"], twice))
        assert all(map(same, put["leaves"], [[row] for row in native.reshape(8, 1)]))
        assert all(map(same, put["rows"], twice))
        assert all(map(same, put["wide"], np.broadcast_to(native[:, None], (8, 8000))))


def test_columns_may_be_any_iterable_in_order(arena: Any) -> None:
    put = arena.put({"a": range(3), "b": (x for x in "abc"), "c": (1.5, None, "x")})
    assert put == {"a": [0, 1, 2], "b": ["a", "b", "c"], "c": [1.5, None, "x"]}
