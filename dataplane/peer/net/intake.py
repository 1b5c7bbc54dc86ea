"""What comes in at the peer door: requests, as many as have room.

A message that is none is answered and forgotten; the link stays. While the requests that are being
answered fill the bound nothing is taken from the socket, and zmq makes the senders wait.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from dataplane.errors import ProtocolError
from dataplane.peer.net.failures import failed
from dataplane.peer.net.sockets import Socket
from dataplane.wire import limits, peering
from dataplane.wire.peering import PeerReply, PeerRequest
from dataplane.wire.refusals import Refusals

log = logging.getLogger(__name__)

REQUEST_BYTES = 4_096
"""A request counts as at least this, which bounds their number (65,536) as well."""

Take = Callable[[bytes, PeerRequest, int], None]
"""Told who asks, what, and the room that it takes until `answered`."""


class Intake:
    def __init__(self, incarnation: int, take: Take) -> None:
        self.refusals = Refusals(log, "the peer door")
        self.limit_bytes = limits.MAX_BYTES_UNDER_WAY
        self._used_bytes = 0
        self._incarnation = incarnation
        self._take = take
        self._router: Socket | None = None

    def __repr__(self) -> str:
        return f"<Intake {self._used_bytes}/{self.limit_bytes} bytes>"

    def open(self, router: Socket) -> None:
        self._router = router
        router.receive(self._arrived)

    def _arrived(self, parts: list[bytes]) -> None:
        assert self._router is not None
        identity, *frames = parts
        for frame in frames:
            try:
                request = peering.decode_request(frame)
            except ProtocolError as exc:
                self.refusals.count(exc)
                reply = PeerReply(0, self._incarnation, failed(exc))
                self._router.post(peering.encode(reply), identity)
                continue
            nbytes = max(len(frame), REQUEST_BYTES)
            self._used_bytes += nbytes
            if self._is_full:
                self._router.pause()
            try:
                self._take(identity, request, nbytes)
            except Exception:  # those that came with it are others'
                log.exception("a request was not taken")

    def answered(self, nbytes: int) -> None:
        was_full = self._is_full
        self._used_bytes -= nbytes
        if was_full and not self._is_full and self._router is not None:
            self._router.resume()

    @property
    def _is_full(self) -> bool:
        return self._used_bytes >= self.limit_bytes
