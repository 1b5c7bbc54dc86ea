"""Put values into memory other than the host arena. A plug-in finds and copies them: see
`dataplane.gpu.client.puts`.


Generated from dataplane/client/_async/other_memory.py: change that.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from dataplane.client._sync.backend import offload
from dataplane.client._sync.space import give_back, room_for
from dataplane.client.arguments import Deadline
from dataplane.client.session.session import Handle, Session
from dataplane.client.write.chunks import NewChunk, NewPiece, chunks_of, spaces_of

if TYPE_CHECKING:
    from dataplane.gpu.client.puts import OnDevice

_OFF_LOOP_BYTES = 64 << 20
"""Added to the size of a copy, so that a thread and not the event loop waits for its end."""


def write(
    fields: OnDevice,
    handle: Handle,
    generation: int,
    which: slice,
    continuing: bool,
    until: Deadline,
) -> list[NewPiece]:
    """Reserve space for the values of these units in their pool, or in the host arena if that pool
    is full, and copy the values into it."""
    run = fields.units[which]
    units = [chunks_of(unit.pieces) for unit in run]
    done = 0
    try:
        while done < len(units) and any(rest := units[done:]):
            count, chunks, _ = room_for(handle, generation, rest, continuing, until, fields.memory)
            _copy(fields, handle.session, chunks, until)
            done += count
    except BaseException:
        give_back(handle.session, [*chain.from_iterable(units)])
        raise
    return [piece for unit in run for piece in unit.pieces]


def _copy(fields: OnDevice, session: Session, chunks: list[NewChunk], until: Deadline) -> None:
    """Copy the values, and return once the copies have finished. After a failure, the space is
    freed once nothing writes into it."""
    keep: list[object] = [chunk.columns for chunk in chunks]
    nbytes = sum([chunk.nbytes for chunk in chunks])
    try:
        offload(lambda: fields.copy(chunks, session.writes, until, keep), nbytes + _OFF_LOOP_BYTES)
    except BaseException:
        spaces = spaces_of(chunks)
        for chunk in chunks:  # the caller must not return space that a copy still writes to
            chunk.offset = -1
        session.keep_when_finished(spaces, keep)
        raise
    for chunk in chunks:
        chunk.columns = ()
