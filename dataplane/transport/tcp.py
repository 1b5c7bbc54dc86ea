"""TCP as a transport: always there, host memory only, the request takes the pin.

The listening socket is made by the peer and handed in, so that a worker that crashed and was
started again keeps its address, and connections made meanwhile wait in the backlog.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping

from dataplane.transport.holds import Holds
from dataplane.transport.seam import (
    Capabilities,
    Mask,
    PinDesk,
    ReadRequest,
    Region,
    RegionKey,
    Remote,
    Transport,
)
from dataplane.transport.secure_stream import door
from dataplane.transport.stream import BulkStream
from dataplane.transport.tcp_owner import RangeServer
from dataplane.transport.tcp_reader import RangeReader
from dataplane.wire.tables import Owner


class TcpTransport(Transport):
    """Both sides of bulk transfer over TCP, see `tcp_owner` and `tcp_reader`.

    Its connections also carry the holds of the other engines that the worker has.
    tls: see `Configure`; with it nothing is read or served in the clear.
    """

    capabilities = Capabilities(
        name="tcp",
        memory=frozenset({"host"}),
        one_sided=False,
    )

    def __init__(
        self,
        listener: socket.socket,
        owner: Owner,
        key: bytes,
        desk: PinDesk,
        tls: bytes = b"",
    ) -> None:
        super().__init__(owner)
        self._listener = listener
        self._key = key
        self._desk = desk
        self._tls = tls

    def register(self, region: Region) -> RegionKey:
        self._reader = RangeReader(region, self._key, tls_only=bool(self._tls))
        self._server = RangeServer(
            self._listener,
            self.owner,
            self._key,
            region,
            self._desk,
            door(self._tls) if self._tls else BulkStream,
        )
        return RegionKey(0)

    def serve(self, holds: Mapping[str, Holds]) -> None:
        """Takes requests from now on; holds: for the worker's other engines."""
        self._server.start(holds)

    def read(self, request: ReadRequest) -> Mask:
        return self._reader.read(request)

    def cancel(self, job: int) -> None:
        self._reader.cancel(job)

    def forget(self, remote: Remote) -> None:
        self._reader.forget(remote.endpoints)

    def close(self) -> None:
        self._server.close()
        self._reader.close()
