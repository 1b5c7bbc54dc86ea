"""The owner's side of bulk transfer: serves `Get` by every transport that the worker runs.

Runs in a bulk worker, with one thread per inbound connection and a bounded number of them. A
request pins its chunks, and its last frame confirms that they were pinned while their bytes moved.
An invalid message of an unknown process ends only its
connection, and unknown processes do not use members' slots. Every request is checked before
anything is pinned or moved: addresses behind these checks are raw, so nothing here trusts a
reader's column or a peer's answer.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from dataplane.errors import (
    DataplaneError,
    DeadlineExceeded,
    InternalError,
    LimitExceeded,
    TicketRefused,
    TransferFailed,
    TransportMissing,
    VersionMismatch,
    mixed_releases,
)
from dataplane.transport.bulk_frames import (
    CHALLENGE_BYTES,
    GONE,
    MAX_CARD_BYTES,
    MAX_GET_FRAME_BYTES,
    MAX_GET_ITEMS,
    MAX_JOIN_FRAME_BYTES,
    PIECE,
    Get,
    Greeting,
    Held,
    Joined,
    Refused,
    Release,
    Sent,
    Watch,
    Watched,
    decode_join,
    decode_to_owner,
    encode,
)
from dataplane.transport.control import PinDesk
from dataplane.transport.seam import (
    Offsets,
    Records,
    Region,
    SendRequest,
    Transport,
)
from dataplane.transport.stream import BulkStream
from dataplane.transport.tickets import (
    held_mac,
    nonce_of,
    proof,
    ticket_of,
    watched_mac,
)
from dataplane.wire.limits import PROTOCOL_VERSION, PROTOCOL_VERSION_MIN
from dataplane.wire.packed import column
from dataplane.wire.refusals import Refusals
from dataplane.wire.tables import Owner

MAX_INBOUND = 64
MAX_STRANGERS = 32
"""The most connections that have not joined. They use no slots of joined connections."""
IDLE_S = 120.0
FRAME_S = 10.0
"""The time limit for a frame that has begun, for a greeting or refusal to be received, and for a
TLS handshake."""
EXPIRY_MAX_MS = 600_000
REFUSAL_S = 1.0

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Inbound:
    stream: BulkStream
    since: float
    member: bool = False
    busy: bool = False
    evicted: bool = False


class ChunkServer:
    """Accepts connections on a listening socket and serves pulls until the socket is closed."""

    def __init__(
        self,
        listener: socket.socket,
        owner: Owner,
        key: bytes,
        transports: Mapping[str, Service],
        stream_of: Callable[[socket.socket], BulkStream] = BulkStream,
        ended: bool = False,
    ) -> None:
        """transports: those that the worker runs. stream_of: wraps an accepted socket. ended: the
        owner's process has exited, and this is its witness."""
        self._listener = listener
        self._stream_of = stream_of
        self._owner = owner
        self._key = key
        self._transports = transports
        self._inbound: set[_Inbound] = set()
        self._changed = threading.Condition()
        self._ended = ended
        self._refusals = Refusals(logger, "bulk transfer")

    def __repr__(self) -> str:
        busy = sum(inbound.busy for inbound in list(self._inbound))
        return f"<ChunkServer {len(self._inbound)} connections, {busy} busy>"

    def start(self) -> None:
        threading.Thread(target=self._accept, name="bulk-accept", daemon=True).start()

    def _accept(self) -> None:
        while True:
            self._await_room()
            try:
                sock, _ = self._listener.accept()
            except OSError as exc:
                if self._listener.fileno() < 0:
                    return
                logger.warning("bulk: could not accept a connection: %s", exc)
                with self._changed:  # no descriptor left: wait until one is free
                    self._changed.wait(0.1)
                continue
            self._admit(sock)

    def _await_room(self) -> None:
        """Wait until another unjoined connection may be accepted. Abort the oldest unjoined one for
        it."""
        with self._changed:
            while len(strangers := self._of(member=False)) >= MAX_STRANGERS:
                _evict(strangers)
                self._changed.wait()

    def _of(self, member: bool) -> list[_Inbound]:
        return [inbound for inbound in self._inbound if inbound.member is member]

    def _admit(self, sock: socket.socket) -> None:
        try:
            inbound = _Inbound(self._stream_of(sock), time.monotonic())
        except OSError:  # closed before it was served
            sock.close()
            return
        with self._changed:
            self._inbound.add(inbound)
        thread = threading.Thread(
            target=self._serve, args=(inbound,), name="bulk-inbound", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as exc:
            self._refusals.count(f"cannot start another thread: {exc}")
            with self._changed:
                self._inbound.discard(inbound)
                inbound.stream.close()

    def _serve(self, inbound: _Inbound) -> None:
        stream = inbound.stream
        try:
            self._serve_connection(inbound)
        except DataplaneError as exc:
            self._refusals.count(exc)
            self._refuse(inbound, exc)
        except OSError as exc:
            logger.debug("bulk: connection closed: %s", exc)
        except Exception:
            logger.exception("bulk: could not serve a request")
            bug = InternalError(
                f"the bulk worker of peer {self._owner.peer!r} failed: see the traceback in that "
                "peer's log"
            )
            self._refuse(inbound, bug)
        finally:
            with self._changed:
                self._inbound.discard(inbound)
                stream.close()
                self._changed.notify_all()

    def _refuse(self, inbound: _Inbound, error: DataplaneError) -> None:
        self._end(inbound)  # a reader that does not take its refusal must not block others
        inbound.stream.refuse(Refused.of(error), time.monotonic() + REFUSAL_S)

    def _serve_connection(self, inbound: _Inbound) -> None:
        challenge = secrets.token_bytes(CHALLENGE_BYTES)
        versions = (PROTOCOL_VERSION_MIN, PROTOCOL_VERSION)
        greeting = Greeting(versions, challenge)
        inbound.stream.handshake(time.monotonic() + FRAME_S)
        inbound.stream.send(encode(greeting), time.monotonic() + FRAME_S)
        if not self._join(inbound, challenge):
            return
        sequence = 0
        while inbound.stream.readable(IDLE_S) and self._begin(inbound):
            frame = inbound.stream.receive(MAX_GET_FRAME_BYTES, time.monotonic() + FRAME_S)
            if frame is None:
                return
            self._answer(inbound.stream, frame, nonce_of(challenge, sequence))
            sequence += 1
            self._end(inbound)

    def _join(self, inbound: _Inbound, challenge: bytes) -> bool:
        """Exchange proofs of the run's key. Return False if the reader left without an answer."""
        stream = inbound.stream
        deadline = time.monotonic() + FRAME_S
        frame = stream.receive(MAX_JOIN_FRAME_BYTES, deadline)
        if frame is None:
            return False
        join = decode_join(frame)
        check_version(join.version)
        expected = proof(self._key, "reader", challenge, join.challenge)
        if not hmac.compare_digest(expected, join.proof):
            raise TicketRefused(
                "the reader and the owner of the values belong to different runs: start "
                "all peers with the same --run, --seeds and --token-file"
            )
        self._enter(inbound, deadline)
        stream.send(encode(Joined(proof(self._key, "owner", challenge, join.challenge))), deadline)
        return True

    def _enter(self, inbound: _Inbound, deadline: float) -> None:
        """Count the connection as joined. If there are too many, close the one that is idle
        longest."""
        with self._changed:
            while len(members := self._of(member=True)) >= MAX_INBOUND:
                _evict([member for member in members if not member.busy])
                if not self._changed.wait(deadline - time.monotonic()):
                    raise LimitExceeded(
                        f"all {MAX_INBOUND} connections to the bulk worker of peer "
                        f"{self._owner.peer!r} are busy: repeat the call",
                        limit=MAX_INBOUND,
                    )
            inbound.member = True
            inbound.since = time.monotonic()
            self._changed.notify_all()

    def _begin(self, inbound: _Inbound) -> bool:
        with self._changed:
            inbound.busy = not inbound.evicted
            return inbound.busy

    def _end(self, inbound: _Inbound) -> None:
        with self._changed:
            inbound.busy = False
            inbound.since = time.monotonic()
            self._changed.notify_all()

    def _answer(self, stream: BulkStream, frame: bytes, nonce: bytes) -> None:
        asked = decode_to_owner(frame)
        if isinstance(asked, Watch):
            self._watched(stream, asked, nonce)
            return
        if self._ended:
            raise TransferFailed(
                f"the process of peer {self._owner.peer!r} has exited: repeat the call"
            )
        if isinstance(asked, Release):
            raise mixed_releases(
                "unexpected Release from the reader: the owner holds no chunks for this reader"
            )
        service = self._service(asked.transport)
        pieces = checked_pieces(asked, service.most_bytes)
        # one error for every wrong ticket, so that it reveals nothing about the key
        if not hmac.compare_digest(ticket_of(self._key, nonce, asked), asked.ticket):
            raise TicketRefused(
                "the ticket is invalid: it was issued with the key of a different run, for a "
                "different connection, or for another request. Start all peers with the same "
                "--run and --token-file"
            )
        self._check_owner(asked.owner)
        # The reader's time started earlier, so after this it waits for no answer.
        deadline = time.monotonic() + min(asked.expiry_ms, EXPIRY_MAX_MS) / 1000
        service.serve(Transfer(stream, asked, pieces, nonce, deadline))

    def _watched(self, stream: BulkStream, asked: Watch, nonce: bytes) -> None:
        self._check_owner(asked.owner)
        mac = watched_mac(self._key, nonce, self._owner, self._ended)
        stream.send(encode(Watched(self._ended, mac)), time.monotonic() + FRAME_S)

    def _check_owner(self, asked: Owner) -> None:
        if asked != self._owner:
            raise TicketRefused(
                f"the request is for incarnation {asked.incarnation} of peer {asked.peer!r}, but "
                f"it reached incarnation {self._owner.incarnation} of peer {self._owner.peer!r}: "
                "repeat the call to find where the values are now",
                peer=self._owner.peer,
                incarnation=self._owner.incarnation,
            )

    def _service(self, transport: str) -> Service:
        if transport not in self._transports:
            raise TransportMissing(
                f"the bulk worker of peer {self._owner.peer!r} does not support transport "
                f"{transport} (it supports {', '.join(self._transports)}): start all peers with "
                "the same --transport",
                transport=transport,
            )
        return self._transports[transport]


def _evict(idle: list[_Inbound]) -> None:
    """Abort the oldest idle connection, unless an evicted one has not ended yet."""
    if idle and not any(inbound.evicted for inbound in idle):
        oldest = min(idle, key=lambda inbound: inbound.since)
        oldest.evicted = True
        oldest.stream.abort()


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """A checked request with a valid ticket. nonce: of the ticket. deadline: its end."""

    stream: BulkStream
    get: Get
    pieces: Records
    nonce: bytes
    deadline: float


class Service:
    """Serves requests by one transport. card: of the region that the transport registered.

    The pin ends when the bytes are sent or, out of band, when the reader releases it on the same
    connection, which confirms the read; when the ticket expires; or when the connection ends.
    """

    def __init__(
        self, transport: Transport, card: bytes, region: Region, desk: PinDesk, key: bytes
    ) -> None:
        self.most_bytes = transport.most_bytes
        self._transport = transport
        self._card = card
        self._region = region
        self._desk = desk
        self._key = key
        self._under_way = 0
        self._lock = threading.Lock()

    def serve(self, transfer: Transfer) -> None:
        """Serve a request, up to the confirmation."""
        pin, places = self._desk.pin(transfer.pieces["chunk"], transfer.deadline)
        nbytes = 0
        try:
            sources = sources_of(self._region, transfer.pieces, places)
            nbytes = self._move(transfer, sources)
        finally:
            self._desk.unpin(pin, nbytes)

    def _move(self, transfer: Transfer, sources: Offsets) -> int:
        """Send the pieces that are not gone, or let the reader read them, and confirm it. Return
        the number of bytes."""
        stream, deadline = transfer.stream, transfer.deadline
        nbytes = int(transfer.pieces["nbytes"][sources != GONE].sum())
        self._count(1)
        try:
            stream.send(encode(self._held(transfer.nonce, sources)), deadline)
            if nbytes and not self._transport.one_sided:
                self._send(transfer, sources)
            if not self._transport.in_band:
                _await_release(stream, nbytes, deadline)
        finally:
            self._count(-1)
        stream.send(encode(Sent(nbytes)), deadline)
        return nbytes

    def _count(self, change: int) -> None:
        with self._lock:
            self._under_way += change
            self._transport.holding(self._under_way)

    def _held(self, nonce: bytes, sources: Offsets) -> Held:
        raw = sources.tobytes()
        return Held(raw, self._card, held_mac(self._key, nonce, self._card, raw))

    def _send(self, transfer: Transfer, sources: Offsets) -> None:
        stream, pieces, deadline = transfer.stream, transfer.pieces, transfer.deadline

        def check() -> None:
            if stream.ended():
                raise TransferFailed("the reader closed the connection: repeat the call")
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(
                    "the ticket expired before all bytes were sent: repeat the call"
                )

        there = (sources != GONE) & (pieces["nbytes"] > 0)
        nbytes = np.ascontiguousarray(pieces["nbytes"][there])
        get = transfer.get
        self._transport.send(SendRequest(get.card, sources[there], nbytes, check, stream, deadline))


def _await_release(stream: BulkStream, nbytes: int, deadline: float) -> None:
    """Wait for `Release`, with which the reader says that it has all bytes."""
    frame = stream.receive(MAX_JOIN_FRAME_BYTES, deadline)
    if frame is None:
        raise ConnectionResetError("the reader closed the connection before it released the chunks")
    release = decode_to_owner(frame)
    if not isinstance(release, Release):
        raise mixed_releases(
            f"unexpected message from the reader: expected Release, got {type(release).__name__}"
        )
    if release.nbytes != nbytes:
        raise mixed_releases(
            f"invalid Release from the reader: expected {nbytes} bytes, got {release.nbytes}"
        )


def check_version(version: int) -> None:
    """Raise VersionMismatch unless this peer speaks the version."""
    if not PROTOCOL_VERSION_MIN <= version <= PROTOCOL_VERSION:
        raise VersionMismatch(
            f"the reader speaks bulk protocol version {version}, but the owner of the "
            f"values speaks versions {PROTOCOL_VERSION_MIN} to {PROTOCOL_VERSION}: install the "
            "same dataplane release everywhere",
            version=version,
        )


def checked_pieces(asked: Get, most: int) -> Records:
    """Return the PIECE records of a request of at most `most` bytes. Raises LimitExceeded or
    ProtocolError."""
    if len(asked.card) > MAX_CARD_BYTES:
        raise mixed_releases(
            f"the reader's memory description is {len(asked.card)} bytes long, over the limit of "
            f"{MAX_CARD_BYTES}"
        )
    pieces: Records = column(asked.pieces, PIECE)
    if len(pieces) > MAX_GET_ITEMS:
        raise LimitExceeded(
            f"the request has {len(pieces)} pieces, over the limit of {MAX_GET_ITEMS}: "
            "install the same dataplane release everywhere",
            size=len(pieces),
            limit=MAX_GET_ITEMS,
        )
    # Piece by piece first: a sum of huge claims could wrap around.
    largest = int(pieces["nbytes"].max(initial=0))
    nbytes = largest if largest > most else int(pieces["nbytes"].sum())
    if nbytes > most:
        raise LimitExceeded(
            f"the request is for {nbytes} bytes, over the limit of {most}: install the same "
            "dataplane release everywhere",
            size=nbytes,
            limit=most,
        )
    return pieces


def sources_of(region: Region, pieces: Records, places: Records) -> Offsets:
    """Return where each piece starts in the region, or GONE if its chunk was freed. Neither a
    reader's piece nor a peer's answer may reach outside the region."""
    start, nbytes = pieces["start"], pieces["nbytes"]
    offset, length = places["offset"], places["length"]
    there = offset != GONE
    beyond = (start > length) | (nbytes > length - np.minimum(start, length))
    if (beyond & there).any():
        at = int(np.argmax(beyond & there))
        end = int(start[at]) + int(nbytes[at])
        raise mixed_releases(
            f"piece {at} of the request ends at byte {end} of its chunk, which is only "
            f"{int(length[at])} bytes long"
        )
    size = np.uint64(region.nbytes)
    outside = (offset > size) | (length > size - np.minimum(offset, size))
    if (outside & there).any():
        raise InternalError(
            "the peer pinned a value at an offset outside its arena. This is a bug in dataplane: "
            "please report this error"
        )
    sources: Offsets = np.where(there, offset + start, GONE)
    return sources
