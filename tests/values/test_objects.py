"""The codec of object values."""

from __future__ import annotations

import contextlib
import enum
import math
import struct
from collections import OrderedDict, namedtuple
from typing import Any

import ml_dtypes
import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from dataplane.errors import InvalidValue, LimitExceeded, ValueCorrupt
from dataplane.wire.limits import MAX_LEAVES_PER_ROW, MAX_NESTING
from dataplane.wire.objects import decode, encode, encode_many
from tests.same import same


def row(value: object) -> bytes:
    """What a chunk has of it."""
    return b"".join(encode(value))


def head(value: object) -> bytes:
    """The MessagePack value at the start of a row."""
    (nbytes,) = struct.unpack_from("<I", row(value))
    return row(value)[4 : 4 + nbytes]


def round_trip(value: object) -> Any:
    return decode(row(value))


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=-(1 << 200), max_value=1 << 200),
    st.floats(),
    st.text(),
    st.binary(),
)
ARRAYS = st.sampled_from(
    [
        np.arange(6, dtype=np.int16).reshape(2, 3),
        np.zeros((0, 4), np.float32),
        np.array(1.5, np.float64),
        np.array([1, 2], ml_dtypes.bfloat16),
        np.array(["2020-01-01"], "M8[D]"),
        np.float32(0.1),
        np.bool_(True),
        np.int8(-1),
        ml_dtypes.float8_e4m3fn(2),
        np.datetime64("2020-01-01T00:00", "m"),
    ]
)
KEYS = st.one_of(SCALARS, st.tuples(SCALARS, SCALARS)).filter(lambda k: k == k)
VALUES = st.recursive(
    SCALARS | ARRAYS,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=5)
    ),
    max_leaves=20,
)


@given(VALUES)
@settings(max_examples=300)
def test_any_nested_value_comes_back_with_its_exact_types(value: object) -> None:
    assert same(round_trip(value), value)


def test_types_that_equal_each_other_stay_apart() -> None:
    value = [1, 1.0, True, "1", b"1", np.int64(1), np.float64(1.0), (1,), [1], {1: 1}, {"1": 1}]
    assert [type(item) for item in round_trip(value)] == [type(item) for item in value]


def test_a_missing_key_stays_missing_and_the_order_of_keys_is_kept() -> None:
    rows = [{"b": 1, "a": 2}, {"a": 3}, {}]
    assert [list(row) for row in round_trip(rows)] == [["b", "a"], ["a"], []]


def test_nan_infinity_and_negative_zero_are_kept() -> None:
    nan, infinite, zero = round_trip([math.nan, -math.inf, -0.0])
    assert math.isnan(nan) and infinite == -math.inf and math.copysign(1, zero) == -1


def test_keys_of_every_scalar_type_are_kept() -> None:
    value = {1: "int", "1": "str", None: 0, b"1": 0, 2.5: 0, (1, "a"): 0, 1 << 90: 0, np.int8(7): 0}
    result = round_trip(value)
    assert result == value and list(map(type, result)) == list(map(type, value))


def test_large_maps_with_odd_keys_are_spelled_out() -> None:
    for count in (15, 16, 70_000):
        value = {(index,): index for index in range(count)}
        assert round_trip(value) == value


def test_bytearray_and_memoryview_come_back_as_bytes() -> None:
    assert round_trip([bytearray(b"ab"), memoryview(b"cd")]) == [b"ab", b"cd"]


def test_arrays_are_behind_the_head_and_views_of_the_row() -> None:
    image, scores = np.arange(12.0).reshape(3, 4), np.arange(3, dtype=np.int8)
    buffers = encode({"image": image, "scores": [scores] * 2})
    assert any(one is image for one in buffers)
    memory = np.frombuffer(b"".join(buffers), np.uint8)
    found = decode(memoryview(memory))  # type: ignore[arg-type]
    assert np.shares_memory(found["image"], memory)
    assert not found["image"].flags.writeable
    starts = [found["image"], *found["scores"]]
    start = memory.__array_interface__["data"][0]
    assert all((one.__array_interface__["data"][0] - start) % 16 == 0 for one in starts)


def test_a_row_in_memory_that_can_be_written_is_read_only_all_the_same() -> None:
    found = decode(memoryview(bytearray(row([np.zeros(2)]))))
    assert not found[0].flags.writeable


def test_the_head_is_plain_msgpack_for_an_independent_decoder() -> None:
    given = {"role": "user", "n": [1, None, 0.5], 3: b"x"}
    assert msgpack.unpackb(head(given), strict_map_key=False) == given
    outer = msgpack.unpackb(head((np.zeros((3, 2)), np.ones(1, np.int8), 1 << 64)))
    first, second, number = msgpack.unpackb(outer.data)
    assert (outer.code, first.code, number.code) == (2, 1, 3)
    assert msgpack.unpackb(first.data) == ["float64", [3, 2], 0]
    assert msgpack.unpackb(second.data) == ["int8", [1], 48]
    assert int.from_bytes(number.data, "little", signed=True) == 1 << 64


class Color(enum.IntEnum):
    RED = 1


Point = namedtuple("Point", "x y")


