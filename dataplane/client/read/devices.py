"""Columns of fetched rows some of which lie on a device: arrays of the device, and torch tensors.

Runs in the client. An entry is made when asked, keeps the pin, and is nothing but a view of the
device's memory; what wants host memory gets a copy. Tensors, of such a column or straight from the
arena, are for a process that has imported torch: what is asked of the GPU is asked of torch's
current stream of this thread, and nothing here waits for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.client.read.ragged import RIGHT, Offsets, Padding, no_view, padding_value, unlike
from dataplane.client.read.views import ColumnView
from dataplane.client.session.devices import Devices
from dataplane.errors import DeviceMissing, InvalidValue, ProtocolError
from dataplane.gpu.direct import DirectCopies, Runs
from dataplane.wire.arrays import Array, dtype_name, dtype_of, shape_of
from dataplane.wire.records import PLACE, PLACE_ABSENT, column
from dataplane.wire.tables import Column, Spec

Records = npt.NDArray[np.void]
FETCH_S = 60.0
"""How long a device may take to copy a column to the host."""


def view_of(
    source: Column,
    specs: Sequence[Spec],
    base: Array,
    name_of: Callable[[int], object] | None,
    devices: Devices,
    inline: bytes,
) -> ColumnView:
    """The column, where none of it lies on a device a plain one."""
    places = column(source.values, PLACE)
    on_device = (places["offset"] >= devices.arena_bytes) & (places["flags"] == 0)
    if not on_device.any():
        return ColumnView(source, specs, base, name_of, inline)
    return DeviceColumn(source, specs, base, name_of, devices, inline, places, on_device)


class DeviceColumn(ColumnView):
    """As `ColumnView`; entries that lie on a device are arrays of it: of cupy's and torch's kind
    (`__cuda_array_interface__`), bfloat16 and fp8 as unsigned integers of their width. CUDA has no
    read-only memory between processes: do not write to them. Of another device than the client's
    each is a private copy on the client's, made when it is asked for."""

    __slots__ = ("_devices", "_on_device", "_pin", "_there")

    def __init__(
        self,
        source: Column,
        specs: Sequence[Spec],
        base: Array,
        name_of: Callable[[int], object] | None,
        devices: Devices,
        inline: bytes,
        places: Records,
        on_device: npt.NDArray[np.bool_],
    ) -> None:
        here = places.copy()
        here["flags"][on_device] |= PLACE_ABSENT
        plain = Column(source.field, here.tobytes(), source.leaf_counts, source.leaves)
        super().__init__(plain, specs, base, name_of, inline)
        if (places["spec"][on_device] >= len(specs)).any():
            raise ProtocolError(f"field {self.field!r}: a value on a device has no spec")
        self._devices, self._there, self._on_device = devices, places, on_device
        self._pin = base.base

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        row = range(len(self))[index]
        return self._entry(row) if self._on_device[row] else super().__getitem__(row)

    def __iter__(self) -> Iterator[Any]:
        return (self[row] for row in range(len(self)))

    def __repr__(self) -> str:
        return f"<{self.field}: {len(self)} rows, {self.described()}>"

    def described(self) -> str:
        """Without a value: what is on a device would have to be copied."""
        dtypes = " and ".join(sorted({dtype.name for dtype in self.dtypes}))
        return f"{dtypes or 'values'}, {int(self._on_device.sum())} on a device"

    def present(self, row: int) -> bool:
        return bool(self._on_device[row]) or super().present(row)

    def take(self, rows: npt.ArrayLike) -> ColumnView:
        chosen = np.asarray(rows, np.int64)
        plain = super().take(chosen)
        part = object.__new__(DeviceColumn)
        for name in ColumnView.__slots__:
            setattr(part, name, getattr(plain, name))
        part._devices, part._pin = self._devices, self._pin
        part._there, part._on_device = self._there[chosen], self._on_device[chosen]
        return part

    @property
    def places(self) -> Records:
        return self._there

    @property
    def device_kind(self) -> str | None:
        """Of the device where all entries are; None where some are in host memory, or absent."""
        if not self._on_device.all():
            return None
        return self._devices.at(int(self._there["offset"][0])).device.kind

    def device_number(self, row: int) -> int:
        """Of the device that has an entry, or gets a copy of it: by which libraries call it."""
        return self._devices.at(int(self._there["offset"][row])).device.number

    def dtype_at(self, row: int) -> np.dtype[Any]:
        """Of an entry on a device, also where that has no such dtype."""
        return self._form(int(self._there["spec"][row])).dtype

    def on_host(self) -> ColumnView:
        """The same column with a private copy of what is on a device; entries that are in host
        memory are copied as well. DeviceMissing where the device fails."""
        places = self._there.copy()
        rows = np.flatnonzero(places["flags"] & PLACE_ABSENT == 0)
        starts = np.zeros(len(rows) + 1, np.int64)
        rooms = -(-places["nbytes"][rows].astype(np.int64) // 64) * 64
        np.cumsum(rooms, out=starts[1:])
        memory = np.empty(int(starts[-1]), np.uint8)
        first = memory.__array_interface__["data"][0]
        touched = {}
        for row, start in zip(rows.tolist(), starts.tolist(), strict=False):
            offset, nbytes = int(places["offset"][row]), int(places["nbytes"][row])
            if self._on_device[row]:
                opened = self._devices.at(offset)
                opened.device.copy(first + start, opened.place(offset), nbytes)
                touched[opened.number] = opened.device
            else:
                flags = int(places["flags"][row])
                memory[start : start + nbytes] = self._memory(offset, nbytes, flags)
            places["offset"][row], places["flags"][row] = start, 0
        for device in touched.values():
            if not device.finish(FETCH_S):
                raise DeviceMissing(
                    f"{device} did not finish copying field {self.field!r} within {FETCH_S:g} s: "
                    "check the device, then read the field again"
                )
        return self._over(memory, places)

    def _over(self, memory: Array, places: Records) -> ColumnView:
        specs = [form if isinstance(form, Spec) else form.spec for form in self._forms]
        if not self._leaves.size:
            return ColumnView(Column(self.field, places.tobytes()), specs, memory, self._name_of)
        raise ProtocolError(f"field {self.field!r}: objects are mixed with values on a device")

    def _entry(self, row: int) -> Any:
        offset, nbytes, number, _ = self._there[row].item()
        form = self._form(number)
        if form.spec.kind != "array":
            raise ProtocolError(
                f"field {self.field!r}: Python objects cannot be stored on a device"
            )
        opened = self._devices.at(offset)
        shape = shape_of(form.spec, dtype_of(form.spec.dtype).itemsize, nbytes)
        if opened.reached:
            return opened.device.bring(opened.place(offset), form.dtype, shape)
        return opened.pool.array(offset - opened.base, form.dtype, shape, self._pin)


_APART = np.uint64(16)
"""Where rows begin in one piece of memory: at a multiple of the largest item."""


def tensors_of(
    column: DeviceColumn, layout: str, padding: Padding, view: bool, device: str, offsets: Offsets
) -> Any:
    """As `tensors.to_torch`, of entries that all are on one GPU. InvalidValue where torch has no
    such dtype or layout."""
    torch = sys.modules["torch"]
    rows = [_tensor(torch, column, row) for row in range(len(column))]
    if view:
        if layout in ("dense", "padded", "jagged"):
            raise no_view(column.field, layout)
        return [row.to(device) for row in rows]
    joined = _joined(torch, column, rows, layout, padding, device, offsets)
    return [row.clone().to(device) for row in rows] if joined is None else joined


def copied(
    column: ColumnView,
    layout: str,
    padding: Padding,
    device: str,
    direct: DirectCopies,
    offsets: Offsets,
) -> Any | None:
    """As `tensors.to_torch`, by copies from the arena to the GPU that nobody has waited for yet.

    None where that is no way, or not the faster one: no GPU, memory that cannot be pinned, rows
    that are short and lie apart. InvalidValue where torch has no such dtype or layout.
    """
    landing = direct.landing(device)
    if landing is None or (base := column.base) is None:
        return None
    torch = sys.modules["torch"]
    sizes = column.places["nbytes"].astype(np.uint64)
    uniform = column.uniform is not None
    rooms = sizes if uniform else (sizes + _APART - np.uint64(1)) // _APART * _APART
    ends = np.cumsum(rooms)
    starts = ends - rooms
    runs = Runs(column.places["offset"].astype(np.uint64), starts, sizes)
    if not runs.long:
        return None
    forms = [_torch_form(torch, column, row) for row in range(1 if uniform else len(column))]
    memory = torch.empty(int(ends[-1]), dtype=torch.uint8, device=landing.place)
    if not direct.copy(runs, memory.data_ptr(), landing, base):
        return None
    if uniform and (layout in ("auto", "dense") or layout == "padded" and padding is RIGHT):
        dtype, shape = forms[0]
        return memory.view(dtype).reshape(len(column), *shape)
    rows = []
    for row, (start, nbytes) in enumerate(zip(starts.tolist(), sizes.tolist(), strict=True)):
        dtype, shape = forms[0 if uniform else row]
        rows.append(memory[start : start + nbytes].view(dtype).reshape(shape))
    joined = _joined(torch, column, rows, layout, padding, landing.place, offsets)
    return rows if joined is None else joined


def _torch_form(torch: Any, column: ColumnView, row: int) -> tuple[Any, tuple[int, ...]]:
    array = column[row]
    try:
        return getattr(torch, dtype_name(array.dtype) or ""), array.shape
    except AttributeError as exc:
        raise InvalidValue(
            f"field {column.field!r}: torch has no dtype {array.dtype}; use "
            f"batch.numpy({column.field!r})"
        ) from exc


def _joined(
    torch: Any,
    column: ColumnView,
    rows: list[Any],
    layout: str,
    padding: Padding,
    device: str,
    offsets: Offsets,
) -> Any | None:
    """Rows on a GPU as one tensor there; None where they stay a list."""
    alike = len({(row.dtype, row.shape) for row in rows}) == 1
    if alike and (layout in ("auto", "dense") or layout == "padded" and padding is RIGHT):
        return torch.stack(rows).to(device)
    if layout in ("auto", "list"):
        return None
    ragged = column.ragged()
    if layout == "padded":
        return _padded(torch, column, rows, 0 if ragged is None else ragged.axis, padding).to(
            device
        )
    if layout == "dense" or ragged is None:
        raise unlike(column.field, column.forms(), layout)
    return offsets.nested(torch.cat(rows, ragged.axis).to(device), ragged)


def _tensor(torch: Any, column: DeviceColumn, row: int) -> Any:
    """A view of the entry, which keeps the pin."""
    # By its number: another GPU may be the current one of this thread, and would get a copy.
    plain = torch.as_tensor(column[row], device=f"cuda:{column.device_number(row)}")
    dtype = column.dtype_at(row)
    if dtype.isbuiltin == 1:
        return plain
    try:
        return plain.view(getattr(torch, dtype_name(dtype) or ""))
    except (AttributeError, TypeError) as exc:
        raise InvalidValue(
            f"field {column.field!r}: torch has no dtype {dtype}; use batch.numpy({column.field!r})"
        ) from exc


def _padded(torch: Any, column: ColumnView, rows: list[Any], axis: int, padding: Padding) -> Any:
    field, forms = column.field, column.forms()
    if len({(dtype, len(shape)) for dtype, shape in forms}) > 1:
        raise unlike(field, forms, "padded")
    value = padding_value(field, padding, forms[0][0]).item()
    shape = [max(lengths) for lengths in zip(*(row.shape for row in rows), strict=True)]
    if shape:
        lengths = np.array([row.shape[axis] for row in rows], np.int64)
        shape[axis] = padding.width(field, lengths)
    made = torch.full([len(rows), *shape], value, dtype=rows[0].dtype, device=rows[0].device)
    for target, row in zip(made, rows, strict=True):
        spans = [slice(length) for length in row.shape]
        if spans:
            spans[axis] = padding.span(row.shape[axis], shape[axis])
        target[tuple(spans)] = row
    return made
