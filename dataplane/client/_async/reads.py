"""Read rows without a lease: `get`, `rows`, and the pages of a large reply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from dataplane.client import arguments
from dataplane.client._async.calls import ask, attach
from dataplane.client.arguments import Deadline
from dataplane.client.read.table import TableReader, reader_of
from dataplane.client.ref import Ref
from dataplane.client.session.session import Handle, Session
from dataplane.client.write.rows import (
    Names,
    in_parts,
    name_list,
    named_rows,
)
from dataplane.errors import FrameTooLarge, InvalidCall
from dataplane.metadata.tables.where import Where
from dataplane.wire.arrays import shown
from dataplane.wire.messages import Defined, Read, ReadDone
from dataplane.wire.packed import KEY
from dataplane.wire.tables import Definition, Rows, Table, Values


async def read(
    handle: Handle,
    keys: Names | None,
    where: Where | None,
    fields: Sequence[str] | None,
    timeout: float | None,
) -> TableReader:
    """Read the rows with these keys, in this order; the rows that match `where`; or all rows."""
    if keys is not None and where is not None:
        raise InvalidCall("got both keys= and where=: pass only one of them")
    deadline = Deadline(timeout)
    parts: list[Rows | None] = [None]
    if keys is not None:
        parts = [named_rows(p) for p in in_parts(name_list(keys, "key"), handle.session.max_rows)]
    return await _read_parts(handle, parts, where, fields, deadline)


async def overview(
    handle: Handle, where: Where | None, limit: int, timeout: float | None
) -> ReadDone:
    """Read the first rows that match `where`, without values: which fields each row has, and its
    state for each stage."""
    deadline = Deadline(timeout)
    generation = await attach(handle, deadline)
    filtered = arguments.filter_of(where)
    body = Read(handle.name, generation, None, filtered, [], limit, overview=True)
    return await ask(handle.session, body, ReadDone, deadline, "reading rows")


async def read_rows(
    handle: Handle, rows: Rows, fields: Sequence[str] | None, timeout: float | None
) -> TableReader:
    """Read the rows of a batch or a ref, in their order."""
    parts = _cut(rows, handle.session.max_rows)
    return await _read_parts(handle, parts, None, fields, Deadline(timeout))


def handle_of(plane: Any, session: Session, ref: Ref) -> Handle:
    """Return the partition of a ref. Raise InvalidCall if the ref belongs to another run."""
    if not issubclass(type(ref), Ref):  # isinstance would run the object's own code
        raise InvalidCall(
            f"expected a ref returned by put(), got {shown(ref):.80}. To read by key, use "
            "part.get(keys=…)"
        )
    if ref.plane != session.plane:
        raise InvalidCall(
            f"this ref belongs to run {ref.plane!r}, but this client is connected to run "
            f"{session.plane!r}: connect with dataplane.connect(run={ref.plane!r})"
        )
    return Handle(session, ref.partition, plane=plane)


async def read_ref(
    handle: Handle, ref: Ref, fields: Sequence[str] | None, timeout: float | None
) -> TableReader:
    """Read the rows of a ref. Raise PartitionGone if its partition was dropped."""
    handle.defined = Defined(ref.generation, Definition(), "open")
    rows = Rows(ref.key_column, None if ref.names is None else list(ref.names))
    return await read_rows(handle, rows, fields, timeout)


def _cut(rows: Rows, size: int) -> list[Rows]:
    """Yield the rows, `size` at a time."""
    return [
        Rows(
            rows.keys[i * KEY.itemsize : (i + size) * KEY.itemsize],
            None if rows.names is None else rows.names[i : i + size],
        )
        for i in range(0, rows.count, size)
    ]


async def _read_parts(
    handle: Handle,
    parts: Sequence[Rows | None],
    where: Where | None,
    fields: Sequence[str] | None,
    deadline: Deadline,
) -> TableReader:
    """Read the rows of each part (None: all rows), with one message per page."""
    session = handle.session
    pages: list[ReadDone] = []
    generation = await attach(handle, deadline)
    wanted, filtered = arguments.optional_texts(fields, "fields"), arguments.filter_of(where)
    ask_for = Read(handle.name, generation, None, filtered, wanted, session.max_rows)
    try:
        for part in parts:
            await _read_part(session, replace(ask_for, rows=part), deadline, pages)
    except BaseException:
        # Release the pins of earlier pages with an unreferenced object.
        session.pinned(*(page.pin for page in pages))
        raise
    if not parts:  # the client needs no request for an empty selection
        pages.append(ReadDone(Table(Rows(b""), Values(wanted or [])), 0))
    reader = reader_of(session, *pages)
    session.tally.got(reader.table.rows.count, reader.volume)
    return reader


async def _read_part(
    session: Session, body: Read, deadline: Deadline, pages: list[ReadDone]
) -> None:
    """Add the pages of a reply. A message is repeated for fewer rows if its reply would be too
    large."""
    while True:
        try:
            page = await ask(session, body, ReadDone, deadline, "reading rows")
        except FrameTooLarge:  # rows with many small values
            rows = body.rows
            count = body.limit if rows is None else rows.count
            if count == 1:
                raise
            if rows is not None:
                for part in _cut(rows, -(-count // 2)):
                    await _read_part(session, replace(body, rows=part), deadline, pages)
                return
            body = replace(body, limit=count // 2)
            continue
        pages.append(page)
        session.warn_of_tags(body.partition, page.unknown_tags)
        if not page.cursor:
            return
        body = replace(body, after=page.cursor)
