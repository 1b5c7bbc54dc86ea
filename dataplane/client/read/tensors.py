"""Columns as torch tensors, and rows as a TensorDict: private copies, unless views are asked for.

Runs in the client. torch and tensordict are imported when they are asked for, never before. Rows
that are side by side are gathered once, from where they lie in the arena to where they stay.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, cast

import numpy as np

from dataplane.client.read.column_view import ColumnView, arrays_of
from dataplane.client.read.convert import numbers_of, packed
from dataplane.client.read.ragged import (
    RIGHT,
    Offsets,
    Padding,
    Side,
    check_padded,
    no_view,
    padding_value,
    unlike,
)
from dataplane.errors import InvalidCall, InvalidValue
from dataplane.gpu.torch_devices import check_device, filled_on_gpu
from dataplane.wire.arrays import Array, is_torch, kind_of, shown, tensor_over

if TYPE_CHECKING:
    from dataplane.gpu.direct import DirectCopies

Layout = Literal["auto", "dense", "padded", "jagged", "list"]
_LAYOUTS = ("auto", "dense", "padded", "jagged", "list")

T = TypeVar("T")
log = logging.getLogger(__name__)


def to_torch(
    column: ColumnView,
    layout: Layout = "auto",
    padding: Padding = RIGHT,
    view: bool = False,
    device: str = "cpu",
    direct: DirectCopies | None = None,
    offsets: Offsets | None = None,
) -> Any:
    """The column as private, writable torch tensors, packed in one piece of memory.

    auto: one tensor [n, ...] where all rows have one dtype and shape, else a list of tensors.
    dense: one tensor, or InvalidValue that names a row of another shape. padded: one tensor, rows
    filled up as `padding` says along the axis in which they differ (where they do in several, the
    others behind). jagged: a nested tensor; rows differ along one axis only, and those of equal
    lengths share their offsets. list: a tensor a row; objects keep their form, with tensors as
    leaves. view=True: tensors over the arena itself; torch does not know read-only memory, so
    writing to them ends the process. direct: the way to a GPU, see there; what is asked of it is
    asked of torch's current stream of this thread, from pinned memory. InvalidValue where torch has
    no such dtype or layout.
    """
    check_device(device)
    _check_layout(layout)
    if not len(column) and layout in ("dense", "padded", "jagged"):
        raise InvalidValue(
            f"field {column.field!r}: there are no rows, so a {layout} tensor would have no dtype "
            "or shape: skip empty selections, or use layout='list'",
            field=column.field,
        )
    column = arrays_of(column)
    holds_arrays = column.holds_arrays
    if holds_arrays:
        _check_dtypes(column)
    offsets = offsets or Offsets()
    tensors = column.tensors_in_place(layout, padding, view, device, offsets)
    if tensors is not None:
        return tensors
    column = column.on_host()
    if not holds_arrays:
        return _object_tensors(column, layout, view, device)
    if view:
        return _views(column, layout, device)
    if direct is not None:
        tensors = direct.tensors(column, layout, padding, device, offsets)
        if tensors is not None:
            return tensors
    uniform = None if layout == "jagged" else column.uniform
    if layout == "dense" and uniform is None:
        raise unlike(column.field, column.forms(), layout)
    if layout == "padded" and (uniform is None or padding is not RIGHT):
        return _padded(column, padding, device)
    if uniform is not None and layout in ("auto", "dense", "padded"):
        dtype, shape = uniform
        return _made((len(column), *shape), dtype, device, column.pack)
    if layout != "jagged":
        return [tensor_over(row).to(device) for row in _rows(column)]
    ragged = column.ragged
    if ragged is None:
        raise unlike(column.field, column.forms(), layout)
    if ragged.axis == 0:
        values = _made(ragged.shape, ragged.dtype, device, column.pack)
    else:
        values = _filled(ragged.shape, ragged.dtype, device, _side_by_side(column))
    return offsets.nested(values, ragged)


def _check_layout(layout: object) -> None:
    if not isinstance(layout, str) or layout not in _LAYOUTS:
        raise InvalidCall(
            f"layout={shown(layout):.80}: expected 'auto', 'dense', 'padded', 'jagged' or 'list'"
        )


def _check_dtypes(column: ColumnView) -> None:
    """InvalidValue names the first row whose dtype torch lacks, such as times."""
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
    """bool [n, length]: where a padded column has values. InvalidValue where its rows differ in
    several axes, or have none."""
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
"""One for all fields, or one a field."""


@dataclass(frozen=True, slots=True)
class TensorDictForm:
    """How the fields of a TensorDict are laid out; a mapping names only those that differ."""

    layout: Each[Layout] = "auto"
    padding: Each[complex] = 0
    side: Each[Side] = "right"
    length: Each[int | None] = None
    multiple: Each[int | None] = None
    mask: str | Mapping[str, str] | None = None

    def checked(self, fields: Sequence[str]) -> None:
        """InvalidCall for a mapping with a field that is not among these, or a layout of none."""
        for name in ("layout", "padding", "side", "length", "multiple", "mask"):
            given = getattr(self, name)
            unknown = [f for f in given if f not in fields] if isinstance(given, Mapping) else []
            if unknown:
                raise InvalidCall(
                    f"{name}= names field {unknown[0]!r}, which this call does not convert: "
                    f"choose from {list(fields)}"
                )
        for layout in self.layout.values() if isinstance(self.layout, Mapping) else [self.layout]:
            _check_layout(layout)
        if "length" in self._named() and "multiple" in self._named():
            raise InvalidCall("got both length= and multiple=: pass only one of them")

    def _named(self) -> list[str]:
        given = {name: getattr(self, name) for name in ("length", "multiple")}
        return [n for n, one in given.items() if one is not None and not isinstance(one, Mapping)]

    def chosen(self, name: str) -> Layout:
        """The layout that the caller asks for."""
        return cast(Layout, _for_field(self.layout, name, "auto"))

    def layout_of(self, name: str, column: ColumnView) -> Layout:
        """What is given for all fields leaves alone those to which it does not apply."""
        layout = self.chosen(name)
        if isinstance(self.layout, Mapping) and name in self.layout:
            return layout
        if layout == "list" or not column.holds_arrays:
            return layout if layout == "list" else "auto"
        if layout != "dense" and column.uniform is not None and not column.loose:
            return "dense"
        ragged = column.ragged
        if ragged is None and column.uniform is not None:
            return "dense"  # one number a row
        if layout == "auto":
            return "list" if ragged is None else "jagged"
        return layout

    def padding_of(self, name: str, column: ColumnView) -> Padding:
        """One padding for all fields leaves bools alone, which are filled up with False."""
        value = _for_field(self.padding, name, 0)
        if not isinstance(self.padding, Mapping) and column.dtypes == [np.bool_]:
            value = False
        return Padding(
            value,
            cast(Side, _for_field(self.side, name, "right")),
            _for_field(self.length, name, None),
            _for_field(self.multiple, name, None),
        )


def _for_field(given: Any, name: str, default: Any) -> Any:
    return given.get(name, default) if isinstance(given, Mapping) else given


@dataclass(slots=True)
class _Masks:
    """The masks of a TensorDict, by their names, and of which field each is."""

    form: TensorDictForm
    found: dict[str, tuple[str, Any]] = field(default_factory=dict)

    def add(self, name: str, column: ColumnView, padding: Padding, device: str) -> None:
        given = self.form.mask
        named = given.get(name) if isinstance(given, Mapping) else given
        if named is None:
            return
        mask = padding_mask(column, padding, device)
        first, other = self.found.setdefault(named, (name, mask))
        if other is not mask and not sys.modules["torch"].equal(other, mask):
            raise InvalidCall(
                (
                    f"mask={named!r} covers fields {first!r} and {name!r}, but their rows have "
                    "different lengths: give each field its own mask, as in mask={"
                )
                + f"{first!r}: 'a', {name!r}: 'b'"
                + "}"
            )


def to_tensordict(
    columns: Mapping[str, ColumnView],
    n: int,
    form: TensorDictForm,
    device: str = "cpu",
    direct: DirectCopies | None = None,
    offsets: Offsets | None = None,
) -> Any:
    """The columns of n rows as a TensorDict with batch_size [n], of private tensors.

    auto gives a field back as it was put: of an array or tensor [n, ...] a dense one; of a nested
    tensor, or a list of arrays or of lists of numbers, a nested jagged one, ragged where it was;
    numbers as a tensor [n]; everything else as a NonTensorStack. FieldUnknown names a row that
    lacks a field; InvalidValue a field that cannot be laid out so.
    """
    from tensordict import NonTensorStack, TensorDict

    check_device(device)
    form.checked(list(columns))
    offsets, masks, found = offsets or Offsets(), _Masks(form), {}
    for name, column in columns.items():
        if not n:
            continue
        for row in np.flatnonzero(column.absent):
            raise column.lacking(int(row))
        column = arrays_of(column)  # noqa: PLW2901
        layout, padding = form.layout_of(name, column), form.padding_of(name, column)
        if column.holds_arrays and layout != "list":
            found[name] = to_torch(column, layout, padding, False, device, direct, offsets)
            if layout == "padded":
                masks.add(name, column, padding, device)
        else:
            found[name] = _data(column, device, layout == "list", NonTensorStack)
            if form.chosen(name) != "list":
                _tell_of_stack(column, found[name], NonTensorStack)
    for name, (_, mask) in masks.found.items():
        if name in columns:
            raise InvalidCall(
                f"mask={name!r}: a field already has this name; choose another name for the mask"
            )
        found[name] = mask
    made = TensorDict(found, batch_size=[n], device=None if str(device) == "cpu" else device)
    return made.unflatten_keys(".") if any("." in name for name in found) else made


def _data(column: ColumnView, device: str, listed: bool, stack: Any) -> Any:
    """Numbers as a tensor; rows that make no tensor as a NonTensorStack."""
    if column.holds_arrays:
        return stack(*to_torch(column, "list", device=device))
    values = list(column)
    numbers = None if listed or column.loose else numbers_of(values)
    if numbers is None or not _in_torch(numbers.dtype):
        return stack(*values)
    return tensor_over(numbers).to(device)


def _tell_of_stack(column: ColumnView, made: Any, stack: Any) -> None:
    """Say of rows that could have been a tensor why they are none."""
    if not isinstance(made, stack):
        return
    if column.holds_arrays:
        reason = unlike(column.field, column.forms(), "jagged")
    elif not column.loose and all(isinstance(value, _NUMBERS) for value in column):
        reason = _no_tensor(column.field, list(column), "auto")
    else:
        return  # texts, dicts and the like have no other form
    _tell_once(column.field, reason.message.removeprefix(f"field {column.field!r}: "))


_told: set[str] = set()
_MOST_TOLD = 64


def _tell_once(field: str, reason: str) -> None:
    if field in _told or len(_told) >= _MOST_TOLD:
        return
    _told.add(field)
    log.warning("tensordict(): field %r is a NonTensorStack, not a tensor: %s", field, reason)


# making tensors


def _made(
    shape: tuple[int, ...], dtype: np.dtype[Any], device: str, pack: Callable[[Array], None]
) -> Any:
    """As `_filled`, by who writes nothing but bytes."""

    def fill(array: Array) -> None:
        if array.size:
            pack(array.reshape(-1).view(np.uint8))

    return _filled(shape, dtype, device, fill)


def _filled(
    shape: tuple[int, ...], dtype: np.dtype[Any], device: str, fill: Callable[[Array], None]
) -> Any:
    """A tensor of what is written into an array."""
    if device != "cpu":
        form = tensor_over(np.empty(0, dtype)).dtype
        if (made := filled_on_gpu(shape, dtype, form, device, fill)) is not None:
            return made
    array = np.empty(shape, dtype)
    fill(array)
    made = tensor_over(array)
    return made if device == "cpu" else made.to(device)


def _side_by_side(column: ColumnView) -> Callable[[Array], None]:
    """Rows next to each other along the ragged axis, which is not their first."""

    def fill(array: Array) -> None:
        ragged = column.ragged
        assert ragged is not None
        before = (slice(None),) * ragged.axis
        for row, (start, end) in zip(column, pairwise(ragged.ends), strict=True):
            array[(*before, slice(start, end))] = row

    return fill


def _padded(column: ColumnView, padding: Padding, device: str) -> Any:
    ragged = column.ragged
    if ragged is None:
        return _padded_along_axes(column, padding, device)
    width = padding.width(column.field, ragged.lengths)

    def fill(array: Array) -> None:
        array[...] = padding_value(column.field, padding, array.dtype)
        axis, rows, target = ragged.axis, iter(column), array
        if axis:
            rows, target = (row.swapaxes(0, axis) for row in column), array.swapaxes(1, 1 + axis)
        spans: Iterable[slice] = map(slice, ragged.lengths)
        if padding.side == "left":
            spans = [slice(width - length, width) for length in ragged.lengths]
        for row, span, values in zip(target, spans, rows, strict=True):
            row[span] = values

    shape = (len(column), *ragged.head, width, *ragged.tail)
    check_padded(column.field, shape, ragged.dtype)
    return _filled(shape, ragged.dtype, device, fill)


def _padded_along_axes(column: ColumnView, padding: Padding, device: str) -> Any:
    """Of rows that differ along several axes, or have none: the first gets the padding's side."""
    forms = column.forms()
    dtype, ranks = forms[0][0], {len(shape) for _, shape in forms}
    if len(ranks) > 1 or len(column.dtypes) > 1:
        raise unlike(column.field, forms, "padded")
    shape = [max(lengths) for lengths in zip(*(shape for _, shape in forms), strict=True)]
    if shape:
        firsts = [shape[0] for _, shape in forms]
        shape[0] = padding.width(column.field, firsts)

    def fill(array: Array) -> None:
        array[...] = padding_value(column.field, padding, array.dtype)
        for target, row in zip(array, column, strict=True):
            spans = [slice(length) for length in row.shape]
            if spans:
                spans[0] = padding.span(row.shape[0], shape[0])
            target[tuple(spans)] = row

    check_padded(column.field, (len(forms), *shape), dtype)
    return _filled((len(forms), *shape), dtype, device, fill)


