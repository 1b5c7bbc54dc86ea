"""The authority: who takes over what when peers come, go, get in sync, or die."""

from __future__ import annotations

import random

import numpy as np
import pytest

from dataplane.errors import LimitExceeded
from dataplane.metadata.roster.authority import Authority
from dataplane.metadata.roster.roster import NO_BACKUP, Roster
from dataplane.wire.peering import Beat
from dataplane.wire.tables import Owner

A, B, C, D, E = (f"tcp://10.0.0.{n}:7101" for n in range(1, 6))


def authority(*seeds: str, seen: bool = True) -> Authority:
    made = Authority(Roster.from_seeds(seeds), 77, keeper=A)
    for number, seed in enumerate(seeds if seen else ()):
        made.beat(Owner(seed, number + 1), made.roster.epoch, Beat())
    return made


def sync(made: Authority, *addresses: str) -> None:
    for address in addresses:
        owner = next(o for o in made.roster.owners if o.peer == address)
        made.beat(owner, made.roster.epoch, Beat(synced=True))


def shards(made: Authority, address: str) -> set[int]:
    return set(made.roster.shards_of(address).tolist())


def offer(made: Authority, address: str, busy: set[int]) -> None:
    """It says in which of its shards nothing lives."""
    owner = next(o for o in made.roster.owners if o.peer == address)
    spare = np.zeros(made.roster.shards, np.bool_)
    spare[sorted(shards(made, address) - busy)] = True
    bits = np.packbits(spare).tobytes()
    made.beat(owner, made.roster.epoch, Beat(synced=True, spare=bits))


def test_an_in_sync_backup_takes_over_all_shards_of_the_dead() -> None:
    made = authority(A, B, C, D)
    sync(made, B, C, D)
    before = {address: shards(made, address) for address in (B, C, D)}
    successor, in_sync = made.roster.backup_of(B)
    assert in_sync and successor is not None
    made.lost(Owner(B, 2))
    assert B not in made.roster.members
    assert shards(made, successor) == before[successor] | before[B]
    (other,) = {C, D} - {successor}
    assert shards(made, other) == before[other]


def test_a_keeper_that_need_not_host_any_more_backs_up_until_who_is_backed_is_heard() -> None:
    """One that had died was given a newcomer as its backup, which had nothing of it."""
    made = authority(A, B, C)
    made.lost(Owner(C, 3))
    sync(made, B)
    assert made.roster.backup_of(B) == (A, True)
    made.beat(Owner(D, 4), (0, 0), Beat())
    assert D in made.roster.members and made.roster.backup_of(B) == (A, True)
    sync(made, B)
    assert made.roster.backup_of(B) == (D, False)


def test_a_backup_that_is_not_in_sync_is_not_promoted() -> None:
    made = authority(A, B, C, D)
    before = shards(made, B)
    made.lost(Owner(B, 2))
    assert before <= shards(made, C) | shards(made, D)
    assert before & shards(made, C) and before & shards(made, D), "they go where new ones would"
    assert not made.roster.in_sync[sorted(before)].any()


def test_a_plane_has_a_bounded_number_of_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dataplane.metadata.roster.authority.MAX_MEMBERS", 3)
    made = authority(A, B)
    made.beat(Owner(C, 3), (3, 1), Beat())
    with pytest.raises(LimitExceeded, match="already has 3 peers, the maximum"):
        made.beat(Owner(D, 4), (4, 1), Beat())
    assert D not in made.roster.members


def test_shards_taken_over_are_learners_until_the_successors_backup_has_them() -> None:
    made = authority(A, B, C, D)
    sync(made, B, C, D)
    mine = shards(made, B)
    successor, _ = made.roster.backup_of(B)
    assert successor is not None
    own = shards(made, successor)
    next_successor, _ = made.roster.backup_of(successor)
    made.lost(Owner(B, 2))
    if next_successor != B:
        assert made.roster.in_sync[sorted(own)].all()
    assert not made.roster.in_sync[sorted(mine)].any()
    sync(made, successor)
    assert made.roster.in_sync[sorted(mine | own)].all()


