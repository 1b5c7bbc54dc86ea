"""The engines of transports as a program would use them that has nothing but them.

No pins, no tickets, no confirmation, no other thread, no event loop: each `End` lives in a process
of its own with one region of memory, and `read` brings values from the other end's region to the
same places. Ours have to come near these.
"""

from __future__ import annotations

import os
import select
import socket
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

Memory = npt.NDArray[np.uint8]
NAP_S = 0.000_5
"""Between polls of an owner's NIXL, which tells nothing of its own accord."""


class End(Protocol):
    """One side. card: what the other one needs to connect."""

    card: bytes

    def __init__(self, memory: Memory) -> None: ...

    def serve(self) -> None:
        """As the owner: until the process ends."""

    def connect(self, card: bytes) -> None: ...

    def read(self, count: int, size: int) -> None:
        """Values of `size` bytes, which lie one behind the other."""


class SocketEnd:
    """One TCP connection on loopback: the owner sends so many bytes as it is asked for."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory.data
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.card = str(self._listener.getsockname()[1]).encode()

    def serve(self) -> None:
        stream, _ = self._listener.accept()
        with stream:
            while asked := stream.recv(8, socket.MSG_WAITALL):
                stream.sendall(self._memory[: int.from_bytes(asked, "little")])

    def connect(self, card: bytes) -> None:
        self._stream = socket.create_connection(("127.0.0.1", int(card)))

    def read(self, count: int, size: int) -> None:
        room = self._memory[: count * size]
        self._stream.sendall(len(room).to_bytes(8, "little"))
        at = 0
        while at < len(room):
            got = self._stream.recv_into(room[at:])
            if not got:
                raise ConnectionResetError("the owner is gone")
            at += got


class NixlEnd:
    """A NIXL agent: one transfer for all values, polled to its end."""

    def __init__(self, memory: Memory) -> None:
        from dataplane.transport.engines.nixl import _agent

        self._agent: Any = _agent(f"loop-{os.getpid()}")
        self._base = memory.ctypes.data
        self._alive = memory
        self._agent.register_memory([(self._base, memory.nbytes, 0, "")], "DRAM", ["UCX"])
        metadata = self._agent.get_agent_metadata()
        self.card = msgspec.msgpack.encode((self._base, metadata))

    def serve(self) -> None:
        while True:
            self._agent.get_new_notifs()  # nobody sends any; this makes UCX go on
            select.select([], [], [], NAP_S)

    def connect(self, card: bytes) -> None:
        self._there, metadata = msgspec.msgpack.decode(card, type=tuple[int, bytes])
        name = self._agent.add_remote_agent(metadata)
        self._owner = name.decode() if isinstance(name, bytes) else name

    def read(self, count: int, size: int) -> None:
        places = np.zeros((count, 3), np.uint64)
        places[:, 0] = np.arange(count, dtype=np.uint64) * np.uint64(size)
        places[:, 1] = size
        sides = []
        for base in (self._base, self._there):
            side = places.copy()
            side[:, 0] += np.uint64(base)
            sides.append(self._agent.get_xfer_descs(side, "DRAM"))
        handle = self._agent.initialize_xfer("READ", *sides, self._owner, b"", ["UCX"])
        state = self._agent.transfer(handle)
        while state == "PROC":
            state = self._agent.check_xfer_state(handle)
        handle.release()
        if state != "DONE":
            raise OSError(f"NIXL: the transfer ended as {state}")


ENGINES: dict[str, type[End]] = {"tcp": SocketEnd, "nixl": NixlEnd}
