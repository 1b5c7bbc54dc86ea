"""Who was given shards hears what is known of them: from every peer, or from its heir."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dataplane.errors import ProtocolError, StaleEpoch, Unavailable
from dataplane.metadata.authority import Authority
from dataplane.metadata.heirs import Heirs
from dataplane.metadata.roster import Roster
from dataplane.peer.host import Caller, Host
from dataplane.peer.restating import Restating
from dataplane.wire.messages import Body, Done
from dataplane.wire.rosters import Restate
from dataplane.wire.tables import Owner

SEEDS = [f"tcp://10.0.0.{n}:7101" for n in range(1, 7)]


class Plane:
    """The rosters of six peers, all of which are backed up."""

    def __init__(self) -> None:
        self.made = Authority(Roster.from_seeds(SEEDS), 77, keeper=SEEDS[0])
        for number, seed in enumerate(SEEDS, 1):
            self.made.beat(Owner(seed, number), self.made.roster.epoch)
        self.sync()

    def sync(self) -> Roster:
        for owner in self.made.roster.owners:
            self.made.beat(owner, self.made.roster.epoch, synced=True)
        return self.made.roster

    def give(self) -> Roster:
        """All shards are empty, and who has none gets some."""
        self.sync()
        everything = b"\xff" * (self.made.roster.shards // 8)
        for owner in [o for o in self.made.roster.owners if o.peer in self.made.roster.hosts]:
            self.made.beat(owner, self.made.roster.epoch, synced=True, spare=everything)
        return self.made.roster

    def lose(self, owner: Owner) -> tuple[Roster, Owner]:
        before = self.made.roster
        self.made.lost(owner)
        return self.made.roster, self.made.roster.heir_of(before, owner)


class Others:
    """Answers of other peers, given when the test says so."""

    def __init__(self) -> None:
        self.handlers: dict[type[Body], Callable[[Caller, Any], Any]] = {}
        self.asked: dict[str, tuple[Restate, asyncio.Future[Body]]] = {}
        self.tasks: list[asyncio.Task[None]] = []

    def spawn(self, work: Awaitable[None]) -> None:
        self.tasks.append(asyncio.ensure_future(work))

    async def call(self, address: str, body: Body, **how: Any) -> Body:
        assert isinstance(body, Restate)
        self.asked[address] = body, asyncio.get_running_loop().create_future()
        return await self.asked[address][1]

    async def tell(self, *addresses: str) -> None:
        for address in addresses:
            self.asked.pop(address)[1].set_result(Done())
        await asyncio.sleep(0)

    async def break_off(self, address: str) -> None:
        self.asked.pop(address)[1].set_exception(Unavailable("went away"))
        await asyncio.sleep(0)


class Home:
    """A peer that follows rosters, as far as it is asked for what it was given."""

    def __init__(self, owner: Owner, roster: Roster) -> None:
        host = SimpleNamespace(
            owner=owner, address=owner.peer, roster=roster, heirs=Heirs(), untold={}, entries={}
        )
        host.now, host.told = lambda: 0.0, lambda: None
        host.serving = lambda one: Host.serving(host, one)  # type: ignore[arg-type]
        host.another_roster = self._another
        self.host: Any = host
        self.others = Others()
        self.resumed = 0
        self._newer = asyncio.Event()
        homes = SimpleNamespace(turned=lambda new: None, resume=self._resume)
        partitions: Any = SimpleNamespace(homes=homes, known=lambda address: [])
        self.restating = Restating(host, self.others, partitions)  # type: ignore[arg-type]

    def _resume(self) -> None:
        self.resumed += 1

    async def _another(self, than: Roster, until: float) -> bool:
        while self.host.roster is than:
            await self._newer.wait()
        return True

    async def turn(self, new: Roster) -> None:
        old, self.host.roster = self.host.roster, new
        self.host.heirs.follow(old, new)
        self.restating.turned(old, new)
        self._newer.set()
        self._newer = asyncio.Event()
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def a_home_with_a_lost_peers_shards() -> tuple[Plane, Home]:
    plane = Plane()
    before = plane.made.roster
    after, heir = plane.lose(before.owners[1])
    home = Home(heir, before)
    await home.turn(after)
    return plane, home


async def test_a_home_answers_when_every_peer_has_told() -> None:
    _, home = await a_home_with_a_lost_peers_shards()
    before = home.resumed
    assert set(home.others.asked) == set(home.host.untold) == set(home.host.roster.members)
    first, *rest = home.host.roster.members
    await home.others.tell(*rest)
    assert list(home.host.untold) == [first]
    assert home.resumed == before
    await home.others.tell(first)
    assert not home.host.untold
    assert home.resumed > before


async def test_what_was_told_counts_under_one_roster_only() -> None:
    plane, home = await a_home_with_a_lost_peers_shards()
    waiting = dict(home.others.asked)
    await home.turn(plane.sync())
    for _, answer in waiting.values():
        answer.set_result(Done())
    await asyncio.sleep(0)
    assert set(home.host.untold) == set(home.host.roster.members) == set(home.others.asked)
    await home.others.tell(*home.others.asked)
    assert not home.host.untold


@pytest.mark.parametrize("misses_one", [False, True])
async def test_a_home_asks_the_heir_of_a_peer_that_was_lost_before_it_told(
    misses_one: bool,
) -> None:
    """Also where it misses the roster by which that one's heir was given the rows."""
    plane, home = await a_home_with_a_lost_peers_shards()
    plane.sync()
    late = next(o for o in plane.made.roster.owners[1:] if o != home.host.owner)
    shards = home.host.untold[late.peer]
    await home.others.tell(*(set(home.others.asked) - {late.peer}))
    assert list(home.host.untold) == [late.peer]
    after, heir = plane.lose(late)
    if misses_one:
        plane.sync()
        after, heir = plane.lose(heir)
    await home.turn(after)
    await home.others.break_off(late.peer)
    assert heir.peer in home.host.untold
    assert late.peer not in home.host.untold
    asked, _ = home.others.asked[heir.peer]
    assert np.unpackbits(np.frombuffer(asked.shards, np.uint8))[shards].all()


