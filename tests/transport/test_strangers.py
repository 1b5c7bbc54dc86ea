"""Raw bytes to a worker's port: a typed error frame, and the end of that connection only."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import msgspec
import numpy as np
import pytest

from dataplane.errors import TicketRefused
from dataplane.memory.extents import Records
from dataplane.transport import Remote
from dataplane.transport.bulk_frames import (
    GONE,
    MAX_GET_BYTES,
    MAX_GET_FRAME_BYTES,
    MAX_GET_ITEMS,
    MAX_JOIN_FRAME_BYTES,
    PIECE,
    Get,
    Greeting,
    Held,
    Join,
    Joined,
    Refused,
    Sent,
    decode_from_owner,
    decode_join,
    encode,
)
from dataplane.transport.owner import MAX_INBOUND
from dataplane.transport.tickets import nonce_of, plane_key, proof, ticket_of
from dataplane.wire.frames import HEADER_BYTES
from dataplane.wire.limits import PROTOCOL_VERSION
from dataplane.wire.tables import Owner

StartHost = Callable[..., Awaitable[Any]]  # a Host of conftest
KEY = plane_key("test", (1, 1))
MINE = b"sixteen bytes..."


class Stranger:
    """A client that speaks the protocol by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def frame(self) -> Any:
        async with asyncio.timeout(20):
            (length,) = struct.unpack("<I", await self.reader.readexactly(4))
            return decode_from_owner(await self.reader.readexactly(length))

    async def whole(self) -> None:
        """Receive one piece of 4,096 bytes, from the owner's answer to its confirmation."""
        held = await self.frame()
        assert isinstance(held, Held) and held.sources != GONE.tobytes(), held
        await self.reader.readexactly(4096)
        assert await self.frame() == Sent(4096)

    async def refusal(self) -> Refused:
        """The error frame, after which the connection ends."""
        refused = await self.frame()
        assert isinstance(refused, Refused), refused
        self.writer.write_eof()
        assert await self.reader.read() == b""
        return refused


@asynccontextmanager
async def joined(host: Any) -> AsyncIterator[tuple[Stranger, Greeting]]:
    """A connection on which both sides have proved themselves."""
    async with connected(host) as (stranger, greeting):
        stranger.writer.write(join(greeting))
        answer = await stranger.frame()
        assert answer == Joined(proof(KEY, "owner", greeting.challenge, MINE))
        yield stranger, greeting


def join(greeting: Greeting, version: int = PROTOCOL_VERSION, key: bytes = KEY) -> bytearray:
    return encode(Join(version, MINE, proof(key, "reader", greeting.challenge, MINE)))


@asynccontextmanager
async def connected(host: Any) -> AsyncIterator[tuple[Stranger, Greeting]]:
    name, port = host.engine.address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(name, int(port))
    stranger = Stranger(reader, writer)
    try:
        yield stranger, await stranger.frame()
    finally:
        writer.close()
        await writer.wait_closed()


def pull(host: Any, greeting: Greeting, pieces: np.ndarray, /, **changed: Any) -> bytearray:
    get = Get(host.owner, changed.pop("expiry_ms", 5_000), pieces.tobytes())
    nonce = changed.pop("nonce", nonce_of(greeting.challenge, 0))
    get.ticket = ticket_of(changed.pop("key", KEY), nonce, get)
    return encode(msgspec.structs.replace(get, **changed))


async def nothing_held(stranger: Stranger) -> None:
    """The owner ends the connection without `Held` and without bytes, perhaps with a refusal."""
    rest = await stranger.reader.read()
    if rest:
        refused = decode_from_owner(rest[HEADER_BYTES:])
        assert isinstance(refused, Refused) and refused.code == "DeadlineExceeded", refused


async def still_serves(host: Any, start_host: StartHost) -> None:
    host.fill()
    reader = await start_host("reader")
    outcome = await reader.engine.read(host.remote, host.place(np.array([64]), np.array([500])))
    assert outcome.nbytes == 500 and np.array_equal(reader.bytes[64:564], host.bytes[64:564])


async def test_the_owner_greets_first_with_a_new_challenge(start_host: StartHost) -> None:
    a = await start_host("a")
    async with connected(a) as (_, greeting):
        assert greeting.versions[1] == PROTOCOL_VERSION
        async with connected(a) as (_, another):
            assert greeting.challenge != another.challenge


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "FrameTooLarge"),
        (struct.pack("<I", MAX_GET_FRAME_BYTES + 1), "FrameTooLarge"),
        (struct.pack("<I", 5) + b"\xc1\xff\x00\x01\x02", "ProtocolError"),
        (struct.pack("<I", 0), "ProtocolError"),
        (struct.pack("<I", 50_000) + b"\x91" * 50_000, "ProtocolError"),
        (bytes(encode(Refused("x", "y"))), "ProtocolError"),
    ],
    ids=["http", "oversize", "not MessagePack", "empty", "deeply nested", "another frame"],
)
@pytest.mark.parametrize("opened", [connected, joined], ids=["a stranger's", "a member's"])
async def test_garbage_ends_that_connection_only(
    start_host: StartHost, sent: bytes, code: str, opened: Any
) -> None:
    a = await start_host("a")
    async with opened(a) as (stranger, _):
        if opened is connected and len(sent) > MAX_JOIN_FRAME_BYTES:
            code = "FrameTooLarge"
        stranger.writer.write(sent)
        assert (await stranger.refusal()).code == code
    assert a.pins == 0
    await still_serves(a, start_host)


