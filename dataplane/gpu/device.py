"""The interface to a device's memory. Each driver implements it.

The peer allocates a pool and exports it. Clients on the same host open the pool and copy into it
and out of it on their own streams. Events tell when a copy is done. A stream is a handle of the
device's library (`cudaStream_t`), as a number; 0 is the default stream.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple

import numpy as np

from dataplane.errors import DeviceMissing, mixed_releases
from dataplane.wire.tables import PoolHandle as PoolHandle

SPIN_S = 0.001
"""Seconds to poll for the end of copies before sleeping. Small copies end before a thread could
sleep."""
POLL_S = 0.0002

Copy = tuple[int, int, int, int]
"""The arguments of `Device.copy`: target, source, bytes, stream."""


class Located(NamedTuple):
    """An array on the device: contiguous bytes from `address`. They are valid once `stream` has
    finished the work queued on it so far. `keep` keeps the memory alive."""

    address: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    stream: int
    keep: object

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


class Pool(ABC):
    """Memory of a device, mapped into this process: `nbytes` from `address`."""

    address: int
    nbytes: int
    handle: PoolHandle

    @abstractmethod
    def array(
        self, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...], keep: object = None
    ) -> Any:
        """Return part of the pool as an array of this dtype and shape, without a copy. If the
        device's arrays do not support the dtype (bfloat16, fp8), the array has unsigned integers of
        the same width. The array keeps `keep` alive. Raises ProtocolError if the bytes are not
        inside the pool."""

    @abstractmethod
    def close(self) -> None:
        """Free the pool, or unmap it if another process owns it. Its views become invalid."""


class Event(ABC):
    """A mark on a stream. An event that was never recorded counts as done."""

    @abstractmethod
    def record(self, stream: int = 0) -> None:
        """Place the mark after all work queued on the stream so far."""

    @abstractmethod
    def done(self) -> bool:
        """Return whether the stream has passed the mark recorded last. Never waits."""

    @abstractmethod
    def close(self) -> None:
        """Free the event."""


class Device(ABC):
    """One device of a kind. The class methods concern all devices of the kind and allocate no
    device memory."""

    kind: ClassVar[str]
    identity: str
    """A name for this device that is the same in every process of the host."""
    number: int = 0
    """The index by which libraries in this process address the device."""

    @classmethod
    @abstractmethod
    def count(cls) -> int:
        """Return how many devices of this kind this process sees. Raises DeviceMissing if their
        library is not installed."""

    @classmethod
    @abstractmethod
    def numbered(cls, number: int) -> Device:
        """Return the device with this index, from 0. Raises DeviceMissing if there is none."""

    @classmethod
    @abstractmethod
    def of(cls, identity: str) -> Device:
        """Return the device with this `identity`. Raises DeviceMissing if this process does not see
        it."""

    @classmethod
    @abstractmethod
    def is_used(cls, identity: str, current: int | None, required: bool) -> bool:
        """Return whether this process works on the device, so that it reads values there in place.

        `current`: the index of the current GPU of the connecting thread; None if no library uses a
        GPU. `required`: the user asked for a device, even if no library uses one yet. Raises
        DeviceMissing, with the reason, if no device can be used.
        """

    @classmethod
    @abstractmethod
    def may_hold(cls, value: object) -> bool:
        """Return whether the value may be an array on a device of this kind. Imports no library."""

    @abstractmethod
    def allocate(self, nbytes: int) -> Pool:
        """Allocate a pool with undefined contents. Raises DeviceMissing if this fails."""

    @abstractmethod
    def open(self, handle: PoolHandle) -> Pool:
        """Map a pool of this device that another process of the host allocated. Raises
        DeviceMissing, with the reason, if the pool cannot be opened."""

    def reach(self, handle: PoolHandle) -> Pool:
        """Map a pool of another device of this host, for copies by this device only. Raises
        DeviceMissing if this device can reach the pool only through host memory."""
        raise DeviceMissing(
            f"device {self.identity} cannot access the memory of device {handle.device} directly"
        )

    def bring(self, address: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
        """Copy an array from an address in a reachable pool into a private array of this device.
        Returns when the copy is complete. Dtypes are those of `Pool.array`."""
        raise DeviceMissing(
            f"device {self.identity} cannot access the memory of other devices directly"
        )

    @abstractmethod
    def event(self) -> Event: ...

    @abstractmethod
    def copy(self, target: int, source: int, nbytes: int, stream: int = 0) -> None:
        """Queue a copy on the stream. Addresses are in device, pinned or pageable memory."""

    def carry_out(self, copies: Iterable[Copy], look: Callable[[], object] = lambda: None) -> None:
        """Queue all copies and wait until they are complete. Calls `look` while waiting, which may
        raise to stop waiting. If this method raises, copies may still be in progress."""
        streams: set[int] = set()
        marks: list[Event] = []
        for copy in copies:
            self.copy(*copy)
            streams.add(copy[3])
        try:
            for stream in streams:
                marks.append(self.event())
                marks[-1].record(stream)
            began = time.monotonic()
            while not all(mark.done() for mark in marks):
                look()
                time.sleep(POLL_S if time.monotonic() - began > SPIN_S else 0)
        finally:
            for mark in marks:
                mark.close()

    @abstractmethod
    def locate(self, value: object) -> Located | None:
        """Return the memory of a value that is an array on this device; copy it on the device first
        if it is not contiguous. None for other values, and for dtypes that cannot be stored."""

    @abstractmethod
    def finish(self, timeout_s: float) -> bool:
        """Wait until all work of this process on the device is done, and return whether it is. If a
        driver cannot wait with a timeout, the call may take longer than `timeout_s`."""

    def bind(self) -> None:  # noqa: B027
        """Make this the current device of this thread for other libraries."""

    @abstractmethod
    def pin_host(self, address: int, nbytes: int, read_only: bool = False) -> None:
        """Pin host memory until `unpin_host`, so that copies from and to it are asynchronous.

        `read_only`: the memory is mapped read-only and is only a source of copies. The pin belongs
        to this process. Unpin the memory before unmapping it. Raises DeviceMissing if this fails.
        """

    @abstractmethod
    def unpin_host(self, address: int) -> None: ...

    @abstractmethod
    def close(self) -> None:
        """Close the pools and events of this process that are still open. The device must not be
        used afterwards."""


def check_inside(pool: Pool, offset: int, nbytes: int) -> None:
    """Raise ProtocolError unless all bytes are inside the pool."""
    if offset < 0 or nbytes < 0 or offset + nbytes > pool.nbytes:
        raise mixed_releases(
            f"{nbytes} bytes at offset {offset} are outside the device arena of {pool.nbytes} bytes"
        )
