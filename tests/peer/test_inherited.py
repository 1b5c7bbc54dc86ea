"""Which values an owner keeps when peers that had references to them are lost."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Coroutine
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dataplane.errors import LimitExceeded
from dataplane.memory.admission import Admission
from dataplane.memory.remote_references import RemoteReferences
from dataplane.memory.space import Space
from dataplane.metadata.roster.authority import Authority
from dataplane.metadata.roster.roster import Roster, Successors
from dataplane.peer.host import Caller, Progress
from dataplane.peer.shards import references as references_module
from dataplane.peer.shards.log_receiver import LogReceiver
from dataplane.peer.shards.references import References
from dataplane.wire.messages import Body
from dataplane.wire.packed import EXTENT
from dataplane.wire.peering import Beat, Inherited, Release
from dataplane.wire.tables import Owner, Takeover

LOST, BETWEEN, SUCCESSOR = (Owner(f"tcp://10.0.0.{n}:7101", n) for n in (2, 3, 4))
TOLD_AT = 8


def lent_chunks(**host: Any) -> tuple[References, Any]:
    """An owner, and two chunks of its that LOST has in its rows."""
    space = Space(1 << 20)
    granted = space.grant(1, Admission.OPEN, 8192)
    start = int(granted["offset"][0])
    written = np.array([(start, 64), (start + 4096, 64)], EXTENT)
    chunks = space.commit(1, written.tolist(), Admission.OPEN)
    me = SimpleNamespace(
        space=space,
        owner=Owner("tcp://10.0.0.1:7101", 1),
        remote_references=RemoteReferences(),
        **host,
    )
    room = SimpleNamespace(release=space.release)
    mesh = SimpleNamespace(handlers={})
    references = References(me, mesh, room)  # type: ignore[arg-type]
    references.remote_references.add(LOST, chunks)
    return references, chunks


def successors(*takeovers: Takeover) -> Successors:
    """As an owner knows them to whom these were told."""
    first = Roster.from_seeds([])
    known = Successors()
    known.follow(first, dataclasses.replace(first, takeovers=takeovers))
    return known


YET_TO_COME = Owner(SUCCESSOR.peer, 0)
"""As a roster names a seed that has not been heard."""


@pytest.mark.parametrize("given_to", [SUCCESSOR, YET_TO_COME])
@pytest.mark.parametrize(("began", "kept"), [(TOLD_AT, 0), (TOLD_AT + 1, 0), (TOLD_AT - 1, 2)])
def test_what_was_lent_to_a_lost_peer_is_free_when_its_successor_began_empty(
    began: int, kept: int, given_to: Owner
) -> None:
    taken = [Takeover(LOST, BETWEEN, TOLD_AT - 4), Takeover(BETWEEN, given_to, TOLD_AT)]
    references, chunks = lent_chunks(successors=successors(*taken))
    told = Inherited(YET_TO_COME, b"", b"", began)
    references.inherited(Caller(SUCCESSOR.peer, SUCCESSOR.incarnation), told)
    # One that came before it was given the shards may have had copies of them: it says which.
    assert references.host.space.alive(chunks).sum() == len(references.remote_references) == kept


def test_a_successor_keeps_what_it_names_and_the_rest_is_free() -> None:
    references, chunks = lent_chunks(successors=successors(Takeover(LOST, SUCCESSOR, TOLD_AT)))
    told = Inherited(LOST, chunks[:1].tobytes(), np.ones(1, "<u4").tobytes())
    references.inherited(Caller(SUCCESSOR.peer, SUCCESSOR.incarnation), told)
    assert references.host.space.alive(chunks).tolist() == [True, False]
    assert references.remote_references.peers == [SUCCESSOR]


class SlowToInherit:
    """A successor's way to the owner of values, on which what it took over comes late."""

    def __init__(self, owner: References) -> None:
        self.handlers: dict[type[Body], Any] = {}
        self.tasks: list[asyncio.Task[Any]] = []
        self.told: list[Inherited] = []
        self._owner = owner

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        self.tasks.append(asyncio.create_task(work))
        return self.tasks[-1]

    async def tell(self, to: Owner, body: Body, caller: Caller | None = None) -> Body:
        successor = Caller(SUCCESSOR.peer, SUCCESSOR.incarnation)
        if isinstance(body, Inherited):
            for _ in range(10):
                await asyncio.sleep(0)
            self.told.append(body)
            return self._owner.inherited(successor, body)
        assert isinstance(body, Release)
        answer: Body = self._owner.release_here(successor, body)
        return answer


