"""What comes in at the peer door: bad messages are answered, good ones wait for room."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from dataplane.peer.net.intake import REQUEST_BYTES, Intake
from dataplane.peer.net.streams import Stream, Streams
from dataplane.wire import peering
from dataplane.wire.messages import Failed, Stats
from dataplane.wire.peering import PeerRequest


class Door:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.intake = Intake(7, False, self._take)
        self.intake.limit_bytes = 2 * REQUEST_BYTES
        self.taken: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
        self.answers: asyncio.Queue[bytes] = asyncio.Queue()
        self.fails_at = 0

    def _take(self, stream: Stream, request: PeerRequest, nbytes: int) -> None:
        if request.rid == self.fails_at:
            raise RuntimeError("a bug")
        self.taken.put_nowait((request.rid, nbytes))

    async def next(self) -> tuple[int, int]:
        return await asyncio.wait_for(self.taken.get(), 10)


@pytest.fixture
async def there() -> AsyncIterator[tuple[Door, Stream]]:
    """A door and a stream to it."""
    door, here = Door(), "tcp://127.0.0.1:9"
    streams = door.intake.streams
    await streams.listen(here, here)
    stream = await Streams.dial(
        streams.address,
        streams.promise(),
        lambda stream, frame: door.answers.put_nowait(frame),
        lambda stream, why: None,
    )
    yield door, stream
    stream.close()
    streams.close()


def request(rid: int) -> bytes:
    return peering.encode(PeerRequest(rid, "tcp://a:1", 1, 0, 0, 0, (1, 1), 1000, Stats()))


async def test_a_request_that_cannot_be_taken_takes_nobody_elses_along(
    there: tuple[Door, Stream],
) -> None:
    door, stream = there
    door.fails_at = 1
    stream.post(request(1))
    stream.post(request(2))
    assert await door.next() == (2, REQUEST_BYTES)


async def test_requests_beyond_the_room_wait_until_others_are_answered(
    there: tuple[Door, Stream],
) -> None:
    door, stream = there
    for rid in range(1, 4):
        stream.post(request(rid))
    assert [await door.next() for _ in range(2)] == [(1, REQUEST_BYTES), (2, REQUEST_BYTES)]
    third = asyncio.ensure_future(door.next())
    await asyncio.wait({third}, timeout=0.3)
    assert not third.done()
    door.intake.answered(REQUEST_BYTES)
    assert await third == (3, REQUEST_BYTES)


async def test_what_is_no_request_is_answered_and_counted(there: tuple[Door, Stream]) -> None:
    door, stream = there
    for frame in (b"two", b"\xc1", request(4), request(5)):
        stream.post(frame)
    assert [(await door.next())[0] for _ in range(2)] == [4, 5]
    assert door.intake.refusals.total == 2
    frames = [await asyncio.wait_for(door.answers.get(), 10) for _ in range(2)]
    replies = [peering.decode_reply(frame) for frame in frames]
    assert [(reply.rid, reply.incarnation) for reply in replies] == [(0, 7), (0, 7)]
    assert all(isinstance(r.body, Failed) and r.body.code == "ProtocolError" for r in replies)
