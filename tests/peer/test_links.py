"""Connections to other peers that end at awkward moments."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from dataplane.errors import DataplaneError, ProtocolError, StaleEpoch, Unavailable
from dataplane.peer.failures import LinkBroken
from dataplane.peer.host import Caller, Progress
from dataplane.peer.net.links import Link, Unreadable
from dataplane.peer.net.mesh import Mesh
from dataplane.peer.net.streams import Stream, Streams
from dataplane.peer.operations import Channel
from dataplane.wire import peering
from dataplane.wire.messages import Body, Done, Failed, Put, Stats
from dataplane.wire.peering import Append, PeerHello, PeerReply
from dataplane.wire.tables import Rows


def nothing(link: Link, reply: PeerReply, append: Append) -> None:
    """No answer here brings operations."""


def never() -> None:
    """No peer here works under another roster."""


ROSTER: Any = SimpleNamespace(epoch=(1, 2))
HOST: Any = SimpleNamespace(
    now=time.monotonic, progress=Progress(), roster=ROSTER, address="tcp://10.0.0.1:7101"
)


def ask(link: Link, rid: int, frame: bytes) -> asyncio.Future[Body]:
    """On a link that takes it; no answer here is late."""
    return link.ask(Stats, rid, frame, math.inf, RuntimeError)


class Line:
    """A zmq connection, and what is told of it."""

    def __init__(self) -> None:
        self.closed = False

    def dial(self, address: str, greeting: bytes, take: Any, broke: Any) -> Any:
        self.take, self.broke = take, broke
        return self.close

    def close(self) -> None:
        self.closed = True


def greet(link: Link, line: Line, dial: Any, meet: Callable[..., None] = lambda hello: None) -> Any:
    """The link greets over the line, as request 1."""
    mesh: Any = link.mesh
    mesh.greetings, mesh.others = line, SimpleNamespace(meet=meet)
    mesh.door = SimpleNamespace(streams=SimpleNamespace(dial=dial))
    return asyncio.create_task(link.greet(1, b"greeting"))


async def test_a_greeting_whose_connection_ends_says_so_once() -> None:
    broke: list[Link] = []

    def tell(link: Link) -> None:
        broke.append(link)
        link.close(LinkBroken("it broke"))

    line = Line()
    link = link_to(tell)
    greeting = greet(link, line, None)
    await asyncio.sleep(0)
    line.broke()
    with pytest.raises(LinkBroken, match="it broke"):
        await asyncio.wait_for(greeting, 10)
    assert broke == [link] and line.closed and not link.answers


async def test_a_link_that_was_closed_answers_with_the_reason() -> None:
    there, line = Owner(), Line()
    link = link_to()
    await there.greets(link, line)
    call = ask(link, 2, b"2")
    await asyncio.sleep(0)
    link.close(Unavailable("the peer is no member any more"))
    for one in (call, ask(link, 3, b"3")):
        with pytest.raises(Unavailable, match="no member"):
            await asyncio.wait_for(one, 10)
    assert line.closed
    there.streams.close()


async def test_who_greets_with_something_else_is_no_peer() -> None:
    line, link = Line(), link_to()
    greeting = greet(link, line, None)
    await asyncio.sleep(0)
    line.take(peering.encode(PeerReply(1, 7, Done())))
    with pytest.raises(ProtocolError, match="expected PeerHello, got Done"):
        await asyncio.wait_for(greeting, 10)


def link_to(broke: Callable[[Link], None] = lambda link: None) -> Link:
    mesh: Any = SimpleNamespace(
        broke=broke, bring=nothing, on_stale=never, on_heard=lambda peer: None
    )
    return Link("tcp://127.0.0.1:9", mesh)


class Owner:
    """The other end of a link: it answers when it is told to."""

    def __init__(self) -> None:
        self.came: asyncio.Queue[tuple[Stream, int]] = asyncio.Queue()
        self.streams = Streams(False, lambda s, frame: self.came.put_nowait((s, int(frame))))

    async def greets(self, link: Link, line: Line | None = None) -> None:
        """The link has a stream to here from now on."""
        here, line = "tcp://127.0.0.1:9", line or Line()
        await self.streams.listen(here, here)
        hello = PeerHello((1, 1), "p", "b", 1, here, (1, 1), 4096, "")
        hello.stream, hello.stream_secret = self.streams.address, self.streams.promise()
        hello.control_secret = self.streams.promise(Channel.CONTROL)
        hello.heartbeat_secret = self.streams.promise(Channel.HEARTBEAT)
        greeting = greet(link, line, self.streams.dial)
        await asyncio.sleep(0)
        line.take(peering.encode(PeerReply(1, 1, hello)))
        await greeting

    async def asked(self) -> tuple[Stream, int]:
        return await asyncio.wait_for(self.came.get(), 10)

    def answers(self, who: Stream, rid: int) -> None:
        self.streams.answer(who, peering.encode(PeerReply(rid, 1, Done())))


async def test_a_link_whose_stream_ends_breaks() -> None:
    there, broke = Owner(), asyncio.Event()

    def tell(one: Link) -> None:
        one.close(LinkBroken("it broke"))
        broke.set()

    link = link_to(tell)
    await there.greets(link)
    asked = ask(link, 1, b"1")
    await there.asked()
    there.streams.close()
    await asyncio.wait_for(broke.wait(), 10)
    with pytest.raises(LinkBroken, match="it broke"):
        await asked


async def test_a_link_that_ends_while_its_stream_is_made_keeps_none() -> None:
    there = Owner()
    link = link_to()
    greeting = asyncio.create_task(there.greets(link))
    await asyncio.sleep(0)
    link.close(Unavailable("the peer is no member any more"))
    with pytest.raises(Unavailable, match="no member"):
        await asyncio.wait_for(greeting, 10)
    assert not link.streams and link.hello is None
    there.streams.close()


async def test_what_the_next_life_of_a_peer_answers_is_no_answer_of_this_one() -> None:
    """It may use the same chunk numbers, so the bytes of other chunks would be taken for these."""
    link = link_to()
    link.hello = PeerHello((1, 1), "p", "b", 7, "tcp://127.0.0.1:9", (1, 1), 4096, "")
    link.streams[Channel.CALLS] = Stream(lambda stream, frame: None, lambda stream, why: None)
    asked = ask(link, 1, b"a question")
    link.received(peering.encode(PeerReply(1, 8, Done())))
    assert not asked.done()
    link.received(peering.encode(PeerReply(1, 7, Done())))
    assert asked.result() == Done()
    link.close(Unavailable("enough"))


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

    mesh._send = send
    mesh.host = HOST
    put = Put("p", 1, Rows(b""))
    who = Caller("tcp://10.0.0.1:7101", 1, 5)
    asked = mesh.call("tcp://10.0.0.2:7101", put, caller=who, timeout_s=10.0)
    with pytest.raises(
        Unavailable if broke else StaleEpoch, match="it broke" if broke else "moved"
    ):
        await asked


@pytest.mark.parametrize(
    "epoch, changes, sent", [((1, 2), True, 1), ((1, 2), False, 2), (None, True, 2)]
)
async def test_where_a_connection_broke_as_the_roster_changed_who_asks_looks_where_the_shard_is(
    epoch: tuple[int, int] | None, changes: bool, sent: int
) -> None:
    """The peer may be no member any more, not know it, and have a claim wait there."""
    mesh: Any = object.__new__(Mesh)
    host = SimpleNamespace(**vars(HOST))
    answers = [LinkBroken("it broke"), Unavailable("away")]

    async def send(*request: Any) -> Body:
        if changes:
            host.roster = SimpleNamespace(epoch=(1, 3))
        raise answers.pop(0)

    mesh._send = send
    mesh.host = host
    who = Caller("tcp://10.0.0.1:7101", 1, 5)
    put = Put("p", 1, Rows(b""))
    with pytest.raises(Unavailable):
        await mesh.call("tcp://10.0.0.2:7101", put, caller=who, timeout_s=10.0, epoch=epoch)
    assert len(answers) == 2 - sent


async def test_what_waited_for_the_backup_until_the_roster_changed_looks_where_the_shard_is() -> (
    None
):
    """The backup died, and had been the primary that it was about to ask."""
    mesh: Any = object.__new__(Mesh)
    host = SimpleNamespace(**vars(HOST))
    host.progress = SimpleNamespace(is_settled=False)

    async def reached(until: float) -> None:
        host.roster = SimpleNamespace(epoch=(1, 3))

    host.progress.reached = reached
    mesh._send = lambda *asked: pytest.fail("who was asked may be gone")
    mesh.host = host
    who = Caller("tcp://10.0.0.1:7101", 1, 5)
    put = Put("p", 1, Rows(b""))
    with pytest.raises(StaleEpoch):
        await mesh.call("tcp://10.0.0.2:7101", put, caller=who, timeout_s=10.0, epoch=(1, 2))


@pytest.mark.parametrize(
    "bad", [b"\xc1", peering.encode(PeerReply(0, 1, Failed("ProtocolError", "no request", {})))]
)
async def test_what_cannot_be_read_ends_the_link_and_its_calls_at_once(bad: bytes) -> None:
    """An answer, or a request as its receiver says: nobody can tell whose that was."""
    there = Owner()
    link = link_to(lambda one: one.close(one.ended or LinkBroken("it broke")))
    await there.greets(link)
    calls = [ask(link, rid, b"%d" % rid) for rid in (1, 2)]
    who, _ = await there.asked()
    there.streams.answer(who, bad)
    for call in calls:
        with pytest.raises(Unreadable, match="could not decode a reply"):
            await asyncio.wait_for(call, 10)
    there.streams.close()


@pytest.mark.parametrize("always", [False, True])
async def test_damage_of_the_way_is_met_by_asking_again_and_what_is_always_so_is_told(
    always: bool,
) -> None:
    mesh: Any = object.__new__(Mesh)
    sent = 0

    async def send(*request: Any) -> Body:
        nonlocal sent
        sent += 1
        if always or sent == 1:
            raise Unreadable("not a reply")
        return Done()

    mesh._send = send
    mesh.host = HOST
    who = Caller("tcp://10.0.0.1:7101", 1, 5)
    asked = mesh.call("tcp://10.0.0.2:7101", Stats(), caller=who, timeout_s=10.0)
    if always:
        with pytest.raises(Unavailable, match="not a reply") as told:
            await asked
        assert type(told.value) is Unavailable
    else:
        assert await asked == Done()
    assert sent == 2
