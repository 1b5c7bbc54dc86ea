"""The reader's side of bulk transfer: `Get` over TCP, and by other engines.

Runs in a bulk worker. A read is cut into slices. Over TCP a few threads take one slice after
another, each on a connection of its own, straight into the arena. For another engine the ranges of
a slice are held at the owner, read, and confirmed. That conversation uses a joined connection, and
the bytes use the engine. A slice counts only once the owner has confirmed that it held the ranges
to the end.

The first error stops the whole read. The read returns only when none of its threads can write
any more, so that the peer can reuse the destination.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress

import numpy as np

from dataplane.errors import (
    DataplaneError,
    DeadlineExceeded,
    InternalError,
    TicketRefused,
    TransferFailed,
    Unavailable,
    mixed_releases,
)
from dataplane.transport.bulk_frames import (
    GONE,
    MAX_GET_BYTES,
    MAX_GET_FRAME_BYTES,
    MAX_GET_ITEMS,
    MAX_HELD_BYTES,
    FromOwner,
    Get,
    Held,
    Release,
    Sending,
    Sent,
    encode,
)
from dataplane.transport.connections import Connection, Connections
from dataplane.transport.joining import answer_of
from dataplane.transport.reading import Reading
from dataplane.transport.registry import TCP
from dataplane.transport.seam import (
    Mask,
    Offsets,
    ReadRequest,
    Records,
    Region,
    Transport,
)
from dataplane.transport.slices import Slice, cut, pieces_of
from dataplane.transport.stream import BulkStream, iovecs
from dataplane.transport.tickets import held_mac, issue
from dataplane.wire.packed import U8, column
from dataplane.wire.tables import Owner

RUNNERS = 32
RUNS_PER_READ = 2
"""Connections that one large read uses at once. On loopback with 2 cores 1 and 2 are equally fast
(about 0.9 of a bare socket); with more cores the second
keeps one core's copy from being the ceiling."""
LEAST_SLICE_BYTES = 8 << 20
"""For less, the second connection is not worth its exchange."""
EARLY_ITEMS = 512
"""A request this short fits into socket buffers even while the owner is busy sending; a longer one
could leave both sides sending and nobody receiving."""

logger = logging.getLogger(__name__)


class Reads(ABC):
    """All reads of one worker by one transport, with a pool of connections."""

    def __init__(self, transport: str, key: bytes, *, tls_only: bool = False) -> None:
        self._name = transport
        self._key = key
        self._connections = Connections(key, tls_only=tls_only)

    def read(self, reading: Reading) -> Mask:
        """Carry out a read. Return which of its copies are gone at the owner."""
        reading.left.extend(self._cut(reading.copies))
        self._carry_out(reading)
        reading.raise_error()
        return reading.gone

    def forget(self, owner: Owner) -> None:
        """See `Transport.forget`."""
        self._connections.forget(owner)

    def _carry_out(self, reading: Reading) -> None:
        """Takes slices until none is left or the read stopped. Never raises."""
        try:
            part = reading.next()
            while part is not None:
                part = self._take(reading, part)
        except BaseException as exc:
            reading.stop(_typed(exc, reading))

    @contextmanager
    def _connection(self, reading: Reading) -> Iterator[Connection]:
        """For one transfer. It is for others too where the body has left it `clean`."""
        connection = self._connections.borrow(reading)
        try:
            yield connection
        finally:
            if reading.unwatch(connection.stream) and connection.clean:
                self._connections.give_back(connection)
            else:
                self._connections.discard(connection)

    def _ask(
        self,
        connection: Connection,
        part: Slice,
        deadline: float,
        tag: int = 0,
        card: bytes = b"",
    ) -> bytes:
        """Send the request for a slice. Return its nonce."""
        pieces, nonce, name = pieces_of(part.copies).tobytes(), connection.nonce(), self._name
        expiry_ms = max(1, int((deadline - time.monotonic()) * 1000))
        owner = connection.remote.owner
        ticket = issue(self._key, owner, expiry_ms, nonce, pieces, name, card)
        get = Get(connection.version, ticket, pieces, part.nbytes, name, tag, card)
        with suppress(ConnectionError):  # then there is no answer
            connection.stream.send(encode(get), deadline)
        return nonce

    @abstractmethod
    def _cut(self, copies: Records) -> Iterator[Slice]: ...

    @abstractmethod
    def _take(self, reading: Reading, part: Slice) -> Slice | None:
        """Brings a slice, and perhaps more of them: the one to go on with. That is this one again
        where a pooled connection was closed for being idle."""


