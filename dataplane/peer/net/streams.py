"""Streams: TCP connections on the event loop, over which peers call each other.

A link is greeted over zmq. The reply says where the other side accepts streams, and carries the
secrets of three of them, one for each channel (`operations.Channel`). The *call stream* is paused
while too many of its requests are unanswered. The *control stream* and the *heartbeat stream* are
never paused. Streams do not use libzmq, which would wake two more threads per message on each side.
With a token, the secret, sent only in the encrypted greeting, yields a fresh key for each
direction. Every frame is encrypted with AES-256-GCM and numbered by its position. A frame that
is out of order ends the connection.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections import OrderedDict
from collections.abc import Callable
from contextvars import Context as Variables
from typing import cast

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from dataplane.errors import FrameTooLarge
from dataplane.launch.values import parse_address
from dataplane.peer.failures import LinkBroken
from dataplane.peer.operations import Channel
from dataplane.wire import limits
from dataplane.wire.frames import HEADER_BYTES, FrameReader
from dataplane.wire.refusals import Refusals

log = logging.getLogger(__name__)

ID_BYTES, KEY_BYTES, TAG_BYTES = 16, 32, 16
MAX_EXPECTED = len(Channel) * limits.MAX_MEMBERS
"""Promised streams that are not open yet. The oldest promise is forgotten first."""
MAX_UNKNOWN = 1_024
"""Connections that have not identified their stream. All peers may connect at once."""
JOIN_S = 3.0
"""Time for a connection to identify its stream, and for an attempt to connect."""
FULL_BYTES = 4 << 20
"""With more unsent bytes, a stream is full: senders wait, and a call stream is not read."""
UNACKED_MS = 8_000
"""A connection ends when the other host acknowledges nothing for this long. The next call connects
again. After a cut, the kernel retransmits ever more rarely, while a new connection works at once.
The end of a connection says nothing about the peer."""
KEEPALIVE_S = 1

Take = Callable[["Stream", bytes | memoryview], None]
Ended = Callable[["Stream", str], None]


class Sealer:
    """Encrypts or decrypts the frames of one direction, in order."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)
        self._number = 0

    def _nonce(self) -> bytes:
        self._number += 1
        return self._number.to_bytes(12, "little")

    def seal(self, frame: bytes) -> bytes:
        return self._cipher.encrypt(self._nonce(), frame, None)

    def open(self, sealed: bytes | memoryview) -> bytes:
        """Decrypt a frame. Raise InvalidTag if it was not encrypted with this key, in this
        order."""
        return self._cipher.decrypt(self._nonce(), sealed, None)


