"""A device's memory as the code above its driver uses it.

The peer allocates a pool and exports it. Clients of its host open the pool and copy into it and out
of it on streams of their own. Events say when a copy is done. A stream is the number that the
library which made it gives it (`cudaStream_t`); 0 is the default stream.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple

import numpy as np

from dataplane.errors import DeviceMissing, ProtocolError
from dataplane.wire.tables import PoolHandle as PoolHandle

SPIN_S = 0.001
"""Small copies are done before a thread could sleep, and a device copies a GiB in this time."""
POLL_S = 0.0002

Copy = tuple[int, int, int, int]
"""As `Device.copy` takes it: target, source, bytes, stream."""


class Located(NamedTuple):
    """An array of the device: contiguous bytes from `address`, there once `stream` is done with
    what was asked of it so far. `keep` holds the memory."""

    address: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    stream: int
    keep: object

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


class Pool(ABC):
    """Memory of a device as this process has it mapped: `nbytes` from `address`."""

    address: int
    nbytes: int
    handle: PoolHandle

    @abstractmethod
    def view(self, offset: int, nbytes: int, keep: object = None) -> Any:
        """Bytes of it, uint8, without a copy, for whoever takes arrays of that device.

        `keep` lives as long as the view: a pin. ProtocolError where the bytes are not in the pool.
        """

    @abstractmethod
    def array(
        self, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...], keep: object = None
    ) -> Any:
        """As `view`, as an array of the device. A dtype that the device's arrays do not have
        (bfloat16, fp8) comes as the unsigned integers of its width."""

    @abstractmethod
    def close(self) -> None:
        """Frees the pool, or where it was opened, lets go of it. Views end with it."""


class Event(ABC):
    """A mark on a stream. One that was never recorded is done."""

    @abstractmethod
    def record(self, stream: int = 0) -> None:
        """The mark is behind everything that was asked of the stream so far."""

    @abstractmethod
    def done(self) -> bool:
        """Whether the stream is past the mark that was recorded last. Never waits."""

    @abstractmethod
    def close(self) -> None:
        """The event is not needed any more."""


class Device(ABC):
    """One device of a kind. What the kind as a whole can tell are class methods; none of them takes
    memory of a device."""

    kind: ClassVar[str]
    identity: str
    """Names this device in every process of the host."""
    number: int = 0
    """By which libraries in this process call it."""

    @classmethod
    @abstractmethod
    def count(cls) -> int:
        """Devices of this kind that this process sees. DeviceMissing without their library."""

    @classmethod
    @abstractmethod
    def numbered(cls, number: int) -> Device:
        """The device of this number, 0 is the first. DeviceMissing where there is none."""

    @classmethod
    @abstractmethod
    def of(cls, identity: str) -> Device:
        """The device of this name. DeviceMissing where this process does not see it."""

    @classmethod
    @abstractmethod
    def is_used(cls, identity: str, current: int | None, required: bool) -> bool:
        """Whether this process works on the device, so that values are read there in place.

        current: the number of the GPU that is current in the thread that connects, None where no
        library works on one. required: the user asks for a device, even if nothing works on it yet.
        DeviceMissing says why none can be used.
        """

    @classmethod
    @abstractmethod
    def may_hold(cls, value: object) -> bool:
        """Whether the value may be an array on a device of this kind. Imports no library."""

    @abstractmethod
    def allocate(self, nbytes: int) -> Pool:
        """A pool of its own, filled with nothing in particular. DeviceMissing where it cannot."""

    @abstractmethod
    def open(self, handle: PoolHandle) -> Pool:
        """A pool of another process of this host. DeviceMissing says why it cannot be opened."""

    def reach(self, handle: PoolHandle) -> Pool:
        """A pool of another device of this host, mapped for this one's copies alone. DeviceMissing
        where this one reaches it only by way of the host."""
        raise DeviceMissing(
            f"device {self.identity} cannot access the memory of device {handle.device} directly"
        )

    def bring(self, address: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
        """A private array of this device with a copy of what is at an address of a pool that it
        reaches, there when this returns. Dtypes as those of `Pool.array`."""
        raise DeviceMissing(
            f"device {self.identity} cannot access the memory of other devices directly"
        )

    @abstractmethod
    def event(self) -> Event: ...

    @abstractmethod
    def copy(self, target: int, source: int, nbytes: int, stream: int = 0) -> None:
        """Asks the stream to copy between addresses of the device, of pinned or of other memory."""

    def carry_out(self, copies: Iterable[Copy], look: Callable[[], object] = lambda: None) -> None:
        """Asks for all of them, and returns when they are there. `look` is called meanwhile, and
        may give up: where this raises, the device may still be at it."""
        streams, marks = set[int](), list[Event]()
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
        """Where the value lies, if it is an array on this device; contiguous, else a copy of it on
        the device. None where it is none, or of a dtype that cannot travel."""

    @abstractmethod
    def finish(self, timeout_s: float) -> bool:
        """Waits until all that this process asked of the device is done, and says whether it is: a
        driver that can wait no other way waits for longer."""

    def bind(self) -> None:  # noqa: B027
        """Other libraries that this thread calls work with this device from now on."""

    @abstractmethod
    def pin_host(self, address: int, nbytes: int, read_only: bool = False) -> None:
        """Copies from and to this host memory are direct and asynchronous, until `unpin_host`.

        read_only: it is mapped so, and only copied from. Registrations are of this process, and
        must end before the mapping does. DeviceMissing where it cannot be.
        """

    @abstractmethod
    def unpin_host(self, address: int) -> None: ...

    @abstractmethod
    def close(self) -> None:
        """Pools and events of this process, that are still open, are closed; nothing is asked of
        the device any more."""


def check_inside(pool: Pool, offset: int, nbytes: int) -> None:
    """ProtocolError for bytes that are not all in the pool."""
    if offset < 0 or nbytes < 0 or offset + nbytes > pool.nbytes:
        raise ProtocolError(
            f"{nbytes} bytes at offset {offset} are outside the device arena of {pool.nbytes} bytes"
        )
