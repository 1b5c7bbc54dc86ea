"""The owner's side of TCP bulk transfer: answers other peers' pulls out of the arena's map.

Runs in a bulk worker, one thread per inbound connection, a bounded number of them. The request
takes the pin and the last frame confirms it. What a stranger sends ends that connection only.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from dataplane.errors import (
    DataplaneError,
    InternalError,
    LimitExceeded,
    ProtocolError,
    VersionMismatch,
)
from dataplane.transport.bulk_frames import (
    CHALLENGE_BYTES,
    GONE,
    MAX_PULL_BYTES,
    MAX_PULL_FRAME_BYTES,
    MAX_PULL_ITEMS,
    PIECE,
    Greeting,
    Pull,
    Refused,
    Sending,
    Sent,
    decode_pull,
    encode,
)
from dataplane.transport.seam import Mask, PinDesk, Records, Region
from dataplane.transport.slices import ranges_of
from dataplane.transport.stream import BulkStream, iovecs
from dataplane.transport.tickets import nonce_of, verify
from dataplane.wire.limits import PROTOCOL_VERSION, PROTOCOL_VERSION_MIN
from dataplane.wire.records import column
from dataplane.wire.tables import Owner

MAX_INBOUND = 64
IDLE_S = 120.0
FRAME_S = 10.0
"""A frame that began must be whole, and a greeting or refusal be taken, within this."""
EXPIRY_MAX_MS = 600_000
REFUSAL_S = 1.0

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Inbound:
    stream: BulkStream
    since: float
    busy: bool = False
    evicted: bool = False


class RangeServer:
    """Accepts on a listening socket and serves pulls until closed."""

    def __init__(
        self, listener: socket.socket, owner: Owner, key: bytes, region: Region, desk: PinDesk
    ) -> None:
        self._listener = listener
        self._owner = owner
        self._key = key
        self._region = region
        self._desk = desk
        self._inbound: set[_Inbound] = set()
        self._changed = threading.Condition()
        self._closed = False

    def __repr__(self) -> str:
        busy = sum(inbound.busy for inbound in list(self._inbound))
        return f"<RangeServer {len(self._inbound)} connections, {busy} busy>"

    def start(self) -> None:
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
        """Waits until one more connection may come in; the one idle for longest makes room."""
        with self._changed:
            while len(self._inbound) >= MAX_INBOUND and not self._closed:
                idle = [c for c in self._inbound if not c.busy and not c.evicted]
                if idle:
                    oldest = min(idle, key=lambda c: c.since)
                    oldest.evicted = True
                    oldest.stream.abort()
                self._changed.wait()
            return not self._closed

    def _admit(self, sock: socket.socket) -> None:
        try:
            inbound = _Inbound(BulkStream(sock), time.monotonic())
        except OSError:  # gone before it was served
            sock.close()
            return
        with self._changed:
            self._inbound.add(inbound)
        threading.Thread(
            target=self._serve, args=(inbound,), name="bulk-inbound", daemon=True
        ).start()

    def _serve(self, inbound: _Inbound) -> None:
        stream = inbound.stream
        try:
            self._converse(inbound)
        except DataplaneError as exc:
            logger.info("bulk: a connection is refused: %s", exc)
            stream.refuse(Refused.of(exc), time.monotonic() + REFUSAL_S)
        except OSError as exc:
            logger.debug("bulk: a connection ended: %s", exc)
        except Exception:
            logger.exception("bulk: a request could not be served")
            bug = InternalError("the owner's bulk worker failed; its log has the traceback")
            stream.refuse(Refused.of(bug), time.monotonic() + REFUSAL_S)
        finally:
            with self._changed:
                self._inbound.discard(inbound)
                stream.close()
                self._changed.notify_all()

    def _converse(self, inbound: _Inbound) -> None:
        challenge = secrets.token_bytes(CHALLENGE_BYTES)
        versions = (PROTOCOL_VERSION_MIN, PROTOCOL_VERSION)
        greeting = Greeting(
            versions, challenge, MAX_PULL_FRAME_BYTES, MAX_PULL_ITEMS, MAX_PULL_BYTES
        )
        inbound.stream.send(encode(greeting), time.monotonic() + FRAME_S)
        sequence = 0
        # A stranger that says nothing at all is worth less patience than an idle reader.
        while inbound.stream.readable(IDLE_S if sequence else FRAME_S) and self._begin(inbound):
            frame = inbound.stream.receive(MAX_PULL_FRAME_BYTES, time.monotonic() + FRAME_S)
            if frame is None:
                return
            self._answer(inbound.stream, frame, nonce_of(challenge, sequence))
            sequence += 1
            self._end(inbound)

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
        pull = decode_pull(frame)
        pieces = self._checked_pieces(pull)
        verify(self._key, pull.ticket, self._owner, nonce, pull.pieces)
        expiry_ms = min(max(pull.ticket.expiry_ms, 0), EXPIRY_MAX_MS)
        deadline = time.monotonic() + expiry_ms / 1000
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
        self._check_inside(pieces, places)
        nbytes = int(pieces["nbytes"].sum())
        base = np.uint64(self._region.address)
        body = iovecs(base + places["offset"] + pieces["start"], pieces["nbytes"])
        # One call may carry all three: the confirmation is copied out after the last byte, and
        # the pin lasts until the call is back.
        head = encode(Sending(_packed(gone), nbytes))
        stream.send_around(head, body, encode(Sent(nbytes)), deadline)
        return nbytes

    def _checked_pieces(self, pull: Pull) -> Records:
        if not PROTOCOL_VERSION_MIN <= pull.version <= PROTOCOL_VERSION:
            raise VersionMismatch(
                f"bulk protocol {pull.version} is asked for, this peer speaks "
                f"{PROTOCOL_VERSION_MIN} to {PROTOCOL_VERSION}",
                version=pull.version,
            )
        pieces: Records = column(pull.pieces, PIECE)
        if len(pieces) > MAX_PULL_ITEMS:
            raise LimitExceeded(
                f"{len(pieces)} pieces in one pull, the limit is {MAX_PULL_ITEMS}",
                size=len(pieces),
                limit=MAX_PULL_ITEMS,
            )
        # Piece by piece first: a sum of huge claims could wrap around.
        largest = int(pieces["nbytes"].max(initial=0))
        nbytes = largest if largest > MAX_PULL_BYTES else int(pieces["nbytes"].sum())
        if nbytes > MAX_PULL_BYTES:
            raise LimitExceeded(
                f"one pull asks for {nbytes} bytes, the limit is {MAX_PULL_BYTES}",
                size=nbytes,
                limit=MAX_PULL_BYTES,
            )
        if nbytes != pull.nbytes:
            raise ProtocolError(f"a pull announces {pull.nbytes} bytes, its pieces have {nbytes}")
        return pieces

    def _check_inside(self, pieces: Records, places: Records) -> None:
        """Neither a reader's piece nor a peer's answer may reach outside: addresses are raw."""
        start, nbytes, length = pieces["start"], pieces["nbytes"], places["length"]
        if ((start > length) | (nbytes > length - np.minimum(start, length))).any():
            raise ProtocolError("a pull asks for bytes beyond the end of a range")
        size = np.uint64(self._region.nbytes)
        if ((places["offset"] > size) | (length > size - np.minimum(places["offset"], size))).any():
            raise InternalError("the peer answered with a place outside its arena")


def _packed(gone: Mask) -> bytes:
    return gone.astype(np.uint8).tobytes() if gone.any() else b""
