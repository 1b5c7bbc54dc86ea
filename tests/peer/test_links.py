"""Connections to other peers that end at awkward moments."""

from __future__ import annotations

import asyncio
import math
import os
import resource
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from dataplane.errors import DataplaneError, StaleEpoch, Unavailable
from dataplane.peer.host import Caller
from dataplane.peer.net.authentication import Gate
from dataplane.peer.net.links import (
    RECONNECT_MAX_MS,
    RECONNECT_MS,
    Link,
    LinkBroken,
    Unreadable,
    tune,
)
from dataplane.peer.net.mesh import Mesh, _Call
from dataplane.peer.net.sockets import Context
from dataplane.peer.net.streams import Stream, Streams
from dataplane.peer.progress import Progress
from dataplane.wire import limits, peering
from dataplane.wire.messages import Body, Done, Failed, Put, Stats
from dataplane.wire.peering import Append, PeerHello, PeerReply
from dataplane.wire.tables import Rows


def nothing(link: Link, reply: PeerReply, append: Append) -> None:
    """No answer here brings operations."""


def never() -> None:
    """No peer here works under another roster."""


HOST: Any = SimpleNamespace(now=time.monotonic, progress=Progress())


def ask(link: Link, rid: int, frame: bytes, brings: int = 0) -> asyncio.Future[Body]:
    """On a link that takes it; no answer here is late."""
    return link.ask(rid, frame, math.inf, RuntimeError, brings)


async def test_a_link_whose_connection_ends_says_so_once() -> None:
    context = Context()
    broke: list[Link] = []
    told = asyncio.Event()

    def tell(link: Link) -> None:
        broke.append(link)
        link.close(LinkBroken("it broke"))
        told.set()

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        link = Link.open(
            context,
            f"tcp://127.0.0.1:{port}",
            Gate(None, "test"),
            tell,
            nothing,
            never,
        )
        accepted, _ = await asyncio.to_thread(server.accept)
        call = ask(link, 1, b"a question")
        accepted.close()
        with pytest.raises(LinkBroken, match="it broke"):
            await asyncio.wait_for(call, 10)
    assert broke == [link] and told.is_set()
    context.destroy()


async def test_a_link_that_was_closed_answers_with_the_reason() -> None:
    context = Context()
    link = Link.open(
        context,
        "tcp://127.0.0.1:9",
        Gate(None, "test"),
        lambda link: None,
        nothing,
        never,
    )
    call = ask(link, 1, b"a question")
    await asyncio.sleep(0)
    link.close(Unavailable("the peer is no member any more"))
    for one in (call, ask(link, 2, b"another one")):
        with pytest.raises(Unavailable, match="no member"):
            await asyncio.wait_for(one, 10)
    context.destroy()


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


@pytest.mark.parametrize("few", range(4))
async def test_a_link_for_which_no_descriptor_is_left_can_be_made_later(few: int) -> None:
    context = Context()
    address, gate = "tcp://127.0.0.1:9", Gate(None, "test")
    first = Link.open(
        context, address, gate, lambda link: None, nothing, never
    )  # the context has its own now
    made = []
    with descriptors(few):
        for _ in range(4):
            try:
                made.append(Link.open(context, address, gate, lambda link: None, nothing, never))
            except LinkBroken as exc:
                assert "ulimit -n" in exc.message
    assert len(made) < 4
    for link in [
        first,
        *made,
        Link.open(context, address, gate, lambda link: None, nothing, never),
    ]:
        link.close(Unavailable("enough"))
    context.destroy()


class Told:
    """What a socket was told."""

    def __init__(self) -> None:
        self.options: dict[int, int | bytes] = {}

    def setsockopt(self, option: int, value: int | bytes) -> None:
        self.options[option] = value


