"""A peer that follows a script: literal frames over socketpairs, and a small arena of its own.

It answers what the test says, in its own thread per connection, and remembers every request.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from dataplane.client.read.column_view import ColumnView
from dataplane.client.read.table import TableReader
from dataplane.client.session.housekeeping import Housekeeper
from dataplane.client.session.opening import join
from dataplane.metadata.tables.bits import in_bytes
from dataplane.wire import limits
from dataplane.wire.frames import FrameReader, decode_request, encode
from dataplane.wire.messages import (
    Body,
    Claim,
    Claimed,
    Define,
    Defined,
    Done,
    Finish,
    Hello,
    HelloDone,
    Put,
    PutDone,
    Reply,
    Request,
    Reserve,
    Reserved,
    Welcome,
)
from dataplane.wire.packed import EXTENT, KEY, U8, column
from dataplane.wire.tables import INLINE, Definition, Piece, Rows, Table, Values

ARENA_BYTES = 4 << 20
SILENCE = b""
"""A script's answer that leaves the request without one."""
Answer = Body | bytes
Script = Callable[[Request, Any], Answer]


class ScriptedPeer:
    def __init__(self, definition: Definition | None = None) -> None:
        self.definition = definition or Definition({"s": ["a"]})
        self.requests: list[Request] = []
        self.connections: list[socket.socket] = []
        self.closed = 0
        self.silent = 0
        """so many connections that come next are not admitted"""
        self.pins = 0
        self.free = 0
        self.welcome = self._welcome()
        self.scripts: dict[type[Body], Script] = {
            Hello: lambda r, b: HelloDone(b.session or 77, (1 << 20, 1 << 20, 1 << 20)),
            Define: lambda r, b: Defined(4, b.definition or self.definition, "open"),
            Reserve: lambda r, b: self.reserved(b),
            Put: lambda r, b: PutDone(),
            Finish: lambda r, b: PutDone(),
        }
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._opening = threading.Lock()
        self._closed = False
        self.fd = os.memfd_create("scripted")
        os.ftruncate(self.fd, ARENA_BYTES)

    @staticmethod
    def _welcome() -> Welcome:
        versions = (limits.PROTOCOL_VERSION_MIN, limits.PROTOCOL_VERSION)
        return Welcome(versions, "p", "scripted", 3, ARENA_BYTES, 1 << 26, 65_536)

    # the client's side

    def keeper(self) -> Housekeeper:
        return join(self.open)

    def open(self, limit_s: float = 0.0) -> socket.socket:
        """A connected socket, as a client's opener makes it."""
        with self._opening:
            if self._closed:
                raise ConnectionRefusedError("the scripted peer is closed")
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            self.connections.append(ours)
            if self.silent:
                self.silent -= 1
                return theirs
            thread = threading.Thread(target=self._serve, args=(ours,), daemon=True)
            self._threads.append(thread)
            thread.start()
        return theirs

    def bodies(self, *kinds: type[Body]) -> list[Any]:
        return [r.body for r in self.requests if isinstance(r.body, kinds)]

    def requests_of(self, *kinds: type[Body]) -> list[Any]:
        return [r for r in self.requests if isinstance(r.body, kinds)]

    def await_body(self, kind: type[Body], count: int = 1) -> Any:
        """The count-th request of this kind; waits for it, for at most 10 s."""
        with self._changed:
            arrived = self._changed.wait_for(lambda: len(self.bodies(kind)) >= count, 10)
        assert arrived, f"no {kind.__name__} came, but {[type(r.body) for r in self.requests]}"
        return self.bodies(kind)[count - 1]

    def await_closed(self, count: int = 1) -> None:
        """Until the client has closed so many connections."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.closed >= count, 10)

    # serving

    def _serve(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):
            frame = encode(Reply(0, self.welcome))
            socket.send_fds(sock, [frame], [self.fd, self.fd])
            reader = FrameReader()
            while data := sock.recv(1 << 16):
                for body in reader.feed(data):
                    self._answer(sock, decode_request(body))
        with self._changed:
            self.closed += 1
            self._changed.notify_all()

    def _answer(self, sock: socket.socket, request: Request) -> None:
        script = self.scripts.get(type(request.body))
        reply = script(request, request.body) if script else Done()
        with self._changed:
            self.requests.append(request)
            self._changed.notify_all()
        if isinstance(reply, Body):
            if request.rid:
                sock.sendall(encode(Reply(request.rid, reply)))  # type: ignore[arg-type]
        elif reply:
            sock.sendall(reply)

    def close(self) -> None:
        with self._opening:  # a housekeeper may be about to look for another anchor
            self._closed = True
        for sock in self.connections:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for sock in self.connections:  # those that were not admitted have no thread
            sock.close()
        os.close(self.fd)

    # the arena

    def grant(self, nbytes: int) -> bytes:
        """One extent of whole pages, as an EXTENT column."""
        length = -(-nbytes // 4096) * 4096
        extent = np.array([(self.free, length)], EXTENT)
        self.free += length
        return extent.tobytes()

    def reserved(self, body: Reserve) -> Reserved:
        nbytes = sum(int(((column(u, U8) + 63) // 64 * 64).sum()) for u in body.units)
        return Reserved(len(body.units), self.grant(nbytes))

    def new_pin(self) -> int:
        self.pins += 1
        return self.pins

    def serve_put(self, put: Put, lease: int = 11) -> None:
        """Claims from now on get the rows of this put."""

        def claimed(request: Request, body: Claim) -> Claimed:
            wanted = body.fields or self.definition.stages[body.stage]
            return Claimed(lease, self.new_pin(), self.table(put, wanted))

        self.scripts[Claim] = claimed

    def view(
        self, body: Put | Finish, field: str, shared: Sequence[tuple[int, int]] = ()
    ) -> ColumnView:
        """The values of a message, from where it says they are. shared: extents of its chunks that
        were written before, in order."""
        values, before = body.values, iter(shared)
        spots = [next(before) if c.number else (c.offset, c.nbytes) for c in values.chunks]
        values, places = named(values), np.array(spots, EXTENT)
        ends = [one.base + in_bytes(one.given).bit_length() for one in values.pieces]
        rows = Rows(bytes(KEY.itemsize * max(ends)))
        table = Table(rows, values, {}, places.tobytes())
        reader = TableReader(table, np.frombuffer(os.pread(self.fd, ARENA_BYTES, 0), np.uint8))
        return reader.view(field)

    def table(self, put: Put, fields: list[str]) -> Table:
        """The rows of a put as a client would read them."""
        places = np.array([(one.offset, one.nbytes) for one in put.values.chunks], EXTENT)
        values = named(values_with(put.values, fields))
        return Table(put.rows, values, put.tags, places.tobytes())


def named(values: Values) -> Values:
    """These values, whose chunks a peer has named by where they were written."""
    chunks = [
        one
        if one.number or values.owners[one.owner] == INLINE
        else msgspec.structs.replace(one, number=1 + one.offset, offset=0, digest=b"")
        for one in values.chunks
    ]
    return msgspec.structs.replace(values, chunks=chunks)


def written(body: Put | Finish) -> list[tuple[int, int]]:
    """The offset and size of each chunk that a message says was written."""
    owners, chunks = body.values.owners, body.values.chunks
    mine = [one for one in chunks if not one.number and owners[one.owner] != INLINE]
    return [(one.offset, one.nbytes) for one in mine]


def shared(body: Put | Finish) -> list[int]:
    """The numbers of the chunks of a message that the peer has already."""
    return [chunk.number for chunk in body.values.chunks if chunk.number]


def inline_fields(body: Put | Finish) -> set[str]:
    """The fields that have a value in a chunk that goes with the message."""
    values = body.values
    found = set()
    for piece in values.pieces:
        if values.owners[values.chunks[piece.chunk].owner] == INLINE:
            found |= {values.fields[field] for field in piece.fields if field >= 0}
    return found


def inline_bytes(body: Put | Finish) -> int:
    """What goes with the message."""
    return sum(len(chunk.inline) for chunk in body.values.chunks)


def values_with(values: Values, fields: list[str]) -> Values:
    """Of these fields alone."""
    numbers = [fields.index(field) if field in fields else -1 for field in values.fields]
    pieces = []
    for piece in values.pieces:
        mine = [-1 if field < 0 else numbers[field] for field in piece.fields]
        if max(mine) >= 0:
            where = (piece.base, piece.given, piece.first, piece.at)
            pieces.append(Piece(piece.chunk, tuple(mine), *where))
    return Values(fields, values.owners, values.layouts, values.chunks, pieces)
