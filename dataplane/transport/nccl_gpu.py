"""NCCL's ranks, over cupy: the GPUs send each other what lies in their memory.

A rank works with one GPU, and the memory of others that this one reaches. NCCL refuses two ranks on
one GPU before 2.30, and from there takes them where NCCL_MULTI_RANK_GPU_ENABLE=1 is set.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import msgspec

from dataplane.errors import ProtocolError, TransportMissing
from dataplane.memory.device import Device
from dataplane.transport.communicators import Communicator, Stretches

GROUP_PIECES = 256
"""Pieces that one call of NCCL's is asked for."""
SHARING_VERSION = 23000
POLL_S = 0.0002
_unique_ids = msgspec.msgpack.Decoder(bytes | tuple[int, ...])
"""bytes, or numbers of cupy before 14"""


def shares_gpus() -> bool:
    """Whether two ranks may be on one GPU. TransportMissing without NCCL."""
    allowed = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    return int(_nccl().get_version()) >= SHARING_VERSION and allowed


class NcclRanks:
    """Ranks on one GPU. TransportMissing without NCCL."""

    def __init__(self, device: Device) -> None:
        self._nccl = _nccl()
        self._device = device

    def unique_id(self) -> bytes:
        return msgspec.msgpack.encode(self._nccl.get_unique_id())

    def join(self, unique_id: bytes, rank: int) -> Communicator:
        try:
            pair = _unique_ids.decode(unique_id)
        except msgspec.MsgspecError as exc:
            raise ProtocolError(f"not a unique id of NCCL: {exc}") from exc
        self._device.bind()
        return _GpuRank(self._nccl, self._device, self._nccl.NcclCommunicator(2, pair, rank), rank)

    def forget(self, unique_id: bytes) -> None:
        """A join that nobody needs ends when the other rank's process does, see `JOINS`."""


class _GpuRank(Communicator):
    def __init__(self, nccl: Any, device: Device, rank: Any, number: int) -> None:
        self._nccl, self._device = nccl, device
        self._rank, self._other = rank, 1 - number
        self._breaking = threading.Lock()
        self._broken = False
        from cupy.cuda import Stream

        self._stream = Stream(non_blocking=True)
        super().__init__()

    def _move(self, stretches: Stretches, sends: bool) -> None:
        self._device.bind()
        try:
            self._ask_for(stretches, sends)
            while not self._stream.done and self._is_well():
                time.sleep(POLL_S)
        except BaseException:
            self._break()  # else what was asked for before the error goes on
            raise
        finally:
            if self._broken:
                self._stream.synchronize()  # NCCL's kernels end when their communicator is aborted

    def _ask_for(self, stretches: Stretches, sends: bool) -> None:
        ask = self._rank.send if sends else self._rank.recv
        for first in range(0, len(stretches), GROUP_PIECES):
            self._nccl.groupStart()
            for address, nbytes in stretches[first : first + GROUP_PIECES]:
                ask(address, nbytes, self._nccl.NCCL_UINT8, self._other, self._stream.ptr)
            self._nccl.groupEnd()

    def _is_well(self) -> bool:
        """Not after `_break`, which frees what is asked here."""
        with self._breaking:
            if not self._broken:
                self._rank.check_async_error()
            return not self._broken

    def _break(self) -> None:
        # `_move` may be inside of NCCL, which waits there for the other rank: abort ends that.
        with self._breaking:
            if not self._broken:
                self._broken = True
                self._rank.abort()


def _nccl() -> Any:
    try:
        from cupy.cuda import nccl
    except ImportError as exc:
        raise TransportMissing(
            f"nccl needs cupy: pip install 'dataplane-rl[nccl]' ({exc})", transport="nccl"
        ) from exc
    if not nccl.available:
        raise TransportMissing(
            "cupy finds no NCCL here: pip install 'dataplane-rl[nccl]'", transport="nccl"
        )
    return nccl
