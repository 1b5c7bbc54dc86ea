"""Calls to peers that come, go, or say nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from dataplane.errors import FrameTooLarge, PeerNameTaken, Unavailable
from dataplane.metadata.roster.roster import Roster
from dataplane.peer.failures import failed
from dataplane.peer.host import Caller, Progress, Serving
from dataplane.peer.net.greetings import Gate
from dataplane.peer.net.mesh import Mesh
from dataplane.peer.net.streams import Streams
from dataplane.peer.operations import Channel
from dataplane.peer.tasks import Tasks
from dataplane.wire import limits, peering
from dataplane.wire.messages import Stats, StatsDone
from dataplane.wire.peering import Append, PartitionLog, PeerHello, PeerReply, Pull
from dataplane.wire.tables import Owner

HERE, THERE = "tcp://127.0.0.1:7101", "tcp://127.0.0.1:7102"
ROSTER = dataclasses.replace(Roster.from_seeds([HERE, THERE]), incarnations=(1, 2))


class Far:
    """Another peer, as the mesh meets it: how it answers greetings, and that it answers no call."""

    def __init__(self) -> None:
        self.answer: Callable[[int], bytes] | None = None
        self.greeted = 0
        self.asked: asyncio.Queue[bytes] = asyncio.Queue()
        self.streams = Streams(False, lambda stream, frame: self.asked.put_nowait(bytes(frame)))

    def dial(self, address: str, greeting: bytes, take: Any, broke: Any) -> Any:
        self.greeted += 1
        if self.answer is not None:
            rid = peering.decode_request(greeting).rid
            asyncio.get_running_loop().call_soon(take, self.answer(rid))
        return self.close

    def close(self) -> None: ...

    def welcome(self, rid: int) -> bytes:
        hello = PeerHello(
            (limits.PROTOCOL_VERSION_MIN, limits.PROTOCOL_VERSION),
            "plane", "far", 2, THERE, ROSTER.epoch, limits.SHARDS, "",
        )  # fmt: skip
        hello.stream, hello.stream_secret = self.streams.address, self.streams.promise()
        hello.control_secret = self.streams.promise(Channel.CONTROL)
        hello.heartbeat_secret = self.streams.promise(Channel.HEARTBEAT)
        return peering.encode(PeerReply(rid, 2, hello))


@pytest.fixture
async def far() -> AsyncIterator[Far]:
    far = Far()
    await far.streams.listen(THERE, THERE)
    yield far
    far.streams.close()


@pytest.fixture
async def mesh(far: Far) -> AsyncIterator[Mesh]:
    host: Any = SimpleNamespace(
        address=HERE, name="near", plane="plane", incarnation=1, roster=ROSTER, now=time.monotonic,
        founding=ROSTER.epoch, progress=Progress(), sent_between=Counter(), speak=lambda: None,
        caller=lambda: Caller(HERE, 1),
    )  # fmt: skip
    host.serving = Serving(host)
    mesh = Mesh(host, lambda: ("", "", ""), Gate(None, "plane"))
    mesh.greetings.close()
    greetings: Any = far
    mesh.greetings = greetings
    yield mesh
    await mesh.close()


async def test_all_who_ask_a_peer_wait_for_one_greeting(mesh: Mesh, far: Far) -> None:
    far.answer = far.welcome
    calls = [asyncio.create_task(mesh.call(THERE, Stats())) for _ in range(3)]
    for _ in calls:
        await asyncio.wait_for(far.asked.get(), 10)
    assert far.greeted == 1 and (await mesh.hello(THERE)).name == "far"
    for call in calls:
        call.cancel()


async def test_a_late_answer_of_a_peer_that_is_connected_is_not_taken_for_a_wrong_setting(
    mesh: Mesh, far: Far
) -> None:
    with pytest.raises(Unavailable, match="check that the peer is running with the same --run"):
        await mesh.call(THERE, Stats(), timeout_s=0.05)
    mesh.part(THERE)
    far.answer = far.welcome
    with pytest.raises(
        Unavailable, match=r"Stats within .* s: the peer is still conn.*repeat the call"
    ):
        await mesh.call(THERE, Stats(), timeout_s=1.0)
    far.answer = None
    far.streams.close()
    while mesh.is_linked(Owner(THERE, 2)):
        await asyncio.sleep(0.01)
    with pytest.raises(Unavailable, match="the connection was lost"):
        await mesh.call(THERE, Stats(), timeout_s=0.05)


async def test_a_small_request_does_not_wait_for_all_long_ones(mesh: Mesh, far: Far) -> None:
    """When a full stream could take more, all long requests that waited went at once, and a small
    put waited 28 s for 400 MB."""
    reading = list[Any]()

    def take(stream: Any, frame: bytes | memoryview) -> None:
        if not reading:
            stream.pause()
            reading.append(stream)
        far.asked.put_nowait(bytes(frame))

    far.answer, far.streams._take = far.welcome, take
    asked = [Stats("x" * (8 << 20)) for _ in range(6)]
    calls = [asyncio.create_task(mesh.call(THERE, one)) for one in asked]
    await asyncio.wait_for(far.asked.get(), 10)
    calls.append(asyncio.create_task(mesh.call(THERE, Stats("small"))))
    await asyncio.sleep(0.1)
    reading[0].resume()
    frames = [await asyncio.wait_for(far.asked.get(), 10) for _ in range(6)]
    bodies: list[Any] = [peering.decode_request(frame).body for frame in frames]
    assert "small" in [body.partition for body in bodies[:3]]
    for call in calls:
        call.cancel()


async def test_small_requests_that_a_peer_does_not_read_are_bounded(
    mesh: Mesh, far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_BYTES_UNDER_WAY", 6 << 20)
    paused = asyncio.Event()

    def take(stream: Any, frame: bytes | memoryview) -> None:
        stream.pause()
        paused.set()

    far.answer, far.streams._take = far.welcome, take
    calls = [asyncio.create_task(mesh.call(THERE, Stats()))]
    await asyncio.wait_for(paused.wait(), 10)
    calls += [asyncio.create_task(mesh.call(THERE, Stats("x" * 60_000))) for _ in range(600)]
    await asyncio.sleep(0)  # each has been sent, or waits
    waiting = mesh._links[THERE].streams[Channel.CALLS].waiting_bytes
    assert 5 << 20 < waiting < 7 << 20, waiting
    for call in calls:
        call.cancel()


async def test_who_waits_for_a_peer_to_be_there_does_not_once_it_is_no_member(
    mesh: Mesh, far: Far
) -> None:
    calls = [asyncio.create_task(mesh.call(THERE, Stats())) for _ in range(3)]
    while not far.greeted:
        await asyncio.sleep(0)
    mesh.part(THERE)
    for call in calls:
        with pytest.raises(Unavailable, match="left the run or was declared lost"):
            await asyncio.wait_for(call, 10)


async def test_a_process_that_is_no_member_any_more_is_not_asked_again(
    mesh: Mesh, far: Far
) -> None:
    """It runs, is cut off from the roster's keeper, and would answer when it is sure again."""
    far.answer = far.welcome
    call = asyncio.create_task(mesh.call(THERE, Pull(b"", b""), to=2))
    await asyncio.wait_for(far.asked.get(), 10)
    mesh.host.roster = dataclasses.replace(ROSTER, incarnations=(1, 3))
    mesh.part(THERE)
    with pytest.raises(Unavailable, match="disconnected during a call"):
        await asyncio.wait_for(call, 10)
    assert far.greeted == 1


