"""Put values into memory other than the host arena. A plug-in finds and copies them: see
`dataplane.gpu.client.puts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dataplane.client._async.backend import offload
from dataplane.client._async.space import give_back, needed, room_for
from dataplane.client.deadline import Deadline
from dataplane.client.handle import Handle
from dataplane.client.session.session import Session
from dataplane.client.write.chunks import NewChunk, NewPiece, Unit, spaces_of

if TYPE_CHECKING:
    from dataplane.gpu.client.puts import OnDevice

_OFF_LOOP_BYTES = 64 << 20
"""Added to the size of a copy, so that a thread waits for the end and not the event loop."""


@dataclass(frozen=True, slots=True)
class OtherPart:
    """The fields of a put that are stored in a pool other than the host arena, or in the host arena
    if that pool is full. Its units have the same rows as those of the other fields."""

    fields: OnDevice
    units: Sequence[Unit]

    @property
    def memory(self) -> int:
        """The number of this memory in `Session.slabs`."""
        return self.fields.memory

    def upto(self, first: int, last: int) -> int:
        """Return how many of the units from `first` to `last` fit in one run. At least one does."""
        most, nbytes = self.fields.most_bytes, 0
        for stop in range(first, last):
            nbytes += self.units[stop].nbytes
            if stop > first and nbytes > most:
                return stop - first
        return last - first

    async def write(
        self, handle: Handle, generation: int, which: slice, continuing: bool, until: Deadline
    ) -> list[NewPiece]:
        """Reserve space for the values of these units, and copy the values into it."""
        run = self.units[which]
        units = needed(run)
        done = 0
        try:
            while done < len(units):
                rest = units[done:]
                if not any(rest):
                    break
                count, chunks, _ = await room_for(
                    handle, generation, rest, continuing, until, self.memory
                )
                await self._copy(handle.session, chunks, until)
                done += count
        except BaseException:
            give_back(handle.session, [chunk for unit in units[:done] for chunk in unit])
            raise
        return [piece for unit in run for piece in unit.pieces]

    async def _copy(self, session: Session, chunks: list[NewChunk], until: Deadline) -> None:
        """Copy the values, and return once the copies have finished. After a failure, the space is
        freed once nothing writes into it."""
        copies = self.fields.copies(chunks, session.writes)
        nbytes = sum([chunk.nbytes for chunk in chunks])
        try:
            await offload(lambda: copies.carry_out(until), nbytes + _OFF_LOOP_BYTES)
        except BaseException:
            session.keep_when_finished(spaces_of(chunks), copies)
            for chunk in chunks:
                chunk.offset = -1
            raise
        for chunk in chunks:
            chunk.columns = ()
