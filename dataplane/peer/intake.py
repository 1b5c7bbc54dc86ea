"""What comes in at the peer door: requests, as many as have room.

A message that is none is answered and forgotten; the link stays. While the requests that are being
answered fill the bound nothing is taken from the socket, and zmq makes the senders wait.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

import zmq.asyncio

from dataplane.errors import ProtocolError
from dataplane.peer.failures import failed
from dataplane.transport.limiter import ResourceLimiter
from dataplane.wire import limits, peering
from dataplane.wire.peering import PeerReply, PeerRequest
from dataplane.wire.refusals import Refusals

log = logging.getLogger(__name__)

REQUEST_BYTES = 4_096
"""A request counts as at least this, which bounds their number (65,536) as well."""


class Intake:
    def __init__(self, incarnation: int) -> None:
        self.refusals = Refusals(log, "the peer door")
        self._incarnation = incarnation
        self._room = ResourceLimiter(limits.MAX_BYTES_UNDER_WAY)

    async def requests(
        self, router: zmq.asyncio.Socket
    ) -> AsyncIterator[tuple[bytes, PeerRequest, int]]:
        """Who asks, what, and the room that it takes until `answered`."""
        while True:
            parts = await router.recv_multipart()
            if len(parts) != 2:
                self.refusals.count(f"a message of {len(parts) - 1} parts")
                continue
            identity, frame = parts
            try:
                request = peering.decode_request(frame)
            except ProtocolError as exc:
                self.refusals.count(exc)
                reply = PeerReply(0, self._incarnation, failed(exc))
                await router.send_multipart([identity, peering.encode(reply)])
                continue
            nbytes = max(len(frame), REQUEST_BYTES)
            await self._room.acquire(nbytes)
            yield identity, request, nbytes

    def answered(self, nbytes: int) -> None:
        self._room.release(nbytes)
