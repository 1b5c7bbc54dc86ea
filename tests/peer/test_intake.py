"""What comes in at the peer door: bad messages are answered, good ones wait for room."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import zmq

from dataplane.peer.net.intake import REQUEST_BYTES, Intake
from dataplane.peer.net.sockets import Context, Socket
from dataplane.wire import peering
from dataplane.wire.messages import Failed, Stats
from dataplane.wire.peering import PeerRequest


class Door:
    """Keeps what it is given."""

    def __init__(self, router: Socket) -> None:
        self.intake = Intake(7, self._take)
        self.intake.limit_bytes = 2 * REQUEST_BYTES
        self.intake.open(router)
        self.taken: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
        self.fails_at = 0

    def _take(self, identity: bytes, request: PeerRequest, nbytes: int) -> None:
        if request.rid == self.fails_at:
            raise RuntimeError("a bug")
        self.taken.put_nowait((request.rid, nbytes))

    async def next(self) -> tuple[int, int]:
        return await asyncio.wait_for(self.taken.get(), 10)


@pytest.fixture
async def sockets() -> AsyncIterator[tuple[Door, Socket]]:
    """A door and a dealer that is connected to it."""
    context = Context()
    router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    router.bind("inproc://door")
    dealer.connect("inproc://door")
    yield Door(router), dealer
    context.destroy()


def request(rid: int) -> bytes:
    return peering.encode(PeerRequest(rid, "tcp://a:1", 1, 0, 0, 0, (1, 1), 1000, Stats()))


async def test_a_request_that_cannot_be_taken_takes_nobody_elses_along(
    sockets: tuple[Door, Socket],
) -> None:
    door, dealer = sockets
    door.fails_at = 1
    await dealer.send([request(1), request(2)])
    assert await door.next() == (2, REQUEST_BYTES)


async def test_requests_beyond_the_room_wait_until_others_are_answered(
    sockets: tuple[Door, Socket],
) -> None:
    door, dealer = sockets
    for rid in range(1, 4):
        await dealer.send([request(rid)])
    assert [await door.next() for _ in range(2)] == [(1, REQUEST_BYTES), (2, REQUEST_BYTES)]
    third = asyncio.ensure_future(door.next())
    await asyncio.wait({third}, timeout=0.3)
    assert not third.done()
    door.intake.answered(REQUEST_BYTES)
    assert await third == (3, REQUEST_BYTES)


async def test_what_is_no_request_is_answered_and_counted(sockets: tuple[Door, Socket]) -> None:
    door, dealer = sockets
    answer: asyncio.Future[list[bytes]] = asyncio.get_running_loop().create_future()
    dealer.receive(answer.set_result)
    await dealer.send([b"two", b"\xc1", request(4)])
    await dealer.send([request(5)])
    assert [(await door.next())[0] for _ in range(2)] == [4, 5]
    assert door.intake.refusals.total == 2
    replies = [peering.decode_reply(frame) for frame in await asyncio.wait_for(answer, 10)]
    assert [(reply.rid, reply.incarnation) for reply in replies] == [(0, 7), (0, 7)]
    assert all(isinstance(r.body, Failed) and r.body.code == "ProtocolError" for r in replies)
