"""Frames between client and peer: a u32 little-endian length, then one MessagePack envelope.

`FrameReader` takes bytes as they arrive, and returns whole bodies. An incomplete frame is not an
error. The reader checks the announced length against the limit before it stores the body.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import TypeVar

import msgspec

from dataplane.errors import FrameTooLarge, mixed_releases
from dataplane.wire.limits import MAX_FRAME_BYTES
from dataplane.wire.messages import Reply, Request

HEADER_BYTES = 4

_T = TypeVar("_T")

_header = struct.Struct("<I")
_length_in = _header.unpack_from
_encoder = msgspec.msgpack.Encoder()
_requests_decoder = msgspec.msgpack.Decoder(Request)
_replies_decoder = msgspec.msgpack.Decoder(Reply)


def encode(envelope: Request | Reply) -> bytes:
    """Return one frame. Raise FrameTooLarge if the receiver would refuse it."""
    body = _encoder.encode(envelope)
    length = len(body)
    if length > MAX_FRAME_BYTES:
        raise FrameTooLarge(
            f"a message of {length} bytes exceeds the limit of {MAX_FRAME_BYTES} bytes: send fewer "
            "rows or fields per call",
            size=length,
            limit=MAX_FRAME_BYTES,
        )
    return _header.pack(length) + body


def body_length(data: bytes | bytearray | memoryview, limit_bytes: int = MAX_FRAME_BYTES) -> int:
    """Return the length in the header of a frame. Raise FrameTooLarge if it is over the limit."""
    length: int = _length_in(data)[0]
    if length > limit_bytes:
        raise _too_long(length, limit_bytes)
    return length


def _too_long(length: int, limit_bytes: int) -> FrameTooLarge:
    return FrameTooLarge(
        f"a frame header announces {length} bytes, over the limit of {limit_bytes}: install "
        "the same dataplane release everywhere",
        size=length,
        limit=limit_bytes,
    )


def decoded(
    decoder: msgspec.msgpack.Decoder[_T], data: bytes | bytearray | memoryview, what: str
) -> _T:
    """Decode the bytes. Raise ProtocolError if they are not `what`."""
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise mixed_releases(f"could not decode {what}: {exc}") from exc


def decode_request(data: bytes | bytearray | memoryview) -> Request:
    return decoded(_requests_decoder, data, "a request")


def decode_reply(data: bytes | bytearray | memoryview) -> Reply:
    return decoded(_replies_decoder, data, "a reply")


class FrameReader:
    """Split a byte stream into frame bodies of at most `limit_bytes` bytes."""

    def __init__(self, limit_bytes: int = MAX_FRAME_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self.awaited_bytes = 0
        """announced by the frame that is not complete yet; 0 between frames"""
        self.held: bytes | bytearray | memoryview = b""
        """bytes that `next` has not returned yet, from the start of a frame"""

    def add(self, data: bytes | memoryview) -> None:
        """Add bytes, which must not change until `next` has returned all bodies."""
        if not self.held:
            self.held = data
            return
        self.awaited_bytes = 0
        if not isinstance(self.held, bytearray):
            self.held = bytearray(self.held)
        self.held += data

    def next(self) -> bytes | memoryview | None:
        """Return the next complete body, or None. After FrameTooLarge, the connection must end."""
        data = self.held
        rest = len(data) - HEADER_BYTES
        if rest < 0:
            return None
        (length,) = _length_in(data)
        if length > self.limit_bytes:
            raise _too_long(length, self.limit_bytes)
        if length > rest:
            self.awaited_bytes = length
            return None
        frames = memoryview(data)
        if length == rest:
            self.held = b""
            return frames[HEADER_BYTES:]
        self.held = frames[HEADER_BYTES + length :]
        return frames[HEADER_BYTES : HEADER_BYTES + length]

    def feed(self, data: bytes | memoryview) -> Iterable[bytes | memoryview]:
        """Add bytes, and yield every body that is complete, as `next` does."""
        self.add(data)
        return iter(self.next, None)
