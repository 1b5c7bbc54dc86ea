"""Frames between client and peer: a u32 little-endian length, then one MessagePack envelope.

`FrameReader` takes bytes as they arrive, and returns whole bodies. An incomplete frame is not an
error. The reader checks the announced length against the limit before it stores the body.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable
from typing import TypeVar

import msgspec

from dataplane.errors import FrameTooLarge, ProtocolError
from dataplane.wire.limits import MAX_FRAME_BYTES
from dataplane.wire.messages import Reply, Request

HEADER_BYTES = 4

_T = TypeVar("_T")

_header = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()


def encode(envelope: Request | Reply) -> bytes:
    """Return one frame. Raise FrameTooLarge if the receiver would refuse it."""
    body = _encoder.encode(envelope)
    length = len(body)
    if length > MAX_FRAME_BYTES:
        raise FrameTooLarge(
            f"a message of {length} bytes exceeds the limit of {MAX_FRAME_BYTES}: send fewer rows "
            "or fields per call",
            size=length,
            limit=MAX_FRAME_BYTES,
        )
    return _header.pack(length) + body


def body_length(
    data: bytes | bytearray | memoryview, limit_bytes: int = MAX_FRAME_BYTES, at: int = 0
) -> int:
    """Return the length in the header of the frame at this offset. Raise FrameTooLarge if it is
    over the limit."""
    length: int = _header.unpack_from(data, at)[0]
    if length > limit_bytes:
        raise FrameTooLarge(
            f"a frame header announces {length} bytes, over the limit of {limit_bytes}: install "
            "the same dataplane release everywhere",
            size=length,
            limit=limit_bytes,
        )
    return length


def decoded(
    decoder: msgspec.msgpack.Decoder[_T], data: bytes | bytearray | memoryview, what: str
) -> _T:
    """Decode the bytes. Raise ProtocolError if they are not `what`."""
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise ProtocolError(
            f"could not decode {what}: {exc}. Install the same dataplane release everywhere"
        ) from exc


decode_request = functools.partial(decoded, msgspec.msgpack.Decoder(Request), what="a request")
decode_reply = functools.partial(decoded, msgspec.msgpack.Decoder(Reply), what="a reply")


class FrameReader:
    """Split a byte stream into frame bodies of at most `limit_bytes` bytes."""

    def __init__(self, limit_bytes: int = MAX_FRAME_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self.awaited_bytes = 0
        """announced by the frame that is not complete yet; 0 between frames"""
        self._data: bytes | bytearray | memoryview = b""
        """as it came, where it begins with a frame; else collected"""
        self._at = 0

    def add(self, data: bytes | memoryview) -> None:
        """Add bytes, which must not change until `next` has returned all bodies."""
        if not self._data:
            self._data = data
            return
        if isinstance(self._data, bytearray):
            del self._data[: self._at]  # cheap: a bytearray remembers where it starts
        else:
            self._data = bytearray(memoryview(self._data)[self._at :])
        self._data += data
        self._at = 0

    def next(self) -> bytes | memoryview | None:
        """Return the next complete body, or None. After FrameTooLarge, the connection must end."""
        data, begin = self._data, self._at + HEADER_BYTES
        self.awaited_bytes = 0
        if len(data) < begin:
            return None
        length = body_length(data, self.limit_bytes, self._at)
        end = begin + length
        if len(data) < end:
            self.awaited_bytes = length
            return None
        self._at = end
        if end == len(data):
            self._data, self._at = b"", 0
        body = memoryview(data)[begin:end]
        return bytes(body) if isinstance(data, bytearray) else body

    def feed(self, data: bytes | memoryview) -> Iterable[bytes | memoryview]:
        """Add bytes, and yield every body that is complete, as `next` does."""
        self.add(data)
        return iter(self.next, None)
