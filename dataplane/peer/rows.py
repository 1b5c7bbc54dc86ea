"""Operations on tables of rows as columns: decode, slice, join. No state.

Both the parts that write and those that read cut messages by peer, and join what peers answered.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.errors import ProtocolError
from dataplane.metadata.names import format_minted_many
from dataplane.wire.limits import ABSENT, NO_GROUP
from dataplane.wire.records import KEY, RANGE, U4, VALUE, column
from dataplane.wire.tables import Column, Name, Owner, Rows, Spec, Table

Index = npt.NDArray[np.intp]


def count(rows: Rows) -> int:
    if len(rows.keys) % KEY.itemsize:
        raise ProtocolError(f"a column of keys has {len(rows.keys)} bytes, not a multiple of 16")
    return len(rows.keys) // KEY.itemsize


def names(rows: Rows) -> list[Name]:
    """The keys as users know them."""
    return format_minted_many(rows.keys) if rows.names is None else rows.names


def flat_values(columns: list[Column]) -> npt.NDArray[Any]:
    """All VALUE records of columns in one row, leaves behind the values of each; read-only."""
    return np.frombuffer(b"".join(b for c in columns for b in (c.values, c.leaves)), VALUE)


def with_values(columns: list[Column], flat: npt.NDArray[Any]) -> list[Column]:
    """The columns with other records, in the order of `flat_values`."""
    raw, at = flat.tobytes(), 0
    result = []
    for c in columns:
        middle, end = at + len(c.values), at + len(c.values) + len(c.leaves)
        result.append(Column(c.field, raw[at:middle], c.leaf_counts, raw[middle:end]))
        at = end
    return result


def ranges_of(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The RANGE records at the head of VALUE records."""
    return values.view(np.uint64).reshape(-1, 3)[:, 0].copy().view(RANGE)


def take_rows(rows: Rows, index: Index) -> Rows:
    """The rows at `index`, with just the groups that they are in."""
    keys = column(rows.keys, KEY)[index]
    names = None if rows.names is None else [rows.names[i] for i in index]
    if not rows.group_index:
        return Rows(keys.tobytes(), names)
    groups = column(rows.group_index, U4)[index]
    used = np.unique(groups[groups != NO_GROUP])
    renumber = np.full(len(column(rows.group_keys, KEY)) + 1, NO_GROUP, U4)
    renumber[used] = np.arange(len(used), dtype=U4)
    groups = np.where(groups == NO_GROUP, NO_GROUP, renumber[np.minimum(groups, len(renumber) - 1)])
    group_names = None if rows.group_names is None else [rows.group_names[i] for i in used]
    return Rows(
        keys.tobytes(),
        names,
        groups.astype(U4).tobytes(),
        column(rows.group_keys, KEY)[used].tobytes(),
        group_names,
    )


def take_column(source: Column, index: Index, record: np.dtype = VALUE) -> Column:
    values = column(source.values, record)[index]
    if not source.leaf_counts:
        return Column(source.field, values.tobytes())
    counts = column(source.leaf_counts, U4).astype(np.int64)
    ends = np.cumsum(counts)
    leaves = column(source.leaves, record)
    parts = [leaves[ends[i] - counts[i] : ends[i]] for i in index]
    return Column(
        source.field,
        values.tobytes(),
        counts[index].astype(U4).tobytes(),
        b"".join(part.tobytes() for part in parts),
    )


@dataclass(slots=True)
class _Interned:
    """Specs or owners of several tables in one list."""

    items: list[Spec | Owner]
    index: dict[Spec | Owner, int]

    def add(self, items: Iterable[Spec | Owner]) -> npt.NDArray[np.uint32]:
        out = []
        for item in items:
            at = self.index.setdefault(item, len(self.items))
            if at == len(self.items):
                self.items.append(item)
            out.append(at)
        return np.array(out, np.uint32)


def _translate(raw: bytes, specs: npt.NDArray[Any], owners: npt.NDArray[Any]) -> npt.NDArray[Any]:
    values = column(raw, VALUE).copy()
    if len(values):
        here = values["owner"] != ABSENT
        if len(specs):
            values["spec"][here] = specs[values["spec"][here]]
        if len(owners):
            values["owner"][here] = owners[values["owner"][here]]
    return values


def join(tables: list[Table]) -> Table:
    """Tables one behind the other. A column that a table lacks is absent in its rows."""
    if len(tables) == 1:
        return tables[0]
    specs, owners = _Interned([], {}), _Interned([], {})
    fields = list(dict.fromkeys(c.field for t in tables for c in t.columns))
    parts: dict[str, list[tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]]] = {
        f: [] for f in fields
    }
    for table in tables:
        n = count(table.rows)
        spec_map, owner_map = specs.add(table.specs), owners.add(table.owners)
        columns = {c.field: c for c in table.columns}
        for name in fields:
            found = columns.get(name)
            if found is None:
                values = np.zeros(n, VALUE)
                values["owner"] = ABSENT
                parts[name].append((values, np.zeros(n, U4), np.zeros(0, VALUE)))
                continue
            values = _translate(found.values, spec_map, owner_map)
            counts = column(found.leaf_counts, U4) if found.leaf_counts else np.zeros(n, U4)
            parts[name].append((values, counts, _translate(found.leaves, spec_map, owner_map)))
    joined = []
    for name in fields:
        values, counts, leaves = (np.concatenate(p) for p in zip(*parts[name], strict=True))
        has_leaves = bool(counts.any())
        joined.append(
            Column(
                name,
                values.tobytes(),
                counts.astype(U4).tobytes() if has_leaves else b"",
                leaves.tobytes() if has_leaves else b"",
            )
        )
    tags = dict.fromkeys(name for t in tables for name in t.tags)
    return Table(
        rows=_join_rows([t.rows for t in tables]),
        columns=joined,
        specs=specs.items,  # type: ignore[arg-type]
        owners=owners.items,  # type: ignore[arg-type]
        tags={
            name: [v for t in tables for v in t.tags.get(name, [None] * count(t.rows))]
            for name in tags
        },
    )


def _join_rows(parts: list[Rows]) -> Rows:
    """Groups are never split over peers, so their keys need no merging."""
    keys = b"".join(p.keys for p in parts)
    named = any(p.names is not None for p in parts)
    names = [n for p in parts for n in row_names(p)] if named else None
    if not any(p.group_index for p in parts):
        return Rows(keys, names)
    index, group_keys, base = [], [], 0
    group_names: list[Name] = []
    for part in parts:
        n = count(part)
        if part.group_index:
            groups = column(part.group_index, U4)
            index.append(np.where(groups == NO_GROUP, groups, groups + base).astype(U4))
        else:
            index.append(np.full(n, NO_GROUP, U4))
        here = column(part.group_keys, KEY)
        group_keys.append(part.group_keys)
        group_names += part.group_names or [minted_name(k.tobytes()) for k in here]
        base += len(here)
    return Rows(keys, names, np.concatenate(index).tobytes(), b"".join(group_keys), group_names)


def minted_name(key: bytes) -> str:
    return "~" + key.hex()


def row_names(rows: Rows) -> list[Name]:
    """What people call these rows."""
    if rows.names is not None:
        return rows.names
    return [minted_name(rows.keys[i : i + 16]) for i in range(0, len(rows.keys), 16)]
