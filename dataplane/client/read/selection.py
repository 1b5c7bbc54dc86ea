"""Fetched rows: keys, groups, tags, and columns as zero-copy views of the arena.

Reads return a `Selection`, and batches are based on it; `Group` is one group of it. Views are
made on first use, are read-only, and keep their bytes pinned while any of them lives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Self, overload

import numpy as np
import numpy.typing as npt

from dataplane.client import arguments
from dataplane.client.read import convert
from dataplane.client.read.column_view import ColumnView
from dataplane.client.read.ragged import Offsets, Padding, Side
from dataplane.client.read.table import TableReader
from dataplane.client.read.tensors import Layout, padding_mask, to_torch
from dataplane.client.ref import Ref
from dataplane.client.session.session import Handle
from dataplane.client.tracebacks import public_at_once
from dataplane.client.write.rows import group_names, row_groups, row_name, row_names, tag_values
from dataplane.errors import InvalidCall, InvalidRows, NotFetched, counted
from dataplane.wire.arrays import is_interval, reader, shown, unreadable
from dataplane.wire.limits import NO_GROUP
from dataplane.wire.packed import KEY, U4, column
from dataplane.wire.tables import Name, Rows, Scalar, Table

Index = npt.NDArray[np.intp]
_SHOWN_FIELDS = 8
"""How many fields a representation describes."""
_LACKING = -1 << 31
"""A row that a table does not have."""


class Selection:
    """Rows and their fetched fields. `selection["field"]` has one entry per row.

    Array entries are read-only views of shared memory.
    """

    def __init__(self, handle: Handle, reader: TableReader) -> None:
        table = reader.table
        self._handle = handle
        self._rows = table.rows
        # Bound to the rows, not to the selection: a cycle would keep the pin until the collector
        # runs.
        self._name_of = partial(row_name, table.rows)
        self._table = table
        self._n = table.rows.count
        self._views: dict[str, ColumnView] = {}
        self._fetched = dict.fromkeys(table.values.fields, reader)
        """by field"""
        self._offsets = Offsets()

    # keys, groups and tags

    def __len__(self) -> int:
        return self._n

    @cached_property
    def keys(self) -> list[Name]:
        """The key of each row. A generated key is "~" followed by 32 hexadecimal digits."""
        return row_names(self._rows)

    @cached_property
    def group_ids(self) -> list[Name | None]:
        """The group id of each row; None for a row without a group."""
        return row_groups(self._rows)

    @cached_property
    def tags(self) -> dict[str, list[Scalar]]:
        """Tags by name, one value per row, as they were when the rows were read."""
        return {name: tag_values(self._table, name, self._n) for name in self._table.tags}

    @property
    def ref(self) -> Ref:
        """A small reference to these rows. Send it to another process, and read the rows there with
        `plane.get(ref)`."""
        session, rows, defined = self._handle.session, self._rows, self._handle.defined
        return Ref(
            session.plane,
            session.peer,
            self._handle.name,
            0 if defined is None else defined.generation,
            rows.keys,
            None if rows.names is None else tuple(rows.names),
            tuple(group_names(rows)),
            tuple(self.fields),
        )

    def __reduce__(self) -> Any:
        what = f"a {type(self).__name__} cannot be sent to another process"
        name = type(self).__name__.lower()
        raise TypeError(f"{what}: send {name}.ref, and call plane.get(ref) in the other process")

    @property
    def partition(self) -> str:
        """The name of the partition that the rows belong to."""
        return self._handle.name

    @property
    def fields(self) -> list[str]:
        """The fields that have been fetched."""
        return list(self._fetched)

    # values

    @overload
    def __getitem__(self, field: str) -> ColumnView: ...
    @overload
    def __getitem__(self, field: slice) -> Self: ...
    @public_at_once
    def __getitem__(self, field: str | slice) -> Any:
        """Return a field, with one entry per row. With a slice, return the part with those rows.
        Raises NotFetched if the field was not fetched."""
        if type(field) is not str:
            chosen = _chosen(field, type(self).__name__.lower(), self._n)
            if not isinstance(chosen, str):
                return self.rows(chosen)
            field = chosen
        view = self._views.get(field)
        if view is None:
            if field not in self._fetched:
                self._bring(field)
            view = self._views[field] = self._fetched[field].view(field, self._name_of)
        return view

    def get(self, field: str, default: Any = None) -> list[Any]:
        """Return a fetched field as a list, with `default` for rows without this field. If the
        field was not fetched, every entry is `default`."""
        field = arguments.text(field, "the field")
        if field not in self:
            return [default] * len(self)
        view = self[field]
        return [view[row] if view.present(row) else default for row in range(len(view))]

    def __contains__(self, field: object) -> bool:
        return isinstance(field, str) and field in self._fetched

    @public_at_once
    def rows(self, positions: Sequence[int] | npt.NDArray[Any]) -> Self:
        """Return the rows at these positions as a part, in the given order, without copying.

        A part of a batch shares the lease of the batch. Its `add`, `ack`, `release` and `drop`
        apply only to its own rows. Raises InvalidRows if a position is out of range or given twice.
        """
        at = _array_of(positions)
        if at is not None and at.dtype == np.bool_ and at.shape == (self._n,):
            at = np.flatnonzero(at)
        if at is None or at.ndim != 1 or (len(at) and at.dtype.kind not in "iu"):
            raise InvalidRows(
                f"rows({shown(positions):.80}): expected int positions from 0 to {self._n - 1}, or "
                "one bool per row"
            )
        if at.dtype.kind == "u":  # a huge position would become negative
            at = np.minimum(at, self._n)
        at = at.astype(np.intp)
        at = np.where(at < 0, at + self._n, at)
        if len(np.unique(at)) < len(at) or (len(at) and not 0 <= at.min() <= at.max() < self._n):
            raise InvalidRows(
                f"rows({shown(positions):.80}): expected positions from 0 to {self._n - 1}, each "
                "at most once"
            )
        part = object.__new__(type(self))
        part.__dict__.update(self.__dict__)
        for name in ("keys", "group_ids", "tags", "_group_rows"):
            part.__dict__.pop(name, None)
        part._become_part(self, at)
        return part

    def _become_part(self, of: Selection, at: Index) -> None:
        """Become the rows at these positions of another selection, with their fetched fields."""
        self._rows, self._n = _rows_at(of._rows, at), len(at)
        self._name_of = partial(row_name, self._rows)
        tags = {name: [values[i] for i in at.tolist()] for name, values in of.tags.items()}
        self._table = Table(self._rows, tags=tags)
        self._views, self._offsets, self._fetched = {}, Offsets(), {}
        self._share(of, list(of._fetched), at)

    def _share(self, of: Selection, fields: Sequence[str], at: Index) -> None:
        """Share these fetched fields of another selection, for its rows at these positions."""
        parts: dict[int, TableReader] = {}
        for field in fields:
            whole = of._fetched[field]
            part = parts.get(id(whole))
            if part is None:
                part = parts[id(whole)] = whole.part(at)
            self._fetched[field] = part
            self._views.pop(field, None)

    def groups(self) -> Iterator[Group]:
        """Iterate over the groups, in the order of their first rows. A row without a group forms a
        group of its own, with id None."""
        for name, rows in self._group_rows:
            yield Group(self, name, rows)

    @cached_property
    def _group_rows(self) -> list[tuple[Name | None, Index]]:
        everything = np.arange(self._n, dtype=np.intp)
        if not self._rows.group_index:
            return [(None, everything[i : i + 1]) for i in range(self._n)]
        index = column(self._rows.group_index, U4, self._n)
        names: list[Name | None] = list(group_names(self._rows))
        # Each row without a group gets a number after those of the groups.
        alone = index == NO_GROUP
        numbers = index.astype(np.intp)
        numbers[alone] = len(names) + np.arange(int(alone.sum()))
        order = np.argsort(numbers, kind="stable")
        cuts = np.flatnonzero(np.diff(numbers[order])) + 1
        parts = np.split(order, cuts) if len(order) else []
        parts.sort(key=lambda rows: int(rows[0]))
        count = len(names)
        return [(names[g] if (g := int(numbers[r[0]])) < count else None, r) for r in parts]

    def _tensors(
        self,
        column: ColumnView,
        layout: Layout,
        padding: Padding,
        view: bool,
        device: str,
        mask: bool,
    ) -> Any:
        """Return a column of these rows as torch tensors; with `mask`, also its mask."""
        if mask and layout != "padded":
            raise InvalidCall(f"mask=True needs layout='padded', not {layout!r}")
        direct = self._handle.session.direct
        made = to_torch(column, layout, padding, view, device, direct, self._offsets)
        return (made, padding_mask(column, padding, device)) if mask else made

    # fetching

    def _bring(self, field: str) -> None:
        """Fetch a missing field, or raise NotFetched."""
        raise NotFetched(
            f"field {shown(field):.80} was not fetched (fetched: {self.fields}): name it in "
            "fields=, or call `await rows.fetch(...)`",
            field=field,
        )

    def _admit(self, reader: TableReader) -> None:
        """Add the fields of a table, which has all of these rows or some of them."""
        if reader.table.rows.keys != self._rows.keys:
            reader = reader.part(_rows_in(reader.table, self._rows.keys))
        for field in reader.fields:
            self._fetched[field] = reader
            self._views.pop(field, None)

    def nbytes(self, field: str) -> int:
        """Return the size of a fetched field in bytes."""
        return self[field].nbytes

    def __repr__(self) -> str:
        name = type(self).__name__
        return (
            f"<{name} {counted(self._n, 'row')} of {self.partition!r}: {self._described_fields()}>"
        )

    def _described_fields(self) -> str:
        """Describe each fetched field: dtype, lengths and first value."""
        told = [f"{field}: {self[field].described()}" for field in self.fields[:_SHOWN_FIELDS]]
        if len(self.fields) > _SHOWN_FIELDS:
            told.append(f"and {len(self.fields) - _SHOWN_FIELDS} more")
        return "; ".join(told) or "no fields"


@reader(InvalidCall)
def _chosen(field: object, what: str, n: int) -> str | Index:
    """Return what the key of `[…]` selects: the field of this name, or positions of `n` rows."""
    if isinstance(field, str):
        return str.__str__(field)
    if isinstance(field, slice):
        return np.arange(n)[field]
    raise InvalidCall(
        f"{what}[{shown(field):.40}]: expected a field name or a slice; to select rows by "
        f"position, use {what}.rows([…])"
    )


def positions(given: object, what: str, n: int) -> Index:
    """Return int positions of rows, from 0 to n - 1, in ascending order. Raise InvalidRows for
    anything else."""
    at = _array_of(given)
    if at is not None and at.shape == (0,):
        return np.empty(0, np.intp)
    if at is None or at.ndim != 1 or at.dtype.kind not in "iu" or not 0 <= at.min() <= at.max() < n:
        raise InvalidRows(
            f"{what}={shown(given):.80}: expected a list of int positions from 0 to {n - 1}"
        )
    return np.unique(at.astype(np.intp))


def _array_of(given: object) -> npt.NDArray[Any] | None:
    """Return an array; None if there is none, as for lists of different lengths."""
    try:
        return None if is_interval(given) else np.asarray(given)
    except (ValueError, TypeError, OverflowError, RuntimeError):
        return None
    except Exception as exc:  # from the user's object
        raise unreadable("the list of positions", given, exc, InvalidRows) from exc


class Group:
    """The rows of one group: its id, keys and tags, and the positions of its rows in the batch.
    `group["field"]` returns a field."""

    __slots__ = ("_of", "id", "rows")

    def __init__(self, of: Selection, name: Name | None, rows: Index) -> None:
        self._of = of
        self.id = name
        self.rows = rows
        """positions of the group's rows in the batch"""

    def __len__(self) -> int:
        return len(self.rows)

    @public_at_once
    def __getitem__(self, field: str) -> ColumnView:
        """Return the group's entries of a field, one per row."""
        return self._of[field].take(self.rows)

    @public_at_once
    def numpy(self, field: str, view: bool = False) -> npt.NDArray[Any] | list[Any]:
        """Return a field of this group's rows as NumPy arrays. See `Batch.numpy`."""
        return convert.to_numpy(self[field], view)

    @public_at_once
    def torch(
        self,
        field: str,
        layout: Layout = "auto",
        padding: float = 0,
        view: bool = False,
        device: str = "cpu",
        *,
        side: Side = "right",
        length: int | None = None,
        multiple: int | None = None,
        mask: bool = False,
    ) -> Any:
        """Return a field of this group's rows as a torch tensor. See `Batch.torch`."""
        shape = Padding(padding, side, length, multiple)
        return self._of._tensors(self[field], layout, shape, view, device, mask)

    @property
    def keys(self) -> list[Name]:
        """The keys of the group's rows."""
        return [self._of.keys[int(row)] for row in self.rows]

    @property
    def tags(self) -> Mapping[str, list[Scalar]]:
        """The tags of the group's rows: for each tag, one value per row."""
        return {
            name: [values[int(row)] for row in self.rows] for name, values in self._of.tags.items()
        }

    def __repr__(self) -> str:
        return f"<Group {self.id!r}: {counted(len(self), 'row')} of {self._of.partition!r}>"


def _rows_at(rows: Rows, at: Index) -> Rows:
    n = rows.count
    names = None if rows.names is None else [rows.names[i] for i in at.tolist()]
    keys = column(rows.keys, KEY, n)[at].tobytes()
    if not rows.group_index:
        return Rows(keys, names)
    index = column(rows.group_index, U4, n)[at]
    used = np.unique(index[index != NO_GROUP])
    renumbered = np.full(len(at), NO_GROUP, U4)
    here = index != NO_GROUP
    renumbered[here] = np.searchsorted(used, index[here])
    group_keys = column(rows.group_keys, KEY)[used].tobytes()
    group_ids = None if rows.group_names is None else [rows.group_names[i] for i in used.tolist()]
    return Rows(keys, names, renumbered.tobytes(), group_keys, group_ids)


def _rows_in(table: Table, keys: bytes) -> Index:
    """Return the index in a table of each of these keys; _LACKING for a missing one."""
    size = KEY.itemsize
    here = {table.rows.keys[i : i + size]: i // size for i in range(0, len(table.rows.keys), size)}
    found = [here.get(keys[i : i + size], _LACKING) for i in range(0, len(keys), size)]
    return np.array(found, np.intp)
