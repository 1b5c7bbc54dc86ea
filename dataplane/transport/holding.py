"""The reader's side of an engine that takes no pins: hold at the owner, read, confirm.

Runs in a bulk worker. The conversation goes over a joined connection to the owner's worker, the
bytes over the engine. Nothing counts before the owner confirmed that it held the ranges until the
end. While the engine moves bytes the connection is watched: an owner that died is noticed, whatever
the engine notices.
"""

from __future__ import annotations

import hmac
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np

from dataplane.errors import (
    DataplaneError,
    DeadlineExceeded,
    ProtocolError,
    TicketRefused,
    TransferFailed,
)
from dataplane.transport.bulk_frames import (
    GONE,
    MAX_HOLD_BYTES,
    MAX_PULL_FRAME_BYTES,
    MAX_PULL_ITEMS,
    SMALL_LANE_BYTES,
    FromOwner,
    Hold,
    Refused,
    Release,
    Sent,
    decode_from_owner,
    encode,
)
from dataplane.transport.bulk_frames import Held as HeldFrame
from dataplane.transport.connections import Connection, Connections, Lane
from dataplane.transport.renewals import Renewals
from dataplane.transport.seam import (
    Endpoint,
    Held,
    Mask,
    Offsets,
    ReadRequest,
    RegionKey,
    Remote,
    Transport,
)
from dataplane.transport.slices import Slice, cut, pieces_of
from dataplane.transport.stream import BulkStream
from dataplane.transport.tcp_reader import typed_error
from dataplane.transport.tickets import held_bytes, held_mac, issue
from dataplane.wire.records import U8, column


class _Reading:
    """One read under way, which may be told to stop while it waits for the owner."""

    def __init__(self, request: ReadRequest) -> None:
        self.request = request
        self.nbytes = 0
        self.renewals = Renewals(request.deadline)
        self._stream: BulkStream | None = None
        self._lock = threading.Lock()

    @property
    def stopped(self) -> bool:
        return self.request.cancelled.is_set()

    def watch(self, stream: BulkStream) -> None:
        with self._lock:
            self._stream = stream
            if self.stopped:
                stream.abort()

    def unwatch(self, stream: BulkStream) -> bool:
        with self._lock:
            self._stream = None
            return not self.stopped

    def abort(self) -> None:
        with self._lock:
            if self._stream is not None:
                self._stream.abort()


