"""A reader that gives up while its owner waits for room to send: the pin comes back soon."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataplane.testing.hosts import KEY
from dataplane.transport.bulk_frames import MAX_GET_BYTES, Get, encode
from dataplane.transport.connections import Connection, Connections
from dataplane.transport.reading import Reading
from dataplane.transport.seam import Remote
from dataplane.transport.slices import pieces_of
from dataplane.transport.stream import iovecs
from dataplane.transport.tickets import ticket_of

StartHost = Callable[..., Awaitable[Any]]  # a Host of conftest
ZERO_WINDOW_PROBE = "04"
"""The kernel's name for the timer of a sender that waits for room at the other side, proc(5)."""


def ask(connection: Connection, remote: Remote, copies: np.ndarray) -> None:
    get = Get(remote.owner, 60_000, pieces_of(copies).tobytes())
    get.ticket = ticket_of(KEY, connection.nonce(), get)
    connection.stream.send(encode(get), time.monotonic() + 10)


def waits_for_room(port: int) -> bool:
    """Whether a sender at this port of the loopback has met a full window."""
    rows = (row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:])
    return any(
        local.endswith(f":{port:04X}") and timer.startswith(ZERO_WINDOW_PROBE)
        for _, local, _, _, _, timer, *_ in rows
    )


def drain_and_discard(connections: Connections, connection: Connection) -> None:
    """What a reading thread does when its stream is aborted in the middle of a transfer."""
    buffer = np.empty(2 * MAX_GET_BYTES, np.uint8)
    place = iovecs(np.array([buffer.ctypes.data], "<u8"), np.array([len(buffer)], "<u8"))
    connection.stream.abort()
    with pytest.raises(ConnectionResetError):
        connection.stream.receive_into(place, time.monotonic() + 10)
    connections.discard(connection)


async def test_a_pin_comes_back_soon_after_a_reader_with_a_full_window_gave_up(
    start_host: StartHost,
) -> None:
    a = await start_host("a", MAX_GET_BYTES)
    copies = a.place(np.zeros(1), np.full(1, MAX_GET_BYTES))
    connections, reading = Connections(KEY), Reading(a.remote, copies, time.monotonic() + 60)
    connection = await asyncio.to_thread(connections.borrow, reading)
    await asyncio.to_thread(ask, connection, a.remote, copies)
    async with asyncio.timeout(30):
        while not waits_for_room(int(a.remote.address.rsplit(":", 1)[1])):
            await asyncio.sleep(0.01)
    assert a.held
    await asyncio.to_thread(drain_and_discard, connections, connection)
    # The kernel itself would give such a connection up after 20 s.
    async with asyncio.timeout(10):
        while a.held:
            await asyncio.sleep(0.01)