def test_links_to_one_peer_do_not_try_again_in_step() -> None:
    sockets: list[Any] = [Told() for _ in range(200)]
    for socket_ in sockets:
        tune(socket_, "tcp://192.0.2.1:7101")
    for option, (least, most) in (
        (zmq.RECONNECT_IVL, RECONNECT_MS),
        (zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS),
    ):
        drawn = {socket_.options[option] for socket_ in sockets}
        assert len(drawn) > 10 and least <= min(drawn) and max(drawn) <= most
    assert all(s.options[zmq.MAXMSGSIZE] == limits.MAX_HELLO_BYTES for s in sockets)
    assert all(s.options[zmq.LINGER] == 0 for s in sockets)


def link_to(context: Context, broke: Callable[[Link], None] = lambda link: None) -> Link:
    """One on whose zmq socket nothing happens."""
    return Link("tcp://127.0.0.1:9", context.socket(zmq.DEALER), broke, nothing, never)


class Owner:
    """The other end of a link: it answers when it is told to."""

    def __init__(self) -> None:
        self.came: asyncio.Queue[tuple[Stream, int]] = asyncio.Queue()
        self.streams = Streams(False, lambda s, frame: self.came.put_nowait((s, int(frame))))

    async def greets(self, link: Link) -> None:
        """The link has a stream to here from now on."""
        here = "tcp://127.0.0.1:9"
        await self.streams.listen(here, here)
        hello = PeerHello((1, 1), "p", "b", 1, here, (1, 1), 4096, "")
        hello.stream, hello.stream_secret = self.streams.address, self.streams.promise()
        await link.greeted(hello, self.streams.dial)

    async def asked(self) -> tuple[Stream, int]:
        return await asyncio.wait_for(self.came.get(), 10)

    def answers(self, who: Stream, rid: int) -> None:
        self.streams.answer(who, peering.encode(PeerReply(rid, 1, Done())))


async def test_what_a_peer_asks_for_and_does_not_take_is_bounded_in_bytes_at_the_other() -> None:
    context = Context()
    there = Owner()
    link = link_to(context)
    await there.greets(link)
    brings = limits.MAX_PULLED_BYTES
    most = limits.MAX_COMING_BYTES // brings

    async def asks(rid: int, brings: int) -> Body:
        await link.takes(brings)
        return await ask(link, rid, b"%d" % rid, brings)

    async def comes_last(rid: int, after: list[int]) -> Stream:
        """A request that brings no values waits for nobody, and passes those that do."""
        calls.append(asyncio.create_task(asks(rid, 0)))
        came = [await there.asked() for _ in [*after, rid]]
        assert [number for _, number in came] == [*after, rid]
        return came[0][0]

    calls = [asyncio.create_task(asks(rid, brings)) for rid in range(1, most + 4)]
    who = await comes_last(1000, list(range(1, most + 1)))
    assert not link.takes_now(brings) and link.takes_now()
    calls[0].cancel()  # its answer is under way all the same
    await comes_last(1001, [])
    there.answers(who, 1)
    there.answers(who, 2)
    await calls[1]
    await comes_last(1002, [most + 1, most + 2])
    link.close(LinkBroken("it broke"))
    for call in calls[2:]:
        with pytest.raises(LinkBroken):
            await asyncio.wait_for(call, 10)
    assert not link.room.used_bytes and not link.coming and not link.answers
    there.streams.close()
    context.destroy()


async def test_a_link_whose_stream_ends_breaks() -> None:
    """Though zmq's connection is there still; who waits for an answer would wait in vain."""
    context = Context()
    there, broke = Owner(), asyncio.Event()

    def tell(one: Link) -> None:
        one.close(LinkBroken("it broke"))
        broke.set()

    link = link_to(context, tell)
    await there.greets(link)
    asked = ask(link, 1, b"1")
    await there.asked()
    there.streams.close()
    await asyncio.wait_for(broke.wait(), 10)
    with pytest.raises(LinkBroken, match="it broke"):
        await asked
    context.destroy()


async def test_a_link_that_ends_while_its_stream_is_made_keeps_none() -> None:
    context = Context()
    there = Owner()
    link = link_to(context)
    greeting = asyncio.create_task(there.greets(link))
    await asyncio.sleep(0)
    link.close(Unavailable("the peer is no member any more"))
    with pytest.raises(Unavailable, match="no member"):
        await asyncio.wait_for(greeting, 10)
    assert link.calls is None and link.hello is None
    there.streams.close()
    context.destroy()


