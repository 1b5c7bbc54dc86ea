"""Two ranks that send host memory to each other over a socket, in the order of NCCL's."""

from __future__ import annotations

import ctypes
import secrets
import socket
from contextlib import suppress

from dataplane.errors import TransferFailed
from dataplane.transport.engines.communicators import Communicator, Pieces

JOIN_S = 30.0


class HostRanks:
    """Ranks of processes of one machine, on twins of devices."""

    def __init__(self) -> None:
        self._doors: dict[bytes, socket.socket] = {}

    def unique_id(self) -> bytes:
        door = socket.socket(socket.AF_UNIX)
        name = b"\0dataplane-ranks-" + secrets.token_hex(16).encode()
        door.bind(name)
        door.listen(1)
        self._doors[name] = door
        return name

    def join(self, unique_id: bytes, rank: int) -> Communicator:
        try:
            sock = _connected(unique_id) if rank else self._doors[unique_id].accept()[0]
        except (OSError, KeyError) as exc:
            why = f"the other rank did not join: {exc!r}; repeat the call"
            raise TransferFailed(why) from exc
        finally:
            self.forget(unique_id)
        return _SocketRank(sock)

    def forget(self, unique_id: bytes) -> None:
        door = self._doors.pop(unique_id, None)
        if door is not None:
            with suppress(OSError):
                door.shutdown(socket.SHUT_RDWR)
            door.close()


def _connected(name: bytes) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(JOIN_S)
        sock.connect(name)
        sock.settimeout(None)
    except BaseException:
        sock.close()
        raise
    return sock


class _SocketRank(Communicator):
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        super().__init__()

    def _move(self, pieces: Pieces, sends: bool) -> None:
        for address, nbytes in pieces:
            left = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
            while len(left):
                moved = self._sock.send(left) if sends else self._sock.recv_into(left)
                if not moved:
                    raise ConnectionResetError("the other rank disconnected")
                left = left[moved:]

    def _break(self) -> None:
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def abort(self) -> None:
        super().abort()
        self._sock.close()
