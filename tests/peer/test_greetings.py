"""Peers meet over zmq: whoever greets is answered, and a connection that ends is told of once."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import uvloop
import zmq
import zmq.asyncio

from dataplane.errors import AddressInUse
from dataplane.launch.token import Token
from dataplane.peer.failures import LinkBroken
from dataplane.peer.net.greetings import (
    RECONNECT_MAX_MS,
    RECONNECT_MS,
    Gate,
    Greetings,
    tune,
)
from dataplane.wire import limits

LIMIT_S = 60
GATE = Gate(None, "plane")
CLOSES_EARLY = """
import sys, threading, time
from dataplane.peer.net.greetings import Gate, Greetings

watch = Greetings._watch

def late(self, *given):
    closing.wait()
    time.sleep(0.2)
    watch(self, *given)

closing = threading.Event()
Greetings._watch = late
greetings = Greetings(Gate(None, "plane"))
greetings.bind(sys.argv[1])
closing.set()
greetings.close()
"""


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"tcp://127.0.0.1:{server.getsockname()[1]}"


class Desk:
    """A peer that is greeted, and one that greets."""

    def __init__(self) -> None:
        self.here, self.there = Greetings(GATE), Greetings(GATE)
        self.address = free_address()
        self.serving: asyncio.Task[None] | None = None

    def serve(self, answer: Callable[[bytes], bytes]) -> None:
        self.there.bind(self.address)
        self.serving = asyncio.create_task(self.there.serve(answer))

    async def close(self) -> None:
        if self.serving is not None:
            self.serving.cancel()
            await asyncio.gather(self.serving, return_exceptions=True)
        self.here.close()
        self.there.close()


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    desk = Desk()
    yield desk
    await desk.close()


class Dialler:
    """What comes of one greeting."""

    def __init__(self, desk: Desk, greeting: bytes = b"greeting") -> None:
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.broke = 0
        self.told = asyncio.Event()
        self.close = desk.here.dial(desk.address, greeting, self.answer.set_result, self._broke)

    def _broke(self) -> None:
        self.broke += 1
        self.told.set()


async def many_are_answered(desk: Desk) -> None:
    early = [Dialler(desk, b"%d" % n) for n in range(5)]  # nobody is there yet
    await asyncio.sleep(0.05)
    desk.serve(lambda greeting: b"to " + greeting)
    all_of_them = early + [Dialler(desk, b"%d" % n) for n in range(5, 200)]
    answers = await asyncio.wait_for(asyncio.gather(*(d.answer for d in all_of_them)), LIMIT_S)
    assert answers == [b"to %d" % n for n in range(200)]
    assert not any(d.broke for d in all_of_them)


async def test_whoever_greets_is_answered_also_who_came_first(desk: Desk) -> None:
    await many_are_answered(desk)


def test_whoever_greets_is_answered_with_uvloop() -> None:
    async def main() -> None:
        desk = Desk()
        await many_are_answered(desk)
        await desk.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


async def test_what_cannot_be_answered_does_not_hold_up_the_next(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    def answer(greeting: bytes) -> bytes:
        if greeting == b"bad":
            raise ValueError("a bug of ours")
        return b"welcome"

    desk.serve(answer)
    bad = Dialler(desk, b"bad")
    while "could not send a reply" not in caplog.text:
        await asyncio.sleep(0.01)
    assert await asyncio.wait_for(Dialler(desk).answer, LIMIT_S) == b"welcome"
    assert not bad.answer.done()


async def test_who_cannot_be_looked_at_at_the_door_does_not_hold_up_the_next(
    desk: Desk, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, looked = GATE.answer, list[bytes]()

    def look_in_vain(asked: list[bytes]) -> list[bytes]:
        looked.append(asked[1])
        if len(looked) == 1:
            raise ValueError("a bug of ours")
        return look(asked)

    monkeypatch.setattr(GATE, "answer", look_in_vain)
    desk.serve(lambda greeting: b"welcome")
    first = Dialler(desk)
    while "could not send a reply" not in caplog.text:
        await asyncio.sleep(0.01)
    assert not first.answer.done()
    assert await asyncio.wait_for(Dialler(desk).answer, LIMIT_S) == b"welcome"


async def test_who_is_refused_before_the_greeting_is_sent_is_told(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """libzmq gives a refused connection's queue up, in a thread of its own: on a busy machine that
    is before the greeting lies in it."""
    desk.there.close()
    desk.there = Greetings(Gate(Token(Path("token"), b"k" * 32), "plane"))
    desk.serve(lambda greeting: b"welcome")
    connect = zmq.asyncio.Socket.connect

    def slow(self: zmq.asyncio.Socket, address: str) -> None:
        connect(self, address)
        time.sleep(0.2)

    monkeypatch.setattr(zmq.asyncio.Socket, "connect", slow)
    refused = Dialler(desk)
    await asyncio.wait_for(refused.told.wait(), LIMIT_S)
    assert refused.broke == 1 and not refused.answer.done()
    refused.close()
    del refused
    gc.collect()
    await asyncio.sleep(0)
    assert "never retrieved" not in caplog.text


@pytest.mark.parametrize("token", [None, Token(Path("token"), b"k" * 32)], ids=["open", "token"])
async def test_whoever_fails_the_handshake_is_counted_and_members_are_not(
    token: Token | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Also one that says nothing, or nothing that libzmq understands."""
    gate, desk = Gate(token, "plane"), Desk()
    await desk.close()
    desk.here, desk.there = Greetings(gate), Greetings(gate)
    desk.serve(lambda greeting: b"welcome")

    async def counted(many: int) -> None:
        async with asyncio.timeout(LIMIT_S):
            while gate.refusals.total < many:
                await asyncio.sleep(0.01)

    async def member() -> None:
        met = Dialler(desk)
        assert await asyncio.wait_for(met.answer, LIMIT_S) == b"welcome"
        met.close()

    await member()
    host, port = desk.address.removeprefix("tcp://").split(":")
    said = [b"GET / HTTP/1.0\r\n\r\n", b"", b"\xff" + bytes(8) + b"\x7f\x03" + b"x" * 53]
    for many, junk in enumerate(said * 20, 1):
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(junk)
        await counted(many)
        await member()
    other = Greetings(Gate(Token(Path("other"), b"o" * 32), "plane"))
    refused = asyncio.Event()
    close = other.dial(desk.address, b"greeting", lambda _: None, refused.set)
    await counted(len(said) * 20 + 1)
    close()
    other.close()
    await desk.close()
    assert "peer door: refused a connection: another process connected, but the" in caplog.text


