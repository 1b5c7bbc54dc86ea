"""The owner's side of a read by another engine than TCP: ranges are held while it moves them.

Runs in a bulk worker, in the thread of the connection on which the reader asked. The pin lasts
until the reader releases it on the same connection, which confirms the read; until the ticket
expires; or until the connection ends.
"""

from __future__ import annotations

import threading
import time

import numpy as np

from dataplane.errors import DeadlineExceeded, ProtocolError, TransferFailed
from dataplane.transport.asked import sources_of
from dataplane.transport.bulk_frames import (
    GONE,
    MAX_CARD_BYTES,
    MAX_JOIN_FRAME_BYTES,
    Held,
    Hold,
    Release,
    Sent,
    decode_to_owner,
    encode,
)
from dataplane.transport.seam import (
    Offsets,
    PinDesk,
    Records,
    Region,
    RegionKey,
    SendRequest,
    Transport,
)
from dataplane.transport.slices import ranges_of
from dataplane.transport.stream import BulkStream
from dataplane.transport.tickets import held_mac


class Holds:
    """Serves one engine. own: what it registered the region as."""

    def __init__(
        self, transport: Transport, own: RegionKey, region: Region, desk: PinDesk, key: bytes
    ) -> None:
        self._transport = transport
        self._own = own
        self._region = region
        self._desk = desk
        self._key = key
        self._under_way = 0
        self._lock = threading.Lock()

    def answer(
        self, stream: BulkStream, hold: Hold, pieces: Records, nonce: bytes, deadline: float
    ) -> None:
        """From a request whose ticket holds to the confirmation."""
        if len(hold.card) > MAX_CARD_BYTES:
            raise ProtocolError(f"a card of {len(hold.card)} bytes, the limit is {MAX_CARD_BYTES}")
        pinned = self._desk.pin(ranges_of(pieces), deadline)
        nbytes = 0
        self._count(1)
        try:
            sources = sources_of(self._region, pieces, pinned.places)
            stream.send(encode(self._held(nonce, sources)), deadline)
            if not self._transport.capabilities.one_sided:
                self._send(stream, hold, pieces, sources, deadline)
            nbytes = _released(stream, int(pieces["nbytes"][sources != GONE].sum()), deadline)
        finally:
            self._count(-1)
            self._desk.unpin(pinned.ask, nbytes)
        stream.send(encode(Sent(nbytes)), deadline)

    def _count(self, change: int) -> None:
        with self._lock:
            self._under_way += change
            self._transport.holding(self._under_way)

    def _held(self, nonce: bytes, sources: Offsets) -> Held:
        own, raw = self._own, sources.tobytes()
        mac = held_mac(self._key, nonce, own.generation, own.card, raw)
        return Held(raw, own.generation, own.card, mac)

    def _send(
        self, stream: BulkStream, hold: Hold, pieces: Records, sources: Offsets, deadline: float
    ) -> None:
        def check() -> None:
            if stream.ended():
                raise TransferFailed("the reader is gone")
            if time.monotonic() >= deadline:
                raise DeadlineExceeded("the ticket expired before the bytes were sent")

        there = (sources != GONE) & (pieces["nbytes"] > 0)
        nbytes = np.ascontiguousarray(pieces["nbytes"][there])
        reader = RegionKey(0, hold.card)
        request = SendRequest(reader, hold.tag, sources[there], nbytes, deadline, check)
        self._transport.send(request)


def _released(stream: BulkStream, nbytes: int, deadline: float) -> int:
    """Waits for the reader's word that it has them all."""
    try:
        frame = stream.receive(MAX_JOIN_FRAME_BYTES, deadline)
    except TimeoutError as exc:
        raise DeadlineExceeded("the ticket expired before the reader released the ranges") from exc
    if frame is None:
        raise ConnectionResetError("the reader left without a word")
    release = decode_to_owner(frame)
    if not isinstance(release, Release) or release.nbytes != nbytes:
        raise ProtocolError(f"ranges of {nbytes} bytes are held, and the reader does not say so")
    return nbytes
