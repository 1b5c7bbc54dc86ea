"""One TCP connection between two bulk workers: frames, and bytes straight from or into an arena.

Blocking, and used by one thread at a time. Only `abort` may be called from another thread; it
wakes the stream. Bytes move by sendmsg/recvmsg over iovec columns that numpy builds, so
thousands of small ranges need no Python loop, and ctypes releases the GIL meanwhile. Every wait
ends at a deadline (monotonic seconds). Callers have checked that what they pass is inside the
arena, because addresses here are raw.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from dataplane.errors import ProtocolError
from dataplane.transport.bulk_frames import Frame, encode
from dataplane.wire.frames import HEADER_BYTES, body_length
from dataplane.wire.packed import Array

IOVEC = np.dtype([("base", "<u8"), ("length", "<u8")])
IOV_MAX = 1024
DEAD_PEER_MS = 20_000
"""After this long without an acknowledgement, the kernel ends the connection (its host may have
lost power)."""


class _MessageHeader(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_void_p),
        ("name_length", ctypes.c_uint32),
        ("iov", ctypes.c_void_p),
        ("iov_length", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_length", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    ]


LATE = "the transfer deadline passed"
_libc = ctypes.CDLL(None, use_errno=True)
for _call in (_libc.sendmsg, _libc.recvmsg):
    _call.argtypes = [ctypes.c_int, ctypes.POINTER(_MessageHeader), ctypes.c_int]
    _call.restype = ctypes.c_ssize_t


def iovecs(bases: Array, lengths: Array) -> Array:
    """Return memory ranges in order, with neighbours merged and empty ones left out."""
    keep = lengths > 0
    bases, lengths = bases[keep], lengths[keep]
    if not len(bases):
        return np.empty(0, IOVEC)
    new = np.ones(len(bases), bool)
    new[1:] = bases[1:] != bases[:-1] + lengths[:-1]
    heads = np.flatnonzero(new)
    joined = np.empty(len(heads), IOVEC)
    joined["base"] = bases[heads]
    joined["length"] = np.add.reduceat(lengths, heads)
    return joined


class BulkStream:
    """A connected socket with deadlines."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        # The kernel tunes the buffers, which is faster than any fixed size.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_PEER_MS)
        self._sock = sock

    def __repr__(self) -> str:
        return f"<BulkStream fd={self._sock.fileno()}>"

    def dial(self, host: str, port: int, deadline: float) -> None:
        """Connect. Raises OSError if no process listens there, and TimeoutError at the deadline."""
        self._sock.settimeout(max(0.001, deadline - time.monotonic()))
        self._sock.connect((host, port))
        self._sock.setblocking(True)

    def abort(self) -> None:
        """Wake any thread that waits on this stream. Safe from any thread, at any time."""
        with suppress(OSError):
            self._shut(socket.SHUT_RDWR)

    def handshake(self, deadline: float) -> None:
        """Run the handshake, on either side, before the first frame. A no-op without TLS."""

    def close(self) -> None:
        self._sock.close()

    def reset(self) -> None:
        """Close the connection so that a sender on the other side notices at once.

        After `abort` the kernel offers no more buffer space, however much is drained. A sender
        with a full window would otherwise probe a half-closed connection for 20 s.
        """
        with suppress(OSError):
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("@ii", 1, 0))
        self._sock.close()

    def refuse(self, frame: Frame, deadline: float) -> None:
        """Send a last frame so that it arrives: closing over unread input would destroy it."""
        with suppress(OSError):
            self.send(encode(frame), deadline)
            self._shut(socket.SHUT_WR)
            # Discard the raw input, also encrypted input.
            while time.monotonic() < deadline and self._polled(
                select.POLLIN, deadline - time.monotonic()
            ):
                if not socket.socket.recv(self._sock, 1 << 16):
                    return

    def readable(self, timeout_s: float) -> bool:
        """Whether bytes or the end of the stream arrive in time."""
        return self._polled(select.POLLIN, timeout_s)

    def ended(self) -> bool:
        """Whether the other side has closed. Bytes that it sent before are not read."""
        return self._polled(select.POLLRDHUP, 0)

    def receive(self, limit: int, deadline: float) -> bytes | None:
        """Receive one frame body; None if the other side closed before a frame."""
        header = self._receive_exactly(HEADER_BYTES, deadline)
        if header is None:
            return None
        body = self._receive_exactly(body_length(header, limit), deadline)
        if body is None:
            raise ConnectionResetError("the connection was closed in the middle of a frame")
        return body

    def send(self, data: bytes | bytearray, deadline: float) -> None:
        held = np.frombuffer(data, np.uint8)
        self.send_from(_iovec_of(held), deadline)

    def send_from(self, vectors: Array, deadline: float) -> None:
        """Send all bytes. Raises TimeoutError at the deadline, and OSError if the connection
        broke."""
        self._move(_libc.sendmsg, vectors, socket.MSG_NOSIGNAL, socket.SO_SNDTIMEO, deadline)

    def receive_into(self, vectors: Array, deadline: float) -> None:
        """Fill all destinations. Raises as `send_from`, and ConnectionResetError at an early
        end."""
        self._move(_libc.recvmsg, vectors, socket.MSG_WAITALL, socket.SO_RCVTIMEO, deadline)

    def _polled(self, events: int, timeout_s: float) -> bool:
        poll = select.poll()
        poll.register(self._sock, events)
        return bool(poll.poll(max(0.0, timeout_s) * 1000))

    def _shut(self, how: int) -> None:
        self._sock.shutdown(how)

    def _receive_exactly(self, nbytes: int, deadline: float) -> bytes | None:
        buffer = np.empty(nbytes, np.uint8)
        try:
            self.receive_into(_iovec_of(buffer), deadline)
        except EOFError:
            return None
        return buffer.tobytes()

    def _move(
        self,
        call: Callable[..., int],
        vectors: Array,
        flags: int,
        timeout_option: int,
        deadline: float,
    ) -> None:
        """`vectors` is used up: entries that are partly done are moved forward in place."""
        moved_before = False
        while len(vectors):
            if not self._arm(timeout_option, deadline):
                raise TimeoutError(LATE)
            moved = self._call(call, vectors[:IOV_MAX], flags)
            if moved == 0:
                if moved_before:
                    raise ConnectionResetError(
                        "the connection was closed in the middle of a transfer"
                    )
                raise EOFError("the connection was closed")
            if moved > 0:
                moved_before = True
                vectors = _advance(vectors, moved)

    def _arm(self, timeout_option: int, deadline: float) -> bool:
        """Return whether time is left, and limit the next call to it."""
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        # At least a microsecond: zero means no limit.
        seconds, micros = int(left), int(left % 1 * 1_000_000) + 1
        packed = struct.pack("@ll", seconds, min(micros, 999_999))
        self._sock.setsockopt(socket.SOL_SOCKET, timeout_option, packed)
        return True

    def _call(self, call: Callable[..., int], vectors: Array, flags: int) -> int:
        """Return the bytes moved, 0 at the end of the stream, or -1 to retry."""
        header = _MessageHeader(iov=vectors.ctypes.data, iov_length=len(vectors))
        moved = call(self._sock.fileno(), ctypes.byref(header), flags)
        if moved >= 0:
            return moved
        code = ctypes.get_errno()
        if code in (errno.EINTR, errno.EAGAIN):  # EAGAIN: the armed time is over, `_arm` raises
            return -1
        raise OSError(code, os.strerror(code))


