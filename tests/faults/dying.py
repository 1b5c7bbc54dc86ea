"""Peers are killed under load, in turn or every few seconds, or frozen; calls to who is gone."""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np

from dataplane import ClaimTimeout, ConnectError, DataplaneError, DeadlineExceeded, Partition
from tests.cluster import members, until
from tests.etcd import etcd
from tests.faults.busy import Busy, Outcome
from tests.faults.peers import KEEPER, NAMES, OTHER, VICTIM, peers

NOTICED_S, FROZEN_S = 3.0, 24.0
"""A death is noticed within 2 s and silence after 20 s; a busy machine takes longer."""
LOAD_S = 1.0
PATIENCE_S = 45.0
FOUR = (*NAMES, "d")
EVERY_S, DOWN_S = 14.0, 5.0
BUSY_S = 0.5
"""What a busy machine may add to a deadline."""


def killed(replicas: int) -> Outcome:
    """In turn the primary of a busy partition, its backup, a host whose only part is that it owns
    bytes, and one that only reads, of five."""
    names = (*FOUR, "e")
    with peers(names) as cluster:
        busy = Busy(cluster, replicas, pause_s=0.03)
        busy.join(KEEPER)
        for role in ("primary", "backup", "owner", "reader"):
            for host in names[1:]:
                busy.join(host, producing=False, consuming=False)
            primary, backup = busy.serving()
            owner, reader = sorted({*names} - {KEEPER, primary, backup})
            for host in (owner, reader):
                busy.leave(host)
            busy.join(owner, consuming=False)
            busy.join(reader, producing=False)
            time.sleep(LOAD_S)
            victim = {"primary": primary, "backup": backup, "owner": owner, "reader": reader}[role]
            busy.kill(victim, role, NOTICED_S - LOAD_S)
            busy.again(victim)
            for host in {*names[1:]} - {victim}:
                busy.leave(host)
        return busy.outcome()


def killed_authority() -> Outcome:
    """Of three, the host whose peer makes the rosters, which etcd keeps."""
    with etcd() as server, peers(roster=server.roster) as cluster:
        busy = Busy(cluster, replicas=2)
        for host in NAMES:
            busy.join(host)
        time.sleep(LOAD_S)
        victim = cluster.keeper()
        busy.kill(victim, "authority", NOTICED_S + LOAD_S)
        return busy.outcome()


def deaths(replicas: int, seconds: float) -> Outcome:
    """Of four hosts, each under load, one dies every 14 s and is back after 5."""
    with peers(FOUR) as cluster:
        busy = Busy(cluster, replicas)
        for host in FOUR:
            busy.join(host)
        for nth in range(max(1, round(seconds / EVERY_S))):
            victim, began = FOUR[(1 + nth) % len(FOUR)], time.monotonic()
            busy.kill(victim, victim, DOWN_S)
            busy.again(victim)
            busy.join(victim)
            time.sleep(max(0.0, began + EVERY_S - time.monotonic()))
        return busy.outcome()


def frozen() -> Outcome:
    """SIGSTOP of a host whose client holds rows; they go to others, and what it says when it wakes
    is refused."""
    with peers() as cluster, ExitStack() as stack:
        planes = {name: cluster.connect(name) for name in NAMES}
        for plane in planes.values():
            stack.callback(_leave, plane)
        part = planes[KEEPER].partition("p", {"s": ["x"]}, replicas=2)
        near, far = planes[OTHER].partition("p"), planes[VICTIM].partition("p")
        near.put({"x": [[n] for n in range(8)]}, key=[f"k{n}" for n in range(8)])
        held = far.claim("s", rows=4, timeout=PATIENCE_S)
        stopped_at = time.monotonic()
        cluster.freeze(VICTIM)
        try:
            until(lambda: len(members(planes[OTHER])) == 2, "it is noticed", PATIENCE_S)
            noticed_s = time.monotonic() - stopped_at
            again = part.claim("s", rows=8, timeout=PATIENCE_S)
            claimed_s = time.monotonic() - stopped_at
        finally:
            cluster.wake(VICTIM)
        late = _error_of(held.ack)
        until(lambda: len(members(planes[OTHER])) == 3, "it is a member again", PATIENCE_S)
        twice = _claimed_meanwhile(near)
        again.ack()
        part.seal()
        left = part.stats()["rows"]
    ok = noticed_s < FROZEN_S and late is not None and len(again) == 8 and not left + twice
    return {
        "ok": ok,
        "noticed_s": round(noticed_s, 2),
        "rows_claimed_elsewhere_s": round(claimed_s, 2),
        "late_ack": late,
        "rows_delivered_twice": twice,
        "rows_left": left,
    }


def _claimed_meanwhile(part: Partition) -> int:
    """How many rows are handed out that somebody else has a live lease of."""
    try:
        return len(part.claim("s", rows=1, timeout=BUSY_S))
    except ClaimTimeout:
        return 0


def failing_calls() -> Outcome:
    """How long calls take to fail when the other side is gone: their deadline at most."""
    deadline_s = 1.0
    with peers() as cluster, ExitStack() as stack:
        near, gone = cluster.connect(OTHER), cluster.connect(VICTIM)
        stack.callback(_leave, near)
        stack.callback(_leave, gone)
        far = gone.partition("p", {"s": ["x"]}, free="drop")
        far.put({"x": np.zeros((2, 100_000))}, key=["k", "l"])  # too large to live in the shard
        part = near.partition("p")
        part.get(keys=["l"])
        cluster.freeze(VICTIM)
        frozen_s, frozen_as = _timed(lambda: part.get(keys=["k"], timeout=deadline_s))
        own_s, own_as = _timed(lambda: far.get(keys=["k"], timeout=deadline_s))
        cluster.wake(VICTIM)
        cluster.kill(VICTIM)
        dead_s, dead_as = _timed(lambda: far.get(keys=["k"], timeout=deadline_s))
    most = max(frozen_s, own_s, dead_s)
    return {
        "ok": most < deadline_s + BUSY_S and None not in (frozen_as, own_as, dead_as),
        "deadline_s": deadline_s,
        "other_peer_frozen": [round(frozen_s, 2), frozen_as],
        "own_peer_frozen": [round(own_s, 2), own_as],
        "own_peer_dead": [round(dead_s, 2), dead_as],
    }


def _timed(call: Any) -> tuple[float, str | None]:
    began = time.monotonic()
    failure = _error_of(call)
    return time.monotonic() - began, failure


def _error_of(call: Any) -> str | None:
    try:
        call()
    except DataplaneError as exc:
        return type(exc).__name__
    return None


def _leave(plane: Any) -> None:
    with suppress(ConnectError, DeadlineExceeded):  # its peer may be gone
        plane.close()
