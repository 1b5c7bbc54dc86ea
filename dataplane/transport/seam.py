"""The seam that every engine implements which moves bytes between hosts; TCP needs none of it.

A transport runs inside a bulk worker, a child process of the peer that maps the peer's arena. It
registers the arena once and moves bytes between registered regions. It never decides what may be
read: pins, tickets and the confirmation (`reader`, `owner`) lie above it. Another engine is one
file with a subclass of `Transport`, named in the entry point group `dataplane.transports`.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol

import numpy as np
import numpy.typing as npt

from dataplane.errors import DeadlineExceeded, TransferFailed
from dataplane.wire.tables import Owner, PoolHandle

MemoryKind = Literal["host", "cuda"]
Records = npt.NDArray[np.void]
Offsets = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a transport can do, so that nobody has to ask for its name.

    memory: kinds of regions that it registers, on either side.
    one_sided: it reads remote memory by offset. Otherwise the owner sends, see `Transport.send`.
    """

    name: str
    memory: frozenset[MemoryKind]
    one_sided: bool


@dataclass(frozen=True, slots=True)
class PlacedPool:
    """A device arena, and where in the region it begins."""

    start: int
    handle: PoolHandle

    def holds(self, offset: int, nbytes: int) -> bool:
        return self.start <= offset and offset + nbytes <= self.start + self.handle.nbytes


@dataclass(frozen=True, slots=True)
class Region:
    """The arena as this process has it mapped, from first to last byte. fd: its memfd, or -1.

    pools: of a region of device memory, which is not mapped here.
    """

    address: int
    nbytes: int
    kind: MemoryKind = "host"
    fd: int = -1
    pools: tuple[PlacedPool, ...] = ()


@dataclass(frozen=True, slots=True)
class RegionKey:
    """What others need to reach a registered region.

    generation: differs for every registration, so that what a reader keeps of an earlier life of
    the owner's worker is noticed. card: the engine's own words, at most MAX_CARD_BYTES; readers get
    it authenticated, with every hold.
    """

    generation: int
    card: bytes = b""


@dataclass(frozen=True, slots=True)
class Remote:
    """A peer in one life of its process, and `host:port` where its bulk worker listens.

    fingerprint: SHA-256 in hex of the certificate that it shows; "": it speaks no TLS.
    """

    owner: Owner
    address: str
    fingerprint: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """Ranges that are pinned at their owner for one read.

    key: of the owner's region. sources: for each copy, the offset in that region. tag: names this
    transfer to both sides of a two-sided one.
    check: raises TransferFailed or DeadlineExceeded when nobody needs the bytes any more: the job
    was cancelled, its time is over, or the owner is gone. To be called every 100 ms or so by
    whoever waits; any thread may.
    """

    key: RegionKey
    sources: Offsets
    tag: int
    check: Callable[[], None]


@dataclass(frozen=True, slots=True, eq=False)
class ReadRequest:
    """COPY records to bring from `remote` into the local region before `deadline` (monotonic).

    `cancelled` may be set before `read` began. check: as `Held.check`, for whoever waits before
    anything is held.
    """

    job: int
    remote: Remote
    copies: Records
    deadline: float
    held: Held | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)

    def check(self) -> None:
        if self.cancelled.is_set():
            raise TransferFailed("the read was cancelled")
        if time.monotonic() >= self.deadline:
            raise DeadlineExceeded("the transfer timed out while other transfers were running")


@dataclass(frozen=True, slots=True, eq=False)
class SendRequest:
    """What the owner sends in a two-sided transfer: stretches of its region, in order.

    key: of the reader's region; its card is what `Transport.turn` gave. tag and check: see `Held`.
    """

    key: RegionKey
    tag: int
    sources: Offsets
    nbytes: Offsets
    deadline: float
    check: Callable[[], None]


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
    """Where a worker asks its own peer to hold ranges while their bytes move."""

    def pin(self, ranges: Records, deadline: float) -> Pinned:
        """Blocks until the peer answered. DeadlineExceeded, or the error that the peer raised."""
        ...

    def unpin(self, ask: int, nbytes: int) -> None:
        """Gives the pin back; `nbytes` were sent under it."""
        ...


class Transport(ABC):
    """Moves bytes between registered regions. `read` and `send` come from several threads at once.

    Made as `cls(owner)` with the peer that it works for. TransportMissing where something that it
    needs is not installed or does not work here: the message says what. It ends with its process.
    """

    capabilities: ClassVar[Capabilities]

    def __init__(self, owner: Owner) -> None:
        self.owner = owner

    @abstractmethod
    def register(self, region: Region) -> RegionKey:
        """Makes the region readable for others and the destination of `read`. Called once."""

    @abstractmethod
    def read(self, request: ReadRequest) -> None:
        """Blocks until every copy is in place; copies lie inside the region, none is empty.

        When it returns or raises, nothing of this request writes into the region any more. Where
        that cannot be had it does not return: the peer then ends the worker. Whoever waits looks at
        `Held.check`. Raises TransferFailed, Unavailable, DeadlineExceeded.
        """

    def turn(self, request: ReadRequest, own: RegionKey) -> AbstractContextManager[bytes]:
        """Around one transfer, from before its ranges are held at the owner until that one has
        confirmed it. Gives the card that the owner will send by, of a two-sided one.

        An engine that cannot tell transfers apart lets them through one by one. `read` is called
        inside, in the same thread, or not at all.
        """
        return nullcontext(b"" if self.capabilities.one_sided else own.card)

    def send(self, request: SendRequest) -> None:
        """The owner's part of a two-sided transfer; blocks until the bytes may be reused."""
        raise NotImplementedError(f"transport {self.capabilities.name} is one-sided")

    def holding(self, count: int) -> None:  # noqa: B027
        """So many reads of this worker's region are under way; for engines that must poll then."""

    @abstractmethod
    def forget(self, remote: Remote) -> None:
        """Drops what is kept for a peer that is gone: connections, keys, descriptors."""
