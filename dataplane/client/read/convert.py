"""Convert columns to NumPy arrays and Arrow tables; `tensors` converts to tensors. Runs in the
client. pyarrow is imported on first use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dataplane.client.read.column_view import ColumnView, arrays_of
from dataplane.wire.arrays import Array, is_torch

if TYPE_CHECKING:
    import pyarrow as pa


def to_numpy(column: ColumnView, view: bool = False) -> Array | list[Any]:
    """Return one array [n, ...] if all rows share a dtype and shape, else a list of the entries.

    The arrays are private and writable. view=True: read-only views, without a copy if the rows are
    adjacent in host memory. Python numbers of one kind become bool, int64 or float64; ints among
    floats become floats if that is exact, else the column stays a list.
    """
    column = arrays_of(column.on_host())
    if column.uniform is not None:
        dense = column.dense() if view else None
        return _dense(column) if dense is None else dense
    if column.holds_arrays or not len(column):
        return list(column) if view else [row.copy() for row in column]
    values = [column[row] if column.present(row) else None for row in range(len(column))]
    numbers = numbers_of(values)
    if numbers is not None:
        return numbers
    return values if view else [mapped(value, _copied) for value in values]


def mapped(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return a copy of an object with `leaf` applied to each array and tensor."""
    if isinstance(value, np.ndarray) or is_torch(value):
        return leaf(value)
    if isinstance(value, list | tuple):
        return type(value)(mapped(item, leaf) for item in value)
    if isinstance(value, dict):
        return {key: mapped(item, leaf) for key, item in value.items()}
    return value


def _copied(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf.clone()


def to_arrow(
    fields: Mapping[str, ColumnView],
    keys: Sequence[object] | None = None,
    tags: Mapping[str, Sequence[object]] | None = None,
) -> pa.Table:
    """A table with `key`, the fields and the tags; a tag named like a field is `tag.NAME`.

    Equal arrays are a fixed-shape tensor column, others nested lists. bfloat16, fp8 and other small
    floats become float32, small ints int8 or uint8, times of other units s, ms, us or ns. A row
    that lacks a field is null, and so is a key that only some dicts of a field have. InvalidValue
    names a row whose value, key or tag Arrow would change.
    """
    import pyarrow as pa

    from dataplane.client.read import arrow

    columns: dict[str, Any] = {}
    if keys is not None:
        instead = "read them with the keys attribute of these rows"
        if len({*map(type, keys)}) > 1:
            instead = "read rows with str keys and rows with int keys in two calls, part.get(keys)"
        columns["key"] = arrow.exact("key", list(keys), instead)
    for name, column in fields.items():
        shown = "field.key" if name == "key" and keys is not None else name
        columns[shown] = arrow.from_field(name, to_numpy(column, view=True))
    for name, values in (tags or {}).items():
        shown = f"tag.{name}" if name in columns else name
        instead = "read it with the tags attribute of these rows"
        if len({type(value) for value in values if value is not None}) > 1:
            instead = "set tags of one type"
        columns[shown] = arrow.exact(f"tag {name!r}", list(values), instead, tag=name)
    return pa.table(columns)


def numbers_of(values: list[Any]) -> Array | None:
    """Return numbers of one kind as one array, else None."""
    kinds = set(map(type, values))
    try:
        if kinds == {bool}:
            return np.array(values, np.bool_)
        if kinds == {int}:
            return np.array(values, np.int64)
        if kinds in ({float}, {int, float}):
            exact = all(type(value) is float or float(value) == value for value in values)
            return np.array(values, np.float64) if exact else None
    except OverflowError:
        return None
    if all(issubclass(kind, np.generic) for kind in kinds):
        dtypes = {value.dtype for value in values}
        return np.array(values, dtypes.pop()) if len(dtypes) == 1 else None
    return None


def _dense(column: ColumnView) -> Array:
    """A private copy [n, ...] of a uniform column."""
    array = column.stacked()
    if array.size:
        column.pack(array.reshape(-1).view(np.uint8))
    return array
