"""A `BulkStream` inside TLS 1.3, for `--bulk-tls`, with the same interface.

The owner presents a self-signed certificate. The reader knows its digest beforehand, and sends
nothing to a process that presents another one. The reader proves its own identity by the join,
as without TLS. OpenSSL reads bytes straight from the arena and writes them straight into it,
except for small ranges, which are gathered first.
"""

from __future__ import annotations

import ctypes
import functools
import os
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dataplane.errors import ProtocolError
from dataplane.transport.stream import LATE, BulkStream
from dataplane.transport.tickets import check_certificate
from dataplane.wire.packed import Array

SEND_BYTES = 256 << 10
"""The most bytes in one call, so that the deadline is checked in between."""
RUN_BYTES = 128 << 10
"""Small ranges are gathered up to this: each call of OpenSSL makes TLS records of its own."""

_view_of = ctypes.pythonapi.PyMemoryView_FromMemory
_view_of.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]
_view_of.restype = ctypes.py_object
_WRITABLE = 0x200
"""PyBUF_WRITE"""


class SecureStream(BulkStream):
    """A stream with TLS. fingerprint: of the owner that the reader connects to; None on the
    owner's side."""

    def __init__(
        self, sock: socket.socket, context: ssl.SSLContext, fingerprint: str | None = None
    ) -> None:
        super().__init__(sock)
        # Wrapped before it connects, so that `abort` always has one socket.
        self._tls = context.wrap_socket(
            sock, server_side=fingerprint is None, do_handshake_on_connect=False
        )
        self._sock = self._tls
        self._fingerprint = fingerprint

    def handshake(self, deadline: float) -> None:
        """Run the TLS handshake. Raises TicketRefused if the owner presents another certificate,
        and ProtocolError for a reader without TLS 1.3."""
        try:
            with self._until(deadline):
                self._tls.do_handshake()
        except ssl.SSLError as exc:
            if self._fingerprint is not None:
                raise
            raise ProtocolError(
                f"this bulk port accepts only TLS 1.3 ({exc}): start every peer with --bulk-tls"
            ) from exc
        if self._fingerprint is not None:
            host, port = self._tls.getpeername()[:2]
            shown = self._tls.getpeercert(binary_form=True)
            check_certificate(shown, self._fingerprint, f"{host}:{port}")

    def readable(self, timeout_s: float) -> bool:
        return self._tls.pending() > 0 or super().readable(timeout_s)

    def send_from(self, vectors: Array, deadline: float) -> None:
        for parts in _runs(vectors):
            data = parts[0] if len(parts) == 1 else memoryview(b"".join(parts))
            while data:
                with self._until(deadline):
                    data = data[self._tls.send(data[:SEND_BYTES]) :]

    def receive_into(self, vectors: Array, deadline: float) -> None:
        begun = False
        for parts in _runs(vectors):
            if len(parts) == 1:
                self._fill(parts[0], deadline, begun)
            else:
                gathered = memoryview(bytearray(sum(map(len, parts))))
                self._fill(gathered, deadline, begun)
                for part in parts:
                    part[:] = gathered[: len(part)]
                    gathered = gathered[len(part) :]
            begun = True

    def _shut(self, how: int) -> None:
        # Not SSLSocket's `shutdown`, which drops TLS first: another thread would continue in plain
        # text.
        socket.socket.shutdown(self._tls, how)

    def _fill(self, room: memoryview, deadline: float, begun: bool) -> None:
        while room:
            with self._until(deadline):
                count = self._tls.recv_into(room)
            if not count and not begun:
                raise EOFError("the connection was closed")
            if not count:
                raise ConnectionResetError("the connection was closed in the middle of a transfer")
            begun, room = True, room[count:]

    @contextmanager
    def _until(self, deadline: float) -> Iterator[None]:
        """Run one OpenSSL call until the deadline, with the errors of a plain socket."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(LATE)
        self._tls.settimeout(left)
        try:
            yield
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as exc:
            raise ConnectionResetError(f"the connection was lost: {exc}") from exc


def door(pem: bytes) -> Callable[[socket.socket], BulkStream]:
    """Return the function that wraps a connection accepted by an owner. pem: see `Identity`."""
    context = _context(ssl.PROTOCOL_TLS_SERVER)
    # No session is resumed, and a ticket would wake a reader that waits for an answer.
    context.num_tickets = 0
    held = os.memfd_create("bulk-identity", os.MFD_CLOEXEC)
    try:
        with open(held, "wb", closefd=False) as file:
            file.write(pem)
        context.load_cert_chain(f"/proc/self/fd/{held}")  # it accepts only files
    finally:
        os.close(held)
    return functools.partial(SecureStream, context=context)


def dialling(fingerprint: str) -> Callable[[socket.socket], BulkStream]:
    """Return the function that makes a stream to the owner with this certificate."""
    return functools.partial(SecureStream, context=reading_context(), fingerprint=fingerprint)


@functools.cache
def reading_context() -> ssl.SSLContext:
    context = _context(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the handshake compares the digest
    return context


def _context(side: int) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def _runs(vectors: Array) -> Iterator[list[memoryview]]:
    """Yield the memory of the vectors in order, in groups of up to RUN_BYTES or one larger
    vector."""
    nbytes = 0
    run: list[memoryview] = []
    for base, length in vectors.tolist():
        if run and nbytes + length > RUN_BYTES:
            yield run
            run, nbytes = [], 0
        run.append(_view_of(base, length, _WRITABLE))
        nbytes += length
    if run:
        yield run
