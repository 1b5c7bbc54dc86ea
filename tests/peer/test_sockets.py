"""Our sockets over zmq's: nothing is lost, and nobody hangs."""

from __future__ import annotations

import asyncio
import select
import time
from collections.abc import AsyncIterator

import pytest
import uvloop
import zmq

from dataplane.peer.net.sockets import Context, Socket, SocketClosed

MESSAGES = 3_000
LIMIT_S = 60


@pytest.fixture
async def context() -> AsyncIterator[Context]:
    context = Context()
    yield context
    context.destroy()


def listening(context: Context) -> tuple[Socket, str]:
    """A router at a port of its own."""
    raw = context._raw.socket(zmq.ROUTER)
    port = raw.bind_to_random_port("tcp://127.0.0.1")
    router = Socket(raw, context._sockets.discard)
    context._sockets.add(router)
    return router, f"tcp://127.0.0.1:{port}"


async def bursts_and_answers(context: Context) -> None:
    """Several dealers send in bursts, while answers come back to each in between."""
    router, address = listening(context)
    router.receive(lambda parts: None if router.send(parts) else pytest.fail("not sent"))
    dealers = []
    for _ in range(3):
        dealer = context.socket(zmq.DEALER)
        dealer.connect(address)
        dealers.append(dealer)

    async def echoed(dealer: Socket) -> list[int]:
        got: list[int] = []
        done = asyncio.Event()

        def take(parts: list[bytes]) -> None:
            got.append(int(parts[0]))
            if len(got) == MESSAGES:
                done.set()

        dealer.receive(take)
        for number in range(MESSAGES):
            while not dealer.send([b"%d" % number]):
                await asyncio.sleep(0.01)
            if number % 300 == 0:
                await asyncio.sleep(0)
        await asyncio.wait_for(done.wait(), LIMIT_S)
        return got

    for got in await asyncio.gather(*map(echoed, dealers)):
        assert got == list(range(MESSAGES))


async def test_bursts_come_whole_and_in_order(context: Context) -> None:
    await bursts_and_answers(context)


def test_bursts_come_whole_and_in_order_with_uvloop() -> None:
    async def main() -> None:
        context = Context()
        await bursts_and_answers(context)
        context.destroy()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


async def test_a_message_that_is_noticed_by_a_send_is_taken(context: Context) -> None:
    """A send may swallow the word that something came: the descriptor is silent from then on."""
    router, address = listening(context)
    asked: asyncio.Future[list[bytes]] = asyncio.get_running_loop().create_future()
    answered = asyncio.Event()
    router.receive(lambda parts: None if asked.done() else asked.set_result(parts))
    dealer = context.socket(zmq.DEALER)
    dealer.receive(lambda parts: answered.set())
    dealer.connect(address)
    dealer.send([b"question"])
    router.send(await asyncio.wait_for(asked, LIMIT_S))
    # The loop must not look meanwhile.
    descriptor = dealer._raw.getsockopt(zmq.FD)
    assert select.select([descriptor], [], [], 10)[0]
    while select.select([descriptor], [], [], 0)[0]:
        dealer.send([b"more"])
    await asyncio.wait_for(answered.wait(), 10)


async def test_what_comes_before_anybody_receives_lets_the_loop_wait(context: Context) -> None:
    router, address = listening(context)
    dealer = context.socket(zmq.DEALER)
    dealer.connect(address)
    dealer.send([b"early"])
    await asyncio.sleep(0.2)
    began = time.process_time()
    await asyncio.sleep(1.0)
    assert time.process_time() - began < 0.1  # of a second in which there is nothing to do
    asked = asyncio.get_running_loop().create_future()
    router.receive(asked.set_result)
    assert (await asyncio.wait_for(asked, LIMIT_S))[1] == b"early"


async def test_a_full_queue_and_a_closed_socket_say_so(context: Context) -> None:
    _, dealer, _ = narrow(context)
    sent = [dealer.send([b"%d" % n]) for n in range(200)]
    assert sent[0] and not sent[-1]
    dealer.close()
    with pytest.raises(SocketClosed):
        dealer.send([b"late"])
    dealer.close()


async def test_a_socket_may_be_closed_by_what_it_received(context: Context) -> None:
    router, dealer, got = narrow(context)
    closed = asyncio.Event()

    def take(parts: list[bytes]) -> None:
        got.append(parts[1])
        router.close()
        closed.set()

    router.receive(take)
    for number in range(3):
        dealer.send([b"%d" % number])
    await asyncio.wait_for(closed.wait(), LIMIT_S)
    assert got == [b"0"] and "closed" in repr(router)


async def test_a_message_that_cannot_be_taken_does_not_hold_up_the_next(
    context: Context, caplog: pytest.LogCaptureFixture
) -> None:
    router, dealer, got = narrow(context)
    second = asyncio.Event()

    def take(parts: list[bytes]) -> None:
        got.append(parts[1])
        if len(got) == 1:
            raise ValueError("a bug of ours")
        second.set()

    router.receive(take)
    dealer.send([b"0"])
    dealer.send([b"1"])
    await asyncio.wait_for(second.wait(), LIMIT_S)
    assert got == [b"0", b"1"] and "was not taken" in caplog.text


def narrow(context: Context) -> tuple[Socket, Socket, list[bytes]]:
    """A router that nobody reads yet and its dealer, with room for a few messages on the way."""
    router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    router.setsockopt(zmq.RCVHWM, 10)
    dealer.setsockopt(zmq.SNDHWM, 10)
    router.bind("inproc://narrow")
    dealer.connect("inproc://narrow")
    return router, dealer, []
