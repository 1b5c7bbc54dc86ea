"""`plane.restore`: put the rows of a checkpoint into a plane of any number of peers.

The restore verifies every file before it puts any row. Rows and values go to this host, as if this
client had put them. Ready rows can be claimed at once. A restore that fails, is cancelled or is
interrupted drops the rows that it has restored.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dataplane import progress
from dataplane.client._async.attaching import attach, define
from dataplane.client._async.backend import to_its_end
from dataplane.client._async.calls import UNKNOWN, ask, limit_beside, send
from dataplane.client._async.save import filing, path_of, within
from dataplane.client._async.space import give_back
from dataplane.client.checkpoint.archive import Manifest, PartitionNote, directory_name, verified
from dataplane.client.deadline import Deadline
from dataplane.client.handle import Handle
from dataplane.client.session.connection import expect
from dataplane.client.session.outgoing import Call
from dataplane.client.session.session import Session
from dataplane.client.write.chunks import NewChunk, chunks_of
from dataplane.client.write.message import values_of
from dataplane.errors import DataplaneError, PartitionConflict, counted
from dataplane.memory.placement import placed
from dataplane.progress import Bar
from dataplane.wire import messages
from dataplane.wire.checkpoint import Census, CensusDone, Progress, Restore
from dataplane.wire.messages import Done, Drop, PutDone, Reserve, Reserved, Seal
from dataplane.wire.records import EXTENT, U8, column
from dataplane.wire.tables import Rows, Values

if TYPE_CHECKING:
    from dataplane.client.checkpoint.arrow_in import PartReader, Portion

log = logging.getLogger(__name__)

PORTION_BYTES = 32 << 20
"""Bytes of values per message, and at most a quarter of the quota for new groups."""
UNDO_S = 10.0
"""Seconds that a failed or cancelled restore waits at most, to drop the restored rows. With a
shorter `timeout`, it waits that long again."""
_WAITING = "waiting for space in the arena"
_RESTORING = "the restore"


async def restore(session: Session, directory: Any, timeout: float | None) -> list[str]:
    with progress.bar("restore") as bar:
        return await _restore(session, path_of(directory), Deadline(timeout), bar)


async def _restore(session: Session, path: Path, deadline: Deadline, bar: Bar) -> list[str]:
    manifest: Manifest = await filing(lambda: verified(path, bar))
    names = [note.name for note in manifest.partitions]
    census = await ask(session, Census(), CensusDone, within(deadline, _RESTORING))
    there = sorted({*names} & {*census.partitions})
    if there:
        raise PartitionConflict(
            f"run {session.plane!r} already has {counted(len(there), 'partition')} with the "
            "same name "
            f"as one in this checkpoint, for example {there[0]!r}: drop them from the run, or "
            "restore into another run",
            partitions=there,
        )
    begun: list[tuple[Handle, PartitionNote]] = []
    try:
        for number, note in enumerate(manifest.partitions):
            handle = Handle(session, note.name)
            begun.append((handle, note))
            await _partition(handle, note, path / directory_name(number), deadline, bar)
    except GeneratorExit:  # nobody carries out another step
        raise
    except BaseException as exc:  # cancelled and interrupted ones too
        limit_s = min(UNDO_S, limit_beside(deadline.timeout_s))
        await to_its_end(partial(_undo, begun, exc, limit_s))
        raise
    return names


async def _undo(
    begun: list[tuple[Handle, PartitionNote]], failure: BaseException, limit_s: float
) -> None:
    """Drop what was restored so far, so that it can be restored again."""
    deadline = Deadline(limit_s)
    refused = isinstance(failure, DataplaneError) and not isinstance(failure, UNKNOWN)
    for handle, note in begun:
        try:
            if handle.defined is None:
                if refused:
                    continue
                # Nobody knows whether it was declared: it is there after this, and then it is not.
                await define(handle, note.definition, deadline)
            body = Drop(handle.name, handle.generation)
            await ask(handle.session, body, messages.Dropped, deadline)
        except DataplaneError as exc:
            said = (
                f"partition {handle.name!r}: the restore failed, and dropping the restored rows "
                f"failed, too: {exc}. Drop the partition before you restore again"
            )
            failure.add_note(said)
            log.warning("%s", said)


async def _partition(
    handle: Handle, note: PartitionNote, part: Path, deadline: Deadline, bar: Bar
) -> None:
    from dataplane.client.checkpoint.arrow_in import PartReader as Reader

    await define(handle, note.definition, within(deadline, _RESTORING))
    with ExitStack() as opened:  # also where this is cancelled as it opens them
        reader: Reader = await filing(lambda: opened.enter_context(closing(Reader(part))))
        most = min(PORTION_BYTES, handle.session.share_bytes[0] // 4)
        portions: Iterator[Portion] = reader.portions(most)
        while True:
            portion: Portion | None = await filing(lambda: next(portions, None))
            if portion is None:
                break
            await _put(handle, reader, portion, deadline)
            nbytes = sum([chunk.nbytes for chunk in chunks_of(portion.pieces)])
            bar.advance(nbytes, f"partition {handle.name!r}")
    generation = await attach(handle, deadline)
    if note.closed_groups:
        body = Restore(
            handle.name, generation, Rows(b""), Values(), {}, Progress(), note.closed_groups
        )
        await ask(handle.session, body, PutDone, within(deadline, _RESTORING))
    if note.sealed:
        await ask(
            handle.session,
            Seal(handle.name, generation, keep_short=True),
            Done,
            within(deadline, _RESTORING),
        )


async def _put(handle: Handle, reader: PartReader, portion: Portion, deadline: Deadline) -> None:
    """Copy the chunks of a portion into the arena, and say what they are."""
    session = handle.session
    generation = await attach(handle, deadline)
    chunks = chunks_of(portion.pieces)
    if chunks:
        sizes = [chunk.nbytes for chunk in chunks]
        unit = Reserve(handle.name, generation, [np.array(sizes, U8).tobytes()])
        reserved = await ask(session, unit, Reserved, within(deadline, _WAITING), _WAITING)
        left = space = column(reserved.extents, EXTENT).tolist()
        try:
            offsets, left = placed(sizes, space)
            for chunk, offset in zip(chunks, offsets, strict=True):
                chunk.offset = offset
            await filing(lambda: _fill(session, reader, chunks, portion.sources))
        except BaseException:
            give_back(session, chunks)
            raise
        finally:
            session.keep(left)
    call = None
    try:
        brought = values_of(session.owner, portion.pieces)
        body = Restore(
            handle.name,
            generation,
            portion.rows,
            brought.values,
            portion.tags,
            portion.progress,
        )
        call = Call(body, within(deadline, _RESTORING))
        done = expect(await send(session, call), PutDone, body)
    except BaseException:
        if call is None or not call.in_flight:
            give_back(session, chunks)
        raise
    brought.committed()
    session.keep(column(done.extents, EXTENT).tolist())


def _fill(
    session: Session, reader: PartReader, chunks: list[NewChunk], sources: dict[NewChunk, int]
) -> None:
    for chunk in chunks:
        if chunk.nbytes:
            memory = session.writes.view(chunk.offset, chunk.nbytes)
            reader.read(sources[chunk], memoryview(memory))  # type: ignore[arg-type]
