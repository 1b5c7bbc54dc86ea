"""Copy batches from the arena directly to a GPU. Pieces of the arena are pinned on first use, and
the GPU's copy engine copies them asynchronously.

Runs in the client, because each process pins memory for itself. The peer keeps the source of a copy
until the copy is done, even if the batch is gone. If memory cannot be pinned, batches are copied
through pageable memory, and the log says so once.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dataplane.errors import DeviceMissing
from dataplane.gpu import registry
from dataplane.gpu.device import Device, Event
from dataplane.memory.arena import ReadMap

log = logging.getLogger(__name__)

PIECE_BYTES = 64 << 20
"""Bytes that are pinned at once. Pinning a whole arena would take too long."""
PINNED_S = 600.0
"""A piece is unpinned after this many seconds without a copy, because other processes cannot use
pinned memory. Longer than several steps of a trainer, which would otherwise pin it again."""
DIRECT_BYTES = 32 << 10
"""Each separate copy costs a call of the driver. If copies have fewer bytes than this on average,
the rows are packed in host memory first. Not measured."""
FINISH_S = 1.0
"""Seconds that the end of a session waits for copies."""
POLL_S = 0.0005

Offsets = npt.NDArray[np.uint64]


class Landing(NamedTuple):
    """The target of copies to a device. stream: copies run after its earlier work. place: the
    device as torch names it."""

    device: Device
    stream: int
    place: str


def landing_on_gpu(where: object) -> Landing | None:
    """Return the target of copies to a torch device, if that is a GPU. torch must be imported.
    Raise DeviceMissing if the device does not work."""
    torch: Any = sys.modules["torch"]
    asked = torch.device(where)
    if asked.type != "cuda":
        return None
    number = torch.cuda.current_device() if asked.index is None else asked.index
    stream = torch.cuda.current_stream(number).cuda_stream
    return Landing(_gpu(number), stream, f"cuda:{number}")


@functools.cache
def _gpu(number: int) -> Device:
    from dataplane.gpu.cuda import CudaDevice

    return CudaDevice(number)


class _Copy(NamedTuple):
    """Copies queued on a stream. event: None if the driver failed, so their end is unknown.
    pieces: the pieces that they read."""

    event: Event | None
    keep: object
    pieces: list[int]


class _Piece(NamedTuple):
    """A page-locked piece of the arena. used: when it was last copied from (monotonic seconds)."""

    device: Device
    used: float


class DirectCopies:
    """The direct copies of one session. Shared by its threads."""

    def __init__(self, reads: ReadMap, tell: Callable[[], None] = lambda: None) -> None:
        """tell: called when `settle` has something to do."""
        self.landing_on: Callable[[object], Landing | None] = landing_on_gpu
        self._tell = tell
        self.refused = ""
        """why no more direct copies are possible; "" if they are"""
        self._reads = reads
        self._mapped: npt.NDArray[np.uint8] | None = None
        self._pieces: dict[int, _Piece] = {}
        self._copies: list[_Copy] = []
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        state = self.refused or f"{len(self._copies)} in flight"
        return f"<DirectCopies {len(self._pieces)} pieces pinned, {state}>"

    @property
    def pending(self) -> bool:
        """Whether `settle` must be called again."""
        return bool(self._copies)

    def landing(self, where: object) -> Landing | None:
        """Return the target of copies to this torch device, or None if there are no direct
        copies."""
        if self.refused:
            return None
        try:
            return self.landing_on(where)
        except DeviceMissing as exc:
            self._refuse(exc.message)
            return None

    def rows(self, column: Any, device: str) -> Any | None:
        """See `client.columns.copied`. None if `device` is no target of copies."""
        landing = self.landing(device)
        return landing and registry.client_module("columns").copied(self, landing, column)

    def copy(self, runs: Runs, target: int, landing: Landing, keep: object) -> bool:
        """Queue the copies. keep: the object that pins the bytes in the arena. Return False,
        without a copy, if the arena cannot be pinned. Raise DeviceMissing if the driver fails."""
        pieces = runs.pieces(PIECE_BYTES)
        with self._lock:
            if self.refused or not self._pin(pieces, landing.device):
                return False
            assert self._mapped is not None
            first = int(self._mapped.__array_interface__["data"][0])
            event: Event | None = None
            try:
                event = landing.device.event()
                try:
                    for offset, start, nbytes in runs.cut(PIECE_BYTES):
                        landing.device.copy(target + start, first + offset, nbytes, landing.stream)
                finally:  # an interrupt ends the loop, but not the queued copies
                    event.record(landing.stream)
            except DeviceMissing as exc:
                event = None
                self._refuse(exc.message)
                raise
            finally:
                self._copies.append(_Copy(event, keep, pieces))
        self._tell()
        return True

    def _pin(self, pieces: list[int], device: Device) -> bool:
        """Page-lock these pieces of the arena. Called with the lock."""
        if self._mapped is None:
            self._mapped = np.asarray(self._reads.pin(0))
        first = int(self._mapped.__array_interface__["data"][0])
        try:
            for piece in pieces:
                known = self._pieces.get(piece)
                if known is None:
                    start = piece * PIECE_BYTES
                    nbytes = min(PIECE_BYTES, self._mapped.nbytes - start)
                    device.pin_host(first + start, nbytes, read_only=True)
                self._pieces[piece] = _Piece(known.device if known else device, time.monotonic())
        except DeviceMissing as exc:
            self._refuse(exc.message)
            return False
        return True

    def _refuse(self, why: str) -> None:
        self.refused = why
        log.warning(
            "arena: pinning failed (%s), so copies to the GPU go through pageable memory",
            why,
        )

    def settle(self) -> None:
        """Release the sources of finished copies, and unpin pieces that were not used for
        PINNED_S. Never waits for a GPU."""
        with self._lock:
            copies, self._copies = self._copies, []
            done: list[_Copy] = []
            for one in copies:
                (done if self._is_done(one) else self._copies).append(one)
            self._unpin_idle(time.monotonic() - PINNED_S)
        for one in done:
            if one.event is not None:
                one.event.close()

    def _unpin_idle(self, since: float) -> None:
        """Called with the lock."""
        if not self._pieces:
            return
        copied_from = {piece for copy in self._copies for piece in copy.pieces}
        for number, piece in list(self._pieces.items()):
            if piece.used < since and number not in copied_from:
                del self._pieces[number]
                self._unpin(number, piece, self._mapped)

    def _unpin(self, number: int, piece: _Piece, mapped: npt.NDArray[np.uint8] | None) -> bool:
        """Return whether the driver has unpinned the piece."""
        assert mapped is not None
        first = int(mapped.__array_interface__["data"][0])
        try:
            piece.device.unpin_host(first + number * PIECE_BYTES)
        except DeviceMissing as exc:
            log.warning(
                "arena: could not unpin piece %d (%s), so it stays pinned until this process exits",
                number,
                exc.message,
            )
            return False
        return True

    def _is_done(self, copy: _Copy) -> bool:
        try:
            return copy.event is not None and copy.event.done()
        except DeviceMissing as exc:
            # The state of the copies is unknown, so all sources are kept until this process ends.
            if not self.refused:
                self._refuse(exc.message)
            return False

    def close(self, timeout_s: float = FINISH_S) -> None:
        """End the copies, and unpin the arena. If a copy has not finished within `timeout_s`, the
        arena stays pinned until the process ends."""
        self.refused = self.refused or "this client was closed"
        until = time.monotonic() + timeout_s
        self.settle()
        while self._copies and time.monotonic() < until:
            time.sleep(POLL_S)
            self.settle()
        with self._lock:
            if self._copies:
                log.warning(
                    "arena: a GPU copy has not finished, so the arena stays pinned until this "
                    "process exits"
                )
                return
            pieces, self._pieces = self._pieces, {}
            mapped, self._mapped = self._mapped, None
        unpinned = [self._unpin(number, piece, mapped) for number, piece in pieces.items()]
        if not all(unpinned):
            self._mapped = mapped  # else CUDA would treat the next mapping there as pinned

    def poison(self) -> None:
        """Forget all copies and pins in a forked child, which owns neither."""
        self.refused = "this client belongs to the parent of this forked process"
        self._lock = threading.Lock()
        self._copies, self._pieces, self._mapped = [], {}, None


class Runs:
    """Extents of the arena that are copied to extents of a target. Adjacent extents are joined."""

    def __init__(self, offsets: Offsets, starts: Offsets, nbytes: Offsets) -> None:
        some = nbytes > 0
        offsets, starts, nbytes = offsets[some], starts[some], nbytes[some]
        ends, target_ends = offsets + nbytes, starts + nbytes
        first = np.ones(len(offsets), np.bool_)
        first[1:] = (offsets[1:] != ends[:-1]) | (starts[1:] != target_ends[:-1])
        at = np.flatnonzero(first)
        self.offsets, self.starts = offsets[at], starts[at]
        self.nbytes = np.add.reduceat(nbytes, at) if len(at) else nbytes

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def long(self) -> bool:
        """Whether the extents are long enough for one copy each."""
        return len(self) > 0 and int(self.nbytes.sum()) >= DIRECT_BYTES * len(self)

    def pieces(self, size: int) -> list[int]:
        """Return the numbers of the pieces of `size` bytes that contain these extents."""
        firsts = (self.offsets // np.uint64(size)).tolist()
        lasts = ((self.offsets + self.nbytes - np.uint64(1)) // np.uint64(size)).tolist()
        both = zip(firsts, lasts, strict=True)
        return sorted({piece for first, last in both for piece in range(first, last + 1)})

    def cut(self, size: int) -> Iterator[tuple[int, int, int]]:
        """Yield the offset, start and length of each copy. No copy crosses the end of a piece,
        because CUDA cannot copy from two registrations at once."""
        columns = (self.offsets.tolist(), self.starts.tolist(), self.nbytes.tolist())
        for offset, start, left in zip(*columns, strict=True):
            while left:
                nbytes = min(left, size - offset % size)
                yield offset, start, nbytes
                offset, start, left = offset + nbytes, start + nbytes, left - nbytes
