"""Requests of other peers are carried out under the roster that their sender works under, and as
many at a time as have room."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import itertools
import math
import time
from collections import Counter
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from dataplane.errors import PartitionGone, StaleEpoch, Unavailable
from dataplane.metadata.roster.roster import Roster
from dataplane.peer.host import Caller, Serving
from dataplane.peer.net.greetings import Gate
from dataplane.peer.net.links import Link
from dataplane.peer.net.peer_door import REQUEST_BYTES, PeerDoor
from dataplane.peer.net.streams import Stream, Streams
from dataplane.peer.operations import Channel
from dataplane.peer.tasks import Tasks
from dataplane.wire import peering
from dataplane.wire.messages import Body, Done, Failed, Seal
from dataplane.wire.peering import Append, Inherited, PeerHello, PeerReply, PeerRequest, Release
from dataplane.wire.tables import Owner

HERE, THERE, ELSEWHERE = (f"tcp://10.0.0.{n}:7101" for n in (1, 2, 3))
FIRST = dataclasses.replace(Roster.from_seeds([HERE, THERE]), incarnations=(1, 2))
NEXT = dataclasses.replace(FIRST, epoch=(FIRST.epoch[0], FIRST.epoch[1] + 1))


class Door:
    """A door without a socket, a stream to it, and what it answered."""

    host: Any

    def __init__(self) -> None:
        progress = SimpleNamespace(is_settled=True)
        self.host = SimpleNamespace(
            address=HERE, roster=FIRST, incarnation=1, now=time.monotonic,
            progress=progress, speak=lambda: None, sent_between=Counter(),
        )  # fmt: skip
        self.answered: asyncio.Queue[PeerReply] = asyncio.Queue()
        self.under: list[Roster] = []
        self.tasks = Tasks()
        self.host.serving, gate = Serving(self.host), Gate(None, "plane")
        self.door = PeerDoor(
            self.host, {Seal: self._seal}, self.tasks.hold, gate, lambda peer: None
        )
        self.id, self.waiting_bytes = b"b", 0
        self.channel, self.is_full, self.unanswered_bytes = Channel.CALLS, False, 0
        self.begun: asyncio.Queue[int] = asyncio.Queue()
        self.may_end = asyncio.Semaphore(0)

    async def _seal(self, caller: Caller, body: Seal) -> Body:
        self.under.append(self.host.roster)
        return Done()

    async def when_it_may(self, caller: Caller, body: Body) -> Body:
        self.begun.put_nowait(caller.session)
        await self.may_end.acquire()
        return Done()

    def post(self, frame: bytes) -> None:
        self.answered.put_nowait(peering.decode_reply(frame))

    def arrives(self, rid: int) -> None:
        request = PeerRequest(rid, THERE, 2, 0, FIRST.epoch, 1000, Seal("p", 1))
        self.door._arrived(self, peering.encode(request))  # type: ignore[arg-type]

    async def answer(self) -> Body:
        return (await asyncio.wait_for(self.answered.get(), 10)).body


@pytest.fixture
async def door() -> Door:
    return Door()


async def test_a_request_in_step_is_carried_out(door: Door) -> None:
    door.arrives(1)
    assert isinstance(await door.answer(), Done) and door.under == [FIRST]


async def test_a_peer_whose_shards_are_moving_refuses_what_depends_on_them(door: Door) -> None:
    def speak() -> None:
        raise StaleEpoch("its shards are moving")

    door.host.speak = speak
    door.arrives(1)
    failed = await door.answer()
    assert isinstance(failed, Failed) and failed.code == "StaleEpoch" and door.under == []


async def test_a_request_is_carried_out_under_the_roster_that_it_was_compared_with(
    door: Door,
) -> None:
    """Its partition's home, say, may be elsewhere a moment later, and this peer know nothing of
    it."""
    door.arrives(1)
    door.host.roster = NEXT
    assert isinstance(await door.answer(), Done) and door.under == [FIRST]


async def test_a_request_that_fails_as_its_peer_ends_leaves_no_traceback(door: Door) -> None:
    told = list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))

    async def refuse(caller: Caller, body: Body) -> Body:
        try:
            await asyncio.sleep(60)
        finally:
            raise PartitionGone("dropped")

    door.door.handlers[Seal] = refuse
    door.arrives(1)
    await door.tasks.close()
    for _ in range(5):
        await asyncio.sleep(0)
    gc.collect()
    assert not told


@pytest.mark.parametrize("body", [Inherited(Owner(ELSEWHERE, 3), b"", b""), Release(b"", b"", 1)])
@pytest.mark.parametrize(
    ("keeper", "number", "is_heard"), [(0, -1, True), (0, 1, False), (1, 0, False)]
)
async def test_what_shards_name_is_heard_once_it_is_known_whose_they_are(
    door: Door,
    body: Inherited | Release,
    keeper: int,
    number: int,
    is_heard: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An owner that is behind would free none of what the successor took over in two steps, ever;
    and where a keeper restarted, a peer that died with the previous one has no successor, and what
    it released is named by the peer that has its shards since."""
    monkeypatch.setattr("dataplane.peer.net.peer_door.CATCH_UP_S", 0.05)

    async def another_roster(than: Roster, until: float) -> bool:
        return False

    async def until_sure(until: float) -> None: ...

    door.host.another_roster = another_roster
    door.host.serving.until_sure = until_sure
    door.door.handlers[type(body)] = lambda caller, body: Done()
    door.host.roster = NEXT
    epoch = (NEXT.epoch[0] + keeper, NEXT.epoch[1] + number)
    request = PeerRequest(1, THERE, 2, 0, epoch, 1000, body)
    door.door._arrived(door, peering.encode(request))  # type: ignore[arg-type]
    said = await door.answer()
    assert isinstance(said, Done if is_heard else Failed)


