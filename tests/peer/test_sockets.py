"""Our sockets over zmq's: nothing is lost, nobody hangs, and whoever is too fast waits."""

from __future__ import annotations

import asyncio
import select
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
    router.receive(lambda parts: None if router.send_now(parts) else pytest.fail("not sent"))
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
            await dealer.send([b"%d" % number])
            if number % 700 == 0:
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
    await dealer.send([b"question"])
    router.send_now(await asyncio.wait_for(asked, LIMIT_S))
    # The loop must not look meanwhile.
    assert select.select([dealer], [], [], 10)[0]
    while select.select([dealer], [], [], 0)[0]:
        dealer.send_now([b"more"])
    await asyncio.wait_for(answered.wait(), 10)


async def test_who_sends_too_much_waits_until_it_is_taken(context: Context) -> None:
    router, dealer, got = narrow(context)
    sending = asyncio.create_task(send_all(dealer, 200))
    await asyncio.wait({sending}, timeout=0.3)
    assert not sending.done() and not dealer.send_now([b"one more"])
    router.receive(lambda parts: got.append(parts[1]))
    await asyncio.wait_for(sending, LIMIT_S)
    async with asyncio.timeout(LIMIT_S):
        while len(got) < 200:
            await asyncio.sleep(0.01)
    assert got == [b"%d" % number for number in range(200)]


async def test_a_pause_stops_what_comes_and_loses_nothing(context: Context) -> None:
    router, dealer, got = narrow(context)

    def take(parts: list[bytes]) -> None:
        got.append(parts[1])
        if len(got) == 7:
            router.pause()

    router.receive(take)
    sending = asyncio.create_task(send_all(dealer, 200))
    await asyncio.wait({sending}, timeout=0.3)
    assert len(got) == 7 and not sending.done()
    router.resume()
    await asyncio.wait_for(sending, LIMIT_S)
    async with asyncio.timeout(LIMIT_S):
        while len(got) < 200:
            await asyncio.sleep(0.01)


async def test_a_socket_that_closes_fails_those_who_wait_to_send(context: Context) -> None:
    _, dealer, _ = narrow(context)
    sending = [asyncio.create_task(dealer.send([b"%d" % n])) for n in range(200)]
    gave_up = sending.pop()
    await asyncio.wait(sending, timeout=0.3)
    gave_up.cancel()
    dealer.close()
    outcomes = await asyncio.gather(*sending, return_exceptions=True)
    assert {type(one) for one in outcomes} == {type(None), SocketClosed}
    with pytest.raises(SocketClosed):
        dealer.send_now([b"late"])
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
        await dealer.send([b"%d" % number])
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
    await send_all(dealer, 2)
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


async def send_all(dealer: Socket, count: int) -> None:
    for number in range(count):
        await dealer.send([b"%d" % number])


async def test_what_is_posted_in_one_turn_goes_in_one_message_to_each() -> None:
    context = Context()
    router, dealers = context.socket(zmq.ROUTER), [context.socket(zmq.DEALER) for _ in range(2)]
    router.bind("inproc://posted")
    came: asyncio.Queue[list[bytes]] = asyncio.Queue()
    router.receive(came.put_nowait)
    asked = []
    for dealer in dealers:
        dealer.connect("inproc://posted")
        dealer.post(b"1")
        dealer.post(b"2")
        asked.append(await asyncio.wait_for(came.get(), LIMIT_S))
    assert [parts[1:] for parts in asked] == [[b"1", b"2"]] * 2
    answers: list[asyncio.Queue[list[bytes]]] = [asyncio.Queue(), asyncio.Queue()]
    for dealer, answer in zip(dealers, answers, strict=True):
        dealer.receive(answer.put_nowait)
    for frame in (b"3", b"4"):
        for parts in asked:
            router.post(frame, parts[0])
    for answer in answers:
        assert await asyncio.wait_for(answer.get(), LIMIT_S) == [b"3", b"4"]
    router.post(b"5", b"nobody")
    dealers[0].post(b"6")
    dealers[0].close()
    await asyncio.sleep(0)
    context.destroy()
