"""Two transports as another package would bring them; tests put this folder on PYTHONPATH.

`shelf` is one-sided: a reader maps the memfd of an owner on the same host. `post` is two-sided: the
owner sends over a unix socket on which the reader listens.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from dataplane.errors import TransferFailed
from dataplane.transport import (
    ReadRequest,
    Region,
    Remote,
    SendRequest,
    Transport,
)
from dataplane.transport.seam import MemoryKind
from dataplane.transport.stream import iovecs
from dataplane.wire.tables import Owner

NUMBER_BYTES = 8
"""Of the number of a transfer, with which the owner of `post` begins what it sends."""
HOST: frozenset[MemoryKind] = frozenset({"host"})
Bytes = np.ndarray


def mapped(region: Region) -> Bytes:
    return np.frombuffer(mmap.mmap(region.fd, region.nbytes), np.uint8)


class UnixStream:
    """A unix socket that waits in short pieces, so that a check is never far."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.settimeout(0.05)

    def exactly(self, nbytes: int) -> bytes:
        self.sock.settimeout(5)
        data = self.sock.recv(nbytes, socket.MSG_WAITALL)
        self.sock.settimeout(0.05)
        return data

    def all_of(
        self, move: Callable[[memoryview], int], vectors: np.ndarray, check: Callable[[], None]
    ) -> None:
        for base, length in vectors.tolist():
            left = memoryview((ctypes.c_char * length).from_address(base)).cast("B")
            while len(left):
                try:
                    moved = move(left)
                except TimeoutError:
                    check()
                    continue
                except OSError as exc:
                    raise TransferFailed(f"broke off: {exc}; it may be retried") from exc
                if not moved:
                    raise TransferFailed("the other side is gone; it may be retried")
                left = left[moved:]

    def receive_some(self, left: memoryview) -> int:
        return self.sock.recv_into(left)

    def send_some(self, left: memoryview) -> int:
        return self.sock.send(left)


class Shelf(Transport):
    name = "shelf"
    memory = HOST

    def register(self, region: Region) -> bytes:
        self._mine = mapped(region)
        self._theirs: dict[bytes, Bytes] = {}
        return json.dumps([os.getpid(), region.fd, region.nbytes]).encode()

    def read(self, request: ReadRequest) -> None:
        theirs = self._opened(request.card)
        dests, sizes = request.copies["dest"].tolist(), request.copies["nbytes"].tolist()
        for source, dest, nbytes in zip(request.sources.tolist(), dests, sizes, strict=True):
            request.check()
            self._mine[dest : dest + nbytes] = theirs[source : source + nbytes]

    def _opened(self, card: bytes) -> Bytes:
        if card not in self._theirs:
            pid, fd, nbytes = json.loads(card)
            try:
                opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY)
            except OSError as exc:
                raise TransferFailed(f"the owner is gone: {exc}; it may be retried") from exc
            view = mmap.mmap(opened, nbytes, prot=mmap.PROT_READ)
            self._theirs[card] = np.frombuffer(view, np.uint8)
            os.close(opened)
        return self._theirs[card]

    def forget(self, owner: Owner) -> None:
        self._theirs.clear()


class Post(Transport):
    name = "post"
    memory = HOST
    one_sided = False

    def __init__(self, owner: Owner) -> None:
        super().__init__(owner)
        self._door = socket.socket(socket.AF_UNIX)
        self._door.bind("\0post-" + secrets.token_hex(8))
        self._door.listen(64)
        self._came = threading.Condition()
        self._calls: dict[bytes, UnixStream] = {}
        self._turn = threading.local()

    def register(self, region: Region) -> bytes:
        self._base = np.uint64(region.address)
        threading.Thread(target=self._accept, daemon=True).start()
        return bytes(self._door.getsockname())

    def _accept(self) -> None:
        while True:
            call = UnixStream(self._door.accept()[0])
            number = call.exactly(NUMBER_BYTES)
            with self._came:
                self._calls[number] = call
                self._came.notify_all()

    @contextmanager
    def turn(self, remote: Remote, own: bytes, check: Callable[[], None]) -> Iterator[bytes]:
        self._turn.number = secrets.token_bytes(NUMBER_BYTES)
        yield self._turn.number + own

    def read(self, request: ReadRequest) -> None:
        with self._came:
            while self._turn.number not in self._calls:
                request.check()
                self._came.wait(0.05)
            call = self._calls.pop(self._turn.number)
        vectors = iovecs(self._base + request.copies["dest"], request.copies["nbytes"])
        with call.sock:
            call.all_of(call.receive_some, vectors, request.check)

    def send(self, request: SendRequest) -> None:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(request.card[NUMBER_BYTES:])
        call = UnixStream(sock)
        with sock:
            sock.sendall(request.card[:NUMBER_BYTES])
            vectors = iovecs(self._base + request.sources, request.nbytes)
            call.all_of(call.send_some, vectors, request.check)

    def forget(self, owner: Owner) -> None:
        pass


class Stranger:
    """No transport at all."""
