"""Somebody between two bulk workers alters what an owner says of its region: nothing is read."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import numpy as np
import pytest

from dataplane.errors import TicketRefused
from dataplane.testing import hosts
from dataplane.testing.hosts import Host
from dataplane.transport import Remote
from dataplane.transport.bulk_frames import Held, decode_from_owner, encode
from dataplane.wire.frames import HEADER_BYTES

THEIRS = Path(__file__).parent / "third_party"
Altering = Callable[[Held], Held]
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]

ALTERED: dict[str, Altering] = {
    "nothing": lambda held: held,
    "where a value lies": lambda held: msgspec.structs.replace(
        held, sources=np.array([4096], "<u8").tobytes()
    ),
    "the region's card": lambda held: msgspec.structs.replace(held, card=b"another" + held.card),
}


@pytest.mark.parametrize("what", ALTERED)
async def test_an_owners_answer_is_taken_as_it_was_given_or_not_at_all(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{THEIRS}:{Path(__file__).parents[2]}")
    async with hosts("shelf") as start:
        owner, reader = await start("owner"), await start("reader")
        owner.fill()
        copies = owner.place(np.array([0]), np.array([1024]))
        before = bytes(reader.bytes)
        async with _between(owner, ALTERED[what]) as remote:
            if what == "nothing":
                await reader.engine.read(remote, copies, 30, "shelf")
                assert np.array_equal(reader.bytes[:1024], owner.bytes[:1024])
                return
            with pytest.raises(TicketRefused, match="altered in transit"):
                await reader.engine.read(remote, copies, 30, "shelf")
        assert bytes(reader.bytes) == before


@asynccontextmanager
async def _between(owner: Host, altering: Altering) -> AsyncIterator[Remote]:
    """A door to the owner's worker behind which somebody alters its answers: to one connection."""
    host, port = owner.engine.address.rsplit(":", 1)
    came: asyncio.Queue[Streams] = asyncio.Queue()

    async def pass_on() -> None:
        theirs, to_them = await came.get()
        ours, to_us = await asyncio.open_connection(host, int(port))
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(_passed_on(theirs, to_us))
                while True:
                    to_them.write(_altered(await _frame(ours), altering))
        finally:
            for writer in (to_them, to_us):
                writer.close()
                with suppress(OSError):
                    await writer.wait_closed()

    server = await asyncio.start_server(lambda *both: came.put_nowait(both), "127.0.0.1", 0)
    between = asyncio.create_task(pass_on())
    try:
        door = "{}:{}".format(*server.sockets[0].getsockname()[:2])
        yield dataclasses.replace(owner.remote, address=door)
    finally:
        between.cancel()
        await asyncio.gather(between, return_exceptions=True)
        server.close()


async def _passed_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while some := await source.read(1 << 16):
        sink.write(some)
    sink.write_eof()


async def _frame(source: asyncio.StreamReader) -> bytes:
    length = int.from_bytes(await source.readexactly(HEADER_BYTES), "little")
    return await source.readexactly(length)


def _altered(body: bytes, altering: Altering) -> bytes:
    said = decode_from_owner(body)
    return bytes(encode(altering(said) if isinstance(said, Held) else said))