class TcpReads(Reads):
    """Reads over TCP, straight into the region."""

    def __init__(self, region: Region, key: bytes, *, tls_only: bool = False) -> None:
        super().__init__(TCP, key, tls_only=tls_only)
        self._base = np.uint64(region.address)
        self._runners = ThreadPoolExecutor(RUNNERS, "bulk-runner")

    def _cut(self, copies: Records) -> Iterator[Slice]:
        each = -(-int(copies["nbytes"].sum()) // RUNS_PER_READ)
        return cut(copies, min(max(each, LEAST_SLICE_BYTES), MAX_GET_BYTES), MAX_GET_ITEMS)

    def _carry_out(self, reading: Reading) -> None:
        others: list[Future[None]] = []
        with suppress(RuntimeError):  # no more threads: this one does it alone
            for _ in range(1, min(RUNS_PER_READ, len(reading.left))):
                others.append(self._runners.submit(super()._carry_out, reading))
        super()._carry_out(reading)
        # Those that have not started are not needed any more; no thread waits for a queue.
        wait([run for run in others if not run.cancel()])

    def _take(self, reading: Reading, part: Slice) -> Slice | None:
        """Slices one after another on one connection."""
        with self._connection(reading) as connection:
            answered, deadline = connection.sequence > 0, reading.deadline
            self._ask(connection, part, deadline)
            while (answer := _answer(connection.stream, deadline)) is not None:
                answered = True
                following = reading.next()
                # Asked before the bytes are taken, so that the owner never waits for the reader.
                early = following is not None and len(following.copies) <= EARLY_ITEMS
                if following is not None and early:
                    self._ask(connection, following, deadline)
                self._receive(connection.stream, part, reading, answer)
                if following is None:
                    connection.clean = True
                    return None
                if not early:
                    self._ask(connection, following, deadline)
                part = following
            if not answered or reading.stopped:
                raise ConnectionResetError("the connection was closed before the owner answered")
            return part

    def _receive(
        self, stream: BulkStream, part: Slice, reading: Reading, answer: FromOwner
    ) -> None:
        if not isinstance(answer, Sending):
            raise mixed_releases(
                f"unexpected reply to a request: expected Sending, got {type(answer).__name__}"
            )
        copies, count, deadline = part.copies, len(part.copies), reading.deadline
        if answer.gone and len(answer.gone) != count:
            raise mixed_releases(
                f"invalid reply to a request: expected flags for {count} pieces, got "
                f"{len(answer.gone)}"
            )
        gone = np.frombuffer(answer.gone or bytes(count), bool)
        copies = copies[~gone] if gone.any() else copies
        asked = int(copies["nbytes"].sum())
        if answer.nbytes != asked:
            raise mixed_releases(
                f"invalid reply to a request: expected {asked} bytes, but the owner announced "
                f"{answer.nbytes}"
            )
        stream.receive_into(iovecs(self._base + copies["dest"], copies["nbytes"]), deadline)
        _confirm(stream, answer.nbytes, deadline)
        reading.arrived(part, gone, answer.nbytes)


class EngineReads(Reads):
    """Reads through one engine, while the owner holds the ranges.

    own: the card of the local region that the engine registered. While the engine moves bytes,
    the connection is watched, so that the death of the owner is noticed even if the engine does
    not notice it.
    """

    def __init__(self, transport: Transport, own: bytes, key: bytes) -> None:
        super().__init__(transport.name, key)
        self._transport = transport
        self._own = own

    def forget(self, owner: Owner) -> None:
        super().forget(owner)
        self._transport.forget(owner)

    def _cut(self, copies: Records) -> Iterator[Slice]:
        return cut(copies, MAX_HELD_BYTES, MAX_GET_ITEMS)

    def _take(self, reading: Reading, part: Slice) -> Slice | None:
        with self._transport.turn(reading.remote, self._own, reading.check) as card:
            done = self._bring(reading, part, card)
        return reading.next() if done else part

    def _bring(self, reading: Reading, part: Slice, card: bytes) -> bool:
        """False where a pooled connection was closed."""
        with self._connection(reading) as connection:
            fresh = connection.sequence == 0
            tag = 0 if self._transport.one_sided else secrets.randbits(48)
            nonce = self._ask(connection, part, reading.deadline, tag, card)
            answer = _answer(connection.stream, reading.deadline)
            if answer is None:
                if fresh or reading.stopped:
                    raise ConnectionResetError(
                        "the connection was closed before the owner answered"
                    )
                return False
            held = self._held(answer, nonce)
            sources = column(held.sources, U8, len(part.copies))
            self._move(connection.stream, part, reading, held.card, sources, tag)
            connection.clean = True
            return True

    def _held(self, answer: FromOwner, nonce: bytes) -> Held:
        """Check that the answer says what the owner holds, and comes from the owner."""
        if not isinstance(answer, Held):
            raise mixed_releases(
                f"unexpected reply to a request: expected Held, got {type(answer).__name__}"
            )
        mac = held_mac(self._key, nonce, answer.card, answer.sources)
        if not hmac.compare_digest(mac, answer.mac):
            raise TicketRefused(
                "the owner's reply to a request was altered in transit: use "
                "a trusted network, then repeat the call"
            )
        return answer

    def _move(
        self,
        stream: BulkStream,
        part: Slice,
        reading: Reading,
        card: bytes,
        sources: Offsets,
        tag: int,
    ) -> None:
        gone: Mask = sources == GONE
        moved = ~gone & (part.copies["nbytes"] > 0)
        copies, check = part.copies[moved], _checking(reading, stream)
        nbytes = int(copies["nbytes"].sum())
        if nbytes:
            request = ReadRequest(reading.remote, copies, card, sources[moved], tag, check)
            self._transport.read(request)
        stream.send(encode(Release(nbytes)), reading.deadline)
        _confirm(stream, nbytes, reading.deadline)
        reading.arrived(part, gone, nbytes)


def _answer(stream: BulkStream, deadline: float) -> FromOwner | None:
    """Receive an answer. None: the owner closed the connection without one, as it does with idle
    connections. Raises the error of a `Refused`."""
    frame = None
    with suppress(ConnectionError):
        frame = stream.receive(MAX_GET_FRAME_BYTES, deadline)
    return None if frame is None else answer_of(frame)


def _confirm(stream: BulkStream, nbytes: int, deadline: float) -> None:
    """The owner's word that so many bytes were pinned until now."""
    frame = stream.receive(MAX_GET_FRAME_BYTES, deadline)
    sent = None if frame is None else answer_of(frame)
    if not isinstance(sent, Sent) or sent.nbytes != nbytes:
        raise TransferFailed(
            "the owner did not confirm that the ranges stayed allocated until the end of "
            "the transfer: repeat the call"
        )


def _checking(reading: Reading, stream: BulkStream) -> Callable[[], None]:
    """See `ReadRequest.check`. The owner sends nothing while bytes move, unless it ends the
    transfer. The thread that receives this stops the read, and so all its threads."""
    lock = threading.Lock()

    def check() -> None:
        with lock:
            reading.raise_error()
            if time.monotonic() >= reading.deadline:
                raise _late(reading)
            if stream.readable(0):
                reading.stop(_said(reading, stream))
            reading.raise_error()

    return check


def _said(reading: Reading, stream: BulkStream) -> DataplaneError:
    """Why the owner ended the transfer."""
    try:
        frame = stream.receive(MAX_GET_FRAME_BYTES, reading.deadline)
        if frame is None:
            return _broken(reading, "the connection was closed")
        said = answer_of(frame)
    except OSError as exc:
        return _broken(reading, exc)
    except DataplaneError as exc:
        return exc
    return _broken(reading, f"unexpected message from the owner: {said!r}")


def _late(reading: Reading) -> DataplaneError:
    remote, nbytes = reading.remote, reading.nbytes
    return DeadlineExceeded(
        f"peer {remote.owner.peer!r} at {remote.address} did not send all requested bytes before "
        f"the deadline ({nbytes} bytes arrived): the peer may be suspended, dead, or cut off. "
        "Check `dataplane status`, then repeat the call",
        peer=remote.owner.peer,
        nbytes=nbytes,
    )


def _broken(reading: Reading, why: object) -> DataplaneError:
    remote = reading.remote
    return TransferFailed(
        f"the transfer from peer {remote.owner.peer!r} at {remote.address} was interrupted: {why}; "
        "repeat the call",
        peer=remote.owner.peer,
    )


def _typed(exc: BaseException, reading: Reading) -> DataplaneError:
    """The one place where what sockets raise becomes an error of ours."""
    remote = reading.remote
    peer = remote.owner.peer
    if isinstance(exc, DataplaneError):
        return exc
    if isinstance(exc, TimeoutError) and time.monotonic() >= reading.deadline:
        return _late(reading)
    if isinstance(exc, (ConnectionRefusedError, TimeoutError)):
        return Unavailable(
            f"peer {peer!r} does not answer at {remote.address} ({exc}): check `dataplane "
            "status`, then repeat the call",
            peer=peer,
        )
    if isinstance(exc, (OSError, EOFError)):
        return _broken(reading, exc)
    logger.error("bulk: transfer from peer %r failed", peer, exc_info=exc)
    return InternalError(
        f"the reading peer's bulk worker failed to read values from peer {peer!r}: {exc!r}; "
        "see the reading peer's log"
    )
