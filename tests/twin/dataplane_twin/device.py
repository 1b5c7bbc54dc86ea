"""Host memory that behaves like a GPU's: pools that others open, streams, events.

Copies are carried out by a thread a stream, some
time after they were asked for; whoever does not heed the events reads bytes that are not there yet.
`hold` keeps a stream from going on, so that a test can show this without waiting for anything.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakSet, finalize

import msgspec
import numpy as np

from dataplane.errors import DeviceMissing, ProtocolError
from dataplane.gpu.device import Device, Event, Located, Pool, PoolHandle, check_inside

POLL_S = 0.0005

_numbers = itertools.count(1)


class _Stream:
    """Work in the order in which it was asked for, in a thread."""

    def __init__(self) -> None:
        self.work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.free = threading.Event()
        self.free.set()
        self.closed = False
        self._thread = threading.Thread(target=self._run, name="twin-stream", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self.closed:
            work = self.work.get()
            self.free.wait()
            if not self.closed:
                work()

    def close(self) -> None:
        """What it has not done yet is never done."""
        self.closed = True
        self.free.set()
        self.work.put(lambda: None)
        self._thread.join()


class TwinArray:
    """An array on the twin, no host array: `get` copies it to one, behind what its stream was asked
    for. Made by `TwinDevice.array`, and by pools as views."""

    def __init__(
        self,
        device: TwinDevice,
        memory: np.ndarray[Any, np.dtype[Any]],
        stream: int = 0,
        keep: object = None,
    ) -> None:
        self.device, self.stream = device, stream
        self._memory, self._keep = memory, keep

    def __repr__(self) -> str:
        return f"<TwinArray {self.dtype} {list(self.shape)} on {self.device.identity}>"

    def __len__(self) -> int:
        return len(self._memory)

    def __array__(self, dtype: object = None, copy: bool | None = None) -> Any:
        return self.get() if dtype is None else self.get().astype(dtype)  # type: ignore[call-overload]

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._memory.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        shape: tuple[int, ...] = self._memory.shape
        return shape

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    @property
    def address(self) -> int:
        """Where on the device it lies."""
        return int(self._memory.__array_interface__["data"][0])

    def get(self) -> np.ndarray[Any, np.dtype[Any]]:
        """A copy in host memory."""
        self.device.synchronize(self.stream)
        return self._memory.copy()


class TwinDevice(Device):
    """Device `identity` of this host, as one process sees it."""

    kind = "twin"

    def __init__(self, identity: str = "twin:0") -> None:
        self.identity = identity
        self._streams: dict[int, _Stream] = {0: _Stream()}
        self._behind: dict[tuple[int, int], int] = {}
        self._made: WeakSet[_TwinPool] = WeakSet()
        self.pinned: dict[int, int] = {}
        """Host memory that is pinned: bytes by address."""

    @classmethod
    def count(cls) -> int:
        """One; `numbered` gives more of them, as if other processes had other devices."""
        return 1

    @classmethod
    def numbered(cls, number: int) -> TwinDevice:
        return cls(f"twin:{number}")

    @classmethod
    def of(cls, identity: str) -> TwinDevice:
        return cls(identity)

    @classmethod
    def is_used(cls, identity: str, current: int | None, required: bool) -> bool:
        return current is None or identity == f"twin:{current}"

    @classmethod
    def may_hold(cls, value: object) -> bool:
        return isinstance(value, TwinArray)

    def __repr__(self) -> str:
        return f"<TwinDevice {self.identity}>"

    def stream(self) -> int:
        """A new stream."""
        number = next(_numbers)
        self._streams[number] = _Stream()
        return number

    def hold(self, stream: int = 0) -> Callable[[], None]:
        """The stream does nothing until the returned function is called."""
        self._streams[stream].free.clear()
        return self._streams[stream].free.set

    def synchronize(self, stream: int = 0) -> None:
        """Waits until all that was asked of the stream is done."""
        done = threading.Event()
        self._streams[stream].work.put(done.set)
        done.wait()

    def allocate(self, nbytes: int) -> Pool:
        fd = os.memfd_create("dataplane-twin", os.MFD_CLOEXEC)
        os.ftruncate(fd, nbytes)
        handle = PoolHandle(self.kind, self.identity, _raw(fd), 0, nbytes)
        return self._kept(_TwinPool(self, fd, handle))

    def open(self, handle: PoolHandle) -> Pool:
        if handle.kind != self.kind or handle.device != self.identity:
            raise DeviceMissing(
                f"the handle belongs to {handle.device}, but this device is {self.identity}"
            )
        return self._kept(_TwinPool(self, _opened(handle.raw), handle))

    def reach(self, handle: PoolHandle) -> Pool:
        if handle.kind != self.kind or handle.device == self.identity:
            raise DeviceMissing(
                f"the memory of {handle.device} cannot be mapped from {self.identity}: expected "
                "the memory of another device"
            )
        return self._kept(_TwinPool(self, _opened(handle.raw), handle))

    def bring(self, address: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
        memory = np.empty(shape, dtype)
        self.copy(memory.__array_interface__["data"][0], address, memory.nbytes)
        self.synchronize()
        return TwinArray(self, memory)

    def event(self) -> Event:
        return _TwinEvent(self)

    def copy(self, target: int, source: int, nbytes: int, stream: int = 0) -> None:
        self.ask(stream, lambda: ctypes.memmove(target, source, nbytes))

    def array(self, values: Any, stream: int = 0) -> TwinArray:
        """The values on this device, as what is asked of the stream from now on finds them."""
        return TwinArray(self, np.array(values, order="C"), stream)

    def locate(self, value: object) -> Located | None:
        if not isinstance(value, TwinArray) or value.device.identity != self.identity:
            return None
        return Located(value.address, value.dtype, value.shape, self._own(value), value)

    def _own(self, value: TwinArray) -> int:
        """The array's stream; where that is another object's of this device, one of ours behind
        it."""
        if value.device is self:
            return value.stream
        foreign = id(value.device), value.stream
        if foreign not in self._behind:
            self._behind[foreign] = self.stream()
        mark, behind = value.device.event(), self._streams[self._behind[foreign]]
        mark.record(value.stream)

        def wait() -> None:
            while not (mark.done() or behind.closed):
                time.sleep(POLL_S)

        behind.work.put(wait)
        return self._behind[foreign]

    def finish(self, timeout_s: float) -> bool:
        until = time.monotonic() + timeout_s
        for stream in list(self._streams.values()):
            done = threading.Event()
            stream.work.put(done.set)
            if not done.wait(max(0.0, until - time.monotonic())):
                return False
        return True

    def pin_host(self, address: int, nbytes: int, read_only: bool = False) -> None:
        if address in self.pinned:
            raise DeviceMissing(f"host memory at {address:#x} is already pinned")
        if not read_only and not _writable(address):
            raise DeviceMissing(
                f"host memory at {address:#x} is mapped read-only, so it cannot be pinned"
            )
        self.pinned[address] = nbytes

    def unpin_host(self, address: int) -> None:
        if self.pinned.pop(address, None) is None:
            raise DeviceMissing(f"host memory at {address:#x} is not pinned")

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()
        for made in list(self._made):
            made.close()

    def _kept(self, made: _TwinPool) -> _TwinPool:
        self._made.add(made)
        return made

    def ask(self, stream: int, work: Callable[[], Any]) -> None:
        if stream not in self._streams:
            raise DeviceMissing(f"{self.identity} has no stream {stream}")
        self._streams[stream].work.put(work)


class _TwinPool(Pool):
    def __init__(self, device: TwinDevice, fd: int, handle: PoolHandle) -> None:
        self._device = device
        self.nbytes, self.handle = handle.nbytes, handle
        self._end = finalize(self, os.close, fd)
        self._map = mmap.mmap(fd, handle.nbytes)
        self.address = int(np.frombuffer(self._map, np.uint8).ctypes.data)

    def array(
        self, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...], keep: object = None
    ) -> Any:
        nbytes = dtype.itemsize * math.prod(shape)
        check_inside(self, offset, nbytes)
        view = np.asarray(_TwinView(self, self.address + offset, nbytes, keep))
        return TwinArray(self._device, view.view(dtype).reshape(shape), 0, keep)

    def close(self) -> None:
        self._end()


class _TwinView:
    def __init__(self, pool: _TwinPool, address: int, nbytes: int, keep: object) -> None:
        self._kept = pool, keep
        self.__array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
        }


class _TwinEvent(Event):
    def __init__(self, device: TwinDevice) -> None:
        self._device = device
        self._passed = threading.Event()
        self._passed.set()

    def record(self, stream: int = 0) -> None:
        self._passed = threading.Event()
        self._device.ask(stream, self._passed.set)

    def done(self) -> bool:
        return self._passed.is_set()

    def close(self) -> None:
        pass


def _writable(address: int) -> bool:
    """Whether this process has it mapped so."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access = line.split(None, 2)[:2]
        first, last = (int(end, 16) for end in span.split("-"))
        if first <= address < last:
            return "w" in access
    return False


def _raw(fd: int) -> bytes:
    return msgspec.msgpack.encode((os.getpid(), fd, os.fstat(fd).st_ino))


def _decoded(raw: bytes) -> tuple[int, int, int]:
    try:
        return msgspec.msgpack.decode(raw, type=tuple[int, int, int])
    except msgspec.MsgspecError as exc:
        raise ProtocolError(f"not a valid handle of the simulated device: {exc}") from exc


def _opened(raw: bytes) -> int:
    """Another process's memory file. DeviceMissing where that process is gone."""
    pid, fd, inode = _decoded(raw)
    try:
        opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as exc:
        raise DeviceMissing(f"process {pid} no longer exports this memory: {exc}") from exc
    if os.fstat(opened).st_ino != inode:
        os.close(opened)
        raise DeviceMissing(f"process {pid} no longer exports this memory")
    return opened
