"""What trainers ask of a column: one numpy array, torch tensors, or an Arrow table.

Runs in the client. torch and pyarrow are imported when they are asked for, never before. Nothing
here changes a stored value: tensors are private copies, unless views are asked for by name.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from dataplane.client.device_tensors import copied, tensors_of
from dataplane.client.device_views import DeviceColumn
from dataplane.client.direct import DirectCopies
from dataplane.client.views import ColumnView
from dataplane.errors import InvalidValue
from dataplane.wire.arrays import Array, is_torch
from dataplane.wire.arrays import tensor_over as _tensor

if TYPE_CHECKING:
    import pyarrow as pa

Layout = Literal["auto", "padded", "jagged", "list"]


def to_numpy(column: ColumnView) -> Array | list[Any]:
    """One array [n, ...] where all rows have one dtype and shape, else a list of the entries.

    The array is a read-only view where the rows lie at a regular distance in host memory, else a
    packed copy.
    Python numbers of one kind become bool, int64 or float64 (ints among floats are floats).
    """
    if isinstance(column, DeviceColumn):
        column = column.on_host()
    if column.uniform is not None:
        dense = column.dense()
        return _packed(column) if dense is None else dense
    if column.holds_arrays or not len(column):
        return list(column)
    values = [column[row] if column.present(row) else None for row in range(len(column))]
    numbers = _numbers(values)
    return values if numbers is None else numbers


def to_torch(
    column: ColumnView,
    layout: Layout = "auto",
    padding: float = 0,
    view: bool = False,
    device: str = "cpu",
    direct: DirectCopies | None = None,
) -> Any:
    """The column as private, writable torch tensors, packed in one piece of memory.

    auto: one tensor [n, ...] where all rows have one dtype and shape, else a list of tensors.
    padded: one tensor, rows filled up behind with `padding`. jagged: a nested tensor (rows differ
    in their first length only). list: a tensor a row; objects keep their form, with tensors as
    leaves. view=True: tensors over the arena itself; torch does not know read-only memory, so
    writing to them ends the process. direct: the way to a GPU, see there; what is asked of it is
    asked of torch's current stream of this thread. InvalidValue where torch has no such dtype or
    layout.
    """
    import torch

    if layout not in ("auto", "padded", "jagged", "list"):
        raise InvalidValue(f"no layout: {layout!r}; it is auto, padded, jagged or list")
    if isinstance(column, DeviceColumn):
        if column.device_kind == "cuda" and str(device).startswith("cuda"):
            return tensors_of(column, layout, padding, view, device)
        column, direct = column.on_host(), None
    if not column.holds_arrays:
        return _object_tensors(column, layout, view, device)
    if view:
        return _views(column, layout, device)
    if direct is not None:
        tensors = copied(column, layout, padding, device, direct)
        if tensors is not None:
            return tensors
    if column.uniform is not None and layout in ("auto", "padded"):
        return _tensor(_packed(column)).to(device)
    if layout == "padded":
        return _tensor(_padded(column, padding)).to(device)
    if layout != "jagged":
        return [_tensor(row).to(device) for row in _rows(column)]
    rows, ends = _joined(column)
    offsets = torch.from_numpy(ends).to(device)
    return torch.nested.nested_tensor_from_jagged(_tensor(rows).to(device), offsets)


def place_named(device: str) -> str:
    """The GPU that `cuda` means in this thread, by its number: in another it may mean another."""
    torch: Any = sys.modules.get("torch")
    if str(device) != "cuda" or torch is None or not torch.cuda.is_available():
        return device
    return f"cuda:{torch.cuda.current_device()}"


def to_torch_there(
    column: ColumnView,
    layout: Layout,
    padding: float,
    view: bool,
    device: str,
    direct: DirectCopies,
) -> Any:
    """As `to_torch`, for whoever goes on in another thread, where torch's streams are others: the
    tensors are there when it returns."""
    tensors = to_torch(column, layout, padding, view, device, direct)
    if str(device).startswith("cuda"):
        sys.modules["torch"].cuda.current_stream(device).synchronize()
    return tensors


def to_arrow(
    fields: Mapping[str, ColumnView],
    keys: Sequence[object] | None = None,
    tags: Mapping[str, Sequence[object]] | None = None,
) -> pa.Table:
    """A table with `key`, the fields and the tags; a tag named like a field is `tag.NAME`.

    Equal arrays are a fixed-shape tensor column, others nested lists. bfloat16, fp8 and other small
    floats become float32, small ints int8 or uint8. A row that lacks a field is null.
    """
    from dataplane.client import arrow

    columns: dict[str, Any] = {}
    if keys is not None:
        mixed = len(set(map(type, keys))) > 1
        columns["key"] = arrow.from_values("key", [str(k) for k in keys] if mixed else list(keys))
    for name, column in fields.items():
        shown = "field.key" if name == "key" and keys is not None else name
        columns[shown] = arrow.from_field(name, to_numpy(column))
    for name, values in (tags or {}).items():
        columns[f"tag.{name}" if name in columns else name] = arrow.from_values(name, list(values))
    return arrow.table(columns)


def _numbers(values: list[Any]) -> Array | None:
    """Numbers as one array; None where they are not all numbers of one kind."""
    kinds = set(map(type, values))
    try:
        if kinds == {bool}:
            return np.array(values, np.bool_)
        if kinds == {int}:
            return np.array(values, np.int64)
        if kinds in ({float}, {int, float}):
            return np.array(values, np.float64)
    except OverflowError:
        return None
    if all(issubclass(kind, np.generic) for kind in kinds):
        dtypes = {value.dtype for value in values}
        return np.array(values, dtypes.pop()) if len(dtypes) == 1 else None
    return None


def _packed(column: ColumnView) -> Array:
    """A private copy [n, ...] of a uniform column."""
    assert column.uniform is not None
    dtype, shape = column.uniform
    array = np.empty((len(column), *shape), dtype)
    if array.size:
        column.pack(array.reshape(-1).view(np.uint8))
    return array


def _rows(column: ColumnView) -> list[Array]:
    """Private copies of the rows, in one piece where they have one dtype."""
    views = list(column)
    dtypes = {row.dtype for row in views}
    if len(dtypes) > 1:
        return [row.copy() for row in views]
    dtype = dtypes.pop()
    memory = np.empty(int(column.places["nbytes"].sum()), np.uint8)
    column.pack(memory)
    items, rows, at = memory.view(dtype), [], 0
    for view in views:
        rows.append(items[at : at + view.size].reshape(view.shape))
        at += view.size
    return rows


def _joined(column: ColumnView) -> tuple[Array, Array]:
    """The rows one behind the other in one private array, copied once, and where each begins and
    ends (one number more than there are rows)."""
    views = list(column)
    if len({(view.dtype, view.shape[1:]) for view in views}) > 1 or views[0].ndim == 0:
        raise InvalidValue(f"{column.field}: jagged rows differ in their first length only")
    ends = np.cumsum([0, *map(len, views)])
    array = np.empty((ends[-1], *views[0].shape[1:]), views[0].dtype)
    if array.size:
        column.pack(array.reshape(-1).view(np.uint8))
    return array, ends


def _padded(column: ColumnView, padding: float) -> Array:
    rows = list(column)
    if len({(row.dtype, row.ndim) for row in rows}) > 1:
        raise InvalidValue(f"{column.field}: rows of different dtypes or ranks cannot be padded")
    shape = tuple(max(lengths) for lengths in zip(*(row.shape for row in rows), strict=True))
    try:
        array = np.full((len(rows), *shape), padding, rows[0].dtype)
    except (OverflowError, ValueError, TypeError) as exc:
        raise InvalidValue(f"{column.field}: {padding!r} is no {rows[0].dtype}: {exc}") from exc
    for target, row in zip(array, rows, strict=True):
        target[tuple(slice(length) for length in row.shape)] = row
    return array


class _Writable:
    """Says of read-only memory that it is writable: torch takes nothing else without a warning."""

    def __init__(self, array: Array) -> None:
        self._keeps_alive = array
        described = array.dtype.isbuiltin == 1
        self.__array_interface__ = {
            "version": 3,
            "shape": array.shape,
            "strides": array.strides,
            "typestr": array.dtype.str if described else f"<u{array.itemsize}",
            "data": (array.__array_interface__["data"][0], False),
        }


def _view_of(array: Array) -> Array:
    """The same memory under an array that claims to be writable, and keeps the pin."""
    return np.asarray(_Writable(array)).view(array.dtype)


def _views(column: ColumnView, layout: Layout, device: str) -> Any:
    dense = column.dense()
    if dense is not None and layout in ("auto", "padded"):
        return _tensor(_view_of(dense)).to(device)
    if layout in ("padded", "jagged"):
        raise InvalidValue(f"{column.field}: a {layout} tensor of these rows is a copy, no view")
    return [_tensor(_view_of(row)).to(device) for row in column]


def _object_tensors(column: ColumnView, layout: Layout, view: bool, device: str) -> Any:
    values = list(column)
    numbers = _numbers(values)
    if numbers is not None and layout != "jagged":
        tensor = _tensor(numbers).to(device)
        return list(tensor.unbind()) if layout == "list" else tensor
    found: list[Any] = []

    def lowered(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            found.append(_tensor(_view_of(value) if view else value.copy()).to(device))
            return found[-1]
        if is_torch(value):
            found.append(value.to(device))
            return found[-1]
        if isinstance(value, (list, tuple)):
            return type(value)(map(lowered, value))
        if isinstance(value, dict):
            return {key: lowered(item) for key, item in value.items()}
        return value

    tensors = [lowered(value) for value in values]
    if layout in ("auto", "list") and (found or not values):
        return tensors
    raise InvalidValue(
        f"{column.field}: its rows are objects, which make no {layout} tensor; "
        "layout='list' gives objects whose arrays are tensors",
        field=column.field,
    )
