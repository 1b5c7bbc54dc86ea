"""Streams between peers: frames come whole, in order and from whom they should, or it ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvloop

from dataplane.errors import Unavailable
from dataplane.peer.net import streams
from dataplane.peer.net.streams import (
    ID_BYTES,
    MAX_EXPECTED,
    Stream,
    Streams,
)
from dataplane.wire import limits
from dataplane.wire.frames import HEADER_BYTES

LIMIT_S = 60
LOOPBACK = "tcp://127.0.0.1:9"


async def send(stream: Stream, frame: bytes) -> None:
    """Once there is room."""
    await stream.drained()
    stream.post(frame)


class Door:
    """One peer's streams; what comes on those that others dial waits in `came`."""

    def __init__(self, sealed: bool) -> None:
        self.came: asyncio.Queue[tuple[Stream, bytes | memoryview]] = asyncio.Queue()
        self.streams = Streams(sealed, lambda stream, frame: self.came.put_nowait((stream, frame)))

    async def next(self) -> tuple[Stream, bytes | memoryview]:
        return await asyncio.wait_for(self.came.get(), LIMIT_S)


class Dialler:
    """The other side of one stream."""

    def __init__(self) -> None:
        self.came: asyncio.Queue[bytes | memoryview] = asyncio.Queue()
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def dial(self, door: Door, secret: bytes | None = None) -> Stream:
        self.stream = await Streams.dial(
            door.streams.address,
            door.streams.promise() if secret is None else secret,
            lambda stream, frame: self.came.put_nowait(frame),
            lambda stream, why: self.ended.set_result(why),
        )
        return self.stream

    async def dial_and_pause(self, door: Door) -> tuple[Stream, Stream]:
        """Both ends of a stream that the accepting side does not read."""
        stream = await self.dial(door)
        stream.post(b"first")
        accepted, _ = await door.next()
        accepted.pause()
        return stream, accepted

    async def next(self) -> bytes | memoryview:
        return await asyncio.wait_for(self.came.get(), LIMIT_S)

    async def end(self) -> str:
        return await asyncio.wait_for(self.ended, LIMIT_S)


@pytest.fixture(params=[False, True], ids=["open", "sealed"])
async def door(request: pytest.FixtureRequest) -> AsyncIterator[Door]:
    door = Door(request.param)
    await door.streams.listen(LOOPBACK, LOOPBACK)
    yield door
    door.streams.close()


async def bursts(door: Door) -> None:
    dialler = Dialler()
    stream = await dialler.dial(door)
    sizes = [0, 1, 400, 70_000, 5 << 20, 3, 2 << 20, 17]
    frames = [bytes([n % 256]) * size for n, size in enumerate(sizes * 5)]
    for frame in frames:
        await send(stream, frame)
    for frame in frames:
        back, came = await door.next()
        assert came == frame
        door.streams.answer(back, bytes(came[:1000]))
    for frame in frames:
        assert await dialler.next() == frame[:1000]
    stream.close()


async def test_frames_of_any_size_come_whole_and_in_order(door: Door) -> None:
    await bursts(door)


@pytest.mark.parametrize("sealed", [False, True])
def test_frames_of_any_size_come_whole_and_in_order_with_uvloop(sealed: bool) -> None:
    async def main() -> None:
        door = Door(sealed)
        await door.streams.listen(LOOPBACK, LOOPBACK)
        await bursts(door)
        door.streams.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


async def test_who_sends_too_much_waits_until_it_is_taken(door: Door) -> None:
    dialler = Dialler()
    stream, accepted = await dialler.dial_and_pause(door)
    frame = bytes(1 << 20)

    async def send_all() -> None:
        for _ in range(100):
            await send(stream, frame)

    sending = asyncio.create_task(send_all())
    await asyncio.wait({sending}, timeout=0.5)
    assert not sending.done() and stream.is_full and stream.waiting_bytes < 16 << 20
    assert door.came.empty()
    accepted.resume()
    for _ in range(100):
        assert (await door.next())[1] == frame
    await sending
    stream.close()