def test_the_word_in_sync_of_an_older_roster_counts_for_nothing() -> None:
    made = authority(A, B, C, D)
    old = made.roster.epoch
    made.lost(Owner(D, 4))
    made.beat(Owner(B, 2), old, Beat(synced=True))
    assert not made.roster.in_sync.any()


def test_the_last_host_is_declared_solo() -> None:
    made = authority(A, B)
    sync(made, A, B)
    made.lost(Owner(B, 2))
    assert len(shards(made, A)) == made.roster.shards
    assert (made.roster.backups == NO_BACKUP).all() and not made.roster.in_sync.any()


def test_a_restarted_peer_returns_as_an_empty_member_and_gets_empty_shards() -> None:
    made = authority(A, B, C, D)
    sync(made, B, C, D)
    had = shards(made, B)
    successor, _ = made.roster.backup_of(B)
    assert successor is not None
    made.beat(Owner(B, 22), (0, 1), Beat())
    assert made.roster.has(Owner(B, 22)) and not made.roster.has(Owner(B, 2))
    assert not shards(made, B) and had <= shards(made, successor)
    busy = set(sorted(had)[:100])
    sync(made, C, D)
    for address in (C, D):
        offer(made, address, busy)
    assert shards(made, B) and not shards(made, B) & busy
    assert busy <= shards(made, successor)


def test_a_roster_says_of_which_shards_both_copies_were_lost() -> None:
    made = authority(A, B, C, D)
    sync(made, B, C, D)
    first = made.roster
    had = {address: shards(made, address) for address in (B, C, D)}
    successor = made.roster.backup_of(B)[0]
    assert successor is not None
    made.lost(Owner(B, 2))
    assert not made.roster.lost_since(first)
    made.lost(next(one for one in made.roster.owners if one.peer == successor))
    assert made.roster.lost_since(first) == had[B]  # the successor's own have a backup in sync
    again = Roster.from_table(made.roster.table)
    assert again.lost_since(first) == had[B]
    (left,) = {B, C, D} - {B, successor}
    made.lost(next(one for one in made.roster.owners if one.peer == left))
    # Also what began empty before, which may have been filled since.
    everything = had[B] | had[C] | had[D]
    assert made.roster.lost_since(again) == made.roster.lost_since(first) == everything


def test_a_process_that_was_called_lost_is_not_let_in_again() -> None:
    made = authority(A, B, C, D)
    made.lost(Owner(B, 2))
    for epoch in (made.roster.epoch, (0, 1)):
        made.beat(Owner(B, 2), epoch, Beat())
        assert B not in made.roster.members
    made.beat(Owner(B, 3), (0, 1), Beat())
    assert B in made.roster.members


def test_a_new_peer_gets_shards_in_which_nothing_lives_once_all_have_said_which() -> None:
    made = authority(A, B, C)
    sync(made, B, C)
    before = made.roster
    busy = {*sorted(shards(made, B))[::2], *sorted(shards(made, C))[::2]}
    made.beat(Owner(E, 5), (0, 0), Beat())
    assert E in made.roster.members and not shards(made, E)
    sync(made, B, C)
    offer(made, B, busy)
    assert not shards(made, E)
    offer(made, C, busy)
    assert len(shards(made, E)) > 100 and not shards(made, E) & busy
    moved = made.roster.primaries != before.primaries
    assert set(np.flatnonzero(moved).tolist()) == shards(made, E)
    assert made.roster.in_sync[~moved].all() and not made.roster.in_sync[moved].any()


def test_what_was_spare_under_an_older_roster_counts_for_nothing() -> None:
    made = authority(A, B, C, D)
    sync(made, B, C, D)
    made.beat(Owner(E, 5), (0, 0), Beat())
    sync(made, B, C, D)
    offer(made, B, set())
    made.beat(Owner(C, 3), made.roster.epoch, Beat(synced=False))
    offer(made, C, set())
    offer(made, D, set())
    assert not shards(made, E)


