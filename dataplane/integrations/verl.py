"""Convert verl's DataProto to rows and back (docs/verl.md).

For code that calls the plane directly, without TransferQueue's interface.

    verl.put(part, data, key=uids)
    with part.claim("train", groups=4) as batch:
        data = verl.dataproto(batch)

Each row keeps the `meta_info` of its put. Only `dataproto` imports verl.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import dataplane
from dataplane.integrations.objects import check_even, packed_object, unpacked_object

if TYPE_CHECKING:
    from verl import DataProto

__all__ = ["dataproto", "put"]

META_INFO = "meta_info"
_OBJECT = "object"


def put(
    part: dataplane.Partition,
    data: DataProto,
    *,
    key: Sequence[str | int] | None = None,
    group: Sequence[str | int] | None = None,
    tags: Mapping[str, Any] | None = None,
    dedup: Collection[str] = (),
    replace: bool = False,
) -> dataplane.Ref:
    """Put the rows of a DataProto: the tensors of `batch`, the arrays of `non_tensor_batch`, and
    `meta_info`, which is stored with every row. The other arguments are those of `Partition.put`.

    Raises ValueError if a name is in both `batch` and `non_tensor_batch`, is "meta_info", or is
    missing from some rows. Raises InvalidValue for an object that contains anything other than
    None, numbers, text, bytes, lists, tuples, dicts, arrays and tensors.
    """
    if data.batch is not None:
        check_even(data.batch)
    columns: dict[str, Any] = dict(data.batch.items()) if data.batch is not None else {}
    if odd := sorted(({*columns} & {*data.non_tensor_batch}) | ({META_INFO} & {*columns})):
        raise ValueError(f"this DataProto has two entries named {odd[0]!r}: rename one of them")
    for name, array in data.non_tensor_batch.items():
        columns[str(name)] = [{_OBJECT: packed_object(one)} for one in array]
    columns[META_INFO] = [packed_object(dict(data.meta_info))] * len(data)
    objects = [*data.non_tensor_batch, *dedup]
    return part.put(columns, key=key, group=group, tags=tags, dedup=objects, replace=replace)


def dataproto(rows: dataplane.Rows | dataplane.Batch) -> DataProto:
    """Return the fetched fields of rows, and their `meta_info`, as a DataProto. Its tensors and
    arrays are private copies.

    Raises ValueError for a field whose rows differ in shape, and for a key of `meta_info` that has
    different values in different puts.
    """
    from verl import DataProto

    tensors: dict[str, torch.Tensor] = {}
    arrays: dict[str, Any] = {}
    for name in rows.fields:
        if name == META_INFO:
            continue
        column = list(rows[name])
        if column and isinstance(column[0], dict) and column[0].keys() == {_OBJECT}:
            arrays[name] = _array([unpacked_object(one[_OBJECT]) for one in column])
            continue
        if len(shapes := {np.shape(one) for one in column}) > 1:
            raise ValueError(
                f"the rows of field {name!r} have different shapes, {sorted(shapes)}, but a "
                "DataProto needs rows of one shape: pad them before the put, or read the field "
                "with `torch(...)`"
            )
        tensors[name] = rows.torch(name)
    meta_info = _joined([unpacked_object(one) for one in _meta_infos(rows)])
    return DataProto.from_dict(tensors, arrays or None, meta_info)


def _meta_infos(rows: dataplane.Rows | dataplane.Batch) -> list[Any]:
    """Return the `meta_info` of each row, which a claim of a stage's fields does not fetch. Empty
    for rows that `put` of this module did not write."""
    if META_INFO not in rows.fields:
        try:
            rows.fetch(META_INFO)
        except dataplane.FieldUnknown:
            return []
    return list(rows[META_INFO])


def _array(values: list[Any]) -> Any:
    """Return an array for non_tensor_batch: of numbers if they share a dtype, else of objects."""
    numbers = all(isinstance(one, np.generic) for one in values)
    if values and numbers and len({one.dtype for one in values}) == 1:
        return np.array(values)
    array = np.empty(len(values), object)
    array[:] = values
    return array


def _joined(infos: list[dict[str, Any]]) -> dict[str, Any]:
    joined: dict[str, Any] = {}
    for info in infos:
        for key, value in info.items():
            if key in joined and not _same(joined[key], value):
                raise ValueError(
                    f"these rows come from puts with different values of meta_info[{key!r}], "
                    f"{joined[key]!r:.80} and {value!r:.80}: use one value in all puts, or read "
                    "the rows of each put separately"
                )
            joined[key] = value
    return joined


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor | np.ndarray) or isinstance(other, torch.Tensor | np.ndarray):
        return type(one) is type(other) and one.shape == other.shape and bool((one == other).all())
    return type(one) is type(other) and bool(one == other)
