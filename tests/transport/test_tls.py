"""Bulk transfer inside TLS: what is on the wire, who is refused, and who may read from whom."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dataplane.errors import DataplaneError, TicketRefused, TransferFailed, TransportMissing
from dataplane.transport.bulk_frames import Greeting, Join, Refused, decode_from_owner, encode
from dataplane.transport.owner import MAX_INBOUND
from dataplane.transport.secure_stream import SecureStream, door
from dataplane.transport.tickets import Identity, new_identity
from dataplane.wire.limits import PROTOCOL_VERSION

MIB = 1 << 20
SAID = b"nobody on the wire reads this sentence. "
StartHost = Callable[..., Awaitable[Any]]  # a Host of conftest


def endpoint(host: Any) -> tuple[str, int]:
    name, port = host.engine.address.rsplit(":", 1)
    return name, int(port)


def pem_file(identity: Identity, folder: Any) -> str:
    path = folder / "other.pem"
    path.write_bytes(identity.pem)
    return str(path)


def client_context(newest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.maximum_version = newest
    return context


async def still_serves(host: Any, start_host: StartHost) -> None:
    host.fill()
    reader = await start_host("reader", tls=True)
    outcome = await reader.engine.read(host.remote, host.place(np.array([64]), np.array([500])))
    assert outcome.nbytes == 500 and np.array_equal(reader.bytes[64:564], host.bytes[64:564])


@asynccontextmanager
async def recorded(host: Any) -> AsyncIterator[tuple[Any, bytearray]]:
    """The host's remote behind a proxy, and what goes through that in either direction."""
    heard = bytearray()

    async def carry(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            heard.extend(data)
            sink.write(data)
            await sink.drain()
        sink.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(*endpoint(host))
        await asyncio.gather(carry(reader, back), carry(there, writer), return_exceptions=True)
        for one in (back, writer):
            one.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        name, port = server.sockets[0].getsockname()
        yield replace(host.remote, address=f"{name}:{port}"), heard


@pytest.mark.parametrize("tls", [True, False])
async def test_only_tls_keeps_values_off_the_wire(start_host: StartHost, tls: bool) -> None:
    a, b = await start_host("a", tls=tls), await start_host("b", tls=tls)
    sentence = np.frombuffer(SAID * 1000, np.uint8)
    a.bytes[: len(sentence)] = sentence
    copies = a.place(np.array([0, 30_000, 30_100]), np.array([25_000, 50, 60]))
    async with recorded(a) as (remote, heard):
        assert (await b.engine.read(remote, copies)).nbytes == 25_110
        assert np.array_equal(b.bytes[:25_000], a.bytes[:25_000])
        assert np.array_equal(b.bytes[30_000:30_050], a.bytes[30_000:30_050])
        assert len(heard) > 25_110
        assert (SAID in heard) is not tls
        for left in (a, b):
            await left.engine.stop()


async def test_another_certificate_is_refused_before_a_word_is_said(
    start_host: StartHost, tmp_path: Any
) -> None:
    a, b = await start_host("a", tls=True), await start_host("b", tls=True)
    heard: list[bytes] = []
    ended = asyncio.Event()

    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(encode(Greeting((1, 1), b"sixteen bytes...")))
        try:
            heard.append(await reader.read())
        except OSError:
            heard.append(b"")
        writer.close()
        ended.set()

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem_file(new_identity(), tmp_path))
    async with await asyncio.start_server(impostor, "127.0.0.1", 0, ssl=context) as server:
        name, port = server.sockets[0].getsockname()
        remote = replace(a.remote, address=f"{name}:{port}")
        with pytest.raises(TicketRefused, match="a certificate that differs"):
            await b.engine.read(remote, a.place(np.array([0]), np.array([4096])))
        async with asyncio.timeout(20):
            await ended.wait()
    assert heard == [b""], "the handshake was all"
    assert not b.bytes[:4096].any()


async def test_a_peer_with_tls_reads_from_no_peer_without(start_host: StartHost) -> None:
    a, b = await start_host("a", tls=False), await start_host("b", tls=True)
    copies = a.place(np.array([0]), np.array([4096]))
    with pytest.raises(TransportMissing, match="start every peer of the run with --bulk-tls"):
        await b.engine.read(a.remote, copies)
    assert a.pins == 0


