"""Convert TensorDicts to rows of the plane and back, and tags of any kind to the plane's scalars.

The rows of a tensor are arrays. Everything else is an object under one key, so that a list of
numbers stays a list. For each field of a row, a hidden tag has its dtype and shape. The tag is
written in the same message as the value, so metadata can be read without values.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

import dataplane
from dataplane.integrations.objects import check_even, packed_object, unpacked_object
from dataplane.wire.arrays import is_time

HIDDEN = "\0"
"""The prefix of names that users do not see."""
OBJECT = "o"
_WHOLE = ""
_SCALARS = (bool, int, float, str)
_INT64 = 1 << 63
_MOST_DEDUP = 4_096  # bytes from which a value has a range of its own


class Column:
    """One field of a put: an entry for the plane, and the text of the hidden tag, per row.

    dedup: whether equal arrays are stored once.
    """

    __slots__ = ("dedup", "entries", "told")

    def __init__(self, entries: Any, told: list[str], dedup: bool = False) -> None:
        self.entries = entries
        self.told = told
        self.dedup = dedup

    def take(self, places: Sequence[int]) -> Column:
        told = [self.told[place] for place in places]
        if isinstance(self.entries, torch.Tensor) and not self.entries.is_nested:
            return Column(self.entries[list(places)], told, self.dedup)
        entries = list(self.entries)
        return Column([entries[place] for place in places], told, self.dedup)


def columns_of(fields: TensorDict) -> dict[str, Column]:
    """Return the fields of a TensorDict [n]. Raises ValueError for a field that is a TensorDict, or
    that only some rows have."""
    check_even(fields)
    rows = fields.batch_size[0]
    return {name: _column(str(name), value, rows) for name, value in fields.items()}


def _column(name: str, value: Any, rows: int) -> Column:
    if isinstance(value, torch.Tensor):
        value = value.detach()
        if value.is_nested:
            parts = value.unbind()
            if value.layout == torch.strided:
                return Column(list(parts), [_told(part, 1) for part in parts])
            return Column(value, [_told(part, value._ragged_idx) for part in parts])
        return Column(value, [_told(value[0], 0)] * rows if rows else [])
    data: Any = value.data if isinstance(value, NonTensorData) else None
    split = isinstance(data, list) or (isinstance(data, np.ndarray) and data.ndim > 0)
    if split and len(data) == rows:
        value = data  # what a TensorDict makes of a list, or an array of texts or objects
    if isinstance(value, NonTensorStack | NonTensorData):
        entries = value.tolist() if value.batch_size else [value.data] * rows
    elif isinstance(value, list | tuple | np.ndarray):
        if isinstance(value, np.ndarray) and value.dtype.kind in "SU":
            value = value.tolist()
        entries = list(value)
    else:
        raise ValueError(f"field {name!r} is a {type(value).__name__}: expected a tensor or a list")
    if len(entries) != rows:
        raise ValueError(
            f"field {name!r} has {len(entries)} rows in a batch of {rows}: pass one entry per row"
        )
    if entries and all(isinstance(entry, torch.Tensor) for entry in entries):
        return Column([entry.detach() for entry in entries], [_told(e, 1) for e in entries])
    packed = [{_WHOLE: packed_object(entry)} for entry in entries]
    return Column(packed, [OBJECT] * rows, dedup=any(map(_has_arrays, packed)))


def _told(row: torch.Tensor, ragged: int) -> str:
    """`int64:3,7:2`: dtype, shape, and which dimension of the batch is ragged, 0 for none."""
    dtype = str(row.dtype).removeprefix("torch.")
    return f"{dtype}:{','.join(map(str, row.shape))}:{ragged}"


@functools.lru_cache(maxsize=4_096)
def kind(told: str) -> tuple[torch.dtype | None, tuple[int, ...] | None, int]:
    """Return the dtype, shape and ragged dimension of a row's value; None, None, 0 for an
    object."""
    if told == OBJECT:
        return None, None, 0
    dtype, shape, ragged = told.split(":")
    sizes = tuple(int(size) for size in shape.split(",") if size)
    return getattr(torch, dtype), sizes, int(ragged)


def _has_arrays(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_arrays, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_arrays, value))
    return isinstance(value, torch.Tensor | np.ndarray) and value.nbytes >= _MOST_DEDUP


def packed_field(
    rows: dataplane.Rows, field: str, told: Sequence[str]
) -> torch.Tensor | NonTensorStack:
    """Return the rows of one field as TransferQueue does: scalars are dense, other tensors are
    jagged (even if their lengths are equal), and everything else is a stack of objects. All are
    private copies."""
    if any(one == OBJECT for one in told):
        return NonTensorStack(*[_entry(rows, field, i, one) for i, one in enumerate(told)])
    dtypes, shapes, _ = map(set, zip(*map(kind, told), strict=True))
    ranks = {len(shape or ()) for shape in shapes}
    if len(dtypes) > 1 or len(ranks) > 1:
        return NonTensorStack(*rows.torch(field, layout="list"))
    if sum(len(set(sizes)) > 1 for sizes in zip(*shapes, strict=True)) > 1:
        return torch.nested.nested_tensor(rows.torch(field, layout="list"), layout=torch.strided)
    # Ragged where rows differ, else as it was put.
    found: torch.Tensor = rows.torch(field, layout="dense" if ranks == {0} else "jagged")
    return found


def _entry(rows: dataplane.Rows, field: str, place: int, told: str) -> Any:
    if told == OBJECT:
        return unpacked_object(rows[field][place][_WHOLE])
    return rows.rows([place]).torch(field, layout="list")[0]


# tags

_JSON = "\0json:"


def tags_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tags of a row as the plane stores them. Raises TypeError for invalid tags, and
    ValueError for a reserved name."""
    if not isinstance(row, Mapping):
        raise TypeError(f"tags must be one dict per row, not a {type(row).__name__}")
    for name in row:
        if not isinstance(name, str):
            raise TypeError(f"the name of a tag must be a str, not {name!r:.60}")
        if name.startswith(HIDDEN):
            raise ValueError(
                f"the tag name {name!r} starts with {HIDDEN!r}, which is reserved: choose another "
                "name"
            )
    return {name: _tag(name, value) for name, value in row.items()}


def _tag(name: str, value: Any) -> Any:
    """One of the plane's scalars. TypeError where JSON has no form for the value."""
    if isinstance(value, np.generic) and not is_time(value):
        value = value.item()
    if type(value) in _SCALARS and not (type(value) is int and not -_INT64 <= value < _INT64):
        return value if type(value) is not str or not value.startswith(HIDDEN) else _json(value)
    try:
        if _is_json(value):
            return _json(value)
    except (ValueError, RecursionError):  # in a circle
        pass
    raise TypeError(
        f"tag {name!r} is a {type(value).__name__} ({value!r:.60}): a tag must be None, a number, "
        "a str, or a list or dict of these with str keys; put anything else as a field"
    )


def _is_json(value: Any) -> bool:
    """Whether it is read again as it was: JSON has neither tuples nor keys that are no texts."""
    if isinstance(value, list):
        return all(map(_is_json, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and all(map(_is_json, value.values()))
    return value is None or isinstance(value, _SCALARS)


def _json(value: Any) -> str:
    return _JSON + json.dumps(value)


def tag_read(value: Any) -> Any:
    """Return the value that was given to `_tag`."""
    if isinstance(value, str) and value.startswith(_JSON):
        return json.loads(value.removeprefix(_JSON))
    return value