def _iovec_of(held: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> Array:
    """Return a vector of `held`, which the caller keeps alive while the vector is used."""
    vector = np.empty(1 if len(held) else 0, IOVEC)
    vector["base"] = held.ctypes.data
    vector["length"] = len(held)
    return vector


def _advance(vectors: Array, moved: int) -> Array:
    """Return the rest of the vectors after `moved` bytes. Changes a vector that is partly done."""
    ends = np.cumsum(vectors["length"][:IOV_MAX])
    done = int(np.searchsorted(ends, moved, side="right"))
    rest = vectors[done:]
    part = moved - (int(ends[done - 1]) if done else 0)
    if part:
        rest["base"][0] += np.uint64(part)
        rest["length"][0] -= np.uint64(part)
    return rest


def unconnected(
    address: str, made: Callable[[socket.socket], BulkStream] = BulkStream
) -> tuple[BulkStream, tuple[str, int]]:
    """Return a stream for `dial`. A separate step, so that another thread can `abort` while it
    connects."""
    host, port = split_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return made(socket.socket(family, socket.SOCK_STREAM)), (host, port)


def split_address(address: str) -> tuple[str, int]:
    """Parse `host:port` or `[v6]:port`. Raises ProtocolError for anything else."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 0xFFFF:
        raise ProtocolError(
            f"invalid address {address!r}: expected host:port, for example 10.0.0.1:7000",
            address=address,
        )
    return host.strip("[]"), int(port)
