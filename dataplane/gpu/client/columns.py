"""Columns of fetched rows with values on a device: arrays of the device, and torch tensors.

Runs in the client. An entry is made on access. It is a view of the device's memory and keeps the
pin. Callers that need host memory get a copy. Tensors need a process that has imported torch: work
for the GPU is queued on this thread's current stream of torch, and nothing here waits for it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from dataplane.client.read.chunk_columns import ChunkColumn, Memory
from dataplane.client.read.column_view import ColumnView, NameOf, RowSpan
from dataplane.client.read.table import TableReader
from dataplane.client.read.tensors import TensorIndex, TensorRows, cut, place
from dataplane.errors import DeviceMissing, InvalidValue, ValueCorrupt, joined, mixed_releases
from dataplane.gpu.direct import DirectCopies, Landing, Runs
from dataplane.memory.arena import Pin
from dataplane.wire.arrays import Array, dtype_name
from dataplane.wire.tables import Table

if TYPE_CHECKING:
    from dataplane.gpu.client.pools import Opened, OpenPools

FETCH_S = 60.0
"""The most seconds that a device may take to copy a column to the host."""


class DeviceTableReader(TableReader):
    """A `TableReader` of chunks some of which are on devices."""

    def __init__(self, table: Table, pin: object, devices: OpenPools) -> None:
        super().__init__(table, pin)
        self._devices = devices

    def view(self, field: str, name_of: NameOf | None = None) -> ColumnView:
        view = super().view(field, name_of)
        if any([isinstance(column, DeviceChunkColumn) for column, _, _ in view.runs]):
            return DeviceColumn(field, view.runs, name_of, view.owner_of)
        return view

    def _beyond(self, offset: int, nbytes: int) -> Memory:
        if offset < self._devices.arena_bytes:
            return super()._beyond(offset, nbytes)
        opened = self._devices.at(offset)
        if offset + nbytes > opened.base + opened.pool.nbytes:
            raise mixed_releases(
                f"a chunk of {nbytes} bytes at offset {offset - opened.base} is outside its "
                f"device arena of {opened.pool.nbytes} bytes"
            )
        # a chunk's columns only slice this memory
        return cast(Memory, DeviceBytes(opened, offset, nbytes, self._pin))

    def _open(self, number: int) -> list[ChunkColumn]:
        columns = super()._open(number)
        if not any([isinstance(column.memory, DeviceBytes) for column in columns]):
            return columns
        return [
            DeviceChunkColumn(c.spec, c.rows, c.lengths, c.bounds, c.memory, c.start)
            for c in columns
        ]


class DeviceBytes:
    """Bytes of a device arena that this process has opened. address: of the first byte, in the
    peer's memory."""

    __slots__ = ("address", "nbytes", "opened", "pin")

    def __init__(self, opened: Opened, address: int, nbytes: int, pin: object) -> None:
        self.opened = opened
        self.address = address
        self.nbytes = nbytes
        self.pin = pin

    def __len__(self) -> int:
        return self.nbytes

    def __getitem__(self, part: slice) -> DeviceBytes:
        start, stop, _ = part.indices(self.nbytes)
        return DeviceBytes(self.opened, self.address + start, stop - start, self.pin)

    def array(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
        """Return an array over the bytes. If they are on another device than the client's, it is a
        private copy."""
        opened, address = self.opened, self.address
        if opened.reached:
            return opened.device.bring(opened.place(address), dtype, shape)
        return opened.pool.array(address - opened.base, dtype, shape, self.pin)


class DeviceChunkColumn(ChunkColumn):
    """A column of a chunk on a device."""

    def device_memory(self, first: int, last: int) -> DeviceBytes:
        """Return the bytes of neighbouring rows."""
        return cast(DeviceBytes, self.span(first, last))

    def array(self, row: int) -> Array:
        memory, shape = self.device_memory(row, row + 1), self.shape_of(row)
        made: Array = memory.array(self.spec.items, shape)
        return made

    def arrays(self, first: int, last: int) -> Iterable[Array]:
        return map(self.array, range(first, last))

    def cells(self, first: int, last: int) -> list[memoryview]:
        raise ValueCorrupt("its chunk is on a device: expected arrays, got objects, text or bytes")


class DeviceColumn(ColumnView):
    """A `ColumnView` whose entries may be arrays on a device, for cupy and torch
    (`__cuda_array_interface__`). bfloat16 and fp8 become unsigned integers of their width. Do not
    write to them: CUDA has no read-only memory between processes. An entry on another device than
    the client's is copied to the client's device on each access."""

    def described(self) -> str:
        """Describe the column without its values, which would have to be copied from the device."""
        dtypes = joined(sorted({dtype.name for dtype in self.dtypes}))
        count = sum([last - first for _, first, last in self._on_device()])
        return f"{dtypes or 'values'}, {count} on a device"

    def _on_device(self) -> list[tuple[DeviceChunkColumn, int, int]]:
        runs = self.runs
        return [
            (one, first, last) for one, first, last in runs if isinstance(one, DeviceChunkColumn)
        ]

    def dense(self) -> None:
        """Return None: the rows are not all in host memory."""

    def on_gpu(self, device: str) -> GpuRows | None:
        """See `ColumnView.on_gpu`. Raise InvalidValue if torch does not have the dtype."""
        on_device = self._on_device()
        if not str(device).startswith("cuda") or not 0 < len(on_device) == len(self.runs):
            return None
        column, first, last = on_device[0]
        if column.device_memory(first, last).opened.device.kind != "cuda":
            return None
        return GpuRows(self, self.tensors(), device)

    def on_host(self) -> ColumnView:
        """Return the column with private host copies of values on a device. Raise DeviceMissing if
        the device fails."""
        touched = {}
        runs: list[RowSpan] = []
        for column, first, last in self.runs:
            if isinstance(column, DeviceChunkColumn):
                memory = column.device_memory(first, last)
                opened, copy = memory.opened, np.empty(memory.nbytes, np.uint8)
                target = copy.__array_interface__["data"][0]
                opened.device.copy(target, opened.place(memory.address), memory.nbytes)
                touched[opened.number] = opened.device
                width, rows = column.spec.width, last - first
                lengths = column.lengths[first * width : last * width]
                bounds = [bound - column.bounds[first] for bound in column.bounds[first : last + 1]]
                runs.append((ChunkColumn(column.spec, rows, lengths, bounds, copy), 0, rows))
            else:
                runs.append((column, first, last))
        for device in touched.values():
            if not device.finish(FETCH_S):
                raise DeviceMissing(
                    f"device {device.identity} did not finish copying field {self.field!r} within "
                    f"{FETCH_S:g} s: check nvidia-smi and dmesg for GPU errors, then read the "
                    "field again"
                )
        return ColumnView(self.field, runs, self.name_of, self.owner_of)

    def tensors(self) -> list[Any]:
        """Return the values of each run as one torch tensor [items] on their GPU, which keeps the
        pin. Raise InvalidValue if torch does not have the dtype."""
        torch, found = sys.modules["torch"], []
        for column, first, last in self._on_device():
            memory, dtype = column.device_memory(first, last), column.spec.items
            items = memory.array(dtype, (memory.nbytes // dtype.itemsize,))
            # with the number, because torch would copy to the current GPU
            plain = torch.as_tensor(items, device=f"cuda:{memory.opened.device.number}")
            whole = dtype.isbuiltin == 1
            found.append(plain if whole else plain.view(_torch_dtype(self.field, dtype)))
        return found


class GpuRows(TensorRows):
    """Rows on GPUs.

    runs: for each run of the column, a tensor [items] of one dtype with the values of its rows.
    private: whether `runs` is one tensor that nothing else refers to.
    """

    on_host = False

    def __init__(
        self, column: ColumnView, runs: list[Any], device: str, private: bool = False
    ) -> None:
        super().__init__(column, device)
        self._runs, self._private = runs, private

    def in_place(self) -> list[Any]:
        rows = []
        for items, (column, first, last) in zip(self._runs, self.column.runs, strict=True):
            assert column is not None
            rows += cut(items, map(column.shape_of, range(first, last)))
        return rows

    def items(self) -> Any:
        items = self._runs[0] if self._private else sys.modules["torch"].cat(self._runs)
        return items.to(self.device)

    def placed(self, shape: tuple[int, ...], where: Sequence[TensorIndex], fill: Any = None) -> Any:
        rows = self.each()
        made = sys.modules["torch"].empty(shape, dtype=rows[0].dtype, device=rows[0].device)
        place(made, rows, where, fill)
        return made


def copied(direct: DirectCopies, landing: Landing, column: ColumnView) -> GpuRows | None:
    """Queue copies of a column from the arena to a GPU, and return its rows there without waiting.

    Return None if that is impossible or slower: the memory cannot be pinned, or values are not in
    the arena, are short, or have several dtypes. Raise InvalidValue if torch does not have the
    dtype.
    """
    if len(column.dtypes) > 1:
        return None
    spans = column.spans()
    arena = spans[0].base
    if not isinstance(arena, np.ndarray) or not isinstance(arena.base, Pin):
        return None
    if any([span.base is not arena for span in spans]):
        return None
    first, sizes = arena.__array_interface__["data"][0], list(map(len, spans))
    places = [span.__array_interface__["data"][0] - first for span in spans]
    starts = list(accumulate(sizes, initial=0))[:-1]
    runs = Runs(*(np.array(numbers, np.uint64) for numbers in (places, starts, sizes)))
    if not runs.long:
        return None
    torch = sys.modules["torch"]
    dtype = _torch_dtype(column.field, column.dtypes[0])
    memory = torch.empty(sum(sizes), dtype=torch.uint8, device=landing.place)
    if not direct.copy(runs, memory.data_ptr(), landing, arena):
        return None
    return GpuRows(column, [memory.view(dtype)], landing.place, private=True)


def _torch_dtype(field: str, dtype: np.dtype[Any]) -> Any:
    try:
        return getattr(sys.modules["torch"], dtype_name(dtype) or "")
    except AttributeError as exc:
        raise InvalidValue(
            f"field {field!r} has dtype {dtype}, which torch does not support: use "
            f"batch.numpy({field!r})"
        ) from exc