async def test_who_does_not_join_may_read_nothing(start_host: StartHost) -> None:
    a = await start_host("a")
    a.place(np.array([0]), np.array([4096]))
    one = np.array([(1 << 32, 0, 4096)], PIECE)
    for sent, code in (
        (lambda greeting: pull(a, greeting, one), "ProtocolError"),
        (lambda greeting: join(greeting, key=b"guess"), "TicketRefused"),
        (lambda greeting: join(greeting, version=99), "VersionMismatch"),
        (lambda greeting: encode(Join(1, MINE, b"")), "TicketRefused"),
        (lambda greeting: encode(Joined(b"x" * 32)), "ProtocolError"),
        (lambda greeting: struct.pack("<I", MAX_JOIN_FRAME_BYTES + 1), "FrameTooLarge"),
    ):
        async with connected(a) as (stranger, greeting):
            stranger.writer.write(sent(greeting))
            assert (await stranger.refusal()).code == code
    async with connected(a) as (stranger, greeting), connected(a) as (_, another):
        stranger.writer.write(join(another))  # a proof that was heard on another connection
        assert (await stranger.refusal()).code == "TicketRefused"
    assert a.pins == 0
    await still_serves(a, start_host)


async def test_an_impostor_at_an_owners_address_is_found_out(start_host: StartHost) -> None:
    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(encode(Greeting((1, 1), MINE)))
        (length,) = struct.unpack("<I", await reader.readexactly(4))
        heard = decode_join(await reader.readexactly(length))
        writer.write(encode(Joined(heard.proof)))  # the reader's own proof, sent back
        await reader.read()
        writer.close()

    a, b = await start_host("a"), await start_host("b")
    async with await asyncio.start_server(impostor, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        remote = Remote(a.owner, f"{host}:{port}")
        with pytest.raises(TicketRefused, match="cannot prove"):
            await b.engine.read(remote, a.place(np.array([0]), np.array([4096])))
    assert not b.bytes[:4096].any()


async def test_strangers_make_room_for_members(start_host: StartHost) -> None:
    a = await start_host("a")
    async with joined(a) as (member, greeting):
        name, port = a.engine.address.rsplit(":", 1)
        crowd = [await asyncio.open_connection(name, int(port)) for _ in range(3 * MAX_INBOUND)]
        for reader, _ in crowd:  # all were let in, one after another
            await asyncio.wait_for(reader.readexactly(4), 20)
        a.place(np.array([0]), np.array([4096]))
        member.writer.write(pull(a, greeting, np.array([(1 << 32, 0, 4096)], PIECE)))
        await member.whole()
        for reader, _ in crowd[: 2 * MAX_INBOUND]:  # who came first made room
            assert await asyncio.wait_for(reader.read(1 << 20), 20) is not None
            assert reader.at_eof()
        for _, writer in crowd:
            writer.close()


async def test_forged_replayed_and_altered_tickets_are_refused(start_host: StartHost) -> None:
    a = await start_host("a")
    a.place(np.array([0]), np.array([4096]))
    pieces = np.array([(1 << 32, 0, 4096)], PIECE)
    others = np.array([(1 << 32 | 1, 0, 4096)], PIECE).tobytes()
    for changed in ({"key": b"guess"}, {"nonce": b"x" * 24}, {"pieces": others}):
        async with joined(a) as (stranger, greeting):
            stranger.writer.write(pull(a, greeting, pieces, **changed))
            assert (await stranger.refusal()).code == "TicketRefused"
    async with joined(a) as (stranger, greeting):
        good = pull(a, greeting, pieces)
        stranger.writer.write(good)
        await stranger.whole()
        stranger.writer.write(good)
        assert (await stranger.refusal()).code == "TicketRefused"
    assert a.pins == 1


async def test_a_ticket_that_expires_ends_the_transfer_and_its_pin(start_host: StartHost) -> None:
    a = await start_host("a", 2 * MAX_GET_BYTES)
    a.place(np.array([0]), np.array([MAX_GET_BYTES]))
    whole = np.array([(1 << 32, 0, MAX_GET_BYTES)], PIECE)
    async with joined(a) as (stranger, greeting):
        room = stranger.writer.get_extra_info("socket")
        room.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)  # the bytes do not fit
        stranger.writer.write(pull(a, greeting, whole, expiry_ms=300))
        async with asyncio.timeout(20):
            while not a.pins or a.held:
                await asyncio.sleep(0.001)
        with suppress(ConnectionError):
            assert len(await stranger.reader.read(-1)) < MAX_GET_BYTES
    await still_serves(a, start_host)