class Stream(asyncio.Protocol):
    """One connection. take: gets each frame that arrives. ended: called once with the reason,
    unless the stream was closed here."""

    def __init__(self, take: Take, ended: Ended) -> None:
        self.id = b""
        self.closed = False
        self._take = take
        self._told_ended = ended
        self._loop = asyncio.get_running_loop()
        # Frames must not run in the context of the call that made the stream.
        self._variables = Variables()
        self._transport: asyncio.Transport | None = None
        self._seals: Sealer | None = None
        self._opens: Sealer | None = None
        self._frames = FrameReader(limits.MAX_FRAME_BYTES + TAG_BYTES)
        self._paused = False
        self._is_accepted = False
        """the other side sends requests, and this side replies"""
        self.channel = Channel.CALLS
        self.unanswered_bytes = 0
        """bytes of its requests, counted by the peer door"""
        self._posted: list[bytes] = []
        self._posted_bytes = 0
        self._is_behind = False
        """the kernel's buffer is full"""
        self._room = asyncio.Event()
        self._room.set()

    def __repr__(self) -> str:
        state = "closed" if self.closed else "paused" if self._paused else "open"
        return f"<Stream {self.id.hex()[:8]} {state}, {self.waiting_bytes} bytes to send>"

    def use(self, secret: bytes, accepted: bool) -> None:
        """Set the stream's name and, if frames are encrypted, a key for each direction, the
        dialler's first."""
        self.id, self._is_accepted = secret[:ID_BYTES], accepted
        keys = secret[ID_BYTES:]
        if keys:
            to, back = Sealer(keys[:KEY_BYTES]), Sealer(keys[KEY_BYTES:])
            self._seals, self._opens = (back, to) if accepted else (to, back)

    # in

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=FULL_BYTES)
        raw = transport.get_extra_info("socket")
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKED_MS)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
            raw.setsockopt(socket.IPPROTO_TCP, option, KEEPALIVE_S)
        if self._paused:
            self._transport.pause_reading()

    def data_received(self, data: bytes) -> None:
        self._frames.add(data)
        self._variables.run(self._take_frames)

    def _take_frames(self) -> None:
        try:
            while self._takes and (frame := self._frames.next()) is not None:
                if self._opens is not None:
                    frame = self._opens.open(frame)
                try:
                    self._take(self, frame)
                except Exception:  # later frames belong to other calls
                    log.exception("%r: could not handle a message", self)
        except InvalidTag:
            self._end("a frame failed authentication")
        except FrameTooLarge as exc:
            self._end(exc.message)

    def pause(self) -> None:
        """Stop reading. TCP makes the sender wait."""
        self._paused = True
        self._look()

    def resume(self) -> None:
        self._paused = False
        self._look()

    @property
    def _takes(self) -> bool:
        """Whether arriving frames are read. A call stream is not read while the other side does not
        read its replies."""
        is_gated = self._is_accepted and self.channel is Channel.CALLS
        return not (self.closed or self._paused or (is_gated and self.is_full))

    def _look(self) -> None:
        if self._transport is None or self.closed or self._transport.is_closing():
            return
        if self._takes:
            self._transport.resume_reading()
            self._loop.call_soon(self._take_frames, context=self._variables)
        else:
            self._transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(str(exc) if exc is not None else "closed by the other side")

    # out

    @property
    def waiting_bytes(self) -> int:
        there = self._transport is not None and not self.closed
        sent = self._transport.get_write_buffer_size() if there else 0  # type: ignore[union-attr]
        return self._posted_bytes + sent

    @property
    def is_full(self) -> bool:
        return not self._room.is_set()

    def post(self, frame: bytes) -> None:
        """Send a frame at the end of this turn of the loop, with all others posted in it. If the
        stream ends before that, the frame is lost."""
        if not self._posted:
            self._loop.call_soon(self._send_posted, context=self._variables)
        self._posted.append(frame)
        self._posted_bytes += len(frame)
        if self._posted_bytes > FULL_BYTES:
            self._is_now(full=True)

    async def drained(self) -> None:
        """Wait until the stream is not full, or has ended."""
        while not (self.closed or self._room.is_set()):
            await self._room.wait()

    def _send_posted(self) -> None:
        posted, self._posted, self._posted_bytes = self._posted, [], 0
        if self.closed or self._transport is None:
            return
        parts: list[bytes] = []
        for frame in posted:
            sealed = frame if self._seals is None else self._seals.seal(frame)
            parts += (len(sealed).to_bytes(HEADER_BYTES, "little"), sealed)
        self._transport.write(b"".join(parts))
        self._is_now(full=self._is_behind)

    def pause_writing(self) -> None:
        self._is_behind = True
        self._is_now(full=True)

    def resume_writing(self) -> None:
        self._is_behind = False
        self._is_now(full=False)

    def _is_now(self, full: bool) -> None:
        if full != self.is_full:
            self._room.clear() if full else self._room.set()
            self._look()

    # its end

    def close(self) -> None:
        """Close at once. Unsent frames are lost, and callers that wait to send are released."""
        self.closed = True
        self._room.set()
        if self._transport is not None:
            self._transport.abort()

    def _end(self, why: str) -> None:
        if not self.closed:
            self.close()
            self._told_ended(self, why)


