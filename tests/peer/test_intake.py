"""What comes in at the peer door: bad messages are answered, good ones wait for room."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import zmq
import zmq.asyncio

from dataplane.peer.intake import REQUEST_BYTES, Intake
from dataplane.wire import peering
from dataplane.wire.messages import Failed, Stats
from dataplane.wire.peering import PeerRequest

Sockets = tuple[zmq.asyncio.Socket, zmq.asyncio.Socket]


@pytest.fixture
async def sockets() -> AsyncIterator[Sockets]:
    """A router and a dealer that is connected to it."""
    with (
        zmq.asyncio.Context() as context,
        context.socket(zmq.ROUTER) as router,
        context.socket(zmq.DEALER) as dealer,
    ):
        router.linger = dealer.linger = 0
        router.bind("inproc://door")
        dealer.connect("inproc://door")
        yield router, dealer


def request(rid: int) -> bytes:
    return peering.encode(PeerRequest(rid, "tcp://a:1", 1, 0, 0, 0, (1, 1), 1000, Stats()))


async def test_requests_beyond_the_room_wait_until_others_are_answered(sockets: Sockets) -> None:
    router, dealer = sockets
    intake = Intake(1)
    intake._room.limit_bytes = 2 * REQUEST_BYTES
    arriving = intake.requests(router)
    for rid in range(1, 4):
        await dealer.send(request(rid))
    taken = [await anext(arriving) for _ in range(2)]
    third = asyncio.ensure_future(anext(arriving))
    await asyncio.wait({third}, timeout=0.3)
    assert not third.done()
    intake.answered(taken[0][2])
    _, asked, nbytes = await asyncio.wait_for(third, 10)
    assert asked.rid == 3 and nbytes == REQUEST_BYTES
    await arriving.aclose()


async def test_what_is_no_request_is_answered_and_counted(sockets: Sockets) -> None:
    router, dealer = sockets
    intake = Intake(7)
    arriving = intake.requests(router)
    await dealer.send_multipart([b"two", b"parts"])
    await dealer.send(b"\xc1")
    await dealer.send(request(5))
    _, asked, _ = await asyncio.wait_for(anext(arriving), 10)
    assert asked.rid == 5 and intake.refusals.total == 2
    reply = peering.decode_reply(await dealer.recv())
    assert (reply.rid, reply.incarnation) == (0, 7)
    assert isinstance(reply.body, Failed) and reply.body.code == "ProtocolError"
    await arriving.aclose()
