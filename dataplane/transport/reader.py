"""The reader's side of bulk transfer: one `Get` for each job of the peer.

Runs in a bulk worker, in the thread of the job. The owner holds the chunks, a transport moves their
bytes, and the owner confirms that it held them to the end. The conversation uses a joined
connection, and TCP moves the bytes over it as well.

The first error ends the read. The read returns only when nothing can write to the destination
any more, so that the peer can reuse it.
"""

from __future__ import annotations

import hmac
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from dataplane.errors import (
    DataplaneError,
    InternalError,
    TicketRefused,
    TransferFailed,
    Unavailable,
    mixed_releases,
)
from dataplane.transport.bulk_frames import (
    GONE,
    MAX_GET_FRAME_BYTES,
    FromOwner,
    Get,
    Held,
    Release,
    Sent,
    encode,
)
from dataplane.transport.connections import Connection, Connections
from dataplane.transport.joining import answer_of
from dataplane.transport.reading import Reading
from dataplane.transport.seam import Mask, ReadRequest, Transport
from dataplane.transport.slices import pieces_of
from dataplane.transport.stream import BulkStream
from dataplane.transport.tickets import held_mac, ticket_of
from dataplane.wire.packed import U8, column
from dataplane.wire.tables import Owner

logger = logging.getLogger(__name__)


class Reads:
    """All reads of one worker by one transport, with a pool of connections.

    own: the card of the local region that the transport registered.
    """

    def __init__(self, transport: Transport, own: bytes, key: bytes, *, tls_only: bool) -> None:
        self._transport = transport
        self._own = own
        self._key = key
        self._connections = Connections(key, tls_only=tls_only)

    def forget(self, owner: Owner) -> None:
        """See `Transport.forget`."""
        self._connections.forget(owner)
        self._transport.forget(owner)

    def read(self, reading: Reading) -> Mask:
        """Carry out a read. Return which of its copies are gone at the owner."""
        try:
            with self._transport.turn(reading.remote, self._own, reading.check) as card:
                while (gone := self._bring(reading, card)) is None:
                    pass
                return gone
        except BaseException as exc:
            raise reading.stop(_typed(exc, reading)) from None

    def _bring(self, reading: Reading, card: bytes) -> Mask | None:
        """Read over one connection. Return None if a pooled connection was closed while idle."""
        transport, deadline = self._transport, reading.deadline
        with self._connection(reading) as connection:
            stream, fresh = connection.stream, connection.sequence == 0
            nonce = self._ask(connection, reading, card)
            answer = _answer(stream, deadline)
            if answer is None:
                if fresh or reading.stopped:
                    raise ConnectionResetError(
                        "the connection was closed before the owner answered"
                    )
                return None
            held = self._held(answer, nonce)
            sources = column(held.sources, U8, len(reading.copies))
            gone: Mask = sources == GONE
            moved = ~gone & (reading.copies["nbytes"] > 0)
            copies, check = reading.copies[moved], _checking(reading, stream)
            nbytes = int(copies["nbytes"].sum())
            if nbytes:
                where = reading.remote, copies, held.card, sources[moved]
                transport.read(ReadRequest(*where, check, stream, deadline))
            if not transport.in_band:
                stream.send(encode(Release(nbytes)), deadline)
            _confirm(stream, nbytes, deadline)
            connection.clean = True
            return gone

    @contextmanager
    def _connection(self, reading: Reading) -> Iterator[Connection]:
        """Borrow a connection for one transfer. Others may use it if the body leaves it `clean`."""
        connection = self._connections.borrow(reading)
        try:
            yield connection
        finally:
            if reading.unwatch() and connection.clean:
                self._connections.give_back(connection)
            else:
                self._connections.discard(connection)

    def _ask(self, connection: Connection, reading: Reading, card: bytes) -> bytes:
        """Send the request. Return its nonce."""
        pieces, nonce = pieces_of(reading.copies).tobytes(), connection.nonce()
        expiry_ms = max(1, int((reading.deadline - time.monotonic()) * 1000))
        get = Get(reading.remote.owner, expiry_ms, pieces, self._transport.name, card)
        get.ticket = ticket_of(self._key, nonce, get)
        with suppress(ConnectionError):  # then there is no answer
            connection.stream.send(encode(get), reading.deadline)
        return nonce

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


def _answer(stream: BulkStream, deadline: float) -> FromOwner | None:
    """Receive an answer. None: the owner closed the connection without one, as it does with idle
    connections. Raises the error of a `Refused`."""
    frame = None
    with suppress(ConnectionError):
        frame = stream.receive(MAX_GET_FRAME_BYTES, deadline)
    return None if frame is None else answer_of(frame)


def _confirm(stream: BulkStream, nbytes: int, deadline: float) -> None:
    """Receive the owner's confirmation that `nbytes` bytes were pinned until now."""
    frame = stream.receive(MAX_GET_FRAME_BYTES, deadline)
    sent = None if frame is None else answer_of(frame)
    if not isinstance(sent, Sent) or sent.nbytes != nbytes:
        raise TransferFailed(
            "the owner did not confirm that the chunks stayed allocated until the end of "
            "the transfer: repeat the call"
        )


def _checking(reading: Reading, stream: BulkStream) -> Callable[[], None]:
    """See `ReadRequest.check`. The owner sends nothing while bytes move, unless it ends the
    transfer. The thread that receives this stops the read."""
    lock = threading.Lock()

    def check() -> None:
        with lock:
            reading.check()
            if stream.readable(0):
                raise reading.stop(_end_reason(reading, stream))

    return check


def _end_reason(reading: Reading, stream: BulkStream) -> DataplaneError:
    """Return why the owner ended the transfer."""
    try:
        frame = stream.receive(MAX_GET_FRAME_BYTES, reading.deadline)
        if frame is None:
            return _broken(reading, "the connection was closed")
        answer = answer_of(frame)
    except OSError as exc:
        return _broken(reading, exc)
    except DataplaneError as exc:
        return exc
    return _broken(reading, f"unexpected message from the owner: {answer!r}")


def _broken(reading: Reading, why: object) -> DataplaneError:
    remote = reading.remote
    return TransferFailed(
        f"the transfer from peer {remote.owner.peer!r} at {remote.address} was interrupted: {why}; "
        "repeat the call",
        peer=remote.owner.peer,
    )


def _typed(exc: BaseException, reading: Reading) -> DataplaneError:
    """Turn an error of a socket into one of our errors. No other function does that."""
    remote = reading.remote
    peer = remote.owner.peer
    if isinstance(exc, DataplaneError):
        return exc
    if isinstance(exc, TimeoutError) and time.monotonic() >= reading.deadline:
        return reading.late()
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