def test_whoever_closes_before_its_watcher_has_run_ends() -> None:
    """The watcher's thread may get no processor time until then. In a process of its own, because
    one that waits there for libzmq can only be killed."""
    subprocess.run([sys.executable, "-c", CLOSES_EARLY, free_address()], timeout=20, check=True)


async def test_many_greetings_of_one_stranger_leave_the_loop_to_others(desk: Desk) -> None:
    answered = 0

    def answer(greeting: bytes) -> bytes:
        nonlocal answered
        answered += 1
        return b"welcome"

    desk.serve(answer)
    with zmq.Context() as context, context.socket(zmq.DEALER) as flood:
        flood.setsockopt(zmq.LINGER, 0)
        flood.connect(desk.address)
        await asyncio.to_thread(lambda: [flood.send(b"greeting") for _ in range(200)])
        while not answered:
            await asyncio.sleep(0)
        before, most = answered, 0
        while answered < 200:
            await asyncio.sleep(0)
            before, most = answered, max(most, answered - before)
    assert most <= 2


@pytest.mark.parametrize("answered", [False, True])
async def test_a_connection_that_ends_is_told_of_once(desk: Desk, answered: bool) -> None:
    """As a peer ends that answered, or one that is no peer."""
    if answered:
        desk.serve(lambda greeting: b"welcome")
        one = Dialler(desk)
        await asyncio.wait_for(one.answer, LIMIT_S)
        assert desk.serving is not None
        desk.serving.cancel()
        await asyncio.gather(desk.serving, return_exceptions=True)
        desk.there.close()
    else:
        port = int(desk.address.rsplit(":", 1)[1])
        with socket.create_server(("127.0.0.1", port)) as server:
            one = Dialler(desk)
            accepted, _ = await asyncio.to_thread(server.accept)
            accepted.close()
            await asyncio.wait_for(one.told.wait(), LIMIT_S)
    await asyncio.wait_for(one.told.wait(), LIMIT_S)
    await asyncio.sleep(0.2)  # libzmq tries again
    assert one.broke == 1 and one.answer.done() is answered


