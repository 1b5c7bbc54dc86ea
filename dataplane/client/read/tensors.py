"""Columns as torch tensors, and rows as a TensorDict: private copies, unless views are asked for.

Runs in the client. torch and tensordict are imported on first use. Rows are copied once, from the
arena into the tensor.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import numpy as np

from dataplane.client.read.column_view import ColumnView, arrays_of
from dataplane.client.read.convert import mapped, numbers_of
from dataplane.client.read.ragged import (
    Offsets,
    Padding,
    Side,
    check_padded,
    no_view,
    padding_value,
    refused,
    unlike,
)
from dataplane.errors import InvalidCall, InvalidValue
from dataplane.gpu.torch_devices import check_device, filled_on_gpu
from dataplane.wire.arrays import Array, kind_of, reader, shown, tensor_over

if TYPE_CHECKING:
    from dataplane.gpu.direct import DirectCopies

Layout = Literal["auto", "dense", "padded", "jagged", "list"]
_LAYOUTS = ("auto", "dense", "padded", "jagged", "list")

T = TypeVar("T")
log = logging.getLogger(__name__)


def to_torch(
    column: ColumnView,
    layout: Layout = "auto",
    padding: Padding | None = None,
    view: bool = False,
    device: str = "cpu",
    direct: DirectCopies | None = None,
    offsets: Offsets | None = None,
) -> Any:
    """Return the column as private, writable torch tensors, packed in one piece of memory.

    auto: one tensor [n, ...] if all rows share a dtype and shape, else a list of tensors. dense:
    one tensor, or InvalidValue that names a row of another shape. padded: one tensor, with rows
    padded along the axis in which they differ (further axes are padded at the end). jagged: a
    nested tensor; rows differ along one axis only, and fields with equal lengths share their
    offsets. list: one tensor per row; objects keep their form, with tensors as leaves. view=True:
    tensors over the arena itself; torch has no read-only memory, so writing to them crashes the
    process. direct: copies to a GPU, from pinned memory, on torch's current stream of this thread.
    Raises InvalidValue if torch lacks the dtype or layout.
    """
    check_device(device)
    _check_layout(layout)
    padding = padding or Padding()
    if not len(column) and layout in ("dense", "padded", "jagged"):
        raise InvalidValue(
            f"field {column.field!r}: there are no rows, so a {layout} tensor would have no dtype "
            "or shape: skip empty selections, or use layout='list'",
            field=column.field,
        )
    column = arrays_of(column)
    if not column.holds_arrays:
        return _object_tensors(column.on_host(), layout, view, device)
    _check_dtypes(column)
    rows: TensorRows | None = column.on_gpu(device)
    if rows is None:
        column = column.on_host()
        rows = None if view or direct is None else direct.rows(column, device)
    rows = rows or TensorRows(column, device)
    if view:
        return rows.views(layout)
    uniform = None if layout == "jagged" else column.uniform
    if uniform is not None and (
        layout in ("auto", "dense") or layout == "padded" and padding.is_default
    ):
        return rows.items().reshape(len(column), *uniform[1])
    if layout in ("auto", "list"):
        return rows.each()
    if layout == "padded":
        return _padded(column, rows, padding)
    ragged = column.ragged
    if layout == "dense" or ragged is None:
        raise unlike(column.field, column.forms(), layout)
    if ragged.axis == 0:
        values = rows.items().reshape(ragged.shape)
    else:
        before, ends = (slice(None),) * ragged.axis, ragged.ends
        spans = map(slice, ends, ends[1:])
        values = rows.placed(ragged.shape, [(*before, span) for span in spans])
    return (offsets or Offsets()).nested(values, ragged)


@reader(InvalidCall, "layout")
def _check_layout(layout: object) -> None:
    if not isinstance(layout, str) or layout not in _LAYOUTS:
        raise InvalidCall(
            f"layout={shown(layout):.80}: expected 'auto', 'dense', 'padded', 'jagged' or 'list'"
        )


def _check_dtypes(column: ColumnView) -> None:
    """Raise InvalidValue, which names the first row whose dtype torch lacks, such as times."""
    lacking = [dtype for dtype in column.dtypes if not _in_torch(dtype)]
    if not lacking:
        return
    forms = column.forms()
    row = next(at for at, (dtype, _) in enumerate(forms) if dtype in lacking)
    raise InvalidValue(
        f"field {column.field!r}: row {row} has dtype {forms[row][0].name}, which torch "
        f"does not support: use batch.numpy({column.field!r}), or convert the values to "
        "another dtype before the put",
        field=column.field,
        row=row,
    )


@lru_cache(maxsize=256)
def _in_torch(dtype: np.dtype[Any]) -> bool:
    try:
        tensor_over(np.zeros(1, dtype))
    except InvalidValue:
        return False
    return True


def padding_mask(column: ColumnView, padding: Padding, device: str) -> Any:
    """Return a bool tensor [n, length] that is True at the values of a padded column. Raise
    InvalidValue if its rows differ along several axes, or have none."""
    ragged = arrays_of(column).ragged
    if ragged is None:
        raise InvalidValue(
            f"field {column.field!r}: cannot make a mask, because the rows are single numbers or "
            "differ along several axes: leave out mask= for this field, or put rows that differ "
            "along only one axis",
            field=column.field,
        )
    width = padding.width(column.field, ragged.lengths)
    check_padded(column.field, (len(column), width), np.dtype(np.bool_))
    mask = padding.mask(ragged.lengths, width)
    return tensor_over(mask).to(device)


# TensorDicts

E = TypeVar("E")
Each: TypeAlias = E | Mapping[str, E]
"""One value for all fields, or one per field."""


@dataclass(frozen=True, slots=True)
class TensorDictForm:
    """The layout of the fields of a TensorDict. A mapping names only fields that differ from the
    default."""

    layout: Each[Layout] = "auto"
    padding: Each[complex] = 0
    side: Each[Side] = "right"
    length: Each[int | None] = None
    multiple: Each[int | None] = None
    mask: str | Mapping[str, str] | None = None

    def check(self, names: Sequence[str]) -> None:
        """Raise InvalidCall for a mapping with a field that is not in `names`."""
        for one in fields(self):
            given = getattr(self, one.name)
            unknown = [name for name in given if name not in names] if _is_each(given) else []
            if unknown:
                raise InvalidCall(
                    f"{one.name}= names field {unknown[0]!r}, which this call does not convert: "
                    f"choose from {list(names)}"
                )

    def of(self, name: str) -> tuple[Layout, Padding, str | None]:
        """Return the layout, the padding and the mask name of a field."""
        layout, value, side, length, multiple, mask = (
            given.get(name, one.default) if _is_each(given) else given
            for one in fields(self)
            for given in [getattr(self, one.name)]
        )
        _check_layout(layout)
        return layout, Padding(value, side, length, multiple), mask


def _is_each(given: object) -> bool:
    return isinstance(given, Mapping)


def _fitting(layout: Layout, column: ColumnView) -> Layout:
    """The layout of a field if `layout` is given for all fields. A field to
    which it does not apply keeps its usual layout."""
    if layout == "list" or not column.holds_arrays:
        return layout if layout == "list" else "auto"
    if layout != "dense" and column.uniform is not None and not column.loose:
        return "dense"
    if column.ragged is None and column.uniform is not None:
        return "dense"  # one number per row
    if layout == "auto":
        return "list" if column.ragged is None else "jagged"
    return layout


def to_tensordict(
    columns: Mapping[str, ColumnView],
    n: int,
    form: TensorDictForm,
    device: str = "cpu",
    direct: DirectCopies | None = None,
    offsets: Offsets | None = None,
) -> Any:
    """Return the columns of n rows as a TensorDict with batch_size [n], of private tensors.

    auto returns a field as it was put: an array or tensor [n, ...] as a dense tensor; a nested
    tensor, or a list of arrays or of lists of numbers, as a nested jagged one, with the same ragged
    axis; numbers as a tensor [n]; everything else as a NonTensorStack. Raises FieldUnknown for a
    row that lacks a field, and InvalidValue for a field that does not fit its layout.
    """
    from tensordict import NonTensorStack, TensorDict

    check_device(device)
    form.check(list(columns))
    offsets = offsets or Offsets()
    found: dict[str, Any] = {}
    masks: dict[str, tuple[str, Any]] = {}
    for name, column in columns.items():
        asked, padding, mask = form.of(name)
        if not n:
            continue
        for row in np.flatnonzero(column.absent):
            raise column.lacking(int(row))
        column = arrays_of(column)  # noqa: PLW2901
        if not _is_each(form.padding) and column.dtypes == [np.bool_]:
            padding = replace(padding, value=False)
        own = isinstance(form.layout, Mapping) and name in form.layout
        layout = asked if own else _fitting(asked, column)
        if column.holds_arrays and layout != "list":
            found[name] = to_torch(column, layout, padding, False, device, direct, offsets)
            if layout == "padded" and mask is not None:
                _add_mask(masks, mask, name, padding_mask(column, padding, device))
        else:
            found[name] = _data(column, device, layout == "list", NonTensorStack)
            if asked != "list":
                _warn_of_stack(column, found[name], NonTensorStack)
    for mask, (_, made) in masks.items():
        if mask in columns:
            raise InvalidCall(
                f"mask={mask!r}: a field already has this name; choose another name for the mask"
            )
        found[mask] = made
    made = TensorDict(found, batch_size=[n], device=None if str(device) == "cpu" else device)
    return made.unflatten_keys(".") if any("." in name for name in found) else made


def _add_mask(masks: dict[str, tuple[str, Any]], name: str, field: str, mask: Any) -> None:
    """Add the mask of a field. masks: by name, the first field that a mask covers, and the mask."""
    first, known = masks.setdefault(name, (field, mask))
    if known is not mask and not sys.modules["torch"].equal(known, mask):
        raise InvalidCall(
            f"mask={name!r} covers fields {first!r} and {field!r}, but their rows have different "
            f"lengths: give each field its own mask, as in mask={{{first!r}: 'a', {field!r}: 'b'}}"
        )


def _data(column: ColumnView, device: str, listed: bool, stack: Any) -> Any:
    """Return numbers as a tensor, and rows that form no tensor as a NonTensorStack."""
    if column.holds_arrays:
        return stack(*to_torch(column, "list", device=device))
    values = list(column)
    numbers = None if listed or column.loose else numbers_of(values)
    if numbers is None or not _in_torch(numbers.dtype):
        return stack(*values)
    return tensor_over(numbers).to(device)


def _warn_of_stack(column: ColumnView, made: Any, stack: Any) -> None:
    """Log why rows of numbers or arrays do not form a tensor."""
    if not isinstance(made, stack):
        return
    if column.holds_arrays:
        reason = unlike(column.field, column.forms(), "jagged")
    elif not column.loose and all(isinstance(value, _NUMBERS) for value in column):
        reason = _no_tensor(column.field, list(column), "auto")
    else:
        return  # texts, dicts and the like have no other form
    field = column.field
    if field not in _warned and len(_warned) < _MOST_WARNED:
        _warned.add(field)
        why = reason.message.removeprefix(f"field {field!r}: ")
        log.warning("tensordict(): field %r is a NonTensorStack, not a tensor: %s", field, why)


_warned: set[str] = set()
_MOST_WARNED = 64


# construction


TensorIndex: TypeAlias = tuple[Any, ...]
"""An int or a slice for each axis."""


class TensorRows:
    """Builds tensors from rows in host memory. The GPU plug-in has a subclass for rows on GPUs. All
    tensors but views are private copies."""

    on_host = True

    def __init__(self, column: ColumnView, device: str) -> None:
        self.column, self.device = column, device

    def views(self, layout: str) -> Any:
        """Return tensors over the rows in place. Raise InvalidValue if they would have to be
        copied."""
        dense = self.column.dense()
        if dense is not None and layout in ("auto", "dense", "padded"):
            return tensor_over(_view_of(dense)).to(self.device)
        if layout in ("dense", "padded", "jagged"):
            raise no_view(self.column.field, layout)
        return [row.to(self.device) for row in self.in_place()]

    def each(self) -> list[Any]:
        """A tensor for each row."""
        if len(self.column.dtypes) > 1:
            return [row.clone().to(self.device) for row in self.in_place()]
        return cut(self.items(), [shape for _, shape in self.column.forms()])

    def in_place(self) -> list[Any]:
        """Return a tensor over each row in place."""
        return [tensor_over(_view_of(row)) for row in self.column]

    def items(self) -> Any:
        """A tensor [items] with the values of all rows, which have one dtype."""

        def pack(array: Array) -> None:
            if array.size:
                self.column.pack(array.view(np.uint8))

        return self._made((self.column.nbytes // self.column.dtypes[0].itemsize,), pack)

    def placed(self, shape: tuple[int, ...], where: Sequence[TensorIndex], fill: Any = None) -> Any:
        """A tensor of this shape, with each row at its index in `where`, and `fill` elsewhere."""
        return self._made(shape, lambda array: place(array, self.column, where, fill))

    def _made(self, shape: tuple[int, ...], write: Callable[[Array], None]) -> Any:
        """Return a tensor of the array that `write` fills."""
        (dtype,), device = self.column.dtypes, self.device
        if device != "cpu":
            form = tensor_over(np.empty(0, dtype)).dtype
            if (made := filled_on_gpu(shape, dtype, form, device, write)) is not None:
                return made
        array = np.empty(shape, dtype)
        write(array)
        made = tensor_over(array)
        return made if device == "cpu" else made.to(device)


def place(target: Any, rows: Iterable[Any], where: Sequence[TensorIndex], fill: Any) -> None:
    """Copy each row to its index in an array or a tensor. fill: the value of all other elements."""
    if fill is not None:
        target[...] = fill
    for at, row in zip(where, rows, strict=True):
        target[at] = row


def _padded(column: ColumnView, rows: TensorRows, padding: Padding) -> Any:
    """All rows as one padded tensor. If they differ along several axes, the padding's side is that
    of the first axis, and the other axes are padded at the end."""
    field, n, ragged = column.field, len(column), column.ragged
    if ragged is not None:
        width = padding.width(field, ragged.lengths)
        dtype, shape = ragged.dtype, (n, *ragged.head, width, *ragged.tail)
        where: list[TensorIndex] = list(enumerate(padding.spans(ragged.lengths, width)))
        if ragged.axis:
            inner = (slice(None),) * ragged.axis
            where = [(row, *inner, span) for row, span in where]
    else:
        forms = column.forms()
        dtype, ranks = forms[0][0], {len(shape) for _, shape in forms}
        if len(ranks) > 1 or len(column.dtypes) > 1:
            raise unlike(field, forms, "padded")
        axes = list(zip(*(shape for _, shape in forms), strict=True))
        widths = [max(axis) for axis in axes]
        spans = [list(map(slice, axis)) for axis in axes]
        if axes:
            widths[0] = padding.width(field, axes[0])
            spans[0] = padding.spans(axes[0], widths[0])
        shape, where = (n, *widths), list(zip(range(n), *spans, strict=True))
    check_padded(field, shape, dtype, on_host=rows.on_host)
    return rows.placed(shape, where, padding_value(field, padding, dtype).item())


def cut(items: Any, shapes: Iterable[tuple[int, ...]]) -> list[Any]:
    """Split a tensor [items] into tensors of these shapes."""
    at, found = 0, []
    for shape in shapes:
        size = math.prod(shape)
        row = items.narrow(0, at, size)  # not `split`, whose parts are not writable in place
        found.append(row if len(shape) == 1 else row.reshape(shape))
        at += size
    return found


class _Writable:
    """Presents read-only memory as writable, because torch warns about anything else."""

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
    """Return an array over the same memory that claims to be writable, and keeps the pin."""
    return np.asarray(_Writable(array)).view(array.dtype)


def _object_tensors(column: ColumnView, layout: Layout, view: bool, device: str) -> Any:
    values = list(column)
    numbers = numbers_of(values)
    if numbers is not None and layout != "jagged" and _in_torch(numbers.dtype):
        tensor = tensor_over(numbers).to(device)
        return list(tensor.unbind()) if layout == "list" else tensor
    found: list[Any] = []

    def lowered(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            leaf = tensor_over(_view_of(leaf) if view else leaf.copy())
        found.append(leaf.to(device))
        return found[-1]

    tensors: list[Any] = []
    for row, value in enumerate(values):
        try:
            tensors.append(mapped(value, lowered))
        except InvalidValue as exc:
            raise InvalidValue(
                f"field {column.field!r}: row {row}: {exc.message}; use batch[{column.field!r}] to "
                "get the original objects",
                field=column.field,
                row=row,
            ) from exc
    if layout in ("auto", "list") and (found or not values):
        return tensors
    raise _no_tensor(column.field, values, layout, arrays=bool(found))


_NUMBERS = (bool, int, float, np.generic)


def _no_tensor(field: str, values: list[Any], layout: str, *, arrays: bool = False) -> InvalidValue:
    """The error for objects that form no tensor: which row, why, and what to do. arrays: whether
    the objects contain arrays."""
    row = next((at for at, one in enumerate(values) if not isinstance(one, _NUMBERS)), None)
    as_put = f"use batch[{field!r}] to get the original objects"
    if row is not None:
        why = f"row {row} is {kind_of(values[row])} ({shown(values[row]):.40})"
        instead = as_put
        if arrays and layout != "list":
            instead += ", or layout='list' to get the arrays in them as tensors"
        return refused(field, row, layout, why, instead)
    kinds = [_number_kind(value) for value in values]
    row = next((at for at, kind in enumerate(kinds) if kind != kinds[0]), 0)
    if row:
        why = f"row {row} is {kinds[row]} ({shown(values[row]):.40}) and row 0 is {kinds[0]}"
    else:
        why = f"row 0 is {kinds[0]} ({shown(values[0]):.40})"
    times = [one.dtype for one in values if isinstance(one, np.datetime64 | np.timedelta64)]
    if times:
        finest = np.result_type(*(one for one in times if one.kind == times[0].kind))
        instead = (
            "torch does not support dates and durations. Put the values as ints of one unit, for "
            f"example as np.asarray(values, {finest.name!r}).astype('int64'), or {as_put}"
        )
        return refused(field, row, layout, why, instead)
    instead = (
        "put numbers of one type, at most 64 bits wide, for example as np.asarray(values, "
        f"'float64') (a partition declared with fields={{{field!r}: 'float64'}} rejects other "
        f"types), or {as_put}"
    )
    return refused(field, row, layout, why, instead)


def _number_kind(value: Any) -> str:
    if type(value) is int and not -(1 << 63) <= value < 1 << 63:
        return "an int beyond 64 bits"
    return value.dtype.name if isinstance(value, np.generic) else type(value).__name__
