"""Columns as Arrow arrays, for `convert.to_arrow`. Imports pyarrow, so it is imported late.

Dense columns become fixed-shape tensors, ragged ones nested lists; both are built from whole
buffers. Objects go through Arrow's own inference, which refuses what it cannot type.
"""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow as pa

from dataplane.errors import InvalidValue
from dataplane.wire.arrays import Array, as_array, is_jagged, is_torch

_MAX_LIST = (1 << 31) - 1


def table(columns: dict[str, pa.Array]) -> pa.Table:
    return pa.Table.from_arrays(list(columns.values()), names=list(columns))


def from_field(name: str, values: Array | list[Any]) -> pa.Array:
    """A field, as `to_numpy` gives it; InvalidValue where Arrow has no type for it."""
    try:
        if isinstance(values, np.ndarray):
            return _dense(_typed(values))
        if set(map(type, values)) == {np.ndarray} and len({(v.dtype, v.ndim) for v in values}) == 1:
            return _ragged(values)
        return pa.array([_plain(value) for value in values])
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as exc:
        raise InvalidValue(
            f"{name}: Arrow has no type for these values: {exc}", field=name
        ) from exc


def from_values(name: str, values: list[object]) -> pa.Array:
    """Keys or a tag as an Arrow array."""
    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError) as exc:
        raise InvalidValue(f"{name}: Arrow has no type for these values: {exc}") from exc


def _typed(array: Array) -> Array:
    """The array in a dtype that Arrow has, where one holds every value exactly."""
    dtype = array.dtype
    if dtype.kind in "mM":
        unit, count = np.datetime_data(dtype)
        exact = unit in ("s", "ms", "us", "ns") and count == 1
        return array if exact else array.astype(f"{dtype.kind}8[s]")
    if dtype.isbuiltin == 1 and dtype.kind in "biuf" and dtype.itemsize <= 8:
        return array
    if dtype.isbuiltin == 1:
        raise InvalidValue(f"Arrow has no type for {dtype}")
    try:
        limits: Any = ml_dtypes.iinfo
        signed = limits(dtype).min < 0
    except (TypeError, ValueError):
        return array.astype(np.float32)
    return array.astype(np.int8 if signed else np.uint8)


def _dense(array: Array) -> pa.Array:
    if array.ndim == 1:
        return pa.array(array)
    if array.size and array.dtype.kind in "iuf":
        return pa.FixedShapeTensorArray.from_numpy_ndarray(np.ascontiguousarray(array))
    return _nested(np.ascontiguousarray(array).reshape(-1), [array.shape[1:]] * len(array))


def _ragged(rows: list[Array]) -> pa.Array:
    if rows[0].ndim == 0:
        return pa.array(_typed(np.stack(rows)))
    flat = np.concatenate([row.reshape(-1) for row in rows])
    return _nested(_typed(flat), [row.shape for row in rows])


def _nested(flat: Array, shapes: list[tuple[int, ...]]) -> pa.Array:
    """Lists in lists over one flat buffer, from the innermost axis outwards."""
    values = pa.array(flat)
    for axis in reversed(range(len(shapes[0]))):
        lists = [math.prod(shape[:axis]) for shape in shapes]
        lengths = np.repeat([shape[axis] for shape in shapes], lists)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        if offsets[-1] > _MAX_LIST:
            values = pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), values)
        else:
            values = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values)
    return values


def _plain(value: Any) -> Any:
    """A value with its arrays as lists."""
    if is_jagged(value):
        return [_plain(row) for row in value.unbind()]
    if is_torch(value):
        return _plain(as_array(value))
    if isinstance(value, np.ndarray):
        return _typed(value).tolist()
    if isinstance(value, np.generic):
        return _typed(np.asarray(value)).item()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value
