"""Pairs of ranks that send memory to each other in order: the part of a library that `nccl` needs.

`NcclRanks` uses NCCL through cupy. A rank cannot tell one transfer from another: the first
request of one rank meets the first of the other, in pieces of the same lengths. A rank that
waits for a peer that never comes can only be aborted. A new pair replaces an aborted one.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any, Protocol

import msgspec

from dataplane.errors import DataplaneError, TransferFailed, TransportMissing
from dataplane.gpu.device import Device
from dataplane.gpu.registry import CUDA
from dataplane.wire.frames import decoded

Pieces = Sequence[tuple[int, int]]
"""Address and length of each piece, in order."""
JOINS = 8
"""The most joins in progress. A join whose other rank never arrives may not end."""
CHECK_S = 0.02
GROUP_PIECES = 256
"""The most pieces in one call of NCCL."""
SHARING_VERSION = 23000
POLL_S = 0.0002
_unique_ids = msgspec.msgpack.Decoder(bytes | tuple[int, ...])
"""bytes, or numbers of cupy before 14"""


class Communicator(ABC):
    """One of two ranks. Work runs in a thread of its own, in the order of requests, one transfer
    at a time."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._failure: BaseException | None = None
        self.aborted = False
        self._thread = threading.Thread(target=self._run, name="communicator", daemon=True)
        self._thread.start()

    def send(self, pieces: Pieces) -> None:
        """Request that these bytes be sent. `done` reports when they were."""
        self._ask(lambda: self._move(pieces, sends=True))

    def receive(self, pieces: Pieces) -> None:
        """Request that these bytes be received. `done` reports when they were."""
        self._ask(lambda: self._move(pieces, sends=False))

    def done(self, timeout_s: float) -> bool:
        """Whether all requested work is done, after waiting this long. Raises TransferFailed if
        the pair is broken."""
        done = self._idle.wait(timeout_s)
        if self._failure is not None or self.aborted:
            raise TransferFailed(
                "the NCCL communicator with the other peer "
                f"{'was aborted' if self._failure is None else f'failed: {self._failure!r}'}; "
                "repeat the call"
            )
        return done

    def abort(self) -> None:
        """Abort both ranks' work. When it returns, this rank neither reads nor writes memory."""
        self.aborted = True
        self._break()
        self._asked.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _ask(self, work: Callable[[], None]) -> None:
        self._idle.clear()
        self._asked.put(work)

    def _run(self) -> None:
        while (work := self._asked.get()) is not None:
            try:
                if not self.aborted:
                    work()
            except BaseException as exc:
                self._failure = exc
            self._idle.set()

    @abstractmethod
    def _move(self, pieces: Pieces, sends: bool) -> None:
        """Move the pieces. Blocks until that is done, or `_break` is called."""

    @abstractmethod
    def _break(self) -> None:
        """Make `_move` end soon, with any error. Any thread may call this, also repeatedly."""


class Ranks(Protocol):
    """A factory of pairs."""

    def unique_id(self) -> bytes:
        """A name for a pair that two ranks will join, one of them in this process, as rank 0."""
        ...

    def join(self, unique_id: bytes, rank: int) -> Communicator:
        """Join a pair. Blocks until the other rank joins too. Raises TransferFailed."""
        ...

    def forget(self, unique_id: bytes) -> None:
        """Abandon a pair, so that a join may end. Any thread may call this, for any name."""
        ...


_joins = threading.BoundedSemaphore(JOINS)


def joined(ranks: Ranks, unique_id: bytes, rank: int, check: Callable[[], None]) -> Communicator:
    """`Ranks.join` as long as `check` does not raise. A pair that forms later is aborted."""
    while not _joins.acquire(timeout=CHECK_S):
        check()
    attempt: futures.Future[Communicator] = futures.Future()

    def join() -> None:
        try:
            attempt.set_result(ranks.join(unique_id, rank))
        except BaseException as exc:
            attempt.set_exception(exc)
        finally:
            _joins.release()

    # A thread of its own, because a library's call cannot be interrupted.
    threading.Thread(target=join, name="join", daemon=True).start()
    try:
        while not futures.wait({attempt}, CHECK_S).done:
            check()
    except BaseException:
        ranks.forget(unique_id)
        attempt.add_done_callback(_abort)
        raise
    try:
        return attempt.result()
    except DataplaneError:
        raise
    except Exception as exc:
        raise TransferFailed(
            f"the two ranks could not create an NCCL communicator: {exc!r}; repeat the call"
        ) from exc