class _Unknown(asyncio.Protocol):
    """A connection that has not identified its stream yet."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._late = asyncio.get_running_loop().call_later(JOIN_S, transport.abort)  # type: ignore[attr-defined]
        self._streams.unknown.add(self)
        if len(self._streams.unknown) > MAX_UNKNOWN:
            self._streams.refusals.count(
                f"more than {MAX_UNKNOWN} connections have not identified themselves"
            )
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._received += data
        if len(self._received) < ID_BYTES:
            return
        self._late.cancel()
        self._streams.unknown.discard(self)
        stream = self._streams.joined(self._received[:ID_BYTES])
        if stream is None:
            self._transport.abort()
            return
        self._transport.set_protocol(stream)
        stream.connection_made(self._transport)
        if rest := self._received[ID_BYTES:]:
            stream.data_received(rest)

    def connection_lost(self, exc: Exception | None) -> None:
        self._late.cancel()
        self._streams.unknown.discard(self)


class Streams:
    """The streams of one peer. sealed: whether frames are encrypted. take: gets the frames of
    streams that other peers opened."""

    def __init__(self, sealed: bool, take: Take) -> None:
        self.refusals = Refusals(log, "stream door")
        self.unknown: set[_Unknown] = set()
        self.address = ""
        """`host:port` where streams are accepted; "": nowhere"""
        self._sealed = sealed
        self._take = take
        self._expected: OrderedDict[bytes, tuple[bytes, Channel]] = OrderedDict()
        self._open: set[Stream] = set()
        self._server: asyncio.Server | None = None

    # streams that other peers open

    async def listen(self, where: str, told: str) -> None:
        """Listen on a port that the system chooses. where: the peer's address (tcp://host:port)
        in numeric form. told: the address that other peers know."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Unknown(self), parse_address(where)[0], 0)
        port = self._server.sockets[0].getsockname()[1]
        self.address = f"{told.removeprefix('tcp://').rpartition(':')[0]}:{port}"

    def __len__(self) -> int:
        """The number of open streams that other peers opened."""
        return len(self._open)

    def promise(self, channel: Channel = Channel.CALLS) -> bytes:
        """Return the secret of a stream that another peer will open: its name, and a key for
        each direction."""
        secret = secrets.token_bytes(ID_BYTES + (2 * KEY_BYTES if self._sealed else 0))
        self._expected[secret[:ID_BYTES]] = secret, channel
        if len(self._expected) > MAX_EXPECTED:
            self._expected.popitem(last=False)
        return secret

    def joined(self, name: bytes) -> Stream | None:
        """Return the stream with this name, or None if the name is unknown."""
        expected = self._expected.pop(name, None)
        if expected is None:
            self.refusals.count("another process opened a connection for an unknown stream")
            return None
        stream = Stream(self._take, self._ended)
        secret, stream.channel = expected
        stream.use(secret, accepted=True)
        self._open.add(stream)
        return stream

    def _ended(self, stream: Stream, why: str) -> None:
        log.debug("%r: closed: %s", stream, why)
        self._open.discard(stream)

    def answer(self, stream: Stream, frame: bytes) -> None:
        """Send a reply. Close the stream of a peer that does not read its replies; that peer
        will call again."""
        if stream.waiting_bytes > limits.MAX_BYTES_UNDER_WAY:
            self.refusals.count(
                f"another peer did not read {stream.waiting_bytes} bytes "
                "of replies, so its stream was closed"
            )
            stream.close()
            self._open.discard(stream)
            return
        stream.post(frame)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for one in list(self.unknown):
            one._transport.abort()
        for stream in list(self._open):
            stream.close()

    # streams that this peer opens

    @staticmethod
    async def dial(address: str, secret: bytes, take: Take, ended: Ended) -> Stream:
        """Open a stream. Raise LinkBroken if no peer accepts it in time."""
        host, port = parse_address(f"tcp://{address}")
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(JOIN_S):
                transport, stream = await loop.create_connection(
                    lambda: Stream(take, ended), host, port
                )
        except (OSError, TimeoutError) as exc:
            raise LinkBroken(
                f"cannot open a stream to {address}: {exc or 'no answer'}; check that no firewall "
                "blocks the --listen ports or the ephemeral ports of the peers",
                address=address,
            ) from exc
        transport.write(secret[:ID_BYTES])
        stream.use(secret, accepted=False)
        return stream
