"""What went in comes out: every dtype and shape, dense, ragged and inside objects."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.client.read.convert import to_numpy
from dataplane.wire.arrays import _BY_NAME, dtype_name, dtype_of
from tests.same import same

DTYPES = [
    *_BY_NAME.values(),
    *map(np.dtype, ("M8[ns]", "M8[D]", "M8[25s]", "M8[2147483647s]", "M8", "m8[us]", "m8")),
]
SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)


def array(dtype: np.dtype, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Any bytes, NaNs with payloads among them; bools and sub-byte ints as they can be."""
    count = int(np.prod(shape, dtype=int))
    raw = np.random.default_rng(seed).integers(0, 256, count * dtype.itemsize, dtype=np.uint8)
    if dtype == np.bool_ or "int" in dtype.name and dtype.itemsize == 1:
        return (raw & 1).astype(dtype).reshape(shape)
    return raw.view(dtype).reshape(shape) if count else np.zeros(shape, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back(arena: Any, dtype: np.dtype) -> None:
    assert dtype_of(dtype_name(dtype) or "") == dtype
    columns: dict[str, Any] = {
        "numbers": array(dtype, (5,)),
        "dense": array(dtype, (5, 3, 2), 1),
        "empty": array(dtype, (5, 0, 2)),
        "ragged": [array(dtype, (n, 3), n) for n in (2, 0, 5, 1, 700)],
        "alone": [array(dtype, (), n) for n in range(5)],
        "leaves": [[array(dtype, (n,), n), {"x": array(dtype, ())}] for n in range(5)],
        "scalars": [array(dtype, ())[()] for _ in range(5)],
    }
    put = arena.put(columns)
    for name, values in columns.items():
        if name == "numbers":
            values = [values[index, ...] for index in range(5)]
        assert all(map(same, put[name], values)), name


@pytest.mark.parametrize(
    "values",
    [
        [0.5, -0.0, math.inf, 5e-324],
        [np.frombuffer(b"\1\0\0\0\0\0\xf8\x7f")[0].item(), math.nan],
        [0, -(1 << 63), (1 << 63) - 1],
        [0, 1 << 63, -(1 << 70)],
        [True, False],
        [True, 1, 1.0],
        [None, 1],
        [np.float32(1), np.float64(1)],
        [np.datetime64(1, "s"), np.datetime64(1, "ms"), np.datetime64("NaT", "s")],
    ],
)
def test_numbers_keep_their_types_and_bits(new_arena: Any, values: list[Any]) -> None:
    put = new_arena().put({"x": values})["x"]
    assert all(map(same, put, values))
    assert all(same(put[at], value) for at, value in enumerate(values))
    assert all(map(same, put[1:], values[1:]))


@given(
    dtype=st.sampled_from(DTYPES),
    shapes=st.lists(SHAPES, min_size=1, max_size=12),
    seed=st.integers(0, 1000),
)
@settings(max_examples=200)
def test_arrays_of_any_shapes_come_back(
    new_arena: Any, dtype: np.dtype, shapes: list[tuple[int, ...]], seed: int
) -> None:
    rows = [array(dtype, shape, seed + index) for index, shape in enumerate(shapes)]
    nested = [[row, (row,)] for row in rows]
    put = new_arena(1 << 20).put({"rows": rows, "nested": nested})
    assert all(map(same, put["rows"], rows)) and all(map(same, put["nested"], nested))


@given(
    dtype=st.sampled_from(DTYPES),
    n=st.integers(1, 70),
    shape=SHAPES,
    seed=st.integers(0, 1000),
)
@settings(max_examples=150)
def test_dense_columns_come_back_dense(
    new_arena: Any, dtype: np.dtype, n: int, shape: tuple[int, ...], seed: int
) -> None:
    values = array(dtype, (n, *shape), seed)
    view = new_arena(2 << 20).view(values)
    assert same(to_numpy(view), values)
    shuffled = np.random.default_rng(seed).permutation(n)
    assert same(to_numpy(view.take(shuffled)), values[shuffled])


@given(
    st.lists(
        st.one_of(
            st.integers(),
            st.floats(),
            st.text(),
            st.none(),
            st.just(np.arange(3)),
            st.just(np.zeros(2000)),
            st.lists(st.just(np.arange(700)), min_size=1),
        ),
        min_size=1,
        max_size=60,
    )
)
@settings(max_examples=100)
def test_mixed_columns_keep_each_entry(new_arena: Any, values: list[Any]) -> None:
    assert all(map(same, new_arena().put({"x": values})["x"], values))