async def test_a_pause_in_the_middle_of_what_came_holds_the_rest_back(door: Door) -> None:
    stream = await Dialler().dial(door)
    for n in range(10):
        stream.post(b"%d" % n)
    took = door.streams._take

    def take(one: Stream, frame: bytes | memoryview) -> None:
        took(one, frame)
        if frame == b"3":
            one.pause()

    door.streams._take = take
    came = [await door.next() for _ in range(4)]
    assert [frame for _, frame in came] == [b"0", b"1", b"2", b"3"]
    later = asyncio.ensure_future(door.next())
    await asyncio.wait({later}, timeout=0.3)
    assert not later.done()
    came[0][0].resume()
    rest = [(await later)[1], *[(await door.next())[1] for _ in range(5)]]
    assert rest == [b"%d" % n for n in range(4, 10)]
    stream.close()


async def test_an_end_is_told_once_and_nobody_waits_to_send_any_more(door: Door) -> None:
    dialler = Dialler()
    stream, _ = await dialler.dial_and_pause(door)
    sending = [asyncio.create_task(send(stream, bytes(8 << 20))) for _ in range(5)]
    await asyncio.wait(sending, timeout=0.3)
    assert not all(one.done() for one in sending)
    door.streams.close()
    await dialler.end()
    await asyncio.wait_for(asyncio.gather(*sending), LIMIT_S)
    assert stream.closed
    await send(stream, b"lost")
    stream.close()
    assert "closed" in repr(stream)


async def test_a_stream_that_was_closed_here_is_told_of_to_the_other_side_alone(door: Door) -> None:
    dialler = Dialler()
    stream = await dialler.dial(door)
    stream.post(b"1")
    await door.next()
    stream.close()
    async with asyncio.timeout(LIMIT_S):
        while door.streams._open:
            await asyncio.sleep(0.01)
    assert not dialler.ended.done()


async def test_a_frame_that_cannot_be_taken_does_not_hold_up_the_next(
    door: Door, caplog: pytest.LogCaptureFixture
) -> None:
    took = door.streams._take

    def take(stream: Stream, frame: bytes | memoryview) -> None:
        if frame == b"0":
            raise ValueError("a bug of ours")
        took(stream, frame)

    door.streams._take = take
    stream = await Dialler().dial(door)
    stream.post(b"0")
    stream.post(b"1")
    assert (await door.next())[1] == b"1" and "could not handle a message" in caplog.text
    stream.close()


async def unread(door: Door) -> None:
    dialler = Dialler()
    stream, took = await dialler.dial(door), list[Stream]()

    def answer(back: Stream, frame: bytes | memoryview) -> None:
        took.append(back)
        door.streams.answer(back, bytes(frame) * (1 << 18))

    door.streams._take = answer
    stream.pause()
    questions = [b"%3d" % n for n in range(200)]
    for question in questions:
        stream.post(question)
    async with asyncio.timeout(LIMIT_S):
        while not took or not took[0].is_full:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)
    assert took[0].waiting_bytes < 2 * streams.FULL_BYTES and len(took) < 50
    stream.resume()
    for question in questions:
        assert (await dialler.next())[:3] == question
    assert not door.streams.refusals.total and not took[0].closed
    stream.close()


async def test_who_does_not_take_its_answers_asks_nothing_more_until_it_does(door: Door) -> None:
    await unread(door)


def test_who_does_not_take_its_answers_asks_nothing_more_with_uvloop() -> None:
    async def main() -> None:
        door = Door(False)
        await door.streams.listen(LOOPBACK, LOOPBACK)
        await unread(door)
        door.streams.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