async def test_a_greeting_that_cannot_be_read_is_asked_for_once_more(mesh: Mesh, far: Far) -> None:
    far.answer = lambda rid: b"\xc1"
    with pytest.raises(Unavailable, match="could not decode a reply"):
        await asyncio.wait_for(mesh.hello(THERE), 10)
    assert far.greeted == 2
    far.greeted, far.answer = 0, lambda rid: far.welcome(rid) if far.greeted == 2 else b"\xc1"
    assert (await asyncio.wait_for(mesh.hello(THERE), 10)).name == "far"


async def test_each_who_is_refused_has_an_error_of_its_own(mesh: Mesh, far: Far) -> None:
    refusal = failed(PeerNameTaken("two are called near", name="near"))
    far.answer = lambda rid: peering.encode(PeerReply(rid, 2, refusal))
    greetings = [mesh.hello(THERE) for _ in range(2)]
    first, second = await asyncio.gather(*greetings, return_exceptions=True)
    assert isinstance(first, PeerNameTaken) and isinstance(second, PeerNameTaken)
    assert first is not second and first.message == second.message and far.greeted == 1


async def test_a_request_that_no_frame_can_hold_fails_like_one_that_is_refused(
    mesh: Mesh, far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error was raised in a callback of the loop. A primary whose log record was as long as a
    client's message may be sent its backup nothing any more, and answered no call."""
    far.answer = far.welcome
    await mesh.hello(THERE)
    monkeypatch.setattr(peering, "MAX_FRAME_BYTES", 100)
    too_long = Append(1, 0, [PartitionLog("p" * 100, 1, [])])
    answer = mesh.ask(THERE, too_long, timeout_s=10.0, to=2)
    with pytest.raises(FrameTooLarge):
        await answer
    assert far.asked.empty() and mesh.is_linked(Owner(THERE, 2))


async def test_a_call_outlives_a_broken_connection_and_a_peer_that_does_not_answer_for_a_while(
    mesh: Mesh, far: Far
) -> None:
    far.answer = far.welcome
    call = asyncio.create_task(mesh.call(THERE, Stats()))
    await asyncio.wait_for(far.asked.get(), 10)
    far.answer = None
    for stream in list(far.streams._open):
        stream.close()
    while far.greeted < 2:
        await asyncio.sleep(0.01)
    assert not call.done() and not mesh.is_linked(Owner(THERE, 2))
    call.cancel()


async def test_a_call_is_sent_again_where_its_connection_broke(mesh: Mesh, far: Far) -> None:
    far.answer = far.welcome
    call = asyncio.create_task(mesh.call(THERE, Stats()))
    await asyncio.wait_for(far.asked.get(), 10)
    assert mesh.is_linked(Owner(THERE, 2))
    for stream in list(far.streams._open):
        stream.close()
    await asyncio.wait_for(far.asked.get(), 10)  # the same, once more
    assert mesh.is_linked(Owner(THERE, 2)) and far.greeted == 2
    call.cancel()


async def test_who_answers_is_heard(mesh: Mesh, far: Far) -> None:
    heard: list[Owner] = []
    mesh.on_heard = heard.append
    far.answer = far.welcome
    call = asyncio.create_task(mesh.call(THERE, Stats()))
    frame = await asyncio.wait_for(far.asked.get(), 10)
    stream = next(one for one in far.streams._open if one.channel is Channel.CALLS)
    reply = PeerReply(peering.decode_request(frame).rid, 2, StatsDone({}))
    far.streams.answer(stream, peering.encode(reply))
    await asyncio.wait_for(call, 10)
    assert set(heard) == {Owner(THERE, 2)}


async def test_nothing_begins_at_a_peer_that_has_ended() -> None:
    """A client's session may end after that, and what its peer would tell others then would wait
    for them when the loop ends."""
    tasks, begun = Tasks(), False

    async def work() -> None:
        nonlocal begun
        begun = True

    await tasks.close()
    await tasks.spawn(work())
    assert not begun


async def test_a_peer_that_ends_takes_no_requests_any_more_while_its_tasks_end(mesh: Mesh) -> None:
    """Those would be carried out behind the end of all that they need."""
    streams = mesh.door.streams
    await streams.listen(HERE, HERE)
    stream = await Streams.dial(
        streams.address, streams.promise(), lambda _, frame: None, lambda _, why: None
    )
    while not streams._open:
        await asyncio.sleep(0)
    (accepted,) = streams._open
    ended = list[bool]()

    async def works() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(accepted.closed)

    mesh.spawn(works())
    await asyncio.sleep(0)
    await mesh.close()
    assert ended == [True]
    stream.close()
