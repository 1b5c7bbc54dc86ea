"""A connection of the local door."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from dataplane.peer.door.client_door import Connection
from dataplane.transport.limiter import ResourceLimiter
from dataplane.wire import frames
from dataplane.wire.messages import Body, Claim, Claimed, Done, Request, Unpin, Want
from dataplane.wire.tables import Rows, Table


class Client:
    """Takes `room` answers, and then none until it is asked to."""

    def __init__(self) -> None:
        self.asked = 0
        self.unpinned: list[tuple[list[int], int]] = []
        """pins, and how much had been asked before they went"""
        self.room = 3
        self.answers: list[Any] = []
        host = SimpleNamespace(
            name="a", now=time.monotonic, sent_local=Counter(),
            progress=SimpleNamespace(is_settled=True),
            serving=SimpleNamespace(is_sure=lambda: True, waiting=0),
        )  # fmt: skip
        door: Any = SimpleNamespace(
            host=host, intake=ResourceLimiter(1 << 20), handlers={Unpin: self._unpin},
            observe=None, connections=set(),
            unpin=lambda _, pins: self.unpinned.append((pins, self.asked)),
        )  # fmt: skip
        self.connection = Connection(door, 1)
        self.connection._session = SimpleNamespace(check=lambda: None)  # type: ignore[assignment]
        self.connection.connection_made(self)  # type: ignore[arg-type]

    def _unpin(self, session: Any, request: Request, body: Unpin) -> Done:
        self.asked += 1
        return Done()

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def set_write_buffer_limits(self, high: int) -> None: ...

    def write(self, frame: bytes) -> None:
        self.answers.append(frames.decode_reply(bytes(frame)[4:]).rid)
        if len(self.answers) == self.room:
            self.connection.pause_writing()

    def takes(self) -> None:
        self.room += 3
        self.connection.resume_writing()


def test_no_more_is_carried_out_of_what_came_at_once_than_is_taken() -> None:
    """Answers at once are no calls under way: a burst would have had them all written."""
    client = Client()
    burst = [frames.encode(Request(rid, 0, 0, 0, (0, 0), 0, Unpin([]))) for rid in range(1, 9)]
    client.connection.data_received(b"".join(bytes(one) for one in burst))
    assert client.asked == 3
    client.takes()
    assert client.asked == 6
    client.takes()
    assert client.answers == list(range(1, 9))


def test_pins_that_a_request_names_go_before_it_is_carried_out() -> None:
    client = Client()
    for rid, pins in ((1, []), (2, [4, 5])):
        request = Request(rid, 0, 0, 0, (0, 0), 0, Unpin([]), pins)
        client.connection.data_received(bytes(frames.encode(request)))
    assert client.unpinned == [([4, 5], 1)]
    assert client.asked == 2


@pytest.mark.parametrize("at_once", [True, False])
async def test_what_was_handed_out_as_its_connection_closed_comes_back(at_once: bool) -> None:
    """The call is cancelled when its handler has ended already, and gives nothing back itself."""
    client = Client()
    granted: asyncio.Future[Body] = asyncio.get_running_loop().create_future()
    unsent: list[Body] = []
    sure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    door: Any = client.connection._door
    door.handlers[Claim] = lambda *_: granted
    serving = SimpleNamespace(is_sure=lambda: at_once, waiting=0, until_sure=lambda _: sure)
    door.host.serving, door.host.serves = serving, lambda partition: False
    door.under_way, door.unsent = set(), lambda session, request, body: unsent.append(body)
    door.sessions = SimpleNamespace(connection_lost=lambda _: None, sweep=lambda _: None)
    claim = Claim("p", 1, "s", Want("rows", 1, 1), timeout_ms=5000)
    client.connection.data_received(bytes(frames.encode(Request(1, 0, 1, 1, (0, 0), 0, claim))))
    sure.set_result(None)
    for _ in range(5):
        await asyncio.sleep(0)
    (call,) = door.under_way
    client.connection.connection_lost(None)
    granted.set_result(Claimed(7, 0, Table(Rows(b""))))
    await asyncio.wait([call])
    assert unsent == [granted.result()]
    assert not client.answers
