"""A connection of the local door, to a peer that nobody else talks to."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from dataplane.launch.settings import PeerConfig
from dataplane.peer.door.client_door import Connection
from dataplane.peer.operations import OPERATIONS
from dataplane.peer.peer import Peer
from dataplane.peer.sessions import Session
from dataplane.wire import frames, limits, messages, peering
from dataplane.wire.messages import (
    Body,
    Claim,
    Claimed,
    Define,
    Defined,
    Done,
    Drop,
    Dropped,
    Failed,
    Finish,
    GiveBack,
    Hello,
    HelloDone,
    Put,
    PutDone,
    Request,
    Reserve,
    Reserved,
    Unpin,
    Want,
)
from dataplane.wire.tables import Definition, Rows, Table
from tests.metadata.stores import named, whole

NO_PROCESS = 1 << 30


class Client:
    """A client and its transport. Takes `room` answers, and then none until it is asked to."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.room = 1 << 30
        self.answers: dict[int, Body] = {}
        self.connection = Connection(peer.door, NO_PROCESS)
        self.connection.connection_made(self)  # type: ignore[arg-type]
        self._numbers = itertools.count(1)
        self.session = 0
        hello = self.ask(Hello(limits.PROTOCOL_VERSION, pid=NO_PROCESS))
        assert isinstance(hello, HelloDone)
        self.session = hello.session

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def set_write_buffer_limits(self, high: int) -> None: ...

    def abort(self) -> None: ...

    def write(self, frame: bytes) -> None:
        reply = frames.decode_reply(frame[4:])
        self.answers[reply.rid] = reply.body
        self.room -= 1
        if not self.room:
            self.connection.pause_writing()

    def takes(self, room: int) -> None:
        self.room = room
        self.connection.resume_writing()

    def request(self, body: Any, op: int = 0, pins: list[int] | None = None) -> Request:
        rid = next(self._numbers)
        return Request(rid, self.session, op or rid, 1, 5_000, body, pins or [])

    def sends(self, *requests: Request) -> None:
        self.connection.data_received(b"".join(map(frames.encode, requests)))

    def ask(self, body: Any, op: int = 0) -> Body | None:
        """The answer that is there at once."""
        request = self.request(body, op)
        self.sends(request)
        return self.answers.get(request.rid)

    def joins(self) -> Client:
        """The same session on another connection."""
        other = Client.__new__(Client)
        other.peer, other.room, other.answers = self.peer, 1 << 30, {}
        other.connection = Connection(self.peer.door, NO_PROCESS)
        other.connection.connection_made(other)  # type: ignore[arg-type]
        other._numbers = itertools.count(1_000)
        other.session = self.session
        other.ask(Hello(limits.PROTOCOL_VERSION, self.session, pid=NO_PROCESS))
        return other

    def defines(self) -> int:
        defined = self.ask(Define("p", Definition({"s": ["x"]})))
        assert isinstance(defined, Defined)
        return defined.generation


@pytest.fixture
async def peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    peer = Peer(PeerConfig("plane", "a", None, (), 1 << 26, tmp_path))
    peer.door.open(str(tmp_path / "door"))
    yield peer
    await peer.close()


@pytest.fixture
async def client(peer: Peer) -> Client:
    return Client(peer)


def test_every_message_has_its_line_in_the_table() -> None:
    """Of the doors that let it in, and of those alone."""
    from_clients = set(_kinds(messages.Request)) - {Hello}
    from_peers = set(_kinds(peering.PeerRequest))
    table = OPERATIONS.values()
    assert {one.message for one in table if one.client is not None} == from_clients
    assert {one.message for one in table if one.peer is not None} == from_peers


def _kinds(envelope: Any) -> tuple[Any, ...]:
    """The messages that an envelope may carry."""
    return get_args(get_type_hints(envelope)["body"])


async def test_no_more_is_carried_out_of_what_came_at_once_than_is_taken(client: Client) -> None:
    """Answers at once are no calls under way: a burst would have had them all written."""
    client.answers.clear()
    client.room = 3
    requests = [client.request(Unpin([])) for _ in range(8)]
    client.sends(*requests)
    assert len(client.answers) == 3
    client.takes(3)
    assert len(client.answers) == 6
    client.takes(3)
    assert list(client.answers) == [one.rid for one in requests]


