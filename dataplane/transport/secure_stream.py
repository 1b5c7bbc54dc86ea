"""A `BulkStream` inside TLS 1.3, for `--bulk-tls`, with the same interface.

The owner presents a self-signed certificate. The reader knows its digest beforehand, and sends
nothing to a process that presents another one. The reader proves its own identity by the join,
as without TLS. OpenSSL reads bytes straight from the arena and writes them straight into it,
except for small ranges, which are gathered first.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import socket
import ssl
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from dataplane.errors import ProtocolError
from dataplane.transport.seam import Records
from dataplane.transport.stream import IOV_MAX, BulkStream, Expired, advance
from dataplane.transport.tickets import check_certificate

SEND_BYTES = 256 << 10
"""In one call, so that the deadline is looked at in between."""
RUN_BYTES = 256 << 10
"""Small ranges are gathered up to this."""
DIRECT_BYTES = 64 << 10
"""A range this long is worth calls of its own: several TLS records."""

_libc = ctypes.CDLL(None, use_errno=True)
for _call in (_libc.pwritev, _libc.preadv):
    _call.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]
    _call.restype = ctypes.c_ssize_t

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
        # Before it is connected, so that there is one socket for `abort` all along.
        self._tls = context.wrap_socket(
            sock, server_side=fingerprint is None, do_handshake_on_connect=False
        )
        self._sock = self._tls
        self._fingerprint = fingerprint

    def handshake(self, deadline: float) -> None:
        """Run the TLS handshake. Raises TicketRefused if the owner presents another certificate,
        and ProtocolError for a reader without TLS 1.3."""
        try:
            with self._until(deadline, begun=True):
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

    def send_from(self, vectors: Records, deadline: float) -> None:
        begun = False
        for run in _runs(vectors):
            data = _memory(run) if len(run) == 1 else self._gathered(run)
            self._send(data, deadline, begun)
            begun = True

    def receive_into(self, vectors: Records, deadline: float) -> None:
        begun = False
        for run in _runs(vectors):
            room = _memory(run) if len(run) == 1 else self._staging.view[: int(run["length"].sum())]
            self._fill(room, deadline, begun)
            begun = True
            if len(run) > 1:
                self._staging.move(_libc.preadv, run)

    def _gathered(self, run: Records) -> memoryview:
        nbytes = int(run["length"].sum())
        self._staging.move(_libc.pwritev, run)
        return self._staging.view[:nbytes]

    @functools.cached_property
    def _staging(self) -> _Staging:
        return _Staging()

    def _shut(self, how: int) -> None:
        # Not SSLSocket's own: that first forgets TLS, and another thread would go on in the clear.
        socket.socket.shutdown(self._tls, how)

    def _send(self, data: memoryview, deadline: float, begun: bool) -> None:
        while data:
            with self._until(deadline, begun):
                data, begun = data[self._tls.send(data[:SEND_BYTES]) :], True

    def _fill(self, room: memoryview, deadline: float, begun: bool) -> None:
        while room:
            with self._until(deadline, begun):
                count = self._tls.recv_into(room)
            if not count and not begun:
                raise EOFError("the connection was closed")
            if not count:
                raise ConnectionResetError("the connection was closed in the middle of a transfer")
            begun, room = True, room[count:]

    @contextmanager
    def _until(self, deadline: float, begun: bool) -> Iterator[None]:
        """One call of OpenSSL's, which ends in time, with the errors of a plain socket."""
        left = deadline - time.monotonic()
        if left <= 0:
            late = "the transfer deadline passed"
            raise TimeoutError(late) if begun else Expired(late)
        self._tls.settimeout(left)
        try:
            yield
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as exc:
            raise ConnectionResetError(f"the connection was lost: {exc}") from exc


def door(pem: bytes) -> Callable[[socket.socket], BulkStream]:
    """Return the function that wraps a connection accepted by an owner. pem: see `Identity`."""
    context = _context(ssl.PROTOCOL_TLS_SERVER)
    # Nothing is ever resumed; and a reader that waits is not woken by what is no answer.
    context.num_tickets = 0
    held = os.memfd_create("bulk-identity", os.MFD_CLOEXEC)
    try:
        with open(held, "wb", closefd=False) as file:
            file.write(pem)
        context.load_cert_chain(f"/proc/self/fd/{held}")  # it takes nothing but files
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


def _memory(run: Records) -> memoryview:
    """What the one vector of a run points at."""
    view: memoryview = _view_of(int(run["base"][0]), int(run["length"][0]), _WRITABLE)
    return view


class _Staging:
    """RUN_BYTES of memory that are a file as well: one pwritev gathers a thousand ranges there, one
    preadv scatters them, without a Python call for each."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("bulk-staging", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self._fd)
        os.ftruncate(self._fd, RUN_BYTES)
        self.view = memoryview(mmap.mmap(self._fd, RUN_BYTES))

    def move(self, call: Callable[..., int], vectors: Records) -> None:
        """Copy from or to the memory of the vectors, and consume them."""
        at = 0
        while len(vectors):
            moved = call(self._fd, vectors.ctypes.data, min(len(vectors), IOV_MAX), at)
            if moved <= 0:
                code = ctypes.get_errno() if moved else errno.EIO  # a call that moves 0 sets none
                raise OSError(
                    code,
                    f"could not copy values through the TLS staging buffer: {os.strerror(code)}",
                )
            at += moved
            vectors = advance(vectors, moved)


def _runs(vectors: Records) -> Iterator[Records]:
    """The vectors in order: each large one alone, small ones in groups that fit into a staging."""
    ends = np.cumsum(vectors["length"])
    large = vectors["length"] >= DIRECT_BYTES
    begin = done = 0
    while begin < len(vectors):
        end = begin + 1
        if not large[begin]:
            fitting = int(np.searchsorted(ends, np.uint64(done + RUN_BYTES), side="right"))
            alone = large[begin:fitting].nonzero()[0]
            end = begin + int(alone[0]) if len(alone) else fitting
        yield vectors[begin:end]
        begin, done = end, int(ends[end - 1])