async def test_nobody_is_waited_for_who_is_lost_with_all_it_knew() -> None:
    plane, home = await a_home_with_a_lost_peers_shards()
    keeper = home.host.roster.owners[0]  # it has no rows, and so no heir
    await home.others.tell(*(set(home.others.asked) - {keeper.peer}))
    await home.turn(plane.lose(keeper)[0])
    await home.others.break_off(keeper.peer)
    assert not home.host.untold


JOINER = Owner("tcp://10.0.1.1:7101", 50)


@pytest.mark.parametrize("never_seen", [False, True])
async def test_shards_that_were_anothers_under_a_missed_roster_are_asked_for(
    never_seen: bool,
) -> None:
    """Also by a seed that was there when nobody had seen it."""
    plane = Plane()
    before = plane.made.roster
    plane.made.beat(JOINER, (1, 1))
    joined = plane.give()
    theirs = joined.primaries == joined.members.index(JOINER.peer)
    after, _ = plane.lose(JOINER)
    assert after.places_like(before)
    back = after.members[int(after.primaries[theirs][0])]
    owner = next(one for one in after.owners if one.peer == back)
    home = Home(owner, Roster.from_seeds(SEEDS) if never_seen else before)
    await home.turn(after)
    assert set(home.others.asked) == set(after.members)


async def test_nobody_is_asked_where_only_backups_got_in_sync() -> None:
    plane, home = await a_home_with_a_lost_peers_shards()
    await home.others.tell(*home.others.asked)
    plane.sync()
    assert plane.made.roster.epoch[1] > home.host.roster.epoch[1] + 1
    await home.turn(plane.made.roster)
    assert not home.others.asked


async def test_what_is_told_across_a_change_of_rosters_is_not_all() -> None:
    """A peer that leaves hands over in the middle what it was to tell."""
    plane, home = await a_home_with_a_lost_peers_shards()
    roster = home.host.roster
    shards = np.packbits(np.ones(roster.shards, np.bool_)).tobytes()

    async def call(address: str, body: Body, **how: Any) -> Body:
        home.host.roster = plane.sync()
        return Done()

    home.others.call = call  # type: ignore[method-assign]
    with pytest.raises(StaleEpoch):
        await home.others.handlers[Restate](Caller(SEEDS[2], 3), Restate(shards))


async def test_a_peer_that_fails_to_tell_is_asked_again() -> None:
    _, home = await a_home_with_a_lost_peers_shards()
    first, *rest = home.others.asked
    await home.others.tell(*rest)
    home.host.another_roster = lambda than, until: asyncio.sleep(0)
    home.others.asked.pop(first)[1].set_exception(ProtocolError("no room in the frame"))
    await asyncio.sleep(0.01)
    await home.others.tell(first)
    assert not home.host.untold


async def test_flags_of_other_than_all_shards_are_refused() -> None:
    _, home = await a_home_with_a_lost_peers_shards()
    with pytest.raises(ProtocolError, match="8 bits for"):
        await home.others.handlers[Restate](Caller(SEEDS[2], 3), Restate(b"\xff"))
