"""Frames of the controller's sockets: a 16-byte header, a MessagePack table, then raw bytes.

The table says which column lies where; arrays are sent from their place (sendmsg) and received into
existing memory (recv_into). Nothing is pickled or copied on the way.
"""

from __future__ import annotations

import itertools
import math
import mmap
import socket
import struct
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from bench.columns import Array
from bench.planes.base import Columns

Buffer = NDArray[np.uint8]

_HEADER = struct.Struct("<4sIQ")
_MAGIC = b"BCF1"
_ALIGN = 64
_IOVECS = 512
_MAP_NORESERVE = 0x4000  # of Linux; missing in the module
_MAX_TABLE_BYTES = 1 << 26


class ColumnTable(msgspec.Struct):
    """Per row: the shape, and the number of the part that holds the bytes."""

    dtype: str
    shapes: list[list[int]]
    parts: list[int]


class Frame(msgspec.Struct):
    """`parts`: byte lengths in order; each part starts at a multiple of 64 of the payload."""

    kind: str
    step: int = 0
    prompt: int = -1
    name: str = ""
    columns: dict[str, ColumnTable] = {}
    parts: list[int] = []


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)
_PADDING = bytes(_ALIGN)


def aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


class Landing:
    """Memory for received payloads, mapped and, unless told not to, touched before it is needed."""

    def __init__(self, reserve: int, touch: bool = True) -> None:
        self._free = self._all = _mapped(aligned(max(reserve, 1)), touch)

    def rewind(self) -> None:
        """Free all memory, so kept payloads may be overwritten."""
        self._free = self._all

    def keep(self, nbytes: int) -> Buffer:
        """Return memory for the caller to keep. If the reserve is used up, map more."""
        if nbytes > self._free.size:
            return _mapped(nbytes)
        room, self._free = self._free[:nbytes], self._free[nbytes:]
        return room


def _mapped(nbytes: int, touch: bool = True) -> Buffer:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (0 if touch else _MAP_NORESERVE)
    region = mmap.mmap(-1, max(nbytes, 1), flags)
    region.madvise(mmap.MADV_HUGEPAGE)
    room = np.frombuffer(region, np.uint8)
    if touch:
        room[:: mmap.PAGESIZE] = 0
    return room[:nbytes]


def pack(kind: str, columns: Columns, dedup: bool, **names: Any) -> tuple[Frame, list[Buffer]]:
    """A frame of these columns. With dedup an array that several rows share is one part."""
    parts: list[Buffer] = []
    seen: dict[tuple[int, int], int] = {}
    tables = {}
    for field, values in columns.items():
        table = ColumnTable(values[0].dtype.str, [], [])
        for value in values:
            place = (value.ctypes.data, value.nbytes)
            number = seen.get(place) if dedup else None
            if number is None:
                number = seen[place] = len(parts)
                parts.append(value.reshape(-1).view(np.uint8))
            table.shapes.append(list(value.shape))
            table.parts.append(number)
        tables[field] = table
    return Frame(kind, columns=tables, parts=[part.size for part in parts], **names), parts


def send(sock: socket.socket, frame: Frame, parts: Sequence[Buffer] = ()) -> int:
    """Send one frame; returns its payload bytes, padding not counted."""
    table = _encoder.encode(frame)
    payload = sum(aligned(n) for n in frame.parts)
    views = [memoryview(_HEADER.pack(_MAGIC, len(table), payload)), memoryview(table)]
    for part in parts:
        views.append(part.data)
        if pad := aligned(part.size) - part.size:
            views.append(memoryview(_PADDING)[:pad])
    _send_all(sock, [view for view in views if view.nbytes])
    return sum(frame.parts)


def _send_all(sock: socket.socket, views: list[memoryview]) -> None:
    first = 0
    while first < len(views):
        sent = sock.sendmsg(views[first : first + _IOVECS])
        while first < len(views) and sent >= views[first].nbytes:
            sent -= views[first].nbytes
            first += 1
        if sent:
            views[first] = views[first][sent:]


def receive_table(sock: socket.socket) -> tuple[Frame, int]:
    """Return the next frame's table, and the size of its payload. Raises EOFError at the end."""
    magic, table_bytes, payload = _HEADER.unpack(receive_into(sock, bytearray(_HEADER.size)))
    if magic != _MAGIC or table_bytes > _MAX_TABLE_BYTES:
        raise ValueError("the received data is not a frame")
    frame = _decoder.decode(receive_into(sock, bytearray(table_bytes)))
    if payload != sum(aligned(n) for n in frame.parts):
        raise ValueError(f"a payload of {payload} bytes does not match its table")
    return frame, payload


def receive_into(sock: socket.socket, room: Any) -> Any:
    """Fill this memory with the next bytes, and return it. Raises EOFError at the end."""
    view = memoryview(room)
    while view.nbytes:
        n = sock.recv_into(view)
        if n == 0:
            raise EOFError("the other end closed the connection")
        view = view[n:]
    return room


def unpack(frame: Frame, payload: Buffer) -> dict[str, list[Array]]:
    """Return views into the payload, one per row."""
    starts = [0, *itertools.accumulate(aligned(n) for n in frame.parts)]
    columns: dict[str, list[Array]] = {}
    for field, table in frame.columns.items():
        dtype = np.dtype(table.dtype)
        columns[field] = values = []
        for shape, part in zip(table.shapes, table.parts, strict=True):
            start, nbytes = starts[part], frame.parts[part]
            if math.prod(shape) * dtype.itemsize != nbytes:
                raise ValueError(f"a value of field {field!r} does not match the size of its part")
            values.append(payload[start : start + nbytes].view(dtype).reshape(shape))
    return columns
