"""Changes that another peer did not answer: whether it applied them, and what becomes of values."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dataplane.errors import (
    ChangeExpired,
    DataplaneError,
    InternalError,
    PartitionGone,
    Unavailable,
)
from dataplane.memory.admission import Admission
from dataplane.memory.extents import Records
from dataplane.memory.remote_references import RemoteReferences
from dataplane.memory.space import Space
from dataplane.metadata.roster.roster import Roster, Successors
from dataplane.metadata.tables.answers import Answers
from dataplane.peer.host import Caller
from dataplane.peer.net.mesh import Mesh
from dataplane.peer.net.router import Router
from dataplane.peer.requests.outgoing_changes import OutgoingChanges
from dataplane.wire.journal import Settle
from dataplane.wire.messages import Body, Finish, PutDone
from dataplane.wire.packed import EXTENT
from dataplane.wire.peering import Settled
from dataplane.wire.tables import Owner
from tests.peer.test_router import HERE, THERE, at

SEEDS = at(Roster.from_seeds([HERE, THERE]), THERE)
TO = Owner(THERE, 0)
CALLER = Caller(HERE, 1, 7)


class Far:
    """The other peer: what it carries out once, over a way that loses requests or answers."""

    tell: Any = Mesh.tell

    def __init__(self) -> None:
        self.host: Any = None
        self.carried_out = 0
        self.answers = Answers()
        self.loses: set[str] = set()
        self.refuses: DataplaneError | None = None
        self.fails_after = False
        self.tasks: list[asyncio.Task[Any]] = []

    def linked(self, address: str) -> Any:
        return SimpleNamespace(incarnation=0)

    async def call(self, address: str, body: Finish | Settle, **_: Any) -> Body:
        assert body.change is not None
        if "requests" in self.loses:
            raise Unavailable("nothing comes through")
        if isinstance(body, Settle):
            answer: Body = Settled(self.answers.settle(body.change))
        elif self.refuses is not None:
            raise self.refuses
        else:
            known = self.answers.to(body.change)
            self.carried_out += known is None
            answer = known or PutDone()
            self.answers.remember(body.change, answer)
            if self.fails_after:
                raise InternalError("failed after it had applied the change")
        if "answers" in self.loses:
            raise Unavailable("nothing comes back")
        return answer

    def spawn(self, work: Awaitable[Any]) -> None:
        self.tasks.append(asyncio.ensure_future(work))


class Near:
    """A host with one range that a client wrote, and that an ack hands over."""

    host: Any
    far: Any

    def __init__(self) -> None:
        self.space = Space(1 << 20)
        extents = self.space.grant(7, Admission.OPEN, 4096)
        written: Records = np.zeros(1, EXTENT)
        written["offset"], written["length"] = extents["offset"][0], 4096
        self.chunks = self.space.commit(7, written.tolist(), Admission.OPEN)
        self.time = 0.0
        self.ack = Finish(5, "ack", partition="p", generation=1)
        self.between: Callable[[], None] = lambda: None
        """called before the ack is repeated"""
        self.remote_references = RemoteReferences()
        self.host = SimpleNamespace(
            space=self.space,
            remote_references=self.remote_references,
            roster=SEEDS,
            successors=Successors(),
            address=HERE,
            owner=Owner(HERE, 1),
            now=lambda: self.time,
            another_roster=self._later,
        )
        self.far = Far()
        self.far.host = self.host
        self.outgoing = OutgoingChanges(self.host, self.far, Router(self.host, self.far))

    async def _later(self, than: Roster, until: float) -> None:
        self.time = until
        self.between()
        await asyncio.sleep(0)

    async def hand_over(self) -> PutDone:
        done: PutDone = await self.outgoing.send(self.ack, CALLER, self.chunks)
        return done

    async def ended(self) -> None:
        """The call is over: its own hold goes, and the other peer can be reached again."""
        self.space.release(self.chunks)
        self.far.loses.clear()
        await asyncio.gather(*self.far.tasks)

    @property
    def used_bytes(self) -> int:
        return int(self.space.stats()["used_bytes"])


@pytest.mark.parametrize(("lost", "taken"), [("requests", False), ("answers", True)])
def test_what_was_not_answered_is_found_out(lost: str, taken: bool) -> None:
    async def scenario() -> None:
        near = Near()
        near.far.loses.add(lost)
        with pytest.raises(Unavailable):
            await near.hand_over()
        assert len(near.remote_references) == len(near.outgoing) == 1
        await near.ended()
        assert near.far.carried_out == len(near.remote_references) == taken
        assert near.used_bytes == (4096 if taken else 0)
        assert len(near.outgoing) == 0

    asyncio.run(scenario())


def test_a_change_that_was_applied_before_its_peer_failed_keeps_its_values() -> None:
    """They were freed: each claim was granted the rows, and found their values gone."""

    async def scenario() -> None:
        near = Near()
        near.far.fails_after = True
        with pytest.raises(InternalError):
            await near.hand_over()
        await near.ended()
        assert near.far.carried_out == len(near.remote_references) == 1
        assert (near.used_bytes, len(near.outgoing)) == (4096, 0)

    asyncio.run(scenario())


def test_what_was_given_up_is_not_carried_out_later() -> None:
    async def scenario() -> None:
        near = Near()
        near.far.loses.add("requests")
        with pytest.raises(Unavailable):
            await near.hand_over()
        near.space.hold(near.chunks)  # another row references them, too
        await near.ended()
        with pytest.raises(ChangeExpired):
            await near.far.call(THERE, near.ack)
        assert near.far.carried_out == len(near.remote_references) == 0

    asyncio.run(scenario())


def test_a_second_attempt_takes_no_second_reference() -> None:
    async def scenario() -> None:
        near = Near()
        near.far.loses.add("answers")
        near.between = near.far.loses.clear
        await near.hand_over()
        await near.ended()
        assert near.far.carried_out == len(near.remote_references) == 1
        assert near.remote_references.release(
            TO, near.chunks, np.full(1, 9, np.uint32)
        ).tolist() == [1]

    asyncio.run(scenario())


def test_a_refusal_lets_go_unless_an_earlier_attempt_is_in_doubt() -> None:
    async def scenario() -> None:
        near = Near()
        near.far.refuses = PartitionGone("dropped")
        with pytest.raises(PartitionGone):
            await near.hand_over()
        assert len(near.remote_references) == len(near.outgoing) == 0
        near.far.refuses, near.far.loses = None, {"answers"}

        def dropped() -> None:
            near.far.refuses, near.far.loses = PartitionGone("dropped"), set()

        near.between = dropped
        with pytest.raises(PartitionGone):
            await near.hand_over()
        assert len(near.outgoing) == 1
        await near.ended()
        assert len(near.remote_references) == near.far.carried_out == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("had_shards", [True, False])
def test_a_peer_that_is_lost_is_asked_no_more(had_shards: bool) -> None:
    async def scenario() -> None:
        near = Near()
        near.far.loses.add("requests")
        with pytest.raises(Unavailable):
            await near.hand_over()
        near.host.roster = Roster.from_seeds([HERE])
        if had_shards:
            near.host.successors._enter(TO, Owner(HERE, 1), 2)
        await near.ended()
        assert len(near.outgoing) == 0
        assert len(near.remote_references) == had_shards  # until its successor says what it holds

    asyncio.run(scenario())
