"""Peers that die while others put there, and clients of a peer that died."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Callable

import numpy as np
import xxhash

import dataplane
from dataplane import DataplaneError
from tests.end_to_end.attacks import no_leaks, used_bytes
from tests.end_to_end.conftest import Cluster, in_sync, until
from tests.end_to_end.test_attacks_peers import Addressed, both, failing, hosts

__all__ = ["hosts"]
MIB = 1 << 20


def test_bytes_of_rows_that_a_dead_peer_kept_come_back(hosts: Addressed) -> None:
    a, b, part, far = both(hosts, "a")
    far.put({"x": np.zeros((4, 2_000))}, group="g", key=list("wxyz"))
    part.put({"y": [np.full(MIB, i, np.uint8) for i in range(4)]}, key=list("wxyz"))
    part.put({"x": [1], "y": [np.ones(MIB, np.uint8)]}, key=["near"])
    assert used_bytes(a) >= 5 * MIB
    hosts.kill("b")
    until(lambda: used_bytes(a) < 2 * MIB, "what only the dead peer's rows had is free", 15)
    assert part.get(keys=["near"])["y"][0].sum() == MIB
    a.close()
    with contextlib.suppress(DataplaneError):
        b.close()


def test_puts_to_a_group_go_on_when_its_peer_dies(hosts: Addressed) -> None:
    a, b, part, far = both(hosts, "a")
    in_sync(a)
    far.put({"x": [np.zeros(2_000)]}, group="g", key=["first"])
    errors: list[DataplaneError] = []
    put_rows = [0]

    def put() -> None:
        try:
            while put_rows[0] < 300:
                part.put({"x": [np.zeros(2_000)]}, group="g", key=[f"k{put_rows[0]}"], timeout=20)
                put_rows[0] += 1
        except DataplaneError as exc:
            errors.append(exc)

    thread = threading.Thread(target=put)
    thread.start()
    until(lambda: put_rows[0] > 20, "rows are put")
    hosts.kill("b")
    thread.join(60)
    assert not thread.is_alive() and not errors, errors
    # The row whose bytes were at the dead peer took its group along; the group was begun anew.
    kept = set(part.get().keys)
    assert kept == {f"k{i}" for i in range(300 - len(kept), 300)}
    part.drop()
    until(lambda: used_bytes(a) == 0, "no row is left, and no byte", 15)
    no_leaks(a)
    a.close()
    with contextlib.suppress(DataplaneError):
        b.close()


def mapped(cluster: Cluster) -> list[int]:
    """Bytes that this process maps of each arena of this cluster's peers."""
    place = xxhash.xxh3_64_hexdigest(os.fsencode(cluster.run_dir.resolve()))
    gc.collect()
    found: dict[str, int] = {}
    with open("/proc/self/maps") as maps:
        for row in maps:
            if "memfd:dataplane" in row and place in row:
                stretch, _, _, _, number, *_ = row.split()
                start, end = (int(at, 16) for at in stretch.split("-"))
                found[number] = found.get(number, 0) + end - start
    return list(found.values())


def test_a_crashed_peers_arena_goes_but_for_live_views(cluster: Cluster) -> None:
    cluster.start("a", arena="32MiB")
    plane = cluster.connect("a")
    part = plane.partition("p", stages={"s": ["x"]})
    part.put({"x": [np.full(MIB, 7, np.uint8)]}, key=["k"])
    batch = part.claim("s", rows=1, timeout=5)
    view = batch["x"][0]
    assert (view == 7).all()
    cluster.restart("a")
    calls: list[Callable[[], object]] = [
        batch.ack,
        batch.release,
        part.seal,
        plane.stats,
        lambda: part.put({"x": [np.zeros(MIB, np.uint8)]}),
        lambda: part.claim("s", rows=1),
        lambda: part.get(keys=["k"]),
        lambda: plane.partition("q", stages={}),
    ]
    for call in calls:
        assert isinstance(failing(call), dataplane.PeerLost)
    with cluster.connect("a") as again:
        anew = again.partition("p", stages={"s": ["x"]})
        anew.put({"x": [np.full(MIB, 8, np.uint8)]}, key=["k"])
        assert (anew.get(keys=["k"])["x"][0] == 8).all()
        assert (view == 7).all(), "what was in view stays as it was"
        size = again.stats()["arena"]["size_bytes"]
        assert 28 << 20 <= size <= 31 << 20, "what is in view is memory that is taken, no more"
    del again, anew
    until(lambda: mapped(cluster) == [32 << 20], "the view keeps it, and nothing else does", 10)
    del view, batch, calls, call
    until(lambda: not mapped(cluster), "though the plane of the dead peer is still there", 10)
    assert repr(plane)
    plane.close()


def granted(plane: dataplane.Plane) -> int:
    return int(plane.stats()["arena"]["granted_bytes"])


def test_a_client_that_calls_nothing_lets_the_arena_of_a_dead_peer_go(cluster: Cluster) -> None:
    cluster.start("a", arena="32MiB")
    with cluster.connect("a") as plane:
        part = plane.partition("p", stages={"s": ["x"]})
        part.put({"x": [np.full(16 * MIB, 7, np.uint8)]})
        until(lambda: not granted(plane), "the client keeps no room that it does not use", 10)
        assert mapped(cluster)
        cluster.peers["a"].kill()
        until(lambda: not mapped(cluster), "nobody views anything, and nobody called", 10)