async def test_a_peer_that_takes_no_answers_is_cut_off(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_BYTES_UNDER_WAY", 8 << 20)
    dialler = Dialler()
    stream = await dialler.dial(door)
    stream.post(b"a question")
    back, _ = await door.next()
    stream.pause()
    for _ in range(100):
        door.streams.answer(back, bytes(1 << 20))
        await asyncio.sleep(0)
    assert back.closed and door.streams.refusals.total == 1 and not door.streams._open
    stream.resume()
    await dialler.end()


# strangers


async def connected(door: Door) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = door.streams.address.rsplit(":", 1)
    return await asyncio.open_connection(host, int(port))


async def is_cut_off(reader: asyncio.StreamReader) -> bool:
    with contextlib.suppress(ConnectionError):
        return await asyncio.wait_for(reader.read(), LIMIT_S) == b""
    return True


def framed(said: bytes) -> bytes:
    return len(said).to_bytes(HEADER_BYTES, "little") + said


async def test_who_does_not_know_a_promised_name_is_turned_away(door: Door) -> None:
    for said in (b"x" * ID_BYTES, b"GET / HTTP/1.1\r\n\r\n"):
        reader, writer = await connected(door)
        writer.write(said)
        assert await is_cut_off(reader)
        writer.close()
    assert door.streams.refusals.total == 2 and door.came.empty()


async def test_a_name_is_good_for_one_stream(door: Door) -> None:
    secret = door.streams.promise()
    first = await Dialler().dial(door, secret)
    first.post(b"1")
    await door.next()
    second = Dialler()
    await second.dial(door, secret)
    await second.end()
    first.post(b"2")
    assert (await door.next())[1] == b"2"
    first.close()


@pytest.mark.parametrize("said", ["noise", "the frame again", "another order", "too long"])
async def test_what_was_not_sent_there_in_this_order_ends_the_stream(said: str) -> None:
    door = Door(sealed=True)
    await door.streams.listen(LOOPBACK, LOOPBACK)
    secret = door.streams.promise()
    sealer = streams.Sealer(secret[ID_BYTES:][: streams.KEY_BYTES])
    frames = [sealer.seal(b"%d" % n) for n in range(3)]
    wrong = {
        "noise": framed(bytes(40)),
        "the frame again": framed(frames[0]),
        "another order": framed(frames[2]),
        "too long": (limits.MAX_FRAME_BYTES + 17).to_bytes(HEADER_BYTES, "little"),
    }[said]
    reader, writer = await connected(door)
    writer.write(secret[:ID_BYTES] + framed(frames[0]) + wrong + framed(frames[1]))
    assert (await door.next())[1] == b"0"
    assert await is_cut_off(reader) and door.came.empty() and not door.streams._open
    writer.close()
    door.streams.close()


async def test_nothing_is_readable_or_of_use_to_who_has_the_name_alone() -> None:
    """An ear at the wire hears the name; the keys never cross it."""
    door = Door(sealed=True)
    await door.streams.listen(LOOPBACK, LOOPBACK)
    secret = door.streams.promise()
    heard = Dialler()
    await heard.dial(door, secret[:ID_BYTES] + bytes(2 * streams.KEY_BYTES))
    heard.stream.post(b"let me in")
    await heard.end()
    assert door.came.empty()
    door.streams.close()


async def test_who_says_nothing_does_not_stay(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "JOIN_S", 0.5)
    monkeypatch.setattr(streams, "MAX_UNKNOWN", 20)
    silent = [await connected(door) for _ in range(25)]
    for reader, writer in silent:
        assert await is_cut_off(reader)
        writer.close()
    assert not door.streams.unknown and door.streams.refusals.total == 5
    monkeypatch.undo()
    stream = await Dialler().dial(door)
    stream.post(b"1")
    assert (await door.next())[1] == b"1"
    stream.close()


async def test_promises_that_nobody_takes_up_are_bounded(door: Door) -> None:
    first = door.streams.promise()
    for _ in range(MAX_EXPECTED):
        last = door.streams.promise()
    assert len(door.streams._expected) == MAX_EXPECTED
    late, kept = Dialler(), Dialler()
    await late.dial(door, first)
    await late.end()
    (await kept.dial(door, last)).post(b"1")
    assert (await door.next())[1] == b"1"
    kept.stream.close()


async def test_a_stream_that_nobody_accepts_says_so(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    door.streams.close()
    ended: list[Any] = []
    with pytest.raises(Unavailable, match="cannot open a stream to"):
        await Streams.dial(
            door.streams.address, bytes(ID_BYTES), lambda *_: None, lambda *of: ended.append(of)
        )
    assert not ended
