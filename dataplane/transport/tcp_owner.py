"""The owner's side of TCP bulk transfer: answers other peers' pulls out of the arena's map.

Runs in a bulk worker, one thread per inbound connection, a bounded number of them. The request
takes the pin and the last frame confirms it. What a stranger sends ends that connection only, and
strangers take no member's place.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from dataplane.errors import (
    DataplaneError,
    DeadlineExceeded,
    InternalError,
    LimitExceeded,
    ProtocolError,
    TicketRefused,
    TransportMissing,
)
from dataplane.transport.asked import check_inside, check_version, checked_pieces
from dataplane.transport.bulk_frames import (
    CHALLENGE_BYTES,
    GONE,
    MAX_JOIN_FRAME_BYTES,
    MAX_PULL_BYTES,
    MAX_PULL_FRAME_BYTES,
    MAX_PULL_ITEMS,
    Greeting,
    Hold,
    Joined,
    Pull,
    Refused,
    Release,
    Sending,
    Sent,
    decode_join,
    decode_to_owner,
    encode,
)
from dataplane.transport.holds import Holds
from dataplane.transport.seam import Mask, PinDesk, Records, Region
from dataplane.transport.slices import ranges_of
from dataplane.transport.stream import BulkStream, Expired, iovecs
from dataplane.transport.tickets import held_bytes, nonce_of, proof, verify
from dataplane.wire.limits import PROTOCOL_VERSION, PROTOCOL_VERSION_MIN
from dataplane.wire.refusals import Refusals
from dataplane.wire.tables import Owner

MAX_INBOUND = 64
MAX_STRANGERS = 32
"""Connections that have not joined yet; they take no room from the others."""
IDLE_S = 120.0
FRAME_S = 10.0
"""A frame that began must be whole, and a greeting or refusal be taken, within this; a handshake of
TLS must be over."""
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


class RangeServer:
    """Accepts on a listening socket and serves pulls until closed."""

    def __init__(
        self,
        listener: socket.socket,
        owner: Owner,
        key: bytes,
        region: Region,
        desk: PinDesk,
        stream_of: Callable[[socket.socket], BulkStream] = BulkStream,
    ) -> None:
        self._listener = listener
        self._stream_of = stream_of
        self._owner = owner
        self._key = key
        self._region = region
        self._desk = desk
        self._inbound: set[_Inbound] = set()
        self._changed = threading.Condition()
        self._closed = False
        self._holds: Mapping[str, Holds] = {}
        self._refusals = Refusals(logger, "bulk transfer")

    def __repr__(self) -> str:
        busy = sum(inbound.busy for inbound in list(self._inbound))
        return f"<RangeServer {len(self._inbound)} connections, {busy} busy>"

    def start(self, holds: Mapping[str, Holds]) -> None:
        self._holds = holds
        threading.Thread(target=self._accept, name="bulk-accept", daemon=True).start()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            for inbound in self._inbound:
                inbound.stream.abort()
            self._changed.notify_all()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while self._await_room():
            try:
                sock, _ = self._listener.accept()
            except OSError as exc:
                if self._closed:
                    return
                logger.warning("bulk: a connection could not be accepted: %s", exc)
                with self._changed:  # out of descriptors: until one is free, or a moment
                    self._changed.wait(0.1)
                continue
            self._admit(sock)

    def _await_room(self) -> bool:
        """Waits until one more may come in that has not joined; the oldest such makes room."""
        with self._changed:
            while len(strangers := self._of(member=False)) >= MAX_STRANGERS and not self._closed:
                _evict(strangers)
                self._changed.wait()
            return not self._closed

    def _of(self, member: bool) -> list[_Inbound]:
        return [inbound for inbound in self._inbound if inbound.member is member]

    def _admit(self, sock: socket.socket) -> None:
        try:
            inbound = _Inbound(self._stream_of(sock), time.monotonic())
        except OSError:  # gone before it was served
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
            self._refusals.count(f"no thread for one more connection: {exc}")
            with self._changed:
                self._inbound.discard(inbound)
                inbound.stream.close()

    def _serve(self, inbound: _Inbound) -> None:
        stream = inbound.stream
        try:
            self._converse(inbound)
        except DataplaneError as exc:
            self._refusals.count(exc)
            self._refuse(inbound, exc)
        except OSError as exc:
            logger.debug("bulk: a connection ended: %s", exc)
        except Exception:
            logger.exception("bulk: a request could not be served")
            bug = InternalError("the owner's bulk worker failed; its log has the traceback")
            self._refuse(inbound, bug)
        finally:
            with self._changed:
                self._inbound.discard(inbound)
                stream.close()
                self._changed.notify_all()

    def _refuse(self, inbound: _Inbound, error: DataplaneError) -> None:
        self._end(inbound)  # who does not take his refusal makes room for others
        inbound.stream.refuse(Refused.of(error), time.monotonic() + REFUSAL_S)

    def _converse(self, inbound: _Inbound) -> None:
        challenge = secrets.token_bytes(CHALLENGE_BYTES)
        versions = (PROTOCOL_VERSION_MIN, PROTOCOL_VERSION)
        greeting = Greeting(
            versions, challenge, MAX_PULL_FRAME_BYTES, MAX_PULL_ITEMS, MAX_PULL_BYTES
        )
        inbound.stream.handshake(time.monotonic() + FRAME_S)
        inbound.stream.send(encode(greeting), time.monotonic() + FRAME_S)
        if not self._join(inbound, challenge):
            return
        sequence = 0
        while inbound.stream.readable(IDLE_S) and self._begin(inbound):
            frame = inbound.stream.receive(MAX_PULL_FRAME_BYTES, time.monotonic() + FRAME_S)
            if frame is None:
                return
            self._answer(inbound.stream, frame, nonce_of(challenge, sequence))
            sequence += 1
            self._end(inbound)

    def _join(self, inbound: _Inbound, challenge: bytes) -> bool:
        """Both sides prove that they have the plane's key. False: it left without a word."""
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
                "this reader does not belong to the plane: start all its peers with the same "
                "--run, --seeds and --token-file"
            )
        self._enter(inbound, deadline)
        stream.send(encode(Joined(proof(self._key, "owner", challenge, join.challenge))), deadline)
        return True

    def _enter(self, inbound: _Inbound, deadline: float) -> None:
        """Becomes one of the members; the one idle for longest makes room."""
        with self._changed:
            while len(members := self._of(member=True)) >= MAX_INBOUND:
                _evict([member for member in members if not member.busy])
                if not self._changed.wait(deadline - time.monotonic()):
                    raise LimitExceeded(
                        f"all {MAX_INBOUND} connections of this bulk worker are busy: try again",
                        limit=MAX_INBOUND,
                    )
            inbound.member = True
            inbound.since = time.monotonic()
            self._changed.notify_all()

    def _begin(self, inbound: _Inbound) -> bool:
        with self._changed:
            inbound.busy = not (inbound.evicted or self._closed)
            return inbound.busy

    def _end(self, inbound: _Inbound) -> None:
        with self._changed:
            inbound.busy = False
            inbound.since = time.monotonic()
            self._changed.notify_all()

    def _answer(self, stream: BulkStream, frame: bytes, nonce: bytes) -> None:
        asked = decode_to_owner(frame)
        if isinstance(asked, Release):
            raise ProtocolError("a release where nothing is held")
        pieces, bound = checked_pieces(asked), asked.pieces
        if isinstance(asked, Hold):
            bound = held_bytes(asked.pieces, asked.transport, asked.card)
        verify(self._key, asked.ticket, self._owner, nonce, bound)
        expiry_ms = min(asked.ticket.expiry_ms, EXPIRY_MAX_MS)
        if expiry_ms <= 0:
            raise DeadlineExceeded("the ticket had expired before it came")
        deadline = time.monotonic() + expiry_ms / 1000
        try:
            if isinstance(asked, Pull):
                self._pulled(stream, pieces, deadline)
            else:
                self._holds_of(asked).answer(stream, asked, pieces, nonce, deadline)
        except Expired as exc:
            raise DeadlineExceeded("the ticket expired before its answer went out") from exc

    def _holds_of(self, hold: Hold) -> Holds:
        if hold.transport not in self._holds:
            runs = ", ".join(("tcp", *self._holds))
            raise TransportMissing(
                f"this peer's bulk worker runs {runs}, not {hold.transport}",
                transport=hold.transport,
            )
        return self._holds[hold.transport]

    def _pulled(self, stream: BulkStream, pieces: Records, deadline: float) -> None:
        pinned = self._desk.pin(ranges_of(pieces), deadline)
        sent = 0
        try:
            sent = self._send(stream, pieces, pinned.places, deadline)
        finally:
            self._desk.unpin(pinned.ask, sent)

    def _send(self, stream: BulkStream, pieces: Records, places: Records, deadline: float) -> int:
        gone = places["offset"] == GONE
        if gone.any():
            pieces, places = pieces[~gone], places[~gone]
        check_inside(self._region, pieces, places)
        nbytes = int(pieces["nbytes"].sum())
        base = np.uint64(self._region.address)
        body = iovecs(base + places["offset"] + pieces["start"], pieces["nbytes"])
        # One call may carry all three: the confirmation is copied out after the last byte, and
        # the pin lasts until the call is back.
        head = encode(Sending(_packed(gone), nbytes))
        stream.send_around(head, body, encode(Sent(nbytes)), deadline)
        return nbytes


def _evict(idle: list[_Inbound]) -> None:
    """Ends the oldest, unless one is ending already."""
    if idle and not any(inbound.evicted for inbound in idle):
        oldest = min(idle, key=lambda inbound: inbound.since)
        oldest.evicted = True
        oldest.stream.abort()


def _packed(gone: Mask) -> bytes:
    return gone.astype(np.uint8).tobytes() if gone.any() else b""
