"""What this machine can do at best: a warm copy, a bare TCP socket, a round trip on a unix socket.

Each is measured between the figures that it is the ceiling of, so that a busy neighbour or a
changing clock slows both sides of a ratio. The other ends are processes of their own.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Self

import numpy as np
import uvloop

from bench.processes import die_with

ROUND_TRIPS = 400
MESSAGE_BYTES = 64
_SPAWN = multiprocessing.get_context("spawn")


class Ceilings:
    """The ceilings for one block of bytes. A context manager: it owns two processes."""

    def __init__(self, block: np.ndarray) -> None:
        self.block = block
        self.copied = np.empty_like(block)
        self.copied[...] = block
        self._children: list[Any] = []
        self._control, self._stream = self._connected(_source, block.nbytes)
        _, self._unix = self._connected(_echo, MESSAGE_BYTES)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._unix.close()
        self._stream.close()
        for child in self._children:
            child.terminate()
            child.join()

    def _connected(
        self, serve: Callable[[Connection, int, int], None], nbytes: int
    ) -> tuple[Connection, socket.socket]:
        """A child that serves one connection of ours, and that connection."""
        ours, theirs = _SPAWN.Pipe()
        child = _SPAWN.Process(target=serve, args=(theirs, nbytes, os.getpid()), daemon=True)
        child.start()
        self._children.append(child)
        address = ours.recv()
        family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
        sock = socket.socket(family)
        sock.connect(address)
        return ours, sock

    def memcpy_s(self) -> float:
        """One copy of the whole block into memory that was touched before."""
        began = time.perf_counter()
        np.copyto(self.copied, self.block)
        return time.perf_counter() - began

    def socket_s(self) -> float:
        """The block over one TCP connection on loopback, from warm memory into warm memory."""
        room = memoryview(self.copied.reshape(-1))
        began = time.perf_counter()
        self._control.send(True)
        at = 0
        while at < len(room):
            count = self._stream.recv_into(room[at:])
            assert count, "the source is gone"
            at += count
        return time.perf_counter() - began

    def round_trip_s(self) -> float:
        """The median of 64-byte round trips to a uvloop echo in another process."""
        message, took = bytes(MESSAGE_BYTES), []
        for _ in range(ROUND_TRIPS):
            began = time.perf_counter()
            self._unix.sendall(message)
            left = MESSAGE_BYTES
            while left:
                left -= len(self._unix.recv(left))
            took.append(time.perf_counter() - began)
        return float(np.median(took))


def _source(control: Connection, nbytes: int, parent: int) -> None:
    """Sends so many bytes whenever it is told to."""
    die_with(parent)
    block = np.ones(nbytes, np.uint8)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        control.send(listener.getsockname())
        stream, _ = listener.accept()
    while control.recv():
        stream.sendall(memoryview(block))


def _echo(control: Connection, nbytes: int, parent: int) -> None:
    die_with(parent)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        path = os.path.join(folder, "echo")
        uvloop.run(_serve_echo(path, control))


async def _serve_echo(path: str, control: Connection) -> None:
    server = await asyncio.get_running_loop().create_unix_server(_Echo, path)
    control.send(path)
    await server.serve_forever()


class _Echo(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)