SEE_THROUGH = Image.new("RGB", (2, 2))
SEE_THROUGH.info["transparency"] = (0, 0, 0)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({1, 2}, "a set cannot be stored"),
        (object(), "an object cannot be stored"),
        (1j, "a complex cannot be stored"),
        (Color.RED, r"Color would come back as a plain int: pass int\("),
        (Point(1, 2), "would come back as a plain tuple"),
        (OrderedDict(a=1), "would come back as a plain dict"),
        (np.str_("a"), "str_ cannot be stored"),
        (np.array(["a"]), "it holds text"),
        (np.zeros(2, "i4,f4"), "it is a structured array"),
        (np.ma.masked_array([1, 2], [False, True]), "would lose its mask"),
        (Image.new("P", (2, 2)), "would lose the palette"),
        (SEE_THROUGH, "would lose the transparency"),
        (np.zeros((1,) * 17), "17 dimensions"),
        ("\ud800", "not valid text"),
        (np.float32, "a type cannot be stored"),
    ],
)
def test_what_cannot_travel_is_refused_with_its_place(bad: object, reason: str) -> None:
    with pytest.raises(InvalidValue, match=reason) as caught:
        encode([0, {"image": (bad,)}], "prompt[3]")
    assert caught.value.message.startswith('prompt[3][1]["image"][0]: ')
    assert caught.value.details["path"] == 'prompt[3][1]["image"][0]'


def test_nesting_and_leaves_have_limits() -> None:
    deep: list[object] = []
    for _ in range(MAX_NESTING - 1):
        deep = [deep]
    assert round_trip(deep) == deep
    with pytest.raises(LimitExceeded, match="nested deeper"):
        encode([deep])
    circle: list[object] = []
    circle.append({"again": circle})
    with pytest.raises(LimitExceeded, match="nested deeper"):
        encode(circle)
    leaf = np.zeros(1)
    assert len(decode(row([leaf] * MAX_LEAVES_PER_ROW))) == MAX_LEAVES_PER_ROW
    with pytest.raises(LimitExceeded, match="value contains more than 4096 arrays"):
        encode([leaf] * (MAX_LEAVES_PER_ROW + 1))


def test_plain_columns_are_encoded_at_once_and_others_are_not() -> None:
    values = [1, "a", None, 2.5, b"x", True]
    rows = encode_many(values)
    assert rows is not None and [decode(row) for row in rows] == values
    assert encode_many([1, [2]]) is None
    assert encode_many([1, 1 << 70]) is None
    scalars = [np.float64(1), 2, np.int8(3)]
    rows = encode_many(scalars)
    assert rows == [encode(one)[0] for one in scalars]
    assert encode_many([np.str_("a")]) is None and encode_many([np.zeros(1)]) is None


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"\xc1",
        b"\x92\x01",
        b"\xdd\xff\xff\xff\xff",
        b"\xd4\x09a",
        b"\xd4\x01\x00",
        b"\xd4\x02\x01",
        b"\xd4\x04\x00",
        b"\xc7\x09\x04\x07float99\0",
        b"\xc7\x0a\x04\x07float32\0\0",
        b"\x81\x81\x01\x01\x02",
        b"\x91" * 100_000,
        b"\x01\x01",
        b"\xa1\xff",
    ],
)
def test_a_head_that_is_not_ours_is_corrupt(head: bytes) -> None:
    with pytest.raises(ValueCorrupt):
        decode(struct.pack("<I", len(head)) + head)


@pytest.mark.parametrize(
    "leaf",
    [
        ["float64", [2], 0],
        ["float64", [1], 16],
        ["float64", [1], 8],
        ["float64", [1], -16],
        ["float64", [-1], 0],
        ["float64", [1 << 62, 4], 0],
        ["float64", [1] * 17, 0],
        ["object", [1], 0],
        ["float64", [1]],
        ["float64", 1, 0],
    ],
)
def test_an_array_that_is_not_in_its_row_is_corrupt(leaf: list[object]) -> None:
    head = msgpack.packb(msgpack.ExtType(1, msgpack.packb(leaf)))
    start = struct.pack("<I", len(head)) + head
    with pytest.raises(ValueCorrupt):
        decode(start + bytes(-len(start) % 16) + bytes(8))


def test_a_row_that_is_cut_off_is_corrupt() -> None:
    whole = row({"a": np.arange(3), "b": "text"})
    for end in range(len(whole)):
        with pytest.raises(ValueCorrupt):
            decode(whole[:end])


@given(st.binary(max_size=64), st.binary(max_size=32))
@settings(max_examples=300)
def test_any_bytes_decode_or_are_corrupt(head: bytes, rest: bytes) -> None:
    with contextlib.suppress(ValueCorrupt):
        decode(struct.pack("<I", len(head)) + head + rest)
    with contextlib.suppress(ValueCorrupt):
        decode(head)


def test_a_large_array_is_in_a_row_once_however_often_the_row_has_it() -> None:
    image = np.random.default_rng(0).random((64, 256))
    value: list[Any] = [{"image": image.copy(), "n": n} for n in range(8)]
    value += [{"image": image.view(np.int64).T.copy().T}, {"image": image + 1}]
    row = b"".join([memoryview(one).cast("B") for one in encode(value)])
    assert 2 * image.nbytes < len(row) < 3 * image.nbytes
    found: Any = decode(row)
    for one, expected in zip(found, value, strict=True):
        assert one["image"].dtype == expected["image"].dtype
        assert np.array_equal(one["image"], expected["image"])
