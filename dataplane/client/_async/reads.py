"""Reading rows without a lease: `get`, `rows`, and the pages that a large answer comes in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dataplane.client import arguments
from dataplane.client._async.attaching import attach
from dataplane.client._async.calls import ask
from dataplane.client.deadline import Deadline
from dataplane.client.handle import Handle
from dataplane.client.ref import Ref
from dataplane.client.session.session import Session
from dataplane.client.write.rows import (
    Names,
    chunks,
    group_names,
    name_list,
    named_rows,
    row_names,
    tag_values,
)
from dataplane.errors import FrameTooLarge, InvalidCall
from dataplane.memory.mapping import Pin
from dataplane.metadata.tables.where import Where
from dataplane.wire.limits import NO_GROUP
from dataplane.wire.messages import Defined, Read, ReadDone
from dataplane.wire.records import KEY, PLACE, PLACE_ABSENT, PLACE_INLINE, U4, column
from dataplane.wire.tables import Column, Definition, Name, Rows, Spec, Table, volume

Found = tuple[Table, Pin]


async def read(
    handle: Handle,
    keys: Names | None,
    where: Where | None,
    fields: Sequence[str] | None,
    timeout: float | None,
) -> Found:
    """The rows with these keys, in this order; or those that `where` holds for; or all."""
    if keys is not None and where is not None:
        raise InvalidCall("pass keys= or where=, not both")
    deadline = Deadline(timeout)
    await attach(handle, deadline)
    if keys is None:
        pages = await _pages(handle, None, where, fields, deadline)
    else:
        parts = chunks(name_list(keys, "key"), handle.session.max_rows)
        pages = await _read_parts(handle, [named_rows(p) for p in parts], fields, deadline)
    return _gather(handle, pages)


async def overview(
    handle: Handle, where: Where | None, limit: int, timeout: float | None
) -> ReadDone:
    """The first rows that `where` holds for, without values: which fields each has, and its state
    for each stage."""
    deadline = Deadline(timeout)
    generation = await attach(handle, deadline)
    filtered = arguments.filter_of(where)
    body = Read(handle.name, generation, None, filtered, [], limit, overview=True)
    return await ask(handle.session, body, ReadDone, deadline)


async def read_rows(
    handle: Handle, rows: Rows, fields: Sequence[str] | None, timeout: float | None
) -> Found:
    """The rows of a batch or a ref, in their order."""
    parts = _cut(rows, handle.session.max_rows)
    return _gather(handle, await _read_parts(handle, parts, fields, Deadline(timeout)))


def handle_of(plane: Any, session: Session, ref: Ref) -> Handle:
    """The partition that a ref is of. InvalidCall where that is none of this plane."""
    if not isinstance(ref, Ref):
        raise InvalidCall(
            f"expected a ref that put returned, not {ref!r:.80}; to read by key, use "
            "part.get(keys=…)"
        )
    if ref.plane != session.plane:
        raise InvalidCall(
            f"this ref belongs to plane {ref.plane!r}, but this client is connected to plane "
            f"{session.plane!r}: connect with dataplane.connect(run={ref.plane!r})"
        )
    return Handle(session, ref.partition, plane=plane)


async def read_ref(
    handle: Handle, ref: Ref, fields: Sequence[str] | None, timeout: float | None
) -> Found:
    """The rows of a ref. PartitionGone where its partition was dropped since."""
    handle.defined = Defined(ref.generation, Definition(), "open")
    rows = Rows(ref.key_column, None if ref.names is None else list(ref.names))
    return await read_rows(handle, rows, fields, timeout)


def _cut(rows: Rows, size: int) -> list[Rows]:
    """Rows, `size` at a time."""
    return [
        Rows(
            rows.keys[i * KEY.itemsize : (i + size) * KEY.itemsize],
            None if rows.names is None else rows.names[i : i + size],
        )
        for i in range(0, len(rows.keys) // KEY.itemsize, size)
    ]


async def _read_parts(
    handle: Handle, parts: list[Rows], fields: Sequence[str] | None, deadline: Deadline
) -> list[ReadDone]:
    pages: list[ReadDone] = []
    try:
        for part in parts:
            pages += await _pages(handle, part, None, fields, deadline)
    except BaseException:
        # The parts before this one are pinned; their pins go with an object nobody keeps.
        handle.session.pinned(*(page.pin for page in pages))
        raise
    return pages


async def _pages(
    handle: Handle,
    rows: Rows | None,
    where: Where | None,
    fields: Sequence[str] | None,
    deadline: Deadline,
) -> list[ReadDone]:
    session = handle.session
    generation = await attach(handle, deadline)
    wanted = arguments.optional_texts(fields, "fields")
    filtered = arguments.filter_of(where)
    pages: list[ReadDone] = []
    after, size = b"", session.max_rows
    while True:
        body = Read(handle.name, generation, rows, filtered, wanted, size, after)
        try:
            page = await ask(handle.session, body, ReadDone, deadline)
        except FrameTooLarge:  # rows with many small values
            count = size if rows is None else len(rows.keys) // KEY.itemsize
            if count == 1:
                session.pinned(*(p.pin for p in pages))
                raise
            if rows is not None:
                return await _read_parts(handle, _cut(rows, -(-count // 2)), fields, deadline)
            size = count // 2
            continue
        except BaseException:
            # The pages before this one are pinned; their pins go with an object nobody keeps.
            session.pinned(*(p.pin for p in pages))
            raise
        pages.append(page)
        session.warn_of_tags(handle.name, page.unknown_tags)
        if not page.cursor:
            return pages
        after = page.cursor


def _gather(handle: Handle, pages: list[ReadDone]) -> Found:
    session = handle.session
    pin = session.pinned(*(page.pin for page in pages))
    table = join_tables([page.table for page in pages])
    rows = len(table.rows.keys) // KEY.itemsize
    session.tally.add("get", rows=rows, bytes=volume(table.columns))
    return table, pin


def join_tables(tables: list[Table]) -> Table:
    """Tables to clients (PLACE records) one behind the other; what one lacks is absent there."""
    if len(tables) == 1:
        return tables[0]
    if not tables:
        return Table(Rows(b""))
    counts = [len(t.rows.keys) // KEY.itemsize for t in tables]
    specs: list[Spec] = []
    index: dict[Spec, int] = {}
    parts: dict[str, list[Column]] = {c.field: [] for t in tables for c in t.columns}
    before = 0
    for table, n in zip(tables, counts, strict=True):
        renumber = np.array([index.setdefault(s, len(index)) for s in table.specs], U4)
        specs += list(index)[len(specs) :]
        here = {c.field: c for c in table.columns}
        for field, columns in parts.items():
            columns.append(
                _renumbered(here[field], renumber, before) if field in here else _absent(field, n)
            )
        before += len(table.inline)
    tag_names = dict.fromkeys(name for t in tables for name in t.tags)
    return Table(
        rows=_join_rows([t.rows for t in tables]),
        columns=[_join_columns(field, columns, counts) for field, columns in parts.items()],
        specs=specs,
        tags={
            name: [v for t, n in zip(tables, counts, strict=True) for v in tag_values(t, name, n)]
            for name in tag_names
        },
        inline=b"".join(t.inline for t in tables),
    )


def _renumbered(source: Column, renumber: np.ndarray, before: int) -> Column:
    """before: the inline bytes that come first."""

    def spec_column(raw: bytes) -> bytes:
        records = column(raw, PLACE).copy()
        here = records["flags"] & PLACE_ABSENT == 0
        records["spec"][here] = renumber[records["spec"][here]]
        records["offset"][records["flags"] & PLACE_INLINE != 0] += np.uint64(before)
        return records.tobytes()

    return Column(
        source.field, spec_column(source.values), source.leaf_counts, spec_column(source.leaves)
    )


def _absent(field: str, n: int) -> Column:
    records = np.zeros(n, PLACE)
    records["flags"] = PLACE_ABSENT
    return Column(field, records.tobytes())


def _join_columns(field: str, columns: list[Column], counts: list[int]) -> Column:
    leaf_counts = b""
    if any(c.leaf_counts for c in columns):
        leaf_counts = b"".join(
            c.leaf_counts or bytes(4 * n) for c, n in zip(columns, counts, strict=True)
        )
    return Column(
        field,
        b"".join(c.values for c in columns),
        leaf_counts,
        b"".join(c.leaves for c in columns),
    )


def _join_rows(parts: list[Rows]) -> Rows:
    """A group may go on behind a page's end, so equal group keys are one group."""
    keys = b"".join(p.keys for p in parts)
    names: list[Name] | None = None
    if any(p.names is not None for p in parts):
        names = [name for p in parts for name in row_names(p)]
    if not any(p.group_index for p in parts):
        return Rows(keys, names)
    numbers: dict[bytes, int] = {}
    ids: list[Name] = []
    columns = []
    for part in parts:
        n = len(part.keys) // KEY.itemsize
        if not part.group_index:
            columns.append(np.full(n, NO_GROUP, U4))
            continue
        renumber = []
        for at, name in enumerate(group_names(part)):
            key = part.group_keys[at * KEY.itemsize : (at + 1) * KEY.itemsize]
            renumber.append(numbers.setdefault(key, len(numbers)))
            if len(ids) < len(numbers):
                ids.append(name)
        groups = column(part.group_index, U4, n)
        known = groups != NO_GROUP
        joined = np.full(n, NO_GROUP, U4)
        joined[known] = np.array(renumber, U4)[groups[known]]
        columns.append(joined)
    return Rows(keys, names, np.concatenate(columns).tobytes(), b"".join(numbers), ids)