async def test_what_a_successor_releases_before_its_report_arrives_is_freed() -> None:
    owner, chunks = lent_chunks(successors=successors(Takeover(LOST, SUCCESSOR, TOLD_AT)))
    way = SlowToInherit(owner)
    me: Any = SimpleNamespace(
        owner=SUCCESSOR, remote_references=RemoteReferences(), progress=Progress()
    )
    successor = References(me, way, None)  # type: ignore[arg-type]
    held = np.ones(2, "<u4")
    successor.took_over(owner.host.owner, Inherited(LOST, chunks.tobytes(), held.tobytes()))
    successor.let_go(owner.host.owner, chunks[:1], held[:1])
    await asyncio.gather(*way.tasks)
    assert owner.host.space.alive(chunks).tolist() == [False, True]
    assert len(owner.remote_references) == 1
    # And what it lets go later, at once.
    successor.let_go(owner.host.owner, chunks[1:], held[1:])
    await way.tasks[-1]
    assert owner.host.space.alive(chunks).sum() == len(owner.remote_references) == 0


async def test_a_successor_that_holds_more_than_a_message_can_name_says_so_in_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The owner heard nothing, as that was too large, and what rows named there was never free."""
    monkeypatch.setattr(references_module, "MOST_CHUNKS", 2)
    owner, chunks = lent_chunks(successors=successors(Takeover(LOST, SUCCESSOR, TOLD_AT)))
    space, held = owner.host.space, [chunks]
    for _ in range(2):  # five are named, the last of six not, and one more often than it is held
        start = int(space.grant(1, Admission.OPEN, 8192)["offset"][0])
        written = np.array([(start, 64), (start + 4096, 64)], EXTENT)
        held.append(space.commit(1, written.tolist(), Admission.OPEN))
        space.hold(held[-1])
    chunks = np.concatenate(held)
    owner.remote_references.add(LOST, np.concatenate([*held[1:], *held[1:]]))
    way = SlowToInherit(owner)
    me: Any = SimpleNamespace(
        owner=SUCCESSOR, remote_references=RemoteReferences(), progress=Progress()
    )
    successor = References(me, way, None)  # type: ignore[arg-type]
    taken, counts = chunks[[0, 1, 2, 3, 4, 3]], np.ones(6, "<u4")
    successor.took_over(owner.host.owner, Inherited(LOST, taken.tobytes(), counts.tobytes()))
    await asyncio.gather(*way.tasks)
    assert owner.remote_references.peers == [SUCCESSOR] and len(owner.remote_references) == 5
    assert space.alive(chunks).tolist() == [True] * 5 + [False]
    for first in way.told[:2]:  # asked again: nobody is sure that it was heard
        owner.inherited(Caller(SUCCESSOR.peer, SUCCESSOR.incarnation), first)
    successor.let_go(owner.host.owner, taken, counts)
    await way.tasks[-1]
    assert [len(one.chunks) // 8 for one in way.told] == [2, 2, 1]
    assert space.alive(chunks).sum() == len(owner.remote_references) == 0


async def test_an_owner_that_refused_to_let_go_of_values_is_told_again() -> None:
    owner, chunks = lent_chunks(successors=successors(Takeover(LOST, SUCCESSOR, TOLD_AT)))
    way, told = SlowToInherit(owner), list[int]()
    by = Caller(SUCCESSOR.peer, SUCCESSOR.incarnation)
    counts = np.ones(2, "<u4")
    way._owner.inherited(by, Inherited(LOST, chunks.tobytes(), counts.tobytes()))

    async def tell(to: Owner, body: Release) -> Body:
        told.append(body.number)
        if len(told) == 1:
            raise LimitExceeded("not now", limit=1)
        for _ in range(2):  # the link broke before the first answer
            answer: Body = owner.release_here(by, body)
        return answer

    async def another_roster(than: Any, until: float) -> bool:
        return False

    host: Any = SimpleNamespace(
        owner=SUCCESSOR, remote_references=RemoteReferences(), progress=Progress(), roster=None,
        now=lambda: 0.0,
        another_roster=another_roster,
    )  # fmt: skip
    way.tell = tell  # type: ignore[assignment, method-assign]
    successor = References(host, way, None)  # type: ignore[arg-type]
    twice = np.full(2, 2, "<u4")
    owner.host.space.hold(chunks)
    owner.remote_references.add(SUCCESSOR, chunks)  # another value of theirs, which stays
    successor.let_go(owner.host.owner, chunks, counts)
    await asyncio.gather(*way.tasks)
    assert owner.host.space.alive(chunks).sum() == 2 and told == [1, 2]
    assert owner.remote_references.release(SUCCESSOR, chunks, twice).tolist() == [1, 1]


async def test_what_is_taken_over_while_frees_wait_for_the_backup_is_told_before_them() -> None:
    """They go together: what came free of the takeover must not overtake it."""
    owner, chunks = lent_chunks(successors=successors(Takeover(LOST, SUCCESSOR, TOLD_AT)))
    there, held = owner.host.owner, np.ones(2, "<u4")
    way, progress = SlowToInherit(owner), Progress()
    me: Any = SimpleNamespace(
        owner=SUCCESSOR, remote_references=RemoteReferences(), progress=progress
    )
    successor = References(me, way, None)  # type: ignore[arg-type]
    progress.required, progress.done = True, 1
    successor.let_go(there, chunks[:0], held[:0])
    await asyncio.sleep(0)  # it waits for the backup now
    successor.took_over(there, Inherited(LOST, chunks.tobytes(), held.tobytes()))
    successor.let_go(there, chunks, held)
    progress.move(1)
    await asyncio.gather(*way.tasks)
    assert owner.host.space.alive(chunks).sum() == len(owner.remote_references) == 0


def rosters_of_a_takeover_of_a_takeover() -> tuple[Roster, Roster, Roster, Owner, Owner, Owner]:
    """Rosters before, between and after; the lost peer, the one between, and the successor."""
    seeds = [f"tcp://10.0.0.{n}:7101" for n in range(1, 6)]
    made = Authority(Roster.from_seeds(seeds), 77, keeper=seeds[0])
    for number, seed in enumerate(seeds, 1):
        made.beat(Owner(seed, number), made.roster.epoch, Beat())

    def sync() -> Roster:
        for owner in made.roster.owners:
            made.beat(owner, made.roster.epoch, Beat(synced=True))
        return made.roster

    before = sync()
    lost = before.owners[1]
    made.lost(lost)
    between = made.roster.successor_of(before, lost)
    middle = sync()
    made.lost(between)
    after = made.roster
    return before, middle, after, lost, between, after.successor_of(before, lost)


@pytest.mark.parametrize("misses_one", [False, True])
def test_an_owner_that_missed_a_roster_knows_whose_references_there_are(
    misses_one: bool,
) -> None:
    before, middle, after, lost, between, successor = rosters_of_a_takeover_of_a_takeover()
    known = Successors()
    seen = [before, after] if misses_one else [before, middle, after]
    for old, new in pairwise(seen):
        known.follow(old, new)
    references, chunks = lent_chunks(successors=known)
    references.remote_references.lost(LOST)
    references.remote_references.add(lost, chunks)
    told = Inherited(between, chunks[:1].tobytes(), np.ones(1, "<u4").tobytes())
    references.inherited(Caller(successor.peer, successor.incarnation), told)
    assert references.host.space.alive(chunks).tolist() == [True, False]
    assert references.remote_references.peers == [successor]


@pytest.mark.parametrize(
    ("misses_one", "began_without"), [(False, False), (True, False), (True, True)]
)
def test_a_successor_that_missed_a_roster_says_nothing_of_who_was_lost_under_it(
    misses_one: bool, began_without: bool
) -> None:
    """Whoever took over from that one was lost as well, and what the successor has of it is all.
    Its first shards may have been those."""
    before, middle, after, lost, between, successor = rosters_of_a_takeover_of_a_takeover()
    if began_without:
        its = before.primaries == before.members.index(between.peer)
        primaries = np.where(its, before.members.index(successor.peer), before.primaries)
        before = dataclasses.replace(before, primaries=primaries)
    told: list[Inherited] = []
    me: Any = SimpleNamespace(
        owner=successor,
        address=successor.peer,
        successors=Successors(),
        roster=before,
        lose=lambda shards: None,
    )
    mesh: Any = SimpleNamespace(handlers={})
    sender: Any = SimpleNamespace(value_replicas=None)
    references: Any = SimpleNamespace(inherited=None, took_over=lambda to, body: told.append(body))
    replicas = LogReceiver(me, mesh, None, sender, references)  # type: ignore[arg-type]
    for old, new in pairwise([before, after] if misses_one else [before, middle, after]):
        me.successors.follow(old, new)
        me.roster = new
        replicas.turned(old, new)
    assert {one.origin for one in told} == {between}
    assert len(told) == len(after.owners)
