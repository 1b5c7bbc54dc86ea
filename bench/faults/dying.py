"""One of three peers is killed or frozen under load; where etcd keeps the roster, its authority."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack, suppress
from typing import Any

from bench.faults.etcd import etcd
from bench.faults.load import Consumer, Producer, join, start
from bench.faults.peers import KEEPER, NAMES, OTHER, VICTIM, Peers, members, three_peers, until
from dataplane import ClaimTimeout, ConnectError, DataplaneError, DeadlineExceeded, Partition

NOTICED_S = 3.0
LOAD_S = 1.0
DRAIN_S = 60.0
PATIENCE_S = 15.0
BUSY_S = 0.5
"""What a busy machine may add to a deadline."""

Outcome = dict[str, Any]


def killed(replicas: int) -> Outcome:
    """Kill -9 of a host with a producer, while two others consume.

    No claim waits longer than 3 s; of what was acknowledged, no row is lost with two replicas, and
    with one the lost rows are named."""
    with three_peers() as peers:
        return _killed(peers, VICTIM, replicas)


def killed_authority() -> Outcome:
    """The same with two replicas, of the host whose peer makes the rosters, which etcd keeps."""
    with etcd() as server, three_peers(server) as peers:
        return _killed(peers, peers.authority(), replicas=2)


def _killed(peers: Peers, victim: str, replicas: int) -> Outcome:
    one, other = sorted({*NAMES} - {victim})
    with ExitStack() as stack:
        planes = {name: peers.connect(name) for name in NAMES}
        for plane in planes.values():
            stack.callback(_leave, plane)
        part = planes[one].partition("p", {"s": ["x"]}, replicas=replicas)
        near, far = planes[other].partition("p"), planes[victim].partition("p")
        producers = Producer(near, "near"), Producer(far, "far")
        consumers = Consumer(part), Consumer(near)
        reported: list[set[Any]] = []
        subscriber = threading.Thread(target=_hear, args=(near, reported), daemon=True)
        subscriber.start()
        putting, claiming = start(*producers), start(*consumers)
        time.sleep(LOAD_S)
        gone_at = time.monotonic()
        peers.kill(victim)
        until(lambda: members(planes[other]) == 2, "the peer is no member any more", PATIENCE_S)
        noticed_s = time.monotonic() - gone_at
        time.sleep(LOAD_S)
        for producer in producers:
            producer.stopped.set()
        hanging = not join(putting, PATIENCE_S)
        part.seal()
        hanging |= not join([*claiming, subscriber], DRAIN_S)
    acknowledged = producers[0].acknowledged | producers[1].acknowledged
    seen = consumers[0].seen.keys() | consumers[1].seen.keys()
    lost = acknowledged - seen
    named = set().union(*reported)
    gap_s = max(one.longest_gap_s(gone_at) for one in consumers)
    unnamed = lost - named
    wrong = sum(len(one.wrong) for one in consumers)
    ok = gap_s < NOTICED_S and not hanging and not wrong
    ok &= not lost if replicas == 2 else not unnamed
    return {
        "ok": ok,
        "acknowledged_rows": len(acknowledged),
        "lost_rows": len(lost),
        "lost_rows_not_named": len(unnamed),
        "wrong_rows": wrong,
        "noticed_s": round(noticed_s, 2),
        "longest_gap_between_claims_s": round(gap_s, 2),
        "slowest_call_s": round(max(one.slowest_s for one in consumers), 2),
        "hanging": hanging,
        "errors": {**_errors(producers), **_errors(consumers)},
    }


def _hear(part: Partition, reported: list[set[Any]]) -> None:
    with suppress(ConnectError):  # the scenario broke off, and ended the peers
        reported += map(set, part.lost())


def frozen() -> Outcome:
    """SIGSTOP of a host whose client holds rows; they go to others, and what it says when it wakes
    is refused."""
    with three_peers() as peers, ExitStack() as stack:
        planes = {name: peers.connect(name) for name in NAMES}
        for plane in planes.values():
            stack.callback(_leave, plane)
        part = planes[KEEPER].partition("p", {"s": ["x"]}, replicas=2)
        near, far = planes[OTHER].partition("p"), planes[VICTIM].partition("p")
        near.put({"x": [[n] for n in range(8)]}, key=[f"k{n}" for n in range(8)])
        held = far.claim("s", rows=4, timeout=PATIENCE_S)
        stopped_at = time.monotonic()
        peers.freeze(VICTIM)
        try:
            until(lambda: members(planes[OTHER]) == 2, "the frozen peer is noticed", PATIENCE_S)
            noticed_s = time.monotonic() - stopped_at
            again = part.claim("s", rows=8, timeout=PATIENCE_S)
            claimed_s = time.monotonic() - stopped_at
        finally:
            peers.wake(VICTIM)
        late = _error_of(held.ack)
        until(lambda: members(planes[OTHER]) == 3, "it is a member again", PATIENCE_S)
        twice = _claimed_meanwhile(near)
        again.ack()
        part.seal()
        left = part.stats()["rows"]
    ok = noticed_s < NOTICED_S and late is not None and len(again) == 8 and not left + twice
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
    with three_peers() as peers, ExitStack() as stack:
        near, gone = peers.connect(OTHER), peers.connect(VICTIM)
        stack.callback(_leave, near)
        stack.callback(_leave, gone)
        far = gone.partition("p", {"s": ["x"]}, free="drop")
        far.put({"x": [[1]]}, key=["k"])
        part = near.partition("p")
        part.get(keys=["k"])
        peers.freeze(VICTIM)
        frozen_s, frozen_as = _timed(lambda: part.get(keys=["k"], timeout=deadline_s))
        own_s, own_as = _timed(lambda: far.get(keys=["k"], timeout=deadline_s))
        peers.wake(VICTIM)
        peers.kill(VICTIM)
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


def _errors(workers: tuple[Producer | Consumer, ...]) -> dict[str, int]:
    total: dict[str, int] = {}
    for worker in workers:
        for name, count in worker.errors.items():
            total[name] = total.get(name, 0) + count
    return total
