"""What this machine can do at best: a warm copy, a bare TCP socket, a round trip on a unix socket,
and one that another process has to hear of before it is answered.

Each is measured between the figures that it is the ceiling of, so that a busy neighbour or a
changing clock slows both sides of a ratio. The other ends are processes of their own.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any, Self

import numpy as np
import uvloop
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from bench.processes import die_with, run_folder
from tests.perf.children import spawned

ROUND_TRIPS = 400
MESSAGE_BYTES = 64
TAG_BYTES = 16


class Ceilings:
    """The ceilings for one block of bytes. A context manager: it owns four processes."""

    def __init__(self, block: np.ndarray) -> None:
        self.block = block
        self.copied = np.empty_like(block)
        self.copied[...] = block
        self._owned = ExitStack()
        with self._owned:  # also where one does not start
            folder = self._owned.enter_context(run_folder())
            self._control, self._stream = self._connected(_source, block.nbytes)
            _, self._unix = self._connected(_echo, os.path.join(folder, "echo"))
            second = self._child(_second)[1]
            self._relayed = self._connected(_relay, os.path.join(folder, "relay"), second)[1]
            self._owned = self._owned.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._owned.close()

    def _child(self, serve: Callable[..., None], *told: Any) -> tuple[Connection, Any]:
        """A child that serves connections, and where."""
        child, ours = spawned(serve, *told)
        self._owned.callback(child.join)
        self._owned.callback(child.terminate)
        return ours, ours.recv()

    def _connected(
        self, serve: Callable[..., None], *told: Any
    ) -> tuple[Connection, socket.socket]:
        """A child that serves one connection of ours, and that connection."""
        ours, address = self._child(serve, *told)
        family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
        sock = self._owned.enter_context(socket.socket(family))
        sock.connect(address)
        return ours, sock

    def memcpy_s(self) -> float:
        """One copy of the whole block into memory that was touched before."""
        began = time.perf_counter()
        np.copyto(self.copied, self.block)
        return time.perf_counter() - began

    def socket_s(self) -> float:
        """The block over one TCP connection on loopback, from warm memory into warm memory."""
        room = self.copied.reshape(-1).data
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
        return _median_s(self._unix)

    def relayed_s(self) -> float:
        """The same where the echo first has a third process answer it, over TCP and sealed, as a
        peer its backup: below that no answer can be that a second peer must know of."""
        return _median_s(self._relayed)


def _median_s(sock: socket.socket) -> float:
    message, took = bytes(MESSAGE_BYTES), []
    for _ in range(ROUND_TRIPS):
        began = time.perf_counter()
        sock.sendall(message)
        left = MESSAGE_BYTES
        while left:
            left -= len(sock.recv(left))
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
        stream.sendall(block.data)


def _echo(control: Connection, path: str, parent: int) -> None:
    die_with(parent)
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


def _second(control: Connection, parent: int) -> None:
    die_with(parent)
    uvloop.run(_serve_sealed(control))


async def _serve_sealed(control: Connection) -> None:
    server = await asyncio.get_running_loop().create_server(
        lambda: _Sealed(_Sealed.send), "127.0.0.1", 0
    )
    control.send(server.sockets[0].getsockname())
    await server.serve_forever()


def _relay(control: Connection, path: str, second: tuple[str, int], parent: int) -> None:
    die_with(parent)
    uvloop.run(_serve_relayed(path, second, control))


async def _serve_relayed(path: str, second: tuple[str, int], control: Connection) -> None:
    loop, relay = asyncio.get_running_loop(), _Relay()
    _, relay.link = await loop.create_connection(lambda: _Sealed(relay.answer), *second)
    server = await loop.create_unix_server(lambda: relay, path)
    control.send(path)
    await server.serve_forever()


class _Relay(_Echo):
    """Echoes what the other process has answered."""

    link: _Sealed

    def data_received(self, data: bytes) -> None:
        self.link.send(data)

    def answer(self, link: _Sealed, message: bytes) -> None:
        self._transport.write(message)


class _Sealed(asyncio.Protocol):
    """Messages of one size, one at a time, sealed as frames between peers are."""

    def __init__(self, take: Callable[[_Sealed, bytes], None]) -> None:
        self._take = take
        self._cipher = AESGCM(bytes(32))
        self._sent = self._came = 0
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def send(self, message: bytes) -> None:
        self._sent += 1
        nonce = self._sent.to_bytes(12, "little")
        self._transport.write(self._cipher.encrypt(nonce, message, None))

    def data_received(self, data: bytes) -> None:
        self._data += data
        if len(self._data) < MESSAGE_BYTES + TAG_BYTES:
            return
        self._came += 1
        sealed, self._data = self._data, b""
        nonce = self._came.to_bytes(12, "little")
        self._take(self, self._cipher.decrypt(nonce, sealed, None))
