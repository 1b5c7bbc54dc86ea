"""What comes in at the peer door: requests, as many as have room.

A message that is none is answered and forgotten; the connection stays. While the requests that are
being answered fill the bound nothing is taken from any stream, and TCP makes the senders wait.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from dataplane.errors import ProtocolError
from dataplane.peer.failures import failed
from dataplane.peer.net.streams import Stream, Streams
from dataplane.wire import limits, peering
from dataplane.wire.peering import PeerReply, PeerRequest
from dataplane.wire.refusals import Refusals

log = logging.getLogger(__name__)

REQUEST_BYTES = 4_096
"""A request counts as at least this, which bounds their number (65,536) as well."""

Take = Callable[[Stream, PeerRequest, int], None]
"""Told who asks, what, and the room that it takes until `answered`."""


class Intake:
    def __init__(self, incarnation: int, sealed: bool, take: Take) -> None:
        self.refusals = Refusals(log, "the peer door")
        self.limit_bytes = limits.MAX_BYTES_UNDER_WAY
        self.streams = Streams(sealed, self._arrived)
        self._used_bytes = 0
        self._incarnation = incarnation
        self._take = take

    def __repr__(self) -> str:
        return f"<Intake {self._used_bytes}/{self.limit_bytes} bytes>"

    def _arrived(self, stream: Stream, frame: bytes) -> None:
        try:
            request = peering.decode_request(frame)
        except ProtocolError as exc:
            self.streams.answer(stream, self.refusal(exc))
            return
        nbytes = max(len(frame), REQUEST_BYTES)
        self._used_bytes += nbytes
        if self._is_full:
            self.streams.pause()
        self._take(stream, request, nbytes)

    def refusal(self, exc: ProtocolError) -> bytes:
        """The answer to what is no request."""
        self.refusals.count(exc)
        return peering.encode(PeerReply(0, self._incarnation, failed(exc)))

    def answered(self, nbytes: int) -> None:
        was_full = self._is_full
        self._used_bytes -= nbytes
        if was_full and not self._is_full:
            self.streams.resume()

    @property
    def _is_full(self) -> bool:
        return self._used_bytes >= self.limit_bytes