async def test_a_ticket_has_no_life_without_end_and_none_before_it(start_host: StartHost) -> None:
    a = await start_host("a")
    a.place(np.array([0]), np.array([4096]))
    one = np.array([(1 << 32, 0, 4096)], PIECE)
    async with joined(a) as (stranger, greeting):
        stranger.writer.write(pull(a, greeting, one, expiry_ms=2**62))
        await stranger.whole()
    async with joined(a) as (stranger, greeting):
        stranger.writer.write(pull(a, greeting, one, expiry_ms=-(2**62)))
        await nothing_held(stranger)


async def test_a_ticket_that_expires_before_its_chunks_are_pinned_holds_nothing(
    start_host: StartHost,
) -> None:
    a = await start_host("a")
    a.place(np.array([0]), np.array([4096]))
    a.on_pin = lambda: time.sleep(0.1)
    async with joined(a) as (stranger, greeting):
        stranger.writer.write(
            pull(a, greeting, np.array([(1 << 32, 0, 4096)], PIECE), expiry_ms=50)
        )
        await nothing_held(stranger)
    assert a.pins == 1
    async with asyncio.timeout(20):
        while a.held:
            await asyncio.sleep(0.001)
    await still_serves(a, start_host)


async def test_wrong_sizes_and_owners_are_refused(start_host: StartHost) -> None:
    a = await start_host("a")
    one = np.array([(1 << 32, 0, 4096)], PIECE)
    wraps = np.array([(1 << 32, 0, 2**63), (1 << 32, 0, 2**63 + 5)], PIECE)
    cases: list[tuple[dict[str, Any], Records, str]] = [
        ({"pieces": b"12345"}, one, "ProtocolError"),
        ({"owner": Owner("a", 6)}, one, "TicketRefused"),
        ({}, np.array([(1 << 32, 0, MAX_GET_BYTES + 1)], PIECE), "LimitExceeded"),
        ({}, wraps, "LimitExceeded"),
        ({}, np.zeros(MAX_GET_ITEMS + 1, PIECE), "LimitExceeded"),
    ]
    for changed, pieces, code in cases:
        async with joined(a) as (stranger, greeting):
            stranger.writer.write(pull(a, greeting, pieces, **changed))
            assert (await stranger.refusal()).code == code
    assert a.pins == 0
    await still_serves(a, start_host)


async def test_idle_members_make_room_for_new_ones(start_host: StartHost) -> None:
    a = await start_host("a")
    async with AsyncExitStack() as members:
        crowd = [await members.enter_async_context(joined(a)) for _ in range(MAX_INBOUND + 8)]
        closed = [await stranger.reader.read() for stranger, _ in crowd[:8]]
        assert closed == [b""] * 8, "those idle for longest"
        await still_serves(a, start_host)


async def test_idle_connections_make_room_for_new_ones(start_host: StartHost) -> None:
    a = await start_host("a")
    name, port = a.engine.address.rsplit(":", 1)
    idle = [await asyncio.open_connection(name, int(port)) for _ in range(MAX_INBOUND + 8)]
    await still_serves(a, start_host)
    closed = [await asyncio.wait_for(reader.readexactly(4), 20) for reader, _ in idle]
    assert len(closed) == len(idle), "each was greeted, whatever became of it"
    for _, writer in idle:
        writer.close()


async def test_a_half_sent_request_and_a_reader_that_leaves_do_no_harm(
    start_host: StartHost,
) -> None:
    a = await start_host("a", MAX_GET_BYTES)
    a.place(np.array([0]), np.array([MAX_GET_BYTES]))
    pieces = np.array([(1 << 32, 0, MAX_GET_BYTES)], PIECE)
    async with joined(a) as (stranger, greeting):
        stranger.writer.write(pull(a, greeting, pieces)[:20])
    async with joined(a) as (stranger, greeting):
        stranger.writer.write(pull(a, greeting, pieces))
        await stranger.reader.readexactly(100)
    async with asyncio.timeout(20):
        while a.held or not a.pins:
            await asyncio.sleep(0)
    await still_serves(a, start_host)


def test_another_plane_roster_or_token_has_other_keys() -> None:
    keys = {
        plane_key("p", (1, 1), b"token"),
        plane_key("q", (1, 1), b"token"),
        plane_key("p", (2, 1), b"token"),
        plane_key("p", (1, 1), b"other"),
        plane_key("p", (1, 1)),
        plane_key("p", (2, 1)),
    }
    assert len(keys) == 6
