"""torch tensors of a column that lies on a GPU, made there: nothing goes by way of the host.

Runs in the client, in whose process torch has been imported.
"""

from __future__ import annotations

import sys
from typing import Any

from dataplane.client.device_views import DeviceColumn
from dataplane.errors import InvalidValue
from dataplane.wire.arrays import dtype_name


def tensors_of(column: DeviceColumn, layout: str, padding: float, view: bool, device: str) -> Any:
    """As `convert.to_torch`, of entries that all are on one GPU. The copies are asked of torch's
    current stream. InvalidValue where torch has no such dtype or layout."""
    torch = sys.modules["torch"]
    rows = [_tensor(torch, column, row) for row in range(len(column))]
    if view:
        if layout in ("padded", "jagged"):
            raise InvalidValue(
                f"{column.field}: a {layout} tensor of these rows is a copy, no view"
            )
        return [row.to(device) for row in rows]
    alike = len({(row.dtype, row.shape) for row in rows}) == 1
    if alike and layout in ("auto", "padded"):
        return torch.stack(rows).to(device)
    if layout == "padded":
        return _padded(torch, column.field, rows, padding).to(device)
    if layout == "jagged":
        if len({(row.dtype, row.shape[1:]) for row in rows}) > 1 or not rows[0].ndim:
            raise InvalidValue(f"{column.field}: jagged rows differ in their first length only")
        ends = torch.tensor([0, *map(len, rows)], device=rows[0].device).cumsum(0)
        return torch.nested.nested_tensor_from_jagged(torch.cat(rows).to(device), ends.to(device))
    return [row.clone().to(device) for row in rows]


def _tensor(torch: Any, column: DeviceColumn, row: int) -> Any:
    """A view of the entry, which keeps the pin."""
    plain = torch.as_tensor(column[row], device="cuda")
    dtype = column.dtype_at(row)
    if dtype.isbuiltin == 1:
        return plain
    try:
        return plain.view(getattr(torch, dtype_name(dtype) or ""))
    except (AttributeError, TypeError) as exc:
        raise InvalidValue(f"{column.field}: torch has no dtype {dtype}") from exc


def _padded(torch: Any, field: str, rows: list[Any], padding: float) -> Any:
    if len({(row.dtype, row.ndim) for row in rows}) > 1:
        raise InvalidValue(f"{field}: rows of different dtypes or ranks cannot be padded")
    shape = [max(lengths) for lengths in zip(*(row.shape for row in rows), strict=True)]
    padded = torch.full([len(rows), *shape], padding, dtype=rows[0].dtype, device=rows[0].device)
    for target, row in zip(padded, rows, strict=True):
        target[tuple(slice(length) for length in row.shape)] = row
    return padded
