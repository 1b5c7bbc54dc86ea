"""Spilling: while a call waits for space, the oldest values that no client reads move to a file.
Later readers get copies in the arena.

Threads move the file's bytes. One task writes and clears, so no part of the file is cleared
while it is written again. A disk that is full or fails leaves everything unchanged.
"""

from __future__ import annotations

import asyncio
import errno
import logging

from dataplane.errors import BackPressure, SpillFull, TransferFailed, counted, sized
from dataplane.memory.spill import DISK, Spilled, SpillFile
from dataplane.peer.host import Host
from dataplane.peer.net.mesh import Mesh
from dataplane.peer.room.admission import Room
from dataplane.wire.packed import Array

log = logging.getLogger(__name__)

MAX_SPILLED_BYTES = 64 << 20
"""The most bytes written at once, and at most an eighth of the arena."""
PAUSE_S = 0.2
"""The pause before the next try if nothing could be spilled."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Spilling:
    def __init__(
        self, host: Host, mesh: Mesh, room: Room, file: SpillFile, size_bytes: int
    ) -> None:
        self.host = host
        self.mesh = mesh
        self.room = room
        self.file = file
        self.spill = host.space.spill = Spilled(size_bytes, host.space.chunks)
        self.spill.on_left = self.wake
        self.written_bytes = 0
        self.read_bytes = 0
        self.exhausted = False
        """Whether the last try found no chunk that may be spilled, or no space in the file."""
        self._trouble: OSError | None = None
        self._work: asyncio.Task[None] | None = None
        room.on_wait.append(self.wake)
        room.beyond = self._beyond

    def wake(self) -> None:
        """Note that a call waits for space, or that something in the file was freed."""
        if self._work is None or self._work.done():
            self.exhausted = False
            self._work = self.mesh.spawn(self._while_needed())

    async def read(self, chunks: Array, dest: Array) -> None:
        """Copy all bytes of these spilled chunks to these offsets of the arena. Raises RowsGone."""
        space = self.host.space
        space.hold(chunks)
        try:
            extents = space.chunks.extents(chunks)
            await self.host.threads.run(self.file.read, extents["offset"], extents["length"], dest)
        except OSError as exc:
            raise TransferFailed(
                f"could not read back {counted(len(chunks), 'value')} from the spill file "
                f"{self.file.path}: {exc}. Repeat the call; if the disk has failed, put the "
                "rows again",
                path=str(self.file.path),
            ) from exc
        finally:
            space.release(chunks)
        self.read_bytes += int(extents["length"].sum())

    @property
    def _waiting(self) -> int:
        return len(self.room) + self.room.starved

    async def _while_needed(self) -> None:
        while self.spill.has_left or self._waiting:
            if self.spill.has_left:
                await self._clear()
            if self._waiting:
                self.exhausted = not await self._spill()
                if self.exhausted:
                    await asyncio.sleep(PAUSE_S)

    async def _spill(self) -> bool:
        """Spill once. Return whether that freed space."""
        space = self.host.space
        move = space.choose_spill(min(MAX_SPILLED_BYTES, space.size_bytes // 8))
        if move is None:
            return False
        try:
            await self.host.threads.run(
                self.file.write, move.start, move.nbytes, move.sources, move.lengths
            )
        except BaseException as exc:
            self.spill.give_up(move)
            if not isinstance(exc, OSError):
                raise
            if self._trouble is None:
                log.warning("spill: cannot write to %s: %s", self.file.path, exc)
            self._trouble = exc
            return False
        self._trouble = None
        self.written_bytes += move.nbytes
        freed = space.settle_spill(move)
        self.room.pump()
        return freed > 0

    async def _clear(self) -> None:
        """Return freed extents of the file to the disk, and release the copies of freed chunks."""
        starts, ends = self.spill.take_left()
        if self.spill.spilled_bytes:
            await self.host.threads.run(self.file.clear, starts, ends)
        else:
            await self.host.threads.run(self.file.empty)
        self.spill.cleared(starts, ends)
        space = self.host.space
        space.copies.drop_dead(DISK)
        self.room.pump()

    def _beyond(self) -> tuple[type[BackPressure], str]:
        """Return the error for a put that waited for space without success, and the state of the
        spill file."""
        spill, trouble = self.spill, self._trouble
        full = trouble is not None and trouble.errno in _FULL
        says = f"{sized(spill.spilled_bytes)} of {sized(spill.size_bytes)} are spilled to "
        says += f"{self.file.path}"
        if trouble is not None:
            says += f", but writing to it failed: {trouble.strerror}"
        return SpillFull if full else BackPressure, says
