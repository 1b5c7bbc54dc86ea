"""The interface of transports that move bytes between hosts.

A transport runs inside a bulk worker, a child process of the peer that maps the peer's arena. It
registers the arena once and moves bytes between registered regions. It never decides what may be
read: `reader` and `owner` do that, with pins, tickets and a confirmation. A new engine is one file
with a subclass of `Transport`, named in the entry point group `dataplane.transports`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from dataplane.transport.bulk_frames import MAX_HELD_BYTES
from dataplane.transport.stream import BulkStream
from dataplane.wire.tables import Owner, PoolHandle

MemoryKind = Literal["host", "cuda"]
Records = npt.NDArray[np.void]
Offsets = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]


class PlacedPool(NamedTuple):
    """A pool and the offset at which it starts in the region."""

    start: int
    handle: PoolHandle


@dataclass(frozen=True, slots=True)
class Region:
    """The arena as this process has mapped it, from first to last byte. `fd`: its memfd, or -1.

    `pools`: what a region consists of that is not mapped here.
    """

    address: int
    nbytes: int
    kind: MemoryKind = "host"
    fd: int = -1
    pools: tuple[PlacedPool, ...] = ()


@dataclass(frozen=True, slots=True)
class Remote:
    """One incarnation of a peer, and the `host:port` where its bulk worker listens.

    `fingerprint`: SHA-256 in hex of its TLS certificate; "" without TLS.
    """

    owner: Owner
    address: str
    fingerprint: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class ReadRequest:
    """COPY records to bring from `remote`, which pins their chunks, into the local region.

    - `card`: of the owner's region.
    - `sources`: for each copy, the offset in that region.
    - `check`: raises TransferFailed or DeadlineExceeded if the bytes are no longer needed: the job
      was cancelled, its deadline has passed, or the owner is gone. Call it about every 100 ms while
      waiting, from any thread.
    - `stream`, `deadline` (monotonic): for a transport that is `in_band`.
    """

    remote: Remote
    copies: Records
    card: bytes
    sources: Offsets
    check: Callable[[], None]
    stream: BulkStream
    deadline: float


@dataclass(frozen=True, slots=True, eq=False)
class SendRequest:
    """What the owner sends in a two-sided transfer: parts of its region, in order.

    `card`: of the reader, from its `Transport.turn`. The other fields: see `ReadRequest`.
    """

    card: bytes
    sources: Offsets
    nbytes: Offsets
    check: Callable[[], None]
    stream: BulkStream
    deadline: float


@dataclass(frozen=True, slots=True, eq=False)
class ReadOutcome:
    """`gone`: a mask over the requested copies, True for chunks that the owner no longer has."""

    gone: Mask
    nbytes: int


class Transport(ABC):
    """Moves bytes between registered regions. Several threads call `read` and `send` at once.

    A bulk worker creates it as `cls(owner)`, where `owner` is the worker's peer. Raises
    TransportMissing if something that the transport needs is not installed or does not work on this
    host; the message says what. A transport is never closed: it ends with its process.

    - `name`: as users choose it.
    - `memory`: kinds of regions that it registers, on either side.
    - `one_sided`: it reads remote memory by offset. Otherwise the owner sends, see `send`.
    - `in_band`: the owner sends on the connection of the request.
    - `most_bytes`: the most that one request may ask for.
    """

    name: ClassVar[str]
    memory: ClassVar[frozenset[MemoryKind]]
    one_sided: ClassVar[bool] = True
    in_band: ClassVar[bool] = False
    most_bytes: ClassVar[int] = MAX_HELD_BYTES

    def __init__(self, owner: Owner) -> None:
        self.owner = owner

    @abstractmethod
    def register(self, region: Region) -> bytes:
        """Make the region readable for other peers and a destination for `read`. Called once.

        Return the region's card: what others need to reach it, at most MAX_CARD_BYTES. Readers get
        it authenticated, with every reply. If a reader must notice that the owner's worker has
        restarted, the card must differ for every registration.
        """

    @abstractmethod
    def read(self, request: ReadRequest) -> None:
        """Wait until every copy is in place. Copies are inside the region, and none is empty.

        When it returns or raises, nothing of this request may write into the region any more. If
        that cannot be guaranteed, it must not return: the peer then ends the worker. Call
        `request.check` while waiting. Raises TransferFailed, Unavailable and DeadlineExceeded.
        """

    def turn(
        self, remote: Remote, own: bytes, check: Callable[[], None]
    ) -> AbstractContextManager[bytes]:
        """Return a context manager for one transfer from `remote`. It is entered before the owner
        holds the chunks, and left after the owner has confirmed the transfer. For a two-sided
        transfer it yields the card that the owner sends with. That card may also identify the
        transfer. `check`: see `ReadRequest`.

        An engine that cannot tell transfers apart admits one transfer at a time. `read` is called
        at most once, inside the context and in the same thread.
        """
        return nullcontext(b"" if self.one_sided else own)

    def send(self, request: SendRequest) -> None:
        """Send the owner's part of a two-sided transfer. Returns when the bytes may be reused."""
        raise NotImplementedError(
            f"transport {self.name} is one-sided and has no send(): call read()"
        )

    def holding(self, count: int) -> None:  # noqa: B027
        """Take note that `count` reads of this worker's region are in flight. Engines that must
        poll during reads override this method."""

    @abstractmethod
    def forget(self, owner: Owner) -> None:
        """Drop the connections, keys and descriptors of a lost peer."""
