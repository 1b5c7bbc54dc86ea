"""torch tensors on a GPU: of a column that lies there, or straight from the arena.

Runs in the client, in whose process torch has been imported. What is asked of the GPU is asked of
torch's current stream of this thread; nothing here waits for it.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from dataplane.client.read.device_views import DeviceColumn
from dataplane.client.read.ragged import RIGHT, Offsets, Padding
from dataplane.client.read.views import ColumnView
from dataplane.client.session.direct import DirectCopies, Runs
from dataplane.errors import InvalidValue
from dataplane.wire.arrays import dtype_name

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
            raise InvalidValue(
                f"{column.field}: a {layout} tensor of these rows is a copy, no view"
            )
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
        raise InvalidValue(f"torch has no dtype {array.dtype}") from exc


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
    if layout == "dense":
        raise InvalidValue(
            f"{column.field}: its rows differ in dtype or shape, which make no dense tensor; use "
            "layout='jagged' or 'padded'",
            field=column.field,
        )
    ragged = column.ragged()
    if layout == "padded":
        axis = 0 if ragged is None else ragged.axis
        return _padded(torch, column.field, rows, axis, padding).to(device)
    if ragged is None:
        raise InvalidValue(f"{column.field}: jagged rows differ along one axis only")
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
        raise InvalidValue(f"{column.field}: torch has no dtype {dtype}") from exc


def _padded(torch: Any, field: str, rows: list[Any], axis: int, padding: Padding) -> Any:
    if len({(row.dtype, row.ndim) for row in rows}) > 1:
        raise InvalidValue(f"{field}: rows of different dtypes or ranks cannot be padded")
    shape = [max(lengths) for lengths in zip(*(row.shape for row in rows), strict=True)]
    if shape:
        lengths = np.array([row.shape[axis] for row in rows], np.int64)
        shape[axis] = padding.width(field, lengths)
    made = torch.full(
        [len(rows), *shape], padding.value, dtype=rows[0].dtype, device=rows[0].device
    )
    for target, row in zip(made, rows, strict=True):
        spans = [slice(length) for length in row.shape]
        if spans:
            spans[axis] = padding.span(row.shape[axis], shape[axis])
        target[tuple(spans)] = row
    return made