def _rows(column: ColumnView) -> list[Array]:
    """Private copies of the rows, in one piece where they have one dtype."""
    views = list(column)
    dtypes = {row.dtype for row in views}
    if len(dtypes) > 1:
        return [row.copy() for row in views]
    memory = packed(column)
    items, rows, at = memory.view(dtypes.pop()), [], 0
    for view in views:
        rows.append(items[at : at + view.size].reshape(view.shape))
        at += view.size
    return rows


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
    if dense is not None and layout in ("auto", "dense", "padded"):
        return tensor_over(_view_of(dense)).to(device)
    if layout in ("dense", "padded", "jagged"):
        raise no_view(column.field, layout)
    return [tensor_over(_view_of(row)).to(device) for row in column]


def _object_tensors(column: ColumnView, layout: Layout, view: bool, device: str) -> Any:
    values = list(column)
    numbers = numbers_of(values)
    if numbers is not None and layout != "jagged" and _in_torch(numbers.dtype):
        tensor = tensor_over(numbers).to(device)
        return list(tensor.unbind()) if layout == "list" else tensor
    found: list[Any] = []

    def lowered(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            found.append(tensor_over(_view_of(value) if view else value.copy()).to(device))
            return found[-1]
        if is_torch(value):
            found.append(value.to(device))
            return found[-1]
        if isinstance(value, (list, tuple)):
            return type(value)(map(lowered, value))
        if isinstance(value, dict):
            return {key: lowered(item) for key, item in value.items()}
        return value

    tensors: list[Any] = []
    for row, value in enumerate(values):
        try:
            tensors.append(lowered(value))
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
    """The error of objects that make no tensor: which row, why, and what to do. arrays: there are
    some in them."""
    row = next((at for at, one in enumerate(values) if not isinstance(one, _NUMBERS)), None)
    as_put = f"use batch[{field!r}] to get the original objects"
    if row is not None:
        why = f"row {row} is {kind_of(values[row])} ({shown(values[row]):.40})"
        instead = as_put
        if arrays and layout != "list":
            instead += ", or layout='list' to get the arrays in them as tensors"
        return _refused(field, row, layout, why, instead)
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
        return _refused(field, row, layout, why, instead)
    instead = (
        "put numbers of one type, at most 64 bits wide, for example as np.asarray(values, "
        f"'float64') (a partition declared with fields={{{field!r}: 'float64'}} rejects other "
        f"types), or {as_put}"
    )
    return _refused(field, row, layout, why, instead)


def _refused(field: str, row: int, layout: str, why: str, instead: str) -> InvalidValue:
    tensor = {"auto": "tensor", "list": "list of tensors"}.get(layout, f"{layout} tensor")
    return InvalidValue(
        f"field {field!r}: {why}, so the rows do not form a {tensor}: {instead}",
        field=field,
        row=row,
    )


def _number_kind(value: Any) -> str:
    if type(value) is int and not -(1 << 63) <= value < 1 << 63:
        return "an int beyond 64 bits"
    return value.dtype.name if isinstance(value, np.generic) else type(value).__name__
