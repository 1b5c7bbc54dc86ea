"""The engines of transports as a program would use them that has nothing but them.

No pins, no tickets, no confirmation, no other thread, no event loop: each `End` lives in a process
of its own with one region of memory, and `read` brings values from the other end's region to the
same places. Ours have to come near these.
"""

from __future__ import annotations

import os
import select
import socket
from collections import deque
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
        self._memory = memoryview(memory)
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


class UcxEnd:
    """A UCP worker: gets of PIECE_BYTES, as many under way as its shared memory holds."""

    def __init__(self, memory: Memory) -> None:
        from dataplane.transport.engines.libucp import UcpWorker, settle
        from dataplane.transport.engines.ucx import _binding

        settle()
        binding = _binding()
        features = binding.Feature.RMA, binding.Feature.WAKEUP
        context = binding.UCXContext({}, feature_flags=features)
        worker = binding.UCXWorker(context)
        self._alive = memory, context, worker
        self._ucp = UcpWorker(int(context.handle), int(worker.handle))
        self._base = memory.ctypes.data
        key = self._ucp.register(self._base, memory.nbytes)
        self.card = msgspec.msgpack.encode((self._ucp.address(), key, self._base))
        self._poll = select.poll()
        self._poll.register(self._ucp.event_fd, select.POLLIN)

    def serve(self) -> None:
        while True:
            while self._ucp.progress():
                pass
            self._sleep(1000)

    def connect(self, card: bytes) -> None:
        address, key, self._there = msgspec.msgpack.decode(card, type=tuple[bytes, bytes, int])
        self._line = self._ucp.connect(address, key)

    def read(self, count: int, size: int) -> None:
        from dataplane.transport.engines.libucp import PENDING
        from dataplane.transport.engines.ucx import MEMORY_WINDOW_BYTES, PIECE_BYTES, WINDOW

        step = min(size, PIECE_BYTES)
        left = deque(
            (at + part, min(step, size - part))
            for at in range(0, count * size, size)
            for part in range(0, size, step)
        )
        under_way: deque[tuple[int, int]] = deque()
        in_all = 0
        while left or under_way:
            while left and len(under_way) < WINDOW and in_all < MEMORY_WINDOW_BYTES:
                at, nbytes = left.popleft()
                request = self._line.get(self._base + at, nbytes, self._there + at)
                if request:
                    under_way.append((request, nbytes))
                    in_all += nbytes
            went_on = self._ucp.progress()
            while under_way and (status := self._ucp.status(under_way[0][0])) != PENDING:
                if status:
                    raise OSError(f"UCX: {self._ucp.text(status)}")
                in_all -= under_way.popleft()[1]
                went_on = True
            if not went_on:
                self._sleep(50)

    def _sleep(self, milliseconds: int) -> None:
        if self._ucp.arm():
            self._poll.poll(milliseconds)


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


ENGINES: dict[str, type[End]] = {"tcp": SocketEnd, "nixl": NixlEnd, "ucx": UcxEnd}