async def test_a_peer_without_tls_reads_from_one_that_has_it(start_host: StartHost) -> None:
    a, b = await start_host("a", 16 * MIB, tls=True), await start_host("b", 16 * MIB, tls=False)
    a.fill()
    large = a.place(np.arange(8) * 2 * MIB, np.full(8, MIB))
    assert (await b.engine.read(a.remote, large)).nbytes == 8 * MIB
    small = a.place(MIB + np.arange(5000) * 32, np.full(5000, 31))
    assert (await b.engine.read(a.remote, small)).nbytes == 5000 * 31
    rows, sent = (x.bytes.reshape(8, 2, MIB)[:, 0] for x in (b, a))
    assert np.array_equal(rows, sent)
    scattered = (x.bytes[MIB : MIB + 5000 * 32].reshape(5000, 32) for x in (b, a))
    got, told = scattered
    assert np.array_equal(got[:, :31], told[:, :31]) and not got[:, 31].any()


async def test_who_does_not_know_of_the_tls_gets_nothing(start_host: StartHost) -> None:
    a, b = await start_host("a", tls=True), await start_host("b", tls=False)
    copies = a.place(np.array([0]), np.array([4096]))
    with pytest.raises(DataplaneError) as refused:
        await b.engine.read(replace(a.remote, fingerprint=""), copies, timeout_s=2.0)
    assert isinstance(refused.value, (TransferFailed, TimeoutError))
    assert a.pins == 0


async def test_inside_tls_a_reader_must_still_prove_itself(start_host: StartHost) -> None:
    a = await start_host("a", tls=True)
    reader, writer = await asyncio.open_connection(*endpoint(a), ssl=client_context())
    async with asyncio.timeout(20):
        (length,) = struct.unpack("<I", await reader.readexactly(4))
        assert isinstance(decode_from_owner(await reader.readexactly(length)), Greeting)
        writer.write(encode(Join(PROTOCOL_VERSION, b"sixteen bytes...", b"a guess")))
        (length,) = struct.unpack("<I", await reader.readexactly(4))
        refused = decode_from_owner(await reader.readexactly(length))
    assert isinstance(refused, Refused) and refused.code == "TicketRefused"
    writer.transport.abort()
    await still_serves(a, start_host)


async def test_older_tls_is_refused(start_host: StartHost) -> None:
    a = await start_host("a", tls=True)
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await asyncio.open_connection(
            *endpoint(a), ssl=client_context(newest=ssl.TLSVersion.TLSv1_2)
        )
    await still_serves(a, start_host)


async def test_noise_at_the_door_costs_nothing(start_host: StartHost) -> None:
    a = await start_host("a", tls=True)
    silent, writer = await asyncio.open_connection(*endpoint(a))
    for noise in (b"GET / HTTP/1.1\r\n\r\n", bytes(64 << 10), b"\x16\x03\x01\xff\xff", b"\x16"):
        heard, told = await asyncio.open_connection(*endpoint(a))
        told.write(noise)
        with suppress(OSError):  # it has been thrown out already
            told.write_eof()
        async with asyncio.timeout(20):
            with suppress(OSError):
                assert len(await heard.read()) < 64, "an alert at most"
        told.close()
    await still_serves(a, start_host)
    async with asyncio.timeout(30):
        assert await silent.read() == b"", "it said nothing for 10 s"
    writer.close()
    assert a.pins == 1


async def test_a_crowd_that_never_shakes_hands_keeps_no_member_out(start_host: StartHost) -> None:
    a = await start_host("a", tls=True)
    crowd = [await asyncio.open_connection(*endpoint(a)) for _ in range(2 * MAX_INBOUND)]
    await still_serves(a, start_host)
    for _, writer in crowd:
        writer.close()


async def test_the_key_is_seen_nowhere_outside_the_processes(start_host: StartHost) -> None:
    a = await start_host("a", tls=True)
    pid = a.pid
    for name in ("cmdline", "environ"):
        with open(f"/proc/{pid}/{name}", "rb") as told:
            assert b"PRIVATE KEY" not in told.read()
    fds = f"/proc/{pid}/fd"
    assert not [fd for fd in os.listdir(fds) if "identity" in os.readlink(f"{fds}/{fd}")]
    assert "PRIVATE" not in repr(new_identity())


def test_an_abort_never_lets_a_stream_go_on_in_the_clear() -> None:
    identity = new_identity()
    context = client_context()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        reader = SecureStream(socket.socket(), context, identity.fingerprint)
        host, port = listener.getsockname()
        reader.dial(host, port, _soon())
        shaking = threading.Thread(target=reader.handshake, args=(_soon(),))
        shaking.start()
        owner = door(identity.pem)(listener.accept()[0])
        owner.handshake(_soon())
        shaking.join()
        reader.abort()
        with pytest.raises(OSError):
            while True:  # the first may still fit into a buffer
                reader.send(SAID, _soon())
        assert owner.receive(1000, _soon()) is None, "not a byte came that was no TLS"
        reader.close()
        owner.close()


def _soon() -> float:
    return time.monotonic() + 20