async def test_what_the_next_life_of_a_peer_answers_is_no_answer_of_this_one() -> None:
    """It numbers its ranges alike: their bytes would be taken for those that were asked for."""
    context = Context()
    link = Link.open(
        context,
        "tcp://127.0.0.1:9",
        Gate(None, "test"),
        lambda link: None,
        nothing,
        never,
    )
    link.hello = PeerHello((1, 1), "p", "b", 7, "tcp://127.0.0.1:9", (1, 1), 4096, "")
    link.calls = Stream(lambda stream, frame: None, lambda stream, why: None)
    asked = ask(link, 1, b"a question")
    link.received(peering.encode(PeerReply(1, 8, Done())))
    assert not asked.done()
    link.received(peering.encode(PeerReply(1, 7, Done())))
    assert asked.result() == Done()
    link.close(Unavailable("enough"))
    context.destroy()


@pytest.mark.parametrize("broke", [False, True])
async def test_what_may_have_been_carried_out_does_not_count_as_refused(broke: bool) -> None:
    """The connection broke, and whoever answers there now has the shard no more: a put that went on
    to the next as if for the first time found its own rows in the way."""
    mesh: Any = object.__new__(Mesh)
    answers: list[DataplaneError] = [StaleEpoch("it moved")]
    if broke:
        answers.insert(0, LinkBroken("it broke"))

    async def send(*request: Any) -> Body:
        raise answers.pop(0)

    async def ready(*asked: Any) -> None: ...

    mesh._ask_now, mesh._ready, mesh._send = lambda *asked: None, ready, send
    mesh._until, mesh.host = lambda *limit: time.monotonic() + 10, HOST
    put = Put("p", 1, Rows(b""), [], [])
    who = Caller("tcp://10.0.0.1:7101", 1, 5, 6)
    asked = mesh._asked(_Call("tcp://10.0.0.2:7101", put, who), 1.0)
    with pytest.raises(
        Unavailable if broke else StaleEpoch, match="it broke" if broke else "moved"
    ):
        await asked


@pytest.mark.parametrize(
    "bad", [b"\xc1", peering.encode(PeerReply(0, 1, Failed("ProtocolError", "no request", {})))]
)
async def test_what_cannot_be_read_ends_the_link_and_its_calls_at_once(bad: bytes) -> None:
    """An answer, or a request as its receiver says: nobody can tell whose that was."""
    context, there = Context(), Owner()
    link = link_to(context, lambda one: one.close(one.ended or LinkBroken("it broke")))
    await there.greets(link)
    calls = [ask(link, rid, b"%d" % rid) for rid in (1, 2)]
    who, _ = await there.asked()
    there.streams.answer(who, bad)
    for call in calls:
        with pytest.raises(Unreadable, match="do not understand each other"):
            await asyncio.wait_for(call, 10)
    there.streams.close()
    context.destroy()


@pytest.mark.parametrize("always", [False, True])
async def test_damage_of_the_way_is_met_by_asking_again_and_what_is_always_so_is_told(
    always: bool,
) -> None:
    mesh: Any = object.__new__(Mesh)
    links = 0

    async def send(*request: Any) -> Body:
        if always or links == 1:
            raise Unreadable("not a reply")
        return Done()

    async def ready(*asked: Any) -> None:
        nonlocal links
        links += 1

    mesh._ask_now, mesh._ready, mesh._send = lambda *asked: None, ready, send
    mesh._until, mesh.host = lambda *limit: time.monotonic() + 10, HOST
    who = Caller("tcp://10.0.0.1:7101", 1, 5, 6)
    asked = mesh._asked(_Call("tcp://10.0.0.2:7101", Stats(), who), 1.0)
    if always:
        with pytest.raises(Unavailable, match="not a reply") as told:
            await asked
        assert type(told.value) is Unavailable
    else:
        assert await asked == Done()
    assert links == 2