@pytest.mark.parametrize("leaves", [False, True])
async def test_what_a_peer_that_leaves_has_done_is_confirmed_when_it_is_passed_on(
    door: Door, leaves: bool
) -> None:
    """Its successor may die as soon as it has the shards."""
    roster = dataclasses.replace(FIRST, leaving=frozenset([THERE] if leaves else []))
    has_it = asyncio.get_running_loop().create_future()
    door.host.roster, door.host.silent = roster, False
    door.host.progress = SimpleNamespace(is_settled=False, reached=lambda until: has_it)
    door.door.handlers[Append] = lambda caller, body: Done()
    request = PeerRequest(1, THERE, 2, 0, roster.epoch, 1000, Append(1, 0, []))
    door.door._arrived(door, peering.encode(request))  # type: ignore[arg-type]
    assert door.answered.empty() == leaves
    has_it.set_result(None)
    assert isinstance(await door.answer(), Done)


async def test_over_zmq_a_peer_only_greets(door: Door) -> None:
    def greets(caller: Caller, body: PeerHello) -> Body:
        return door.door.welcome(body)

    door.door.handlers[PeerHello] = greets
    hello = PeerHello((1, 1), "p", "b", 2, THERE, (1, 1), 4096, "")

    def said(body: Body) -> Body:
        request = PeerRequest(1, THERE, 2, 0, FIRST.epoch, 1000, body)  # type: ignore[arg-type]
        return peering.decode_reply(door.door.greeted(peering.encode(request))).body

    first, second = said(hello), said(hello)
    assert isinstance(first, PeerHello) and isinstance(second, PeerHello)
    promised = {
        secret
        for hello in (first, second)
        for secret in (hello.stream_secret, hello.control_secret, hello.heartbeat_secret)
    }
    assert len(promised) == 6 and {len(one) for one in promised} == {16}
    refused = said(Seal("p", 1))
    assert isinstance(refused, Failed) and refused.code == "ProtocolError" and not door.under
    assert door.door.refusals.total == 1


