"""Requests of other peers are carried out under the roster that their sender works under."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from dataplane.metadata.roster.roster import Roster
from dataplane.peer.host import Caller
from dataplane.peer.net.authentication import Gate
from dataplane.peer.net.peer_door import PeerDoor
from dataplane.peer.net.serving import Serving
from dataplane.peer.tasks import Tasks
from dataplane.wire import peering
from dataplane.wire.messages import Body, Done, Failed, Seal
from dataplane.wire.peering import PeerHello, PeerReply, PeerRequest

HERE, THERE = "tcp://10.0.0.1:7101", "tcp://10.0.0.2:7101"
FIRST = dataclasses.replace(Roster.from_seeds([HERE, THERE]), incarnations=(1, 2))
NEXT = dataclasses.replace(FIRST, epoch=(FIRST.epoch[0], FIRST.epoch[1] + 1))


class Door:
    """A door without a socket, a stream to it, and what it answered."""

    def __init__(self) -> None:
        progress = SimpleNamespace(is_settled=True)
        self.host: Any = SimpleNamespace(
            address=HERE, roster=FIRST, incarnation=1, now=time.monotonic,
            progress=progress, speak=lambda: None, sent_between=Counter(),
        )  # fmt: skip
        self.answered: asyncio.Queue[PeerReply] = asyncio.Queue()
        self.under: list[Roster] = []
        self.door = PeerDoor(
            self.host, {Seal: self._seal}, Tasks().hold, Gate(None, "plane"), Serving(self.host)
        )
        self.id, self.waiting_bytes = b"b", 0

    async def _seal(self, caller: Caller, body: Seal) -> Body:
        self.under.append(self.host.roster)
        return Done()

    def seal_later(self, caller: Caller, body: Seal) -> Any:
        """A handler that carries most out at once, and some in a coroutine."""
        return self._seal(caller, body)

    def post(self, frame: bytes) -> None:
        self.answered.put_nowait(peering.decode_reply(frame))

    def arrives(self, rid: int) -> None:
        request = PeerRequest(rid, THERE, 2, 0, 0, 0, FIRST.epoch, 1000, Seal("p", 1))
        self.door.intake._arrived(self, peering.encode(request))  # type: ignore[arg-type]

    async def answer(self) -> Body:
        return (await asyncio.wait_for(self.answered.get(), 10)).body


@pytest.fixture
async def door() -> Door:
    return Door()


async def test_a_request_in_step_is_carried_out(door: Door) -> None:
    door.arrives(1)
    assert isinstance(await door.answer(), Done) and door.under == [FIRST]


@pytest.mark.parametrize("at_times", [False, True], ids=["a coroutine", "one at times"])
async def test_a_roster_that_comes_before_a_request_has_begun_refuses_it(
    door: Door, at_times: bool
) -> None:
    """Its partition's home, say, may be elsewhere by then, and this peer know nothing of it."""
    if at_times:
        door.door.handlers[Seal] = door.seal_later
    door.arrives(1)
    door.host.roster = NEXT
    failed = await door.answer()
    assert isinstance(failed, Failed) and failed.code == "StaleEpoch" and door.under == []
    assert door.door.under_way == 0


async def test_over_zmq_a_peer_only_greets(door: Door) -> None:
    def greets(caller: Caller, body: PeerHello) -> Body:
        return door.door.welcome(body)

    door.door.handlers[PeerHello] = greets
    hello = PeerHello((1, 1), "p", "b", 2, THERE, (1, 1), 4096, "")

    def said(body: Body) -> Body:
        request = PeerRequest(1, THERE, 2, 0, 0, 0, FIRST.epoch, 1000, body)  # type: ignore[arg-type]
        return peering.decode_reply(door.door._greeting(peering.encode(request))).body

    first, second = said(hello), said(hello)
    assert isinstance(first, PeerHello) and isinstance(second, PeerHello)
    assert len(first.stream_secret) == 16 and first.stream_secret != second.stream_secret
    refused = said(Seal("p", 1))
    assert isinstance(refused, Failed) and refused.code == "ProtocolError" and not door.under
    assert door.door.refused == 1
