"""Columns of chunks: what was laid out is read, and what does not fit is refused."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Literal

import ml_dtypes
import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.client.read.chunk_columns import ChunkColumn, ChunkForm
from dataplane.errors import ValueCorrupt
from dataplane.wire import layouts
from dataplane.wire.layouts import OPEN, ColumnSpec
from dataplane.wire.limits import MAX_LAYOUT_BYTES

Memory = npt.NDArray[np.uint8]
DTYPES = [np.int64, np.float32, np.bool_, np.float16, ml_dtypes.bfloat16]


def _up(nbytes: int, to: int = 64) -> int:
    return -(-nbytes // to) * to


def laid_out(specs: Sequence[ColumnSpec], rows: Sequence[Sequence[Any]]) -> Memory:
    """A chunk written row by row. rows: per column its arrays, or bytes."""
    lengths, values = list[int](), b""
    for spec, column in zip(specs, rows, strict=True):
        values += bytes(_up(len(values)) - len(values))
        for value in column:
            if spec.dtype:
                open_axes = zip(value.shape, spec.shape, strict=True)
                lengths += [own for own, said in open_axes if said == OPEN]
                values += value.tobytes()
            else:
                lengths.append(len(value))
                values += value
                if spec.kind == "object":
                    values += bytes(_up(len(values), 16) - len(values))
    head = np.array(lengths, "<u4").tobytes()
    gap = bytes(_up(len(head)) - len(head)) if specs else b""
    return np.frombuffer(head + gap + values, np.uint8)


KINDS: list[Literal["array", "scalar", "text", "bytes", "object"]] = [
    "array", "array", "scalar", "text", "bytes", "object"
]  # fmt: skip


@st.composite
def columns(draw: st.DrawFn, rows: int) -> tuple[ColumnSpec, list[Any]]:
    kind = draw(st.sampled_from(KINDS))
    if kind == "scalar":
        dtype = np.dtype(draw(st.sampled_from(DTYPES)))
        return ColumnSpec(kind, dtype.name), list(np.arange(rows).astype(dtype))
    if kind != "array":
        texts = [draw(st.binary(max_size=90)) for _ in range(rows)]
        return ColumnSpec(kind), texts
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    rank = draw(st.integers(0, 3))
    shape = tuple(draw(st.sampled_from([OPEN, 0, 1, 3])) for _ in range(rank))
    alike = draw(st.booleans())
    own = [draw(st.integers(0, 4)) for _ in shape]
    arrays = []
    for _ in range(rows):
        lengths = own if alike else [draw(st.integers(0, 4)) for _ in shape]
        closed = tuple(b if a == OPEN else a for a, b in zip(shape, lengths, strict=True))
        count = int(np.prod(closed, dtype=np.int64))
        arrays.append(np.arange(count).astype(dtype).reshape(closed))
    return ColumnSpec("array", dtype.name, shape), arrays


def _values(column: ChunkColumn) -> list[Any]:
    if column.spec.kind == "array":
        return list(column.arrays(0, column.rows))
    if column.spec.dtype:
        return list(column.scalars(0, column.rows))
    return list(map(bytes, column.cells(0, column.rows)))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, bytes):
        return bool(one == other)
    return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())


@given(st.data())
def test_what_was_laid_out_is_read(data: st.DataObject) -> None:
    rows = data.draw(st.integers(0, 6))
    made = [data.draw(columns(rows)) for _ in range(data.draw(st.integers(1, 5)))]
    specs = [spec for spec, _ in made]
    memory = laid_out(specs, [values for _, values in made])
    found = ChunkForm(tuple(specs), rows).columns(memory)
    for (spec, values), column in zip(made, found, strict=True):
        assert all(map(_same, _values(column), values))
        if spec.kind != "array":
            continue
        assert all(_same(column.array(row), values[row]) for row in range(rows))
        shapes = {value.shape for value in values}
        if rows:
            assert (column.shared_shape(0, rows) is not None) == (len(shapes) == 1)
        first, last = sorted(data.draw(st.integers(0, rows)) for _ in range(2))
        joined = b"".join(value.tobytes() for value in values[first:last])
        assert column.span(first, last).tobytes() == joined


@given(st.data())
def test_what_does_not_fit_is_refused(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 4))
    made = [data.draw(columns(rows)) for _ in range(data.draw(st.integers(1, 3)))]
    specs = [spec for spec, _ in made]
    memory = laid_out(specs, [values for _, values in made])
    cut = data.draw(st.integers(0, len(memory) - 1)) if len(memory) else 0
    for wrong in (memory[:cut], np.concatenate((memory, np.zeros(1, np.uint8)))):
        if len(wrong) != len(memory):
            with pytest.raises(ValueCorrupt):
                ChunkForm(tuple(specs), rows).columns(wrong)


@given(st.binary(min_size=64, max_size=256), st.integers(0, 8), st.data())
def test_random_bytes_are_read_or_refused(raw: bytes, rows: int, data: st.DataObject) -> None:
    specs = [data.draw(columns(0))[0] for _ in range(data.draw(st.integers(1, 3)))]
    memory = np.frombuffer(raw, np.uint8)
    try:
        found = ChunkForm(tuple(specs), rows).columns(memory)
    except ValueCorrupt:
        return
    for value in itertools.chain.from_iterable(map(_values, found)):
        assert value is not None


def test_text_that_is_not_utf_8_is_refused() -> None:
    spec = ColumnSpec("text")
    (column,) = ChunkForm((spec,), 2).columns(laid_out([spec], [[b"fine", b"\xff\xfe"]]))
    assert list(column.values(0, 1)) == ["fine"]
    with pytest.raises(ValueCorrupt, match="UTF-8"):
        column.values(0, 2)


@pytest.mark.parametrize("rows", [1 << 61, 1 << 70])
def test_more_lengths_than_memory_can_hold_are_refused(rows: int) -> None:
    with pytest.raises(ValueCorrupt, match="its chunk cannot have"):
        ChunkForm((ColumnSpec("bytes"),), rows).columns(np.zeros(64, np.uint8))


@pytest.mark.parametrize("rows", [1, 2])
def test_a_row_that_a_caller_gives_another_shape_is_read_as_before(rows: int) -> None:
    spec = ColumnSpec("array", "int64", (OPEN,))
    memory = laid_out([spec], [[np.arange(4)] * rows])
    (column,) = ChunkForm((spec,), rows).columns(memory)
    for _ in range(2):
        (first,) = column.values(0, 1)
        assert first.shape == (4,)
        first.shape = (2, 2)


@pytest.mark.parametrize(
    "spec",
    [
        ColumnSpec("array", "int64", (-2,)),
        ColumnSpec("array", "object", (1,)),
        ColumnSpec("array", "int64", (1,) * 100),
        ColumnSpec("array"),
        ColumnSpec("scalar"),
        ColumnSpec("number", "object"),
        ColumnSpec("number", "datetime64[D]"),  # would be read as dates
        ColumnSpec("number", "complex64"),
        ColumnSpec("scalar", "int64", (OPEN,)),
        ColumnSpec("text", "int64"),
    ],
)
def test_a_spec_that_is_none_is_refused(spec: ColumnSpec) -> None:
    with pytest.raises(ValueCorrupt):
        layouts.decode(layouts.encode((spec,)))


def test_a_layout_longer_than_the_limit_is_refused_and_not_kept() -> None:
    columns = ["text", "", [], False], *[["bytes", "", [], False]] * 3
    layout = msgspec.msgpack.encode([layouts.VERSION, columns, bytes(MAX_LAYOUT_BYTES)])
    kept = layouts.decode.cache_info().currsize
    with pytest.raises(ValueCorrupt, match=f"at most {MAX_LAYOUT_BYTES}"):
        layouts.decode(layout)
    assert layouts.decode.cache_info().currsize == kept


def test_lengths_whose_product_wraps_are_refused() -> None:
    spec = ColumnSpec("array", "int64", (OPEN, OPEN, OPEN, OPEN))
    lengths = np.full(4, 0xFFFF_FFFF, "<u4").view(np.uint8)
    with pytest.raises(ValueCorrupt):
        ChunkForm((spec,), 1).columns(np.concatenate((lengths, np.zeros(48, np.uint8))))