async def test_pins_that_a_request_names_go_before_it_is_carried_out(client: Client) -> None:
    door, happened = client.peer.door, list[object]()

    def unpin(session: Session, request: Request, body: Unpin) -> Done:
        happened.append("carried out")
        return Done()

    door.handlers[Unpin] = unpin
    door.unpin = lambda session, pins: happened.append(pins)
    client.sends(client.request(Unpin([]), pins=[4, 5]))
    assert happened == [[4, 5], "carried out"]


async def test_a_request_that_waits_for_nothing_is_answered_without_a_task(client: Client) -> None:
    """Also where its handler is a coroutine."""
    generation = client.defines()
    assert client.ask(GiveBack(b"")) == Done()
    assert client.ask(Drop("p", generation)) == Dropped(0, 0)
    assert not client.peer.door.under_way


async def test_a_change_that_is_repeated_is_answered_as_the_first_time(client: Client) -> None:
    generation = client.defines()
    bad = client.ask(Drop("p", generation + 1), op=700)
    assert isinstance(bad, Failed) and bad.code == "PartitionGone"
    assert client.ask(Drop("p", generation), op=700) == bad
    assert client.ask(Drop("p", generation), op=701) == Dropped(0, 0)


async def test_room_that_was_granted_as_its_connection_closed_comes_back(client: Client) -> None:
    """It was granted to a client that is gone; asked again, another grant is made."""
    generation = client.defines()
    other = client.joins()
    space = client.peer.host.space
    request = other.request(Reserve("p", generation, [(4096).to_bytes(8, "little")]), op=702)
    other.is_closing = lambda: True  # type: ignore[method-assign]
    other.sends(request)
    assert request.rid not in other.answers
    assert space.stats()["granted_bytes"] == 0
    again = client.ask(request.body, op=702)
    assert isinstance(again, Reserved) and space.stats()["granted_bytes"] == 4096


@pytest.mark.parametrize("repeated", [False, True])
async def test_a_claim_is_cancelled_as_its_connection_closes_and_may_be_repeated(
    client: Client, repeated: bool
) -> None:
    generation = client.defines()
    other = client.joins()
    claim = Claim("p", generation, "s", Want("rows", 1, 1), ["x"], timeout_ms=5_000)
    assert other.ask(claim, op=703) is None
    (call,) = client.peer.door.under_way
    other.connection.connection_lost(None)
    second = client.request(claim, op=703)
    if repeated:
        client.sends(second)
    await asyncio.wait([call])
    assert call.cancelled()
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(client.peer.door.under_way) == repeated == client.peer.claims.waiting
    client.connection.connection_lost(None)
    for _ in range(20):
        await asyncio.sleep(0)
    assert not client.peer.door.under_way and not client.peer.claims.waiting


async def test_what_a_dropped_partition_counted_stays_in_the_totals(client: Client) -> None:
    """Totals are sampled once a second, and a partition may be gone by then."""
    host, generation = client.peer.host, client.defines()
    for name in ("one", "two"):
        client.ask(Put("p", generation, named([name]), whole(["x"], 1, 0, 16)))
        claimed = client.ask(Claim("p", generation, "s", Want("rows", 1, 1)))
        assert isinstance(claimed, Claimed)
        finish = Finish(claimed.lease, "ack" if name == "one" else "release")
        assert isinstance(client.ask(finish), PutDone)
    host.meter()
    again = client.ask(Claim("p", generation, "s", Want("rows", 1, 1)))
    assert isinstance(again, Claimed)
    client.ask(Finish(again.lease, "release"))
    assert isinstance(client.ask(Drop("p", generation)), Dropped)
    assert not host.entries
    assert host.released.sums == {"s": 2} and host.redelivered.sums == {"s": 1}
    assert host.put_by_clients == 2 and host.acked_by_clients.sums == {"s": 1}
    assert 0 < host.acked_rates["s"].per_s(host.now()) <= 1


async def test_what_was_handed_out_as_its_connection_closed_comes_back(client: Client) -> None:
    """The call is cancelled when its handler has ended already, and gives nothing back itself."""
    door, taken_back = client.peer.door, list[Body]()
    granted: asyncio.Future[Body] = asyncio.get_running_loop().create_future()
    door.handlers[Claim] = lambda *_: granted
    door.take_back = lambda session, request, reply: taken_back.append(reply)
    claim = Claim("p", 1, "s", Want("rows", 1, 1), timeout_ms=5000)
    assert client.ask(claim) is None
    (call,) = door.under_way
    granted.set_result(Claimed(7, 0, Table(Rows(b""))))
    client.connection.connection_lost(None)
    await asyncio.wait([call])
    assert taken_back == [granted.result()]