async def test_of_what_was_closed_nothing_is_told(desk: Desk) -> None:
    desk.serve(lambda greeting: b"welcome")
    closed, other = Dialler(desk), Dialler(desk)
    closed.close()
    closed.close()
    await asyncio.wait_for(other.answer, LIMIT_S)
    assert not closed.answer.done() and not closed.broke


async def test_a_connection_that_waits_costs_nothing(desk: Desk) -> None:
    """Nobody is there, or has answered."""
    desk.there.bind(desk.address)
    waiting = [Dialler(desk) for _ in range(3)]
    await asyncio.sleep(0.2)
    began = time.process_time()
    await asyncio.sleep(1.0)
    assert time.process_time() - began < 0.1  # of a second in which there is nothing to do
    assert not any(one.answer.done() for one in waiting)


async def test_an_address_that_is_anothers_is_refused(desk: Desk) -> None:
    desk.there.bind(desk.address)
    with pytest.raises(AddressInUse, match="--listen"):
        desk.here.bind(desk.address)


@contextmanager
def descriptors(more: int) -> Iterator[None]:
    """This process may open so many and none besides."""
    fd = os.open("/dev/null", os.O_RDONLY)
    os.close(fd)  # the lowest that is free: the limit is on numbers
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (fd + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_peer_greets_more_peers_than_libzmq_has_sockets_for_unless_told(
    desk: Desk,
) -> None:
    """1,023 of them, of which a link takes three."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4_096:
        pytest.skip(f"this process may open {hard} files only")
    resource.setrlimit(resource.RLIMIT_NOFILE, (4_096, hard))
    try:
        for one in [Dialler(desk) for _ in range(500)]:
            one.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("few", range(4))
async def test_who_has_no_descriptor_left_can_dial_later(desk: Desk, few: int) -> None:
    made = [Dialler(desk)]  # the context has its own now
    with descriptors(few):
        for _ in range(4):
            try:
                made.append(Dialler(desk))
            except LinkBroken as exc:
                assert "ulimit -n" in exc.message
    assert len(made) < 5
    made.append(Dialler(desk))
    desk.serve(lambda greeting: b"welcome")
    await asyncio.wait_for(asyncio.gather(*(one.answer for one in made)), LIMIT_S)


class Told:
    """What a socket was told."""

    def __init__(self) -> None:
        self.options: dict[int, int | bytes] = {}

    def setsockopt(self, option: int, value: int | bytes) -> None:
        self.options[option] = value


def test_who_waits_for_one_peer_does_not_try_again_in_step() -> None:
    sockets = [Told() for _ in range(200)]
    for socket_ in sockets:
        tune(socket_, "tcp://192.0.2.1:7101")  # type: ignore[arg-type]
    for option, (least, most) in (
        (zmq.RECONNECT_IVL, RECONNECT_MS),
        (zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS),
    ):
        drawn = {int(socket_.options[option]) for socket_ in sockets}
        assert len(drawn) > 10 and least <= min(drawn) and max(drawn) <= most
    assert all(s.options[zmq.MAXMSGSIZE] == limits.MAX_HELLO_BYTES for s in sockets)
    assert all(s.options[zmq.LINGER] == 0 for s in sockets)
