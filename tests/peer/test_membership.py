"""When a peer may answer for its shards."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dataplane.errors import LimitExceeded, StaleEpoch, Unavailable
from dataplane.metadata.roster.authority import Authority
from dataplane.metadata.roster.roster import Roster, proposed
from dataplane.peer.host import Caller, Serving
from dataplane.peer.membership import membership as membership_module
from dataplane.peer.membership.membership import AWAY_S, Membership
from dataplane.wire.peering import Beat, Rostered
from dataplane.wire.tables import Owner

SEEDS = [f"tcp://10.0.0.{n}:7101" for n in range(1, 4)]
JOINER = Owner("tcp://10.0.1.1:7101", 9)


def _spawn(work: Any) -> Any:
    """Nobody is watched here."""
    work.close()
    return SimpleNamespace(cancel=lambda: None)


NOBODY: dict[str, Any] = {
    "others": SimpleNamespace(hello=lambda owner: None),
    "spawn": _spawn,
    "part": lambda address: None,
}


def says_nothing(**but: Any) -> Any:
    """A peer that has nothing, and follows."""
    return SimpleNamespace(
        heartbeat=lambda leaving, spare: Beat(leaving=leaving, spare=spare),
        turned=lambda old, new: None,
        log_receiver=SimpleNamespace(lost_before=list),
        **but,
    )


async def test_who_joins_answers_nobody_before_it_has_the_roster_that_lets_it_in() -> None:
    """Others may have it already, and ask."""
    made = Authority(Roster.from_seeds(SEEDS), 77, keeper=SEEDS[0])
    for number, seed in enumerate(SEEDS, 1):
        made.beat(Owner(seed, number), made.roster.epoch, Beat())
    made.beat(JOINER, (1, 1), Beat())
    answers = [Rostered(), Rostered(made.roster.table)]

    async def call(*args: Any, **how: Any) -> Rostered:
        return answers.pop(0)

    host: Any = SimpleNamespace(
        owner=JOINER,
        address=JOINER.peer,
        incarnation=JOINER.incarnation,
        roster=Roster.from_seeds(SEEDS),
        successors=SimpleNamespace(follow=lambda old, new: None),
        now=asyncio.get_running_loop().time,
    )
    host.turn = lambda new: setattr(host, "roster", new)
    mesh: Any = SimpleNamespace(handlers={}, call=call, **NOBODY)
    keeper: Any = SimpleNamespace(
        commit=None, apart=SEEDS[0], sure=lambda: False, address=lambda: SEEDS[0]
    )
    serving = host.serving = Serving(host)
    membership = Membership(host, mesh, keeper, says_nothing())
    await membership._say()
    assert not serving.is_sure()
    await membership._say()
    assert host.roster.has(JOINER)
    assert serving.is_sure()


async def test_who_is_one_too_many_is_told_so_and_does_not_wait_to_be_let_in() -> None:
    """As if nobody answered, for 5 minutes."""

    async def call(*args: Any, **how: Any) -> Rostered:
        raise LimitExceeded("this run already has 4096 peers, the maximum", limit=4096)

    host: Any = SimpleNamespace(
        owner=JOINER, address=JOINER.peer, roster=Roster.from_seeds(SEEDS), now=lambda: 0.0
    )
    host.serving = Serving(host)
    mesh: Any = SimpleNamespace(handlers={}, call=call, **NOBODY)
    keeper: Any = SimpleNamespace(
        commit=None, apart=SEEDS[0], sure=lambda: False, address=lambda: SEEDS[0]
    )
    membership = Membership(host, mesh, keeper, says_nothing())
    host.silent = host.spare = False
    await membership._say()
    with pytest.raises(LimitExceeded):
        await membership.admitted(300)


@pytest.mark.parametrize("leaves", [False, True])
async def test_who_hears_that_the_plane_goes_on_without_it_does_not_serve_by_that_word(
    leaves: bool,
) -> None:
    """Nor does it go on with handing over, where it wanted to leave: it waited 60 s for a backup
    that works under a roster without it."""
    made = Authority(Roster.from_seeds(SEEDS), 77, keeper=SEEDS[0])
    for number, seed in enumerate(SEEDS, 1):
        made.beat(Owner(seed, number), made.roster.epoch, Beat())
    before, now = made.roster, 100.0
    assert not before.backup_of(SEEDS[1])[1]
    answer = Rostered()

    async def call(*args: Any, **how: Any) -> Rostered:
        return answer

    host: Any = SimpleNamespace(
        owner=Owner(SEEDS[1], 2), address=SEEDS[1], roster=before, silent=True, now=lambda: now
    )
    host.progress = SimpleNamespace(is_settled=False)
    keeper: Any = SimpleNamespace(
        commit=None, apart=SEEDS[0], sure=lambda: False, address=lambda: SEEDS[0]
    )
    mesh: Any = SimpleNamespace(handlers={}, call=call, **NOBODY)
    serving = host.serving = Serving(host)
    membership = Membership(host, mesh, keeper, says_nothing())
    membership._admitted, membership._leaving = True, leaves
    await membership._say()
    assert serving.is_sure()
    made.lost(Owner(SEEDS[1], 2))
    now, answer = now + 9, Rostered(made.roster.table)
    await membership._say()
    assert membership.deposed.is_set() and not serving.is_sure()


async def test_a_roster_of_another_plane_counts_when_the_authority_has_heard_of_this_one() -> None:
    made = Authority(Roster.from_seeds(SEEDS), 77, keeper=SEEDS[0])
    for number, seed in enumerate(SEEDS, 1):
        made.beat(Owner(seed, number), made.roster.epoch, Beat())
    older = made.roster
    made.beat(JOINER, (1, 1), Beat())
    another = Authority(Roster.from_seeds(SEEDS), 88, keeper=SEEDS[0])
    another.go_on([older])
    for number in range(5):
        another.beat(Owner(JOINER.peer, number), (1, 1), Beat())
    answer = Rostered(another.roster.table)

    async def call(*args: Any, **how: Any) -> Rostered:
        return answer

    host: Any = SimpleNamespace(
        owner=Owner(SEEDS[1], 2), address=SEEDS[1], roster=made.roster, silent=True, now=lambda: 1.0
    )
    keeper: Any = SimpleNamespace(
        commit=None, apart=SEEDS[0], sure=lambda: False, address=lambda: SEEDS[0]
    )
    mesh: Any = SimpleNamespace(handlers={}, call=call, **NOBODY)
    host.serving = Serving(host)
    membership = Membership(host, mesh, keeper, says_nothing())
    membership._admitted = True
    caller: Any = None
    with pytest.raises(StaleEpoch):  # who sends it must not think that this one follows it
        membership.rostered_here(caller, answer)
    assert another.roster.has(host.owner) and another.roster.epoch[1] > host.roster.epoch[1]
    assert membership._beat_now.is_set() and not membership.deposed.is_set()
    await membership._say()
    assert membership.deposed.is_set() and host.roster is made.roster


async def test_partitions_go_on_to_begin_where_who_joins_gets_nothing() -> None:
    """Also where the authority ends before it gave anything, or a plane is so large that a joiner
    has no shard by right: no other shard is kept free for it."""
    made = Authority(Roster.from_seeds(SEEDS), 77, keeper=SEEDS[0])
    for number, seed in enumerate(SEEDS, 1):
        made.beat(Owner(seed, number), made.roster.epoch, Beat())
    made.beat(JOINER, (1, 1), Beat())
    said: list[Beat] = []

    async def call(address: str, body: Beat, **how: Any) -> Rostered:
        said.append(body)
        return Rostered()

    host: Any = SimpleNamespace(
        owner=Owner(SEEDS[1], 2),
        address=SEEDS[1],
        roster=made.roster,
        spare=None,
        silent=False,
        now=asyncio.get_running_loop().time,
    )
    keeper: Any = SimpleNamespace(
        commit=None, apart=SEEDS[0], sure=lambda: False, address=lambda: SEEDS[0]
    )
    mesh: Any = SimpleNamespace(handlers={}, call=call, **NOBODY)
    members, mine = made.roster.members, made.roster.primaries == 1
    peer = says_nothing(partitions=SimpleNamespace(spare=lambda: mine))
    host.serving = Serving(host)
    membership = Membership(host, mesh, keeper, peer)
    await membership._say()
    theirs = proposed(members, [1, 2, 3]) == members.index(JOINER.peer)
    assert np.array_equal(host.spare, mine & theirs)
    assert said[0].spare == np.packbits(mine & theirs).tobytes()


async def test_an_answer_of_the_authority_counts_from_when_it_was_asked() -> None:
    """It came before this peer was stopped, and is read when the plane went on without it."""
    made = Authority(Roster.from_seeds(SEEDS), 77, keeper=SEEDS[0])
    for number, seed in enumerate(SEEDS, 1):
        made.beat(Owner(seed, number), made.roster.epoch, Beat())
    clock = [100.0]
    stopped_s = [0.0]

    async def call(*args: Any, **how: Any) -> Rostered:
        clock[0] += stopped_s[0]
        return Rostered()

    host: Any = SimpleNamespace(
        owner=Owner(SEEDS[1], 2), address=SEEDS[1], roster=made.roster, spare=None, silent=False,
        now=lambda: clock[0],
    )  # fmt: skip
    keeper: Any = SimpleNamespace(
        commit=None, apart=SEEDS[0], sure=lambda: False, address=lambda: SEEDS[0]
    )
    serving = host.serving = Serving(host)
    peer = says_nothing(partitions=SimpleNamespace(spare=None))
    mesh: Any = SimpleNamespace(handlers={}, call=call, **NOBODY)
    membership = Membership(host, mesh, keeper, peer)
    await membership._say()
    assert serving.is_sure()
    stopped_s[0] = 6.0
    await membership._say()
    assert not serving.is_sure()
    stopped_s[0] = 0.0
    await membership._say()
    assert serving.is_sure()


async def test_a_keeper_that_only_begins_says_nothing_by_which_anybody_may_serve() -> None:
    """It asks the others what they know, and one of them may have been called lost long ago."""
    caller = Caller(SEEDS[1], 2)
    nobody: Any = None

    def at(address: str) -> Membership:
        host: Any = SimpleNamespace(address=address, roster=Roster.from_seeds(SEEDS))
        keeper: Any = SimpleNamespace(commit=None, apart=SEEDS[0], sure=lambda: True)
        mesh: Any = SimpleNamespace(handlers={}, **NOBODY)
        return Membership(host, mesh, keeper, nobody)

    begins = at(SEEDS[0])
    assert not begins.role.is_open
    with pytest.raises(Unavailable):
        begins.beat_here(caller, Beat())
    assert isinstance(at(SEEDS[1]).beat_here(Caller(SEEDS[0], 1), Beat()), Rostered)


async def test_who_has_ended_with_the_keeper_or_is_about_to_takes_nothing_over() -> None:
    made = Authority(Roster.from_seeds(SEEDS), 77, keeper=SEEDS[0])
    owners = [Owner(seed, number) for number, seed in enumerate(SEEDS, 1)]
    for owner in (*owners, JOINER):
        made.beat(owner, made.roster.epoch if owner != JOINER else (1, 1), Beat())
    now = 100.0
    host: Any = SimpleNamespace(
        owner=owners[1], address=SEEDS[1], roster=made.roster, now=lambda: now
    )
    keeper: Any = SimpleNamespace(commit=None, apart=SEEDS[0], sure=lambda: False)
    mesh: Any = SimpleNamespace(handlers={}, **NOBODY)
    host.serving = Serving(host)
    host.serving.heard = now
    membership = Membership(host, mesh, keeper, says_nothing())
    assert membership.stays() == {SEEDS[0], SEEDS[2], JOINER.peer}
    now += AWAY_S + 1
    assert membership.stays() == {SEEDS[2], JOINER.peer}
    for number in range(9):
        with pytest.raises(Unavailable):  # of who was never a member nothing is remembered
            membership.beat_here(Caller("tcp://10.0.0.9:1", number), Beat(leaving=True))
    assert not membership._ending
    with pytest.raises(Unavailable):
        membership.beat_here(Caller(JOINER.peer, JOINER.incarnation), Beat(leaving=True))
    assert membership.stays() == {SEEDS[2]}
    with pytest.raises(Unavailable):
        membership.beat_here(Caller(SEEDS[2], 3), Beat(leaving=True))
    assert not membership.stays()
    made.beat(Owner(JOINER.peer, JOINER.incarnation + 1), (1, 1), Beat())
    host.roster = made.roster
    assert membership.stays() == {JOINER.peer}


async def test_while_the_keeper_is_away_who_leaves_tells_all_and_counts_on_none_that_it_cannot_tell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also those that said the same, which may wait for this one; and one that it never spoke with
    may have ended before it was told to."""
    monkeypatch.setattr(membership_module, "BEAT_S", 0.0)
    made = Authority(Roster.from_seeds(SEEDS), 77, keeper=SEEDS[0])
    owners = [Owner(seed, number) for number, seed in enumerate(SEEDS, 1)]
    for owner in (*owners, JOINER):
        made.beat(owner, made.roster.epoch if owner != JOINER else (1, 1), Beat())
    answers, told = {SEEDS[2]}, list[str]()

    async def hello(address: str) -> None:
        if address not in answers:
            raise Unavailable("nobody answers")

    async def call(address: str, body: Beat, timeout_s: float) -> None:
        assert body == Beat(leaving=True)
        told.append(address)
        raise Unavailable("no authority is there")

    now = 100.0
    host: Any = SimpleNamespace(
        owner=owners[1], address=SEEDS[1], roster=made.roster, now=lambda: now
    )
    host.serving = Serving(host)
    host.serving.heard = now - AWAY_S - 1
    keeper: Any = SimpleNamespace(commit=None, apart=SEEDS[0], sure=lambda: False)
    mesh: Any = SimpleNamespace(handlers={}, call=call, hello=hello, **NOBODY)
    membership = Membership(host, mesh, keeper, says_nothing())

    async def rounds() -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    says = asyncio.create_task(membership.announce_leaving())
    await rounds()
    assert {*told} == answers and membership.stays() == answers
    answers.add(JOINER.peer)  # it was only slow
    await rounds()
    assert {*told} == answers and membership.stays() == answers
    with pytest.raises(Unavailable):
        membership.beat_here(Caller(JOINER.peer, JOINER.incarnation), Beat(leaving=True))
    told.clear()
    await rounds()
    assert {*told} == answers and membership.stays() == {SEEDS[2]}
    host.serving.heard = now
    await asyncio.wait_for(says, 10)