class HeldReads:
    """Reads through one engine. own: what it registered the local region as."""

    def __init__(self, transport: Transport, own: RegionKey, key: bytes) -> None:
        self._transport = transport
        self._own = own
        self._key = key
        self._connections = Connections(key)
        self._live: dict[int, _Reading] = {}

    def read(self, request: ReadRequest) -> Mask:
        """As `Transport.read`, for any number of copies."""
        reading = self._live[request.job] = _Reading(request)
        gone = np.zeros(len(request.copies), bool)
        endpoints = request.remote.endpoints
        address = endpoints[request.job % len(endpoints)]
        try:
            for part in cut(request.copies, MAX_HOLD_BYTES, MAX_PULL_ITEMS):
                gone[part.index[self._part(reading, part, address)]] = True
        except BaseException as exc:
            if reading.stopped:
                raise TransferFailed("the read was cancelled") from exc
            raise typed_error(exc, request, reading.nbytes, address) from exc
        finally:
            del self._live[request.job]
        return gone

    def cancel(self, job: int) -> None:
        if (reading := self._live.get(job)) is not None:
            reading.abort()
            self._connections.wake()
            self._transport.cancel(job)

    def forget(self, remote: Remote) -> None:
        self._connections.forget(remote.endpoints)
        self._transport.forget(remote)

    def close(self) -> None:
        for reading in list(self._live.values()):
            reading.request.cancelled.set()
            reading.abort()
        self._connections.wake()
        self._connections.close()
        self._transport.close()

    def _part(self, reading: _Reading, part: Slice, address: Endpoint) -> Mask:
        """Again on another connection where a pooled one was closed for being idle, or the ticket
        ran out."""
        while True:
            try:
                with self._turn(reading.request, address) as card:
                    gone = self._try(reading, part, address, card)
            except DeadlineExceeded:
                if reading.stopped or not reading.renewals.take():
                    raise
                continue
            if gone is not None:
                return gone

    def _turn(self, request: ReadRequest, address: Endpoint) -> AbstractContextManager[bytes]:
        if self._transport.capabilities.one_sided:
            return nullcontext(b"")
        return self._transport.turn(request, address, self._own)

    def _try(self, reading: _Reading, part: Slice, address: Endpoint, card: bytes) -> Mask | None:
        lane: Lane = "small" if part.nbytes <= SMALL_LANE_BYTES else "large"
        deadline = reading.request.deadline
        connection = self._connections.borrow(address, lane, deadline, reading)
        clean, fresh = False, connection.sequence == 0
        try:
            held = self._hold(connection, part, reading, card)
            if held is None:
                if fresh or reading.stopped:
                    raise ConnectionResetError("the connection ended before the answer")
                return None
            gone = self._move(connection, part, reading, *held)
            clean = True
            return gone
        finally:
            if reading.unwatch(connection.stream) and clean:
                self._connections.give_back(connection)
            else:
                self._connections.discard(connection)

    def _hold(
        self, connection: Connection, part: Slice, reading: _Reading, card: bytes
    ) -> tuple[RegionKey, Offsets, int] | None:
        """What the owner holds: its region, the offsets there, this transfer's tag."""
        deadline, owner = reading.request.deadline, reading.request.remote.owner
        expiry_ms = max(1, int((deadline - time.monotonic()) * 1000))
        engine = self._transport.capabilities
        tag = 0 if engine.one_sided else secrets.randbits(48)
        pieces, nonce = pieces_of(part.copies).tobytes(), connection.nonce()
        bound = held_bytes(pieces, engine.name, card)
        ticket = issue(self._key, owner, expiry_ms, nonce, bound)
        hold = Hold(connection.version, ticket, pieces, part.nbytes, engine.name, tag, card)
        try:
            connection.stream.send(encode(hold), deadline)
            answer = _receive(connection.stream, deadline)
        except ConnectionError:
            return None
        if answer is None:
            return None
        if not isinstance(answer, HeldFrame):
            raise ProtocolError(f"a hold was answered by {type(answer).__name__}")
        mac = held_mac(self._key, nonce, answer.generation, answer.card, answer.sources)
        if not hmac.compare_digest(mac, answer.mac):
            raise TicketRefused("the owner's answer to a hold was altered on its way")
        sources = column(answer.sources, U8, len(part.copies))
        return RegionKey(answer.generation, answer.card), sources, tag

    def _move(
        self,
        connection: Connection,
        part: Slice,
        reading: _Reading,
        key: RegionKey,
        sources: Offsets,
        tag: int,
    ) -> Mask:
        request, stream = reading.request, connection.stream
        gone: Mask = sources == GONE
        moved = ~gone & (part.copies["nbytes"] > 0)
        nbytes = int(part.copies["nbytes"][moved].sum())
        if nbytes:
            held = Held(key, sources[moved], tag, _checking(reading, stream))
            copies = part.copies[moved]
            self._transport.read(
                ReadRequest(
                    request.job, request.remote, copies, request.deadline, held, request.cancelled
                )
            )
        stream.send(encode(Release(nbytes)), request.deadline)
        sent = _receive(stream, request.deadline)
        if not isinstance(sent, Sent) or sent.nbytes != nbytes:
            raise TransferFailed("the owner did not confirm that it held the ranges to the end")
        reading.nbytes += nbytes
        return gone


def _receive(stream: BulkStream, deadline: float) -> FromOwner | None:
    frame = stream.receive(MAX_PULL_FRAME_BYTES, deadline)
    if frame is None:
        return None
    answer = decode_from_owner(frame)
    if isinstance(answer, Refused):
        raise answer.error()
    return answer


def _checking(reading: _Reading, stream: BulkStream) -> Callable[[], None]:
    """See `Held.check`. The owner says nothing while bytes move, unless it gives up."""
    request = reading.request

    def check() -> None:
        if reading.stopped:
            raise TransferFailed("the read was cancelled")
        if time.monotonic() >= request.deadline:
            raise _late(reading)
        if stream.readable(0):
            try:
                said = _receive(stream, request.deadline)
            except OSError as exc:
                raise _broken(reading, exc) from exc
            raise _broken(reading, "it ended" if said is None else f"it said {said!r}")

    return check


def _late(reading: _Reading) -> DataplaneError:
    peer = reading.request.remote.owner.peer
    return DeadlineExceeded(
        f"peer {peer!r} did not send all bytes in time; it may be stopped or cut off "
        f"({reading.nbytes} bytes arrived)",
        peer=peer,
        nbytes=reading.nbytes,
    )


def _broken(reading: _Reading, why: object) -> DataplaneError:
    peer = reading.request.remote.owner.peer
    return TransferFailed(
        f"the connection to peer {peer!r} broke off while its bytes were read: {why}; the read may "
        "be retried",
        peer=peer,
    )
