"""Whole planes in virtual time: seeds of which each is another cluster, load and set of faults."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from dataplane.metadata.roster.authority import Authority
from dataplane.metadata.roster.roster import Roster
from dataplane.metadata.shard.claim_queue import ClaimQueue
from dataplane.metadata.shard.store import Store
from dataplane.wire.journal import Unit
from dataplane.wire.messages import Claim, Want
from dataplane.wire.peering import Beat
from dataplane.wire.tables import Definition, Owner
from tests.metadata import stores
from tests.metadata.stores import waiting
from tests.simulation.invariants import MET_S, Watch, _is_behind
from tests.simulation.ledger import SMALL, Group, Ledger, Row
from tests.simulation.loop import Machine, VirtualLoop
from tests.simulation.network import DELAY_S
from tests.simulation.run import Run

SEEDS = 5
BATCHES = (0, 5, 10)
"""`make simulate` plays many more; which failed, and why, is in docs/history/bugs-found.md."""


def _simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.simulation", *arguments],
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", BATCHES)
def test_no_promise_is_broken_whatever_fails(first: int) -> None:
    done = _simulate("--first", str(first), "--seeds", str(SEEDS))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{SEEDS} seeds, 0 failed" in done.stdout


def test_a_seed_is_played_alike_every_time() -> None:
    told = [_simulate("--first", "1", "--seeds", "1", "--story").stdout for _ in range(2)]
    assert "trace" in told[0]
    assert told[0].partition("seeds")[0] == told[1].partition("seeds")[0]


def test_a_frozen_machine_does_nothing_until_it_goes_on() -> None:
    loop = VirtualLoop()
    one, other = loop.machine("one"), loop.machine("other")
    seen: list[str] = []
    loop.call_on(one, 1.0, seen.append, "one")
    loop.call_on(other, 2.0, seen.append, "other")
    one.frozen = True
    while loop.step():
        pass
    assert seen == ["other"]
    one.frozen = False
    while loop.step():
        pass
    assert seen == ["other", "one"]


@pytest.mark.parametrize("died, excused", [(101.0, True), (115.0, False)])
def test_second_copies_need_not_have_been_made_anew_where_the_owner_died_unnoticed_at_once(
    died: float, excused: bool
) -> None:
    backup, writer, successor = (Owner(f"tcp://127.0.0.1:{7001 + i}", i + 1) for i in range(3))
    wrong: list[str] = []
    ledger = Ledger("p", Definition({"train": ["x"]}, 1, replicas=2), wrong)
    group = Group("g", acked=True, owners={writer})
    group.rows = [Row(b"k" * 16, group)]
    ledger.opened(group)
    entry = SimpleNamespace(store=SimpleNamespace(rows=SimpleNamespace(keys=b"k" * 16)))
    known: Any = {
        one: SimpleNamespace(
            host=SimpleNamespace(owner=one, name=one.peer, entries={"p": entry}),
            log_receiver=SimpleNamespace(_origins={}),
        )
        for one in (backup, writer, successor)
    }
    ledger.removed(known, backup, True, False, {successor}, now=100.0, died=98.0)
    ledger.removed(known, writer, True, False, {successor}, now=120.0, died=died)
    ledger.reported(b"k" * 16)
    assert (not wrong) == excused


@pytest.mark.parametrize("stays", [False, True])
def test_a_successor_has_no_shard_alone_where_another_peer_stays_that_could_back_it_up(
    stays: bool,
) -> None:
    run = Run(0)
    keeper, *others = (Owner(f"tcp://127.0.0.1:{7001 + i}", i + 1) for i in range(3))
    made = Authority(Roster.from_seeds([keeper.peer, *(o.peer for o in others)]), 7, keeper.peer)
    for one in (keeper, *others):
        made.beat(one, made.roster.epoch, Beat())
        run.cluster.known[one] = mock.Mock(
            host=SimpleNamespace(owner=one, entries={}), log_receiver=SimpleNamespace(_origins={})
        )
    going, other = sorted(others, key=lambda one: one.peer != made.roster.home(SMALL))
    for one in (going,) if stays else (going, other):
        made.beat(one, made.roster.epoch, Beat(leaving=True))
    with run._observed():
        made.roster = made._with_shards_at(going.peer, keeper.peer)  # whose backup has nothing yet
        made.lost(keeper)
    assert any("lost with it alone" in wrong for wrong in run.violations) == stays


@pytest.mark.parametrize("amiss", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_a_claim_that_waits_for_what_is_there_or_elsewhere_is_wrong_where_nothing_is_amiss(
    amiss: bool, known: bool
) -> None:
    owner, machine = Owner("tcp://127.0.0.1:7001", 1), Machine("a")
    roster = mock.Mock(epoch=(1, 1), owners=[owner])
    roster.home.return_value = owner.peer
    store = Store("p", Definition({"train": ["x"]}), 1)
    entry = SimpleNamespace(store=store, generation=1)
    stage = SimpleNamespace(queue=ClaimQueue(store, "train"))
    if known:
        stage.queue.add(waiting(1, Want("rows", 1, 1), holder=7))
    peer: Any = SimpleNamespace(
        host=SimpleNamespace(owner=owner, roster=roster, entries={"p": entry}),
        calls=SimpleNamespace(_stages={("p", 1, "train"): stage}),
    )
    cluster: Any = SimpleNamespace(
        loop=SimpleNamespace(now=0.0),
        network=SimpleNamespace(
            byte_s=0.0, delay_s=DELAY_S, bulk_until=0.0, wires=[], cuts=set(), forbidden=set()
        ),
        places=[SimpleNamespace(peer=peer, machine=machine)],
        waiting={mock.Mock(owner=owner, session=7): Claim("p", 1, "train", Want("rows", 1, 1))},
    )
    watch = Watch(cluster)
    for now in (10.0, 12.0, 14.0, 15.5):
        cluster.loop.now = now
        store.sealed = now > 10.0  # from then on nothing can come
        machine.disturbed_at = 14.0 if amiss and now >= 14.0 else 0.0
        since = 12.0 if known else 10.0
        assert len(watch._overdue([peer])) == (now > since + MET_S and not amiss)


def test_a_claim_is_behind_what_the_shard_has_before_it_while_somebody_waits_for_that() -> None:
    queue = ClaimQueue(stores.store(stages={"s": ["tokens"]}), "s")
    units: list[Unit] = ["groups", "groups", "rows"]
    for number, unit in enumerate(units, 1):
        queue.add(waiting(number, Want(unit, 1, 1), holder=number, since=float(number)))
    queue.add(waiting(2, Want("groups", 1, 1), holder=2, since=2.5))  # repeated, in its place
    assert [_is_behind(queue, one, {1, 2, 3}) for one in (1, 2, 3)] == [False, True, True]
    assert [_is_behind(queue, one, {2, 3}) for one in (2, 3)] == [False, True]
    queue.add(waiting(4, Want("groups", 1, 1), holder=1, since=4.0))  # the first was given up
    assert [_is_behind(queue, one, {1, 2, 3}) for one in (1, 2)] == [True, False]
    assert not _is_behind(queue, 3, {3})