def test_who_has_just_come_is_nobodys_backup_until_it_has_shards() -> None:
    """It would inherit from a peer that leaves, and have no backup that has all as well."""
    made = authority(A, B, C, D)
    made.beat(Owner(E, 5), (5, 1), Beat())
    assert E not in {made.roster.backup_of(address)[0] for address in (B, C, D)}
    sync(made, B, C, D)
    for address in (B, C, D):
        offer(made, address, set())
    assert shards(made, E)
    made.beat(Owner(B, 2), made.roster.epoch, Beat(synced=False))
    made.beat(Owner(C, 3), made.roster.epoch, Beat(synced=False))
    made.beat(Owner(D, 4), made.roster.epoch, Beat(leaving=True))
    assert E in {made.roster.backup_of(address)[0] for address in (B, C)}


def test_who_leaves_hands_over_first_and_is_let_go_when_no_value_lies_there() -> None:
    made = authority(A, B, C, D)
    sync(made, B, C, D)
    made.beat(Owner(B, 2), made.roster.epoch, Beat(synced=True, leaving=True))
    made.lost(Owner(D, 4))
    assert shards(made, B)  # it has yet to follow the rosters since
    made.beat(Owner(B, 2), made.roster.epoch, Beat(synced=True, leaving=True))
    assert shards(made, B)  # its successor has no backup in sync yet
    sync(made, C)
    made.beat(Owner(B, 2), made.roster.epoch, Beat(synced=True, leaving=True))
    assert shards(made, B)  # ... or has not passed on all
    sync(made, C)
    assert not shards(made, B) and B in made.roster.members
    assert made.roster.backup_of(C) == (A, True)  # what it passed on is there
    for number, address in ((1, A), (3, C)):
        assert B in made.roster.members
        made.beat(Owner(address, number), made.roster.epoch, Beat(synced=address == C, clear=[B]))
    assert B not in made.roster.members


def test_a_backup_that_leaves_counts_until_its_primary_is_heard_again() -> None:
    """One that died and was not called lost yet gives no other its copy."""
    made = authority(A, B, C, D)
    sync(made, B, C, D)
    before, (backup, _) = shards(made, B), made.roster.backup_of(B)
    lives = {A: 1, B: 2, C: 3, D: 4}
    assert backup is not None
    (other,) = {C, D} - {backup}
    made.beat(Owner(backup, lives[backup]), made.roster.epoch, Beat(synced=True, leaving=True))
    seen = made.roster.epoch
    for number, address in ((1, A), (lives[other], other)):
        made.beat(Owner(address, number), made.roster.epoch, Beat(synced=True))
    made.beat(Owner(B, 2), (seen[0], seen[1] - 1), Beat(synced=True))  # it may not know yet
    assert made.roster.backup_of(B) == (backup, True)
    dies, lives_on = made.roster, Authority(made.roster, 77, keeper=A)
    lives_on.beat(Owner(B, 2), dies.epoch, Beat(synced=True))
    assert lives_on.roster.backup_of(B) == (other, False)
    made.lost(Owner(B, 2))
    assert before <= shards(made, backup) and not made.roster.lost.any()


def test_a_successor_whose_stream_begins_anew_is_a_learner_again_with_all_its_shards() -> None:
    made = authority(A, B, C, D)
    sync(made, B, C, D)
    made.lost(Owner(B, 2))
    lives = {C: 3, D: 4}
    flags = {m: made.roster.in_sync[sorted(shards(made, m))] for m in lives}
    (successor,) = [m for m in lives if flags[m].any() and not flags[m].all()]
    made.beat(Owner(successor, lives[successor]), made.roster.epoch, Beat(synced=False))
    assert not made.roster.in_sync[sorted(shards(made, successor))].any()


