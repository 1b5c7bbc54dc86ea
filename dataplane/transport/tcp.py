"""TCP as a transport: always there, host memory only, the request takes the pin.

The listening socket is made by the peer and handed in, so that a worker that crashed and was
started again keeps its address, and connections made meanwhile wait in the backlog.
"""

from __future__ import annotations

import socket

from dataplane.transport.seam import (
    Capabilities,
    PinDesk,
    ReadOutcome,
    ReadRequest,
    Region,
    Remote,
    Transport,
)
from dataplane.transport.tcp_owner import RangeServer
from dataplane.transport.tcp_reader import RangeReader
from dataplane.wire.tables import Owner


class TcpTransport(Transport):
    """Both sides of bulk transfer over TCP, see `tcp_owner` and `tcp_reader`."""

    capabilities = Capabilities(
        name="tcp", memory=frozenset({"host"}), one_sided=False, needs_target_progress=True
    )

    def __init__(self, listener: socket.socket, owner: Owner, key: bytes) -> None:
        self._listener = listener
        self._owner = owner
        self._key = key

    def open(self, region: Region, desk: PinDesk) -> None:
        self._reader = RangeReader(region, self._key)
        self._server = RangeServer(self._listener, self._owner, self._key, region, desk)
        self._server.start()

    def read(self, request: ReadRequest) -> ReadOutcome:
        return self._reader.read(request)

    def cancel(self, job: int) -> None:
        self._reader.cancel(job)

    def forget(self, remote: Remote) -> None:
        self._reader.forget(remote.addresses)

    def close(self) -> None:
        self._server.close()
        self._reader.close()
