"""Peers that came with their clients stay while any peer of their plane has one, and leave then."""

from __future__ import annotations

import time

from tests.end_to_end.conftest import Cluster, until

IDLE_S, BUSY_S = 0.4, 5.0


def start(cluster: Cluster) -> None:
    """`busy` is the first seed, so that `idle` serves when both are there."""
    cluster.seed("busy", "idle")
    for name, linger in (("busy", BUSY_S), ("idle", IDLE_S)):
        cluster.launch(name, "--arena", "32MiB", "--linger", str(linger))
    cluster.await_up("busy")


def test_an_idle_host_stays_while_another_has_a_client_and_both_leave_then(
    cluster: Cluster,
) -> None:
    start(cluster)
    with cluster.connect("busy") as plane:
        until(lambda: "clients" in str(plane.stats()["peers"].get("idle")), "both are members")
        end = time.monotonic() + 6 * IDLE_S
        while time.monotonic() < end:
            assert cluster.peers["idle"].poll() is None, cluster.log("idle")
    until(lambda: all(one.poll() == 0 for one in cluster.peers.values()), "both have left")
    assert "no clients left" in cluster.log("idle")