def test_a_successor_whose_backup_lacks_what_it_took_over_loses_nothing_of_its_own() -> None:
    made = authority(A, B, C, D)
    sync(made, B, C, D)
    mine = sorted(shards(made, B))
    successor, _ = made.roster.backup_of(B)
    assert successor is not None
    own = sorted(shards(made, successor))
    made.lost(Owner(B, 2))
    before = made.roster
    made.beat(Owner(successor, {C: 3, D: 4}[successor]), before.epoch, Beat(synced=None))
    assert made.roster is before and not before.in_sync[mine].any()
    assert before.in_sync[own].all()
    made.lost(Owner(successor, {C: 3, D: 4}[successor]))
    assert made.roster.lost_since(before) == set(mine)


def test_a_backup_that_lost_the_thread_is_a_learner_again() -> None:
    made = authority(A, B, C, D)
    sync(made, B, C, D)
    made.beat(Owner(B, 2), made.roster.epoch, Beat(synced=False))
    assert not made.roster.in_sync[sorted(shards(made, B))].any()
    assert made.roster.in_sync[sorted(shards(made, C))].all()


def test_a_new_authority_goes_on_from_the_newest_roster() -> None:
    old = authority(A, B, C)
    sync(old, B, C)
    new = Authority(Roster.from_seeds([A, B, C]), 99)
    new.go_on([old.roster])
    assert new.roster.epoch[0] == 99 and new.roster.epoch[1] > old.roster.epoch[1]
    assert (new.roster.primaries == old.roster.primaries).all() and new.roster.in_sync.any()


def test_a_roster_comes_out_of_its_table_as_it_went_in() -> None:
    made = authority(A, B, C)
    sync(made, B, C)
    again = Roster.from_table(made.roster.table)
    assert again.members == made.roster.members and again.epoch == made.roster.epoch
    for name in ("primaries", "backups", "in_sync"):
        assert (getattr(again, name) == getattr(made.roster, name)).all()


@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_each_shard_has_one_living_primary_and_only_synced_copies_rise(
    seed: int,
) -> None:
    chance = random.Random(seed)
    addresses = [A, B, C, D, E]
    made = authority(*addresses[: chance.randint(1, 5)], seen=False)
    lives = {address: 0 for address in addresses}
    for _ in range(60):
        before = made.roster
        address = chance.choice(addresses)
        match chance.choice(["start", "die", "sync", "sync", "leave"]):
            case "start":
                lives[address] += 10
                made.beat(Owner(address, lives[address] + 1), (0, 1), Beat())
            case "die":
                made.lost(Owner(address, lives[address] + 1))
            case "sync":
                if made.roster.has(Owner(address, lives[address] + 1)):
                    made.beat(
                        Owner(address, lives[address] + 1), made.roster.epoch, Beat(synced=True)
                    )
            case "leave":
                if made.roster.has(Owner(address, lives[address] + 1)):
                    made.beat(
                        Owner(address, lives[address] + 1), made.roster.epoch, Beat(leaving=True)
                    )
        after = made.roster
        assert (after.primaries < len(after.members)).all()
        backed = after.backups != NO_BACKUP
        assert (after.backups[backed] != after.primaries[backed]).all()
        assert not after.in_sync[~backed].any()
        for member in after.members:
            assert len(np.unique(after.backups[after.shards_of(member)])) <= 1
        gone = set(before.members) - set(after.members)
        for member in gone:
            mine = before.shards_of(member)
            synced = mine[before.in_sync[mine]]
            successors = {after.members[p] for p in after.primaries[synced]}
            assert successors <= {before.members[b] for b in before.backups[synced]}


def test_what_was_clear_before_the_shards_moved_counts_for_nothing() -> None:
    made = authority(A, B, C, D)
    sync(made, B, C, D)
    before = made.roster.epoch
    for number, address in ((1, A), (3, C), (4, D)):
        made.beat(Owner(address, number), before, Beat(synced=address != A, clear=[B]))
    made.beat(Owner(B, 2), made.roster.epoch, Beat(synced=True, leaving=True))
    for number, address in ((1, A), (3, C), (4, D)):
        made.beat(Owner(address, number), before, Beat(clear=[B]))
    assert B in made.roster.members and made.roster.leaving == {B}


