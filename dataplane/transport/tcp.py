"""TCP as a transport: the bytes follow the owner's reply, on the connection of the request."""

from __future__ import annotations

import numpy as np

from dataplane.transport.bulk_frames import MAX_GET_BYTES
from dataplane.transport.registry import TCP
from dataplane.transport.seam import ReadRequest, Region, SendRequest, Transport
from dataplane.transport.stream import iovecs
from dataplane.wire.tables import Owner


class TcpTransport(Transport):
    """Sends bytes from one arena into the other, without a buffer in between."""

    name = TCP
    memory = frozenset({"host"})
    one_sided = False
    in_band = True
    most_bytes = MAX_GET_BYTES

    def register(self, region: Region) -> bytes:
        self._base = np.uint64(region.address)
        return b""

    def read(self, request: ReadRequest) -> None:
        vectors = iovecs(self._base + request.copies["dest"], request.copies["nbytes"])
        request.stream.receive_into(vectors, request.deadline)

    def send(self, request: SendRequest) -> None:
        vectors = iovecs(self._base + request.sources, request.nbytes)
        request.stream.send_from(vectors, request.deadline)

    def forget(self, owner: Owner) -> None:
        """Do nothing: the connections belong to the requests."""
