"""The static roster: who serves which shard, and the directory of given names."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.errors import RosterMismatch
from dataplane.metadata.roster.roster import NO_BACKUP, Roster
from dataplane.wire.limits import SHARDS
from dataplane.wire.packed import KEY
from dataplane.wire.tables import Owner, Takeover

SEEDS = [f"tcp://10.0.0.{number}:7101" for number in range(1, 9)]


def keys(*names: bytes) -> np.ndarray:
    return np.array([name.ljust(16, b"\0") for name in names], KEY)


def test_a_peer_alone_serves_every_shard_without_a_backup() -> None:
    roster = Roster.from_seeds([])
    assert roster.members == ("",)
    assert roster.home("step-1") == ""
    assert len(roster.shards_of("")) == SHARDS
    assert (roster.backups == NO_BACKUP).all() and not roster.in_sync.any()


def test_equal_seeds_give_equal_tables_however_they_are_spelled() -> None:
    one = Roster.from_seeds(["tcp://localhost:7101", "TCP://HOST-B:7101/"])
    two = Roster.from_seeds(["tcp://127.0.0.1:7101", "tcp://host-b:7101"])
    assert one.epoch == two.epoch and (one.primaries == two.primaries).all()
    assert one.epoch[0] < 2**53


def test_another_order_is_another_roster() -> None:
    assert Roster.from_seeds(SEEDS).epoch != Roster.from_seeds(SEEDS[::-1]).epoch


@settings(max_examples=25)
@given(st.integers(1, 40))
def test_every_shard_has_one_primary_and_a_backup_elsewhere(peers: int) -> None:
    roster = Roster.from_seeds([f"tcp://h{number}:1" for number in range(peers)])
    sizes = np.bincount(roster.primaries, minlength=peers)
    assert sizes.sum() == SHARDS
    if peers >= 3:
        assert sizes[0] == 0  # the keeper of the roster
    mean = SHARDS / (peers - (peers >= 3))
    assert sizes[sizes > 0].max() < mean + 6 * mean**0.5
    assert (roster.backups != roster.primaries).all()
    for member in range(peers):
        buddies = np.unique(roster.backups[roster.primaries == member])
        assert len(buddies) <= 2
        assert (peers == 1) == (NO_BACKUP in buddies)
    assert not roster.in_sync.any()


def test_one_more_peer_moves_only_the_shards_that_it_gets() -> None:
    before, after = Roster.from_seeds(SEEDS[:7]), Roster.from_seeds(SEEDS)
    moved = before.primaries != after.primaries
    assert set(after.primaries[moved]) == {7}


def test_partitions_spread_over_the_hosts() -> None:
    roster = Roster.from_seeds(SEEDS)
    assert {roster.home(f"step-{number}") for number in range(200)} == set(roster.hosts)
    assert roster.home("step-1") == Roster.from_seeds(SEEDS).home("step-1")


def test_strangers_and_twins_are_refused() -> None:
    with pytest.raises(RosterMismatch, match="contains a duplicate"):
        Roster.from_seeds([SEEDS[0], SEEDS[0]])
    with pytest.raises(RosterMismatch, match="not one of"):
        Roster.from_seeds(SEEDS).shards_of("tcp://10.9.9.9:1")


def test_a_table_that_does_not_fit_together_is_refused() -> None:
    table = Roster.from_seeds(SEEDS).table
    assert Roster.from_table(table).table == table
    for name in ("primaries", "backups", "in_sync"):
        short = msgspec.structs.replace(table, **{name: getattr(table, name)[:-1]})
        with pytest.raises(RosterMismatch, match="inconsistent roster"):
            Roster.from_table(short)
    stranger = msgspec.structs.replace(table, primaries=b"\x08\0" * SHARDS)
    with pytest.raises(RosterMismatch, match="peers outside the roster"):
        Roster.from_table(stranger)


def test_a_peer_that_missed_rosters_is_no_successor_for_the_empty_shards_that_it_was_given() -> (
    None
):
    gone, successor, new = (Owner(f"tcp://10.0.0.{n}:7101", n) for n in (1, 2, 3))
    first = Roster.from_seeds([gone.peer, successor.peer])
    old = dataclasses.replace(
        first,
        incarnations=(1, 2),
        primaries=np.zeros_like(first.primaries),
        epoch=(9, 5),
    )
    primaries = np.full_like(first.primaries, 2)
    primaries[:10] = 1  # something lives in these
    later = dataclasses.replace(
        old,
        members=(gone.peer, successor.peer, new.peer),
        incarnations=(1, 2, 3),
        primaries=primaries,
        epoch=(9, 8),
        takeovers=(Takeover(gone, successor, 6),),
    )
    assert later.successor_of(old, gone) == successor
    told_before = dataclasses.replace(old, epoch=(9, 6))
    assert later.successor_of(told_before, gone) == new
