"""Links are cut and healed under a plane of four hosts; what became of each promise.

`cut`: one host's cable is pulled while it holds rows with `replicas=2`. `parted`: two hosts do not
reach each other, and both reach everybody else. Each is a dict with `ok` and figures.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import numpy as np

from bench.links import Network, address
from dataplane import DataplaneError, Partition, Plane
from deploy.testbed.peers import Peers, name, peers
from tests.cluster import members, until

HOSTS = 4
GROUPS, ROWS, WORDS = 12, 4, 4_096
VALUE_BYTES = 8 * WORDS
PATIENCE_S = 60.0
FAIL_OVER_S = 10.0
"""The promise, of machines that have processor time for their peers."""
CALL_S = 4.0
LEEWAY_S = 6.0
"""What a client waits beyond a call's deadline for its own peer, docs/guarantees.md."""
_NEAR, _CUT = 1, 3


def cut() -> dict[str, Any]:
    """A host is cut off, its rows are read elsewhere, and it comes back as an empty one."""
    with Network(HOSTS) as network, peers(network) as running:
        near, far = running.of(_NEAR), running.of(_CUT)
        part = near.partition("p", {"s": ["x"]}, group_size=ROWS, replicas=2, free="drop")
        _put(part, "near")
        _put(far.partition("p"), "far")
        lives = _lives(near)
        network.cut(_CUT)
        began = time.monotonic()
        gone = address(_CUT)
        until(
            lambda: not any(gone in member for member in members(near)),
            "it is declared lost",
            PATIENCE_S,
        )
        noticed_s = time.monotonic() - began
        batch = part.claim("s", groups=2 * GROUPS, timeout=60)
        claimed_s = time.monotonic() - began
        intact = sorted(batch.keys) == sorted(_keys("near") + _keys("far")) and _intact(batch)
        refused = _refused(far.partition("p"))
        network.heal(_CUT)
        healed_s = _returns(running, near, lives)
        travels = _travels(running)
        for client in (near, far):
            _leave(client)
        in_time = refused["seconds"] <= CALL_S + LEEWAY_S
        return {
            "ok": intact and refused["typed"] and in_time and travels,
            "rows": len(batch.keys),
            "lost_rows": 2 * GROUPS * ROWS - len(batch.keys),
            "contents_ok": intact,
            "noticed_seconds": round(noticed_s, 2),
            "read_elsewhere_seconds": round(claimed_s, 2),
            "within_promise": claimed_s <= FAIL_OVER_S,
            "call_at_the_cut_host": refused,
            "returned_empty_seconds": round(healed_s, 2),
            "works_again": travels,
        }


def _black_hole(network: Network, change: str) -> None:
    """Add or delete the routes by which the two hosts do not reach each other."""
    for here, there in ((_NEAR, _CUT), (_CUT, _NEAR)):
        network.on(here, "ip", "route", change, "blackhole", f"{address(there)}/32")


def parted() -> dict[str, Any]:
    """Two hosts do not reach each other: calls between them end, and all is well when they do."""
    with Network(HOSTS) as network, peers(network) as running:
        one, other = running.of(_NEAR), running.of(_CUT)
        part = one.partition("p", {"s": ["x"]}, group_size=ROWS, replicas=2, free="drop")
        _put(other.partition("p"), "far")
        _black_hole(network, "add")
        began = time.monotonic()
        outcome = _read(part)
        ended_s = time.monotonic() - began
        _black_hole(network, "del")
        healed = time.monotonic()
        until(lambda: len(members(one)) == HOSTS, "all are members again", PATIENCE_S)
        until(
            lambda: _read(running.of(_NEAR).partition("p")) == "read",
            "the rows are read",
            PATIENCE_S,
        )
        healed_s = time.monotonic() - healed
        for client in (one, other):
            _leave(client)
        return {
            "ok": ended_s <= CALL_S + LEEWAY_S,
            "call_across": outcome,
            "call_across_seconds": round(ended_s, 2),
            "whole_again_seconds": round(healed_s, 2),
        }


def _keys(who: str) -> list[str]:
    return [f"{who}-{row}" for row in range(GROUPS * ROWS)]


def _put(part: Partition, who: str) -> None:
    """Acknowledged rows, each with its number in every word."""
    keys = _keys(who)
    groups = [f"{who}-{row // ROWS}" for row in range(len(keys))]
    values = [np.full(WORDS, row, np.int64) for row in range(len(keys))]
    part.put({"x": values}, key=keys, group=groups)


def _intact(batch: Any) -> bool:
    numbers = [int(key.rpartition("-")[2]) for key in batch.keys]
    pairs = zip(numbers, batch["x"], strict=True)
    return all(value.shape == (WORDS,) and bool((value == n).all()) for n, value in pairs)


def _read(part: Partition) -> str:
    try:
        return "read" if _intact(part.get(_keys("far"), timeout=CALL_S)) else "altered"
    except DataplaneError as error:
        return type(error).__name__


def _refused(part: Partition) -> dict[str, Any]:
    """A put at a host that is cut off: a typed error, in time."""
    began = time.monotonic()
    try:
        part.put({"x": [1]}, key=["late"], timeout=CALL_S)
    except DataplaneError as error:
        told = {"error": type(error).__name__, "typed": True}
    else:
        told = {"error": "none", "typed": False}
    return told | {"seconds": round(time.monotonic() - began, 2)}


def _lives(plane: Plane) -> dict[str, int]:
    return {peer: of.get("incarnation", 0) for peer, of in plane.stats()["peers"].items()}


def _returns(running: Peers, near: Plane, before: dict[str, int]) -> float:
    """Until the host is a member again, as another life of its peer, with nothing."""
    began = time.monotonic()
    name_ = name(_CUT)
    until(
        lambda: _lives(near).get(name_, before[name_]) != before[name_],
        f"{name_} is back",
        PATIENCE_S,
    )
    with running.of(_CUT) as again:
        until(lambda: again.stats()["arena"]["used_bytes"] < VALUE_BYTES * ROWS, "it is empty", 20)
    return time.monotonic() - began


def _travels(running: Peers) -> bool:
    """Rows put at the host that returned are read elsewhere."""
    with running.of(_CUT) as again, running.of(_NEAR) as near:
        part = again.partition("after", {"s": ["x"]}, group_size=ROWS)
        _put(part, "after")
        batch = near.partition("after").claim("s", groups=GROUPS, timeout=60)
        return _intact(batch)


def _leave(client: Plane) -> None:
    with contextlib.suppress(DataplaneError):  # its peer's former life may be gone
        client.close()
