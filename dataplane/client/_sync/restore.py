"""`plane.restore`: put the rows of a checkpoint into a plane of any number of peers.

The restore verifies every file before it puts any row. Rows and values go to this host, as if this
client had put them. Ready rows can be claimed at once. A restore that fails, is cancelled or is
interrupted drops the partitions that it has restored. If its process is killed, the shards drop
them: until `Restored`, they belong to this session.


Generated from dataplane/client/_async/restore.py: change that.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from dataplane import progress
from dataplane.client._sync.backend import to_its_end
from dataplane.client._sync.calls import (
    UNKNOWN,
    Call,
    ask,
    attach,
    background_timeout_s,
    define,
    send,
)
from dataplane.client._sync.save import filing, path_of, within
from dataplane.client._sync.space import give_back, room_for
from dataplane.client.arguments import Deadline
from dataplane.client.checkpoint.archive import Manifest, PartitionNote, file_name, verified
from dataplane.client.checkpoint.records import RecordReader
from dataplane.client.session.connection import expect
from dataplane.client.session.session import Handle, Session
from dataplane.client.write.chunks import NewChunk, room_of, spaces_of
from dataplane.errors import DataplaneError, PartitionConflict, counted
from dataplane.progress import Bar
from dataplane.wire import messages
from dataplane.wire.checkpoint import Census, CensusDone, Restore, Restored
from dataplane.wire.messages import Done, Drop, PutDone, Seal

log = logging.getLogger(__name__)

UNDO_S = 10.0
"""Seconds that a failed or cancelled restore waits at most, to drop the restored rows. With a
shorter `timeout`, it waits that long again."""
_RESTORING = "the restore"


def restore(session: Session, directory: Any, timeout: float | None) -> list[str]:
    with progress.bar("restore") as bar:
        return _restore(session, path_of(directory), Deadline(timeout), bar)


def _restore(session: Session, path: Path, deadline: Deadline, bar: Bar) -> list[str]:
    manifest: Manifest = filing(lambda: verified(path, bar))
    names = [note.name for note in manifest.partitions]
    census = ask(session, Census(), CensusDone, within(deadline, _RESTORING))
    there = sorted({*names} & {*census.partitions})
    if there:
        raise PartitionConflict(
            f"run {session.plane!r} already has {counted(len(there), 'partition')} with the same "
            f"name as in this checkpoint, for example {there[0]!r}. Drop them from the run, or "
            "restore into another run",
            partitions=there,
        )
    if busy := sorted(session.restoring.intersection(names)):
        raise PartitionConflict(
            f"partition {busy[0]!r} is being restored by this process: wait for the end of that "
            "restore, or restore into another run",
            partitions=busy,
        )
    session.restoring.update(names)
    begun: list[tuple[Handle, PartitionNote]] = []
    try:
        for number, note in enumerate(manifest.partitions):
            handle = Handle(session, note.name)
            begun.append((handle, note))
            _partition(handle, note, path / file_name(number), deadline, bar)
        if begun:
            (name, generation), *others = [(one.name, one.generation) for one, _ in begun]
            body = Restored(name, generation, dict(others))
            ask(session, body, Done, within(deadline, _RESTORING))
    except GeneratorExit:  # a closed coroutine cannot await
        raise
    except BaseException as exc:  # cancelled and interrupted ones too
        limit_s = min(UNDO_S, background_timeout_s(deadline.timeout_s))
        to_its_end(partial(_undo, begun, exc, limit_s))
        raise
    finally:
        session.restoring.difference_update(names)
    return names


def _undo(
    begun: list[tuple[Handle, PartitionNote]], failure: BaseException, limit_s: float
) -> None:
    """Drop the rows restored so far, so that they can be restored again."""
    deadline = Deadline(limit_s)
    refused = isinstance(failure, DataplaneError) and not isinstance(failure, UNKNOWN)
    for handle, note in begun:
        try:
            if handle.defined is None:
                if refused:
                    continue
                # The declaration may have taken effect. Repeat it to get the generation to drop.
                define(handle, note.definition, deadline, restores=True)
            body = Drop(handle.name, handle.generation)
            ask(handle.session, body, messages.Dropped, deadline)
        except DataplaneError as exc:
            said = (
                f"partition {handle.name!r}: the restore failed, and dropping the restored rows "
                f"failed, too: {exc}. Drop the partition or close this client, then restore again"
            )
            failure.add_note(said)
            log.warning("%s", said)


def _partition(
    handle: Handle, note: PartitionNote, path: Path, deadline: Deadline, bar: Bar
) -> None:
    define(handle, note.definition, within(deadline, _RESTORING), restores=True)
    with ExitStack() as opened:  # closes the file even if opening it is cancelled
        reader: RecordReader = filing(lambda: opened.enter_context(closing(RecordReader(path))))
        records = reader.records()
        while True:
            found: Any = filing(lambda: next(records, None))
            if found is None:
                break
            record, chunks, at = found
            _put(handle, reader, record, chunks, at, deadline)
            bar.advance(room_of(chunks), f"partition {handle.name!r}")
    generation = attach(handle, deadline)
    if note.sealed:
        body = Seal(handle.name, generation, keep_short=True)
        ask(handle.session, body, Done, within(deadline, _RESTORING))


def _put(
    handle: Handle,
    reader: RecordReader,
    record: Restore,
    chunks: list[NewChunk],
    at: int,
    deadline: Deadline,
) -> None:
    """Read the chunks of a record, which start at byte `at`, into the arena. Send the record."""
    session = handle.session
    generation = attach(handle, deadline)
    call = None
    try:
        if chunks:
            room_for(handle, generation, [chunks], False, within(deadline, _RESTORING))
        filing(lambda: _fill(session, reader, chunks, at))
        placed = [
            replace(one, offset=new.offset)
            for one, new in zip(record.values.chunks, chunks, strict=True)
        ]
        values = replace(record.values, owners=[session.owner], chunks=placed)
        body = replace(record, partition=handle.name, generation=generation, values=values)
        call = Call(body, within(deadline, _RESTORING))
        expect(send(session, call), PutDone, body)
    except BaseException:
        if call is None or not call.in_flight:
            give_back(session, chunks)
        raise


def _fill(session: Session, reader: RecordReader, chunks: list[NewChunk], at: int) -> None:
    for offset, length in spaces_of(chunks):
        memory = session.writes.view(offset, length)
        reader.read(at, memoryview(memory))  # type: ignore[arg-type]
        at += length
