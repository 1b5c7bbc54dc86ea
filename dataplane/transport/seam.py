"""The seam that every way of moving bytes between hosts implements; `tcp` is the one always there.

A transport runs inside a bulk worker, a child process of the peer that maps the peer's arena. It
registers the arena once, serves other peers' reads of it, and reads from theirs straight into it.
It never decides what may be read: the `PinDesk`, which asks the peer, does. Another engine is one
file with a subclass of `Transport`.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol

import numpy as np
import numpy.typing as npt

from dataplane.wire.tables import Owner

MemoryKind = Literal["host", "cuda"]
Records = npt.NDArray[np.void]
Offsets = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a transport can do, so that nobody has to ask for its name.

    one_sided: it reads remote memory by offset; ranges are pinned at the owner beforehand and
    `ReadRequest.sources` is filled. Otherwise the request itself takes the pin.
    needs_target_progress: the owner's worker must run for a read of its memory to advance.
    """

    name: str
    memory: frozenset[MemoryKind]
    one_sided: bool
    needs_target_progress: bool


@dataclass(frozen=True, slots=True)
class Region:
    """The arena as this process has it mapped, from first to last byte."""

    address: int
    nbytes: int
    kind: MemoryKind = "host"
    device: int = 0


@dataclass(frozen=True, slots=True)
class Remote:
    """A peer in one life of its process, and where its bulk workers listen."""

    owner: Owner
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ReadRequest:
    """COPY records to bring from `remote` into the local region before `deadline` (monotonic).

    `cancelled` is set before `Transport.cancel` is called, which may be before `read` began.
    """

    job: int
    remote: Remote
    copies: Records
    deadline: float
    sources: Offsets | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, slots=True, eq=False)
class ReadOutcome:
    """gone: a mask over the copies asked for; their ranges are no longer at the owner."""

    gone: Mask
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class Pinned:
    """An answer of the peer: `places` is an EXTENT per range, `offset` GONE where it is gone."""

    ask: int
    places: Records


class PinDesk(Protocol):
    """Where a transport asks its own peer to hold ranges while their bytes move."""

    def pin(self, ranges: Records, deadline: float) -> Pinned:
        """Blocks until the peer answered. DeadlineExceeded, or the error that the peer raised."""
        ...

    def unpin(self, ask: int, nbytes: int) -> None:
        """Gives the pin back; `nbytes` were sent under it."""
        ...


class Transport(ABC):
    """Moves bytes between registered arenas. `read` is called from several threads at once."""

    capabilities: ClassVar[Capabilities]

    @abstractmethod
    def open(self, region: Region, desk: PinDesk) -> None:
        """Registers the region and serves other peers' reads of it from now on."""

    @abstractmethod
    def read(self, request: ReadRequest) -> ReadOutcome:
        """Blocks until every copy is in place or marked gone.

        When it returns or raises, nothing of this request writes into the region any more.
        Raises TransferFailed, Unavailable, DeadlineExceeded, or what the owner refused with.
        """

    @abstractmethod
    def cancel(self, job: int) -> None:
        """Makes the `read` of this job raise soon; unknown jobs are no error."""

    @abstractmethod
    def forget(self, remote: Remote) -> None:
        """Drops what is kept for a peer that is gone: connections, keys, descriptors."""

    @abstractmethod
    def close(self) -> None:
        """Stops serving and wakes every call that waits."""