class Dialled:
    """Streams to the door, whose answers it keeps."""

    def __init__(self, door: Door) -> None:
        self._door, self._open = door, list[Stream]()

    async def dial(self, channel: Channel = Channel.CALLS) -> Stream:
        streams = self._door.door.streams
        stream = await Streams.dial(
            streams.address,
            streams.promise(channel),
            lambda stream, frame: self._door.post(bytes(frame)),
            lambda stream, why: None,
        )
        self._open.append(stream)
        return stream

    def close(self) -> None:
        for stream in self._open:
            stream.close()


@pytest.fixture
async def dialled(door: Door) -> AsyncIterator[Dialled]:
    streams, dialled = door.door.streams, Dialled(door)
    await streams.listen(HERE.replace("10.0.0.1", "127.0.0.1"), "tcp://127.0.0.1:9")
    yield dialled
    dialled.close()
    streams.close()


@pytest.fixture
async def stream(dialled: Dialled) -> Stream:
    return await dialled.dial()


def asks(rid: int, body: Any) -> bytes:
    return peering.encode(PeerRequest(rid, THERE, 2, rid, FIRST.epoch, 5000, body))


def seal(rid: int) -> bytes:
    return asks(rid, Seal("p", 1))


async def test_a_request_that_cannot_be_taken_takes_nobody_elses_along(
    door: Door, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = door.door.streams.answer

    def fails_once(*what: Any) -> None:
        monkeypatch.setattr(door.door.streams, "answer", answer)
        raise RuntimeError("a bug")

    monkeypatch.setattr(door.door.streams, "answer", fails_once)
    door.door.handlers[Seal] = lambda caller, body: Done()
    stream.post(seal(1))
    stream.post(seal(2))
    assert (await asyncio.wait_for(door.answered.get(), 10)).rid == 2


@pytest.mark.parametrize("bound", ["stream_bytes", "limit_bytes"])
async def test_requests_beyond_the_room_wait_until_others_are_answered(
    door: Door, stream: Stream, bound: str
) -> None:
    setattr(door.door, bound, 2 * REQUEST_BYTES)
    door.door.handlers[Seal] = door.when_it_may
    for rid in range(1, 4):
        stream.post(seal(rid))
    assert [await asyncio.wait_for(door.begun.get(), 10) for _ in range(2)] == [1, 2]
    third = asyncio.ensure_future(door.begun.get())
    await asyncio.wait({third}, timeout=0.3)
    assert not third.done()
    door.may_end.release()
    assert await asyncio.wait_for(third, 10) == 3
    door.may_end.release()
    door.may_end.release()
    assert [(await asyncio.wait_for(door.answered.get(), 10)).rid for _ in range(3)] == [1, 2, 3]


async def test_a_stream_with_too_much_unanswered_holds_up_no_other(
    door: Door, dialled: Dialled
) -> None:
    door.door.stream_bytes = 2 * REQUEST_BYTES
    door.door.handlers[Seal] = door.when_it_may
    door.door.handlers[Append] = lambda caller, body: Done()
    flood, other = await dialled.dial(), await dialled.dial()
    control = await dialled.dial(Channel.CONTROL)
    for rid in range(1, 9):
        flood.post(seal(rid))
    assert [await asyncio.wait_for(door.begun.get(), 10) for _ in range(2)] == [1, 2]
    other.post(seal(20))
    assert await asyncio.wait_for(door.begun.get(), 10) == 20
    control.post(asks(30, Append(1, 0, [])))
    assert (await asyncio.wait_for(door.answered.get(), 10)).rid == 30
    door.may_end = asyncio.Semaphore(100)  # for those that begin from now on
    assert door.begun.empty()


async def test_while_all_streams_together_have_too_much_those_below_their_share_are_read(
    door: Door, dialled: Dialled
) -> None:
    door.door.limit_bytes = 4 * REQUEST_BYTES
    door.door.handlers[Seal] = door.when_it_may
    flood, other = await dialled.dial(), await dialled.dial()
    other.post(seal(20))
    assert await asyncio.wait_for(door.begun.get(), 10) == 20  # both are accepted
    for rid in range(1, 9):
        flood.post(seal(rid))
    assert [await asyncio.wait_for(door.begun.get(), 10) for _ in range(3)] == [1, 2, 3]
    other.post(seal(21))
    assert await asyncio.wait_for(door.begun.get(), 10) == 21
    for _ in range(20):
        door.may_end.release()
    answered = [(await asyncio.wait_for(door.answered.get(), 10)).rid for _ in range(10)]
    assert sorted(answered) == [*range(1, 9), 20, 21]


async def test_a_control_stream_is_always_read_and_refuses_what_it_has_no_room_for(
    door: Door, dialled: Dialled
) -> None:
    door.door.limit_bytes = door.door.stream_bytes = REQUEST_BYTES
    door.door.control_bytes = 2 * REQUEST_BYTES
    door.door.handlers[Append] = door.when_it_may
    control = await dialled.dial(Channel.CONTROL)
    for rid in range(1, 4):
        control.post(asks(rid, Append(1, 0, [])))
    refused = await asyncio.wait_for(door.answered.get(), 10)
    assert refused.rid == 3 and isinstance(refused.body, Failed)
    assert refused.body.code == "Unavailable" and str(2 * REQUEST_BYTES) in refused.body.message
    for _ in range(2):
        door.may_end.release()
    assert [(await asyncio.wait_for(door.answered.get(), 10)).rid for _ in range(2)] == [1, 2]
    control.post(seal(4))  # a call, which has no business here
    refused = await asyncio.wait_for(door.answered.get(), 10)
    assert isinstance(refused.body, Failed) and refused.body.code == "ProtocolError"


class Side:
    """A peer that answers a call once the other peer, its backup, has confirmed what it did."""

    def __init__(self, door: Door) -> None:
        self.door, self.numbers = door.door, itertools.count(100)
        door.door.stream_bytes = 2 * REQUEST_BYTES
        door.door.handlers |= {Seal: self.seal, Append: lambda caller, body: Done()}
        mesh: Any = SimpleNamespace(broke=lambda link: None, on_heard=lambda peer: None)
        self.link = Link(THERE, mesh)

    async def seal(self, caller: Caller, body: Seal) -> Body:
        await self.ask(Append(1, 0, []))
        return Done()

    def ask(self, body: Body) -> asyncio.Future[Body]:
        rid = next(self.numbers)
        return self.link.ask(type(body), rid, asks(rid, body), math.inf, RuntimeError)

    async def meets(self, other: Side) -> None:
        streams, take = other.door.streams, self.link.received
        for channel in Channel:
            self.link.streams[channel] = await Streams.dial(
                streams.address,
                streams.promise(channel),
                lambda _, frame: take(frame),
                lambda _, why: None,
            )


async def test_two_peers_that_fill_each_other_with_calls_still_confirm_each_others_changes() -> (
    None
):
    """With one stream for both, neither would read the operations for which the other waits."""
    sides = Side(Door()), Side(Door())
    for side in sides:
        await side.door.streams.listen("tcp://127.0.0.1:9", "tcp://127.0.0.1:9")
    await sides[0].meets(sides[1])
    await sides[1].meets(sides[0])
    calls = [side.ask(Seal("p", 1)) for side in sides for _ in range(50)]
    assert await asyncio.wait_for(asyncio.gather(*calls), 10) == [Done()] * 100
    for side in sides:
        side.link.close(Unavailable("enough"))
        side.door.streams.close()


async def test_what_is_no_request_is_answered_and_counted(door: Door, stream: Stream) -> None:
    for frame in (b"two", b"\xc1", seal(4), seal(5)):
        stream.post(frame)
    replies = [await asyncio.wait_for(door.answered.get(), 10) for _ in range(4)]
    assert [(reply.rid, reply.incarnation) for reply in replies] == [(0, 1), (0, 1), (4, 1), (5, 1)]
    assert all(isinstance(r.body, Failed) and r.body.code == "ProtocolError" for r in replies[:2])
    assert door.door.refusals.total == 2