def _abort(attempt: futures.Future[Communicator]) -> None:
    if attempt.exception() is None:
        attempt.result().abort()


def wait(communicator: Communicator, check: Callable[[], None]) -> None:
    """Wait until all requested work is done. Raises the error of `check`, or TransferFailed."""
    looked = time.monotonic()
    while not communicator.done(CHECK_S):
        if time.monotonic() - looked >= CHECK_S:
            check()
            looked = time.monotonic()


def shares_gpus() -> bool:
    """Whether two ranks may use one GPU. Raises TransportMissing without NCCL."""
    allowed = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    return int(_nccl().get_version()) >= SHARING_VERSION and allowed


class NcclRanks:
    """Ranks of NCCL on one GPU, which also use the memory of other GPUs that this one can access.
    Raises TransportMissing without NCCL.

    NCCL before 2.30 refuses two ranks on one GPU. Later versions accept them if
    NCCL_MULTI_RANK_GPU_ENABLE=1 is set.
    """

    def __init__(self, device: Device) -> None:
        self._nccl = _nccl()
        self._device = device

    def unique_id(self) -> bytes:
        return msgspec.msgpack.encode(self._nccl.get_unique_id())

    def join(self, unique_id: bytes, rank: int) -> Communicator:
        pair = decoded(_unique_ids, unique_id, "an NCCL unique id")
        self._device.bind()
        return _GpuRank(self._nccl, self._device, self._nccl.NcclCommunicator(2, pair, rank), rank)

    def forget(self, unique_id: bytes) -> None:
        """Abandon a pair. The join ends when the other rank's process does, see `JOINS`."""


RANKS: dict[str, Callable[[Device], Ranks]] = {CUDA: NcclRanks}
"""Ranks by kind of device. A package with another kind may add its ranks."""


def ranks_on(device: Device) -> Ranks:
    """Return ranks that work with this device. Raises TransportMissing if none exist for its
    kind."""
    if device.kind not in RANKS:
        raise TransportMissing(
            f"transport nccl cannot use devices of kind {device.kind!r} (it supports: "
            f"{', '.join(RANKS)}): choose another --transport",
            transport="nccl",
        )
    return RANKS[device.kind](device)


class _GpuRank(Communicator):
    def __init__(self, nccl: Any, device: Device, rank: Any, number: int) -> None:
        self._nccl, self._device = nccl, device
        self._rank, self._other = rank, 1 - number
        self._breaking = threading.Lock()
        self._broken = False
        from cupy.cuda import Stream

        self._stream = Stream(non_blocking=True)
        super().__init__()

    def _move(self, pieces: Pieces, sends: bool) -> None:
        self._device.bind()
        try:
            self._ask_for(pieces, sends)
            while not self._stream.done and self._is_well():
                time.sleep(POLL_S)
        except BaseException:
            self._break()  # else the work requested before the error continues
            raise
        finally:
            if self._broken:
                self._stream.synchronize()  # NCCL's kernels end when their communicator is aborted

    def _ask_for(self, pieces: Pieces, sends: bool) -> None:
        ask = self._rank.send if sends else self._rank.recv
        for first in range(0, len(pieces), GROUP_PIECES):
            self._nccl.groupStart()
            for address, nbytes in pieces[first : first + GROUP_PIECES]:
                ask(address, nbytes, self._nccl.NCCL_UINT8, self._other, self._stream.ptr)
            self._nccl.groupEnd()

    def _is_well(self) -> bool:
        """Return whether the communicator is healthy. False after `_break`, which frees it."""
        with self._breaking:
            if not self._broken:
                self._rank.check_async_error()
            return not self._broken

    def _break(self) -> None:
        # `_move` may be inside NCCL, which waits for the other rank: abort ends that.
        with self._breaking:
            if not self._broken:
                self._broken = True
                self._rank.abort()


def _nccl() -> Any:
    try:
        from cupy.cuda import nccl
    except ImportError as exc:
        raise TransportMissing(
            f"transport nccl needs cupy, which cannot be imported ({exc}): install it with "
            "pip install 'dataplane-rl[nccl]'",
            transport="nccl",
        ) from exc
    if not nccl.available:
        raise TransportMissing(
            "transport nccl needs an NCCL library, but cupy found none: install it with "
            "pip install 'dataplane-rl[nccl]'",
            transport="nccl",
        )
    return nccl
