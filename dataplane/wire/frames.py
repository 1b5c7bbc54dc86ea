"""Frames of the local door: u32 little-endian length, then one MessagePack envelope.

`FrameReader` is fed whatever arrived and yields whole bodies; an incomplete frame is an outcome,
not an error. The limit is checked on the announced length, before a byte of the body is stored.
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
    """One frame, ready to send. FrameTooLarge when the other side would refuse it."""
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
    """The length that the header of the frame at this offset announces; FrameTooLarge over the
    limit."""
    length: int = _header.unpack_from(data, at)[0]
    if length > limit_bytes:
        raise FrameTooLarge(
            f"a frame header announces {length} bytes, over the limit of {limit_bytes}",
            size=length,
            limit=limit_bytes,
        )
    return length


def decoded(
    decoder: msgspec.msgpack.Decoder[_T], data: bytes | bytearray | memoryview, what: str
) -> _T:
    """What the bytes say; ProtocolError where they are not `what`."""
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise ProtocolError(f"could not decode {what}: {exc}") from exc


decode_request = functools.partial(decoded, msgspec.msgpack.Decoder(Request), what="a request")
decode_reply = functools.partial(decoded, msgspec.msgpack.Decoder(Reply), what="a reply")


class FrameReader:
    """Cuts a byte stream into frame bodies of at most `limit_bytes`."""

    def __init__(self, limit_bytes: int = MAX_FRAME_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self.awaited_bytes = 0
        """announced by the frame that is not complete yet; 0 between frames"""
        self._data: bytes | bytearray | memoryview = b""
        """as it came, where it begins with a frame; else collected"""
        self._at = 0

    def add(self, data: bytes | memoryview) -> None:
        """They stay as they are until `next` has given all of them."""
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
        """The next body that is complete; FrameTooLarge ends the connection."""
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
        """Every body that is complete with these bytes, as `next` gives them."""
        self.add(data)
        return iter(self.next, None)
