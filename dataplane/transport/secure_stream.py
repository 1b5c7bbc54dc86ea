"""A `BulkStream` inside TLS 1.3, for `--bulk-tls`: its whole interface, and the same promises.

The owner shows a certificate that nobody vouches for. The reader knows its digest beforehand, and
says not a word to whoever shows another one; it proves itself by the join, as without TLS. OpenSSL
takes bytes straight out of the arena and puts them straight into it, except for small ranges, which
go through a `Staging`.
"""

from __future__ import annotations

import ctypes
import functools
import hmac
import os
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dataplane.errors import ProtocolError, TicketRefused
from dataplane.transport.identity import fingerprint_of
from dataplane.transport.seam import Records
from dataplane.transport.staging import Staging, runs
from dataplane.transport.stream import BulkStream, Expired

SEND_BYTES = 256 << 10
"""In one call, so that the deadline is looked at in between."""

_view_of = ctypes.pythonapi.PyMemoryView_FromMemory
_view_of.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]
_view_of.restype = ctypes.py_object
_WRITABLE = 0x200
"""PyBUF_WRITE"""


class SecureStream(BulkStream):
    """fingerprint: of the owner that is dialled; None: this is the owner's side."""

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
        self._staging: Staging | None = None

    def handshake(self, deadline: float) -> None:
        """TicketRefused when the owner shows another certificate; ProtocolError for a reader that
        speaks no TLS 1.3."""
        try:
            with self._until(deadline, begun=True):
                self._tls.do_handshake()
        except ssl.SSLError as exc:
            if self._fingerprint is not None:
                raise
            raise ProtocolError(f"not TLS 1.3, which this bulk port speaks alone: {exc}") from exc
        if self._fingerprint is not None:
            self._recognise(self._fingerprint)

    def _recognise(self, expected: str) -> None:
        shown = fingerprint_of(self._tls.getpeercert(binary_form=True) or b"")
        if not hmac.compare_digest(shown.encode(), expected.encode()):
            host, port = self._tls.getpeername()[:2]
            raise TicketRefused(
                f"what listens at {host}:{port} shows another certificate than the peer told of: "
                "somebody sits between the two",
                address=f"{host}:{port}",
            )

    def readable(self, timeout_s: float) -> bool:
        return self._tls.pending() > 0 or super().readable(timeout_s)

    def close(self) -> None:
        super().close()
        self._unstage()

    def reset(self) -> None:
        super().reset()
        self._unstage()

    def send_from(self, vectors: Records, deadline: float) -> None:
        begun = False
        for run in runs(vectors):
            data = _memory(run) if len(run) == 1 else self._staged().gather(run)
            self._send(data, deadline, begun)
            begun = True

    def receive_into(self, vectors: Records, deadline: float) -> None:
        begun = False
        for run in runs(vectors):
            if len(run) == 1:
                self._fill(_memory(run), deadline, begun)
            else:
                self._fill(self._staged().room(run), deadline, begun)
                self._staged().scatter(run)
            begun = True

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
                raise EOFError("the connection ended")
            if not count:
                raise ConnectionResetError("the connection ended inside a transfer")
            begun, room = True, room[count:]

    @contextmanager
    def _until(self, deadline: float, begun: bool) -> Iterator[None]:
        """One call of OpenSSL's, which ends in time, with the errors of a plain socket."""
        left = deadline - time.monotonic()
        if left <= 0:
            late = "the deadline of the transfer passed"
            raise TimeoutError(late) if begun else Expired(late)
        self._tls.settimeout(left)
        try:
            yield
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as exc:
            raise ConnectionResetError(f"the connection ended: {exc}") from exc

    def _staged(self) -> Staging:
        self._staging = self._staging or Staging()
        return self._staging

    def _unstage(self) -> None:
        staging, self._staging = self._staging, None
        if staging is not None:
            staging.close()


def door(pem: bytes) -> Callable[[socket.socket], BulkStream]:
    """What makes a stream of a connection that an owner accepted. pem: see `Identity`."""
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
    """What makes a stream to the owner with this certificate."""
    return functools.partial(SecureStream, context=_reading(), fingerprint=fingerprint)


@functools.cache
def _reading() -> ssl.SSLContext:
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