def test_nothing_is_given_to_who_leaves() -> None:
    made = authority(A, B, C, D)
    made.beat(Owner(B, 2), made.roster.epoch, Beat(leaving=True))
    assert B not in {made.roster.backup_of(address)[0] for address in (C, D)}
    sync(made, C, D)
    made.lost(Owner(C, 3))
    assert made.roster.members.index(B) not in set(made.roster.primaries[made.roster.in_sync])
    assert Roster.from_table(made.roster.table).leaving == {B}


def test_a_keeper_that_was_not_told_of_the_newest_roster_notices_and_decides_nothing() -> None:
    old = authority(A, B, C, D)
    sync(old, B, C, D)
    new = Authority(Roster.from_seeds([A, B, C, D]), 99, keeper=A)
    new.beat(Owner(A, 11), new.roster.epoch, Beat())
    before = new.roster
    new.beat(Owner(B, 2), old.roster.epoch, Beat(synced=True))
    assert new.is_behind and new.roster is before
    again = Authority(Roster.from_seeds([A, B, C, D]), 99, keeper=A)
    again.go_on([old.roster])
    again.beat(Owner(B, 2), old.roster.epoch, Beat())
    assert not again.is_behind


def test_a_keeper_that_was_told_an_older_roster_lets_nobody_of_the_newer_plane_stay() -> None:
    old = authority(A, B, C, D)
    sync(old, B, C, D)
    before = old.roster
    old.lost(Owner(C, 3))
    sync(old, B, D)
    new = Authority(Roster.from_seeds([A, B, C, D]), 99, keeper=A)
    new.go_on([before])  # C's, who has not heard that it was called lost
    new.beat(Owner(C, 3), new.roster.epoch, Beat())
    new.beat(Owner(D, 4), new.roster.epoch, Beat())
    while new.roster.epoch[1] <= old.roster.epoch[1]:
        new.beat(Owner(E, new.roster.epoch[1]), (5, 1), Beat())
    assert new.roster.has(Owner(B, 2)) and not new.roster.follows(old.roster.epoch)
    new.beat(Owner(B, 2), old.roster.epoch, Beat(synced=True))
    assert not new.is_behind and not new.roster.has(Owner(B, 2))
    assert new.roster.has(Owner(C, 3)) and new.roster.has(Owner(D, 4))


def test_of_two_planes_the_one_goes_on_of_which_most_are() -> None:
    old = authority(A, B, C, D)
    sync(old, B, C, D)
    forked = Authority(Roster.from_seeds([A, B, C, D]), 99, keeper=A)
    forked.go_on([old.roster])
    for number in range(20):
        forked.beat(Owner(E, number), (5, 1), Beat())
    theirs = [old.roster, old.roster]
    old.lost(Owner(C, 3))
    theirs[1] = old.roster
    again = Authority(Roster.from_seeds([A, B, C, D]), 100, keeper=A)
    again.go_on([theirs[0], forked.roster, theirs[1]])
    assert again.roster.members == forked.roster.members  # it follows what the first knows
    again = Authority(Roster.from_seeds([A, B, C, D]), 100, keeper=A)
    again.go_on([theirs[1], forked.roster, theirs[1]])
    assert again.roster.members == old.roster.members
    assert again.roster.follows(old.roster.epoch) and not again.roster.follows(forked.roster.epoch)
    again.beat(Owner(E, 19), forked.roster.epoch, Beat())
    assert not again.is_behind and not again.roster.has(Owner(E, 19))


def test_one_that_comes_from_a_forgotten_roster_is_outvoted_and_learns_of_it() -> None:
    made = authority(A, B, C)
    sync(made, B, C)
    number = made.roster.epoch[1] + 500
    made.beat(Owner(D, 4), (12345, number), Beat())
    assert not made.is_behind
    assert D not in made.roster.members
    assert made.roster.epoch == (77, number + 1)
