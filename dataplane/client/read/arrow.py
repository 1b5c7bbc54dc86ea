"""Columns as Arrow arrays, for `convert.to_arrow`. Imports pyarrow, so it is imported late.

Dense columns become fixed-shape tensors, ragged ones nested lists; both are built from whole
buffers. Arrow infers the type of objects, and rejects values that have none.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow as pa

from dataplane.errors import InvalidValue
from dataplane.wire.arrays import Array, as_array, is_jagged, is_torch, shown

_MAX_LIST = (1 << 31) - 1
_REFUSALS = (InvalidValue, pa.ArrowException, TypeError, ValueError, OverflowError)
_UNITS = {"ms": "ms", "us": "us", "ps": "ns", "ns": "ns", "fs": "ns", "as": "ns"}
"""Arrow's unit for numpy's; seconds for longer ones."""


def from_field(
    name: str, values: Array | list[Any], instead: str = "", tensors: bool = True
) -> pa.Array:
    """Return a field, as `to_numpy` returns it, as an Arrow array. Raise InvalidValue, which names
    the first row that Arrow has no type for, or would change.

    instead: advice for the error. tensors: whether equal arrays become a fixed-shape tensor instead
    of lists.
    """
    instead = instead or f"put values of one type, or read the field with batch[{name!r}]"
    make = partial(_of_field, tensors=tensors)
    return exact(f"field {name!r}", values, instead, make, field=name)


def exact(
    what: str,
    values: Any,
    instead: str,
    make: Callable[[Any], pa.Array] | None = None,
    **details: str,
) -> pa.Array:
    """Return values as an Arrow array, with the errors of `from_field`. make: the converter;
    default: for lists of objects."""
    make = make or _of_objects
    try:
        return make(values)
    except _REFUSALS as exc:
        # the first row whose prefix fails: all rows before it have one type
        row = bisect_left(range(len(values)), True, key=lambda row: _fails(make, values[: row + 1]))
        reason = exc.message if isinstance(exc, InvalidValue) else str(exc)
        beside = " together with the rows before it" if row else ""
        raise InvalidValue(
            f"{what}: row {row} ({shown(values[row]):.60}) does not fit in an Arrow "
            f"column{beside}: {reason}; {instead}",
            row=row,
            **details,
        ) from exc


def _fails(make: Callable[[Any], pa.Array], values: Any) -> bool:
    try:
        make(values)
    except _REFUSALS:
        return True
    return False


def _of_field(values: Array | list[Any], tensors: bool) -> pa.Array:
    if isinstance(values, np.ndarray):
        return _dense(_typed(values), tensors)
    if set(map(type, values)) == {np.ndarray} and len({(v.dtype, v.ndim) for v in values}) == 1:
        return _ragged(values)
    return _of_objects(values)


def _of_objects(values: list[Any]) -> pa.Array:
    kinds: dict[tuple[object, ...], object] = {}
    return pa.array([_plain(value, (), kinds) for value in values])


def _typed(array: Array) -> Array:
    """Return the array in a dtype of Arrow that holds every value exactly."""
    dtype = array.dtype
    if dtype.kind in "mM":
        return _times(array)
    if dtype.isbuiltin == 1 and dtype.kind in "biuf" and dtype.itemsize <= 8:
        return array
    # A complex dtype of ml_dtypes would become a float without its imaginary part.
    if dtype.isbuiltin == 1 or isinstance(np.zeros((), dtype).item(), complex):
        raise InvalidValue(f"Arrow does not support dtype {dtype}")
    try:
        limits: Any = ml_dtypes.iinfo
        signed = limits(dtype).min < 0
    except (TypeError, ValueError):
        return array.astype(np.float32)
    return array.astype(np.int8 if signed else np.uint8)


def _times(array: Array) -> Array:
    """Dates and durations in one of Arrow's four units."""
    dtype = array.dtype
    unit, count = np.datetime_data(dtype)
    if unit in ("s", "ms", "us", "ns") and count == 1:
        return array
    known = array[~np.isnat(array)]
    if known.size and (unit == "generic" or dtype.kind == "m" and unit in ("Y", "M")):
        raise InvalidValue(
            f"Arrow cannot hold {dtype.name}, whose unit has no fixed length in seconds: store the "
            "field in s, ms, us or ns"
        )
    made = array.astype(f"{dtype.kind}8[{_UNITS.get(unit, 's')}]")
    if (made[~np.isnat(array)].astype(dtype) != known).any():
        raise InvalidValue(
            f"converting {dtype.name} to Arrow's {made.dtype.name} would lose precision: store the "
            "field in s, ms, us or ns"
        )
    return made


def _dense(array: Array, tensors: bool) -> pa.Array:
    if array.ndim == 1:
        return pa.array(array)
    if tensors and array.size and array.dtype.kind in "iuf":
        return pa.FixedShapeTensorArray.from_numpy_ndarray(np.ascontiguousarray(array))
    return _nested(np.ascontiguousarray(array).reshape(-1), [array.shape[1:]] * len(array))


def _ragged(rows: list[Array]) -> pa.Array:
    if rows[0].ndim == 0:
        return pa.array(_typed(np.stack(rows)))
    flat = np.concatenate([row.reshape(-1) for row in rows])
    return _nested(_typed(flat), [row.shape for row in rows])


def _nested(flat: Array, shapes: list[tuple[int, ...]]) -> pa.Array:
    """Return nested lists over one flat buffer, built from the innermost axis outwards."""
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


def _plain(value: Any, place: tuple[object, ...], kinds: dict[tuple[object, ...], object]) -> Any:
    """Return a value with its arrays as lists. kinds: the kind of scalar found at each place (text,
    bytes, bool, number or time), because Arrow would merge different kinds."""
    if is_jagged(value):
        return [_plain(row, (*place, None), kinds) for row in value.unbind()]
    if is_torch(value):
        value = as_array(value)
    if isinstance(value, (np.ndarray, np.generic)):
        array = _typed(np.asarray(value))
        if array.dtype.kind in "mM":
            _same_kind(array.dtype, (*place, *[None] * array.ndim), kinds)
            return _nested_list(array)
        kind = bool if array.dtype == bool else "number"
        _same_kind(kind, (*place, *[None] * array.ndim), kinds)
        return array.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(item, (*place, None), kinds) for item in value]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise InvalidValue(
                    f"the keys of an Arrow struct must be str: convert the dict's key "
                    f"{shown(key):.40} to str"
                )
        return {key: _plain(item, (*place, key), kinds) for key, item in value.items()}
    if isinstance(value, (str, bytes, bool)):
        _same_kind(type(value), place, kinds)
    elif isinstance(value, (int, float)):  # Arrow would make a bool in the same place a number
        _same_kind("number", place, kinds)
    return value


def _nested_list(array: Array) -> Any:
    """Like `tolist`, which would turn times in nanoseconds into ints."""
    return [_nested_list(part) for part in array] if array.ndim else array[()]


def _same_kind(
    kind: object, place: tuple[object, ...], kinds: dict[tuple[object, ...], object]
) -> None:
    known = kinds.setdefault(place, kind)
    if known != kind:
        shown = [one.__name__ if isinstance(one, type) else str(one) for one in (known, kind)]
        raise InvalidValue(
            f"the column contains both {shown[0]} and {shown[1]} values, but an Arrow column "
            "can have only one type"
        )
