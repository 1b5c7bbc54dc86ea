"""Processes that die, stop or misbehave: nothing is lost or half, nobody else is disturbed."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import dataplane
from tests.end_to_end.conftest import PLANE, Cluster, line, peer_command, until
from tests.same import dense

HOLDER = """
    import dataplane, sys
    part = dataplane.connect().partition("p")
    batch = part.claim("s", {what}, timeout=20)
    print("holding", *batch.keys, flush=True)
    sys.stdin.read()
"""


def test_a_dead_consumers_group_is_claimed_again(alone: Cluster) -> None:
    with alone.connect("a") as plane:
        part = plane.partition("p", stages={"s": ["x"]}, group_size=3)
        part.put({"x": [1, 2, 3]}, key=list("abc"), group="g")
        holder = alone.worker(HOLDER.format(what="groups=1"))
        assert line(holder) == "holding a b c"
        with pytest.raises(dataplane.ClaimTimeout, match=rf"leased by pid {holder.pid}"):
            part.claim("s", groups=1, timeout=0.2)
        holder.kill()
        batch = part.claim("s", groups=1, timeout=10)
        assert batch.keys == list("abc")


def test_a_waiting_claim_gets_a_dead_consumers_rows_on_another_host(pair: Cluster) -> None:
    with pair.connect("a") as plane:
        part = plane.partition("p", stages={"s": ["x"]})
        part.put({"x": [1, 2, 3]}, key=list("abc"))
        part.seal()
        holder = pair.worker(HOLDER.format(what="rows=3"), DATAPLANE_PEER="b")
        assert line(holder) == "holding a b c"
        holder.kill()
        batch = part.claim("s", rows=3, timeout=10)
        assert batch.keys == list("abc")


PRODUCER = """
    import dataplane, numpy as np, itertools
    part = dataplane.connect().partition("p")
    for g in itertools.count():
        part.put({"x": np.full((8, 1 << 17), g % 256, np.uint8)}, group=f"g{g}")
        if g == 3:
            print("putting", flush=True)
"""


def test_a_producer_killed_in_the_middle_of_a_put_leaves_nothing_half(alone: Cluster) -> None:
    with alone.connect("a") as plane:
        part = plane.partition("p", stages={"s": ["x"]}, group_size=8)
        producer = alone.worker(PRODUCER)
        assert line(producer) == "putting"
        producer.kill()
        producer.wait()
        until(lambda: plane.stats()["arena"]["quarantined_bytes"] == 0, "its memory came back", 5)
        until(lambda: plane.stats()["arena"]["granted_bytes"] == 0, "its memory came back", 5)
        part.seal()
        groups = 0
        for batch in part.stream("s", groups=1):
            x = dense(batch.numpy("x"))
            assert x.shape == (8, 1 << 17) and (x == x[0, 0]).all()
            groups += 1
        assert groups >= 4
        del batch, x
        until(lambda: plane.stats()["arena"]["used_bytes"] == 0, "every byte came back", 5)


def test_a_lease_with_a_limit_ends_and_late_calls_are_fenced_off(plane: dataplane.Plane) -> None:
    part = plane.partition("p", stages={"s": ["x"], "t": ["x", "y"]})
    part.put({"x": [np.zeros(5000)]}, key=["k"])
    late = part.claim("s", rows=1, lease=0.3, timeout=5)
    late.add(y=[np.ones(5000)])
    again = part.claim("s", rows=1, timeout=5)
    with pytest.raises(dataplane.LeaseExpired):
        late.ack()
    again.add(y=[np.full(5000, 2.0)])
    again.ack()
    batch = part.claim("t", rows=1, timeout=5)
    assert (batch["y"][0] == 2).all()


def test_a_limit_begins_when_a_claim_is_met_and_not_while_it_waits(
    plane: dataplane.Plane,
) -> None:
    part = plane.partition("p", stages={"s": ["x"]})
    part.put({"x": [1]}, key=["k"], tags={"length": [4]})
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(part.claim, "s", budget={"length": 10}, lease=2, timeout=30)
        until(lambda: plane.stats()["waiting_claims"] == 1, "it waits")
        with pytest.raises(dataplane.ClaimTimeout):  # longer than the limit
            part.claim("s", rows=2, timeout=2.5)
        part.put({"x": [2, 3]}, key=["l", "m"], tags={"length": [4, 4]})
        batch = waits.result(30)
    assert sorted(batch.keys) == ["k", "l"]
    batch.ack()
    assert part.claim("s", rows=1, timeout=5).keys == ["m"]


def test_an_exception_in_a_stream_body_gives_the_rows_back(plane: dataplane.Plane) -> None:
    part = plane.partition("p", stages={"s": ["x"]})
    part.put({"x": [1, 2]}, key=["a", "b"])
    with pytest.raises(RuntimeError), part.claim("s", rows=2, timeout=5) as batch:
        batch.add(y=[1, 2])
        raise RuntimeError
    assert part.claim("s", rows=2, timeout=5).keys == ["a", "b"]


def test_a_redelivered_row_keeps_the_value_that_was_there(plane: dataplane.Plane) -> None:
    part = plane.partition("p", stages={"s": ["x"], "t": ["x", "y"]}, free="drop")
    part.put({"x": [1]}, key=["a"])
    with part.claim("s", rows=1, timeout=5) as batch:
        batch.add(y=["first"])
    part.reset("s")
    with part.claim("s", rows=1, timeout=5) as batch:
        batch.add(y=["second"])
    assert list(part.get(keys=["a"])["y"]) == ["first"]


def test_a_full_arena_with_nobody_to_free_it_is_recognised_at_once(cluster: Cluster) -> None:
    cluster.start("a", arena="16MiB")
    with cluster.connect("a") as plane:
        part = plane.partition("p", stages={"s": ["x", "never"]})
        began = time.monotonic()
        with pytest.raises(dataplane.BackPressure, match="'p'"):
            for _ in range(100):
                part.put({"x": np.zeros((1, 1 << 20), np.uint8)})
        assert time.monotonic() - began < 10
        with pytest.raises(dataplane.ValueTooLarge):
            part.put({"x": np.zeros((1, 15 << 20), np.uint8)})


def test_a_put_waits_for_room_that_a_consumer_makes(cluster: Cluster) -> None:
    cluster.start("a", arena="16MiB")
    consumer = cluster.worker(
        """
        import dataplane
        part = dataplane.connect().partition("p")
        total = 0
        for batch in part.stream("s", rows=1):
            total += int(batch["x"][0][0])
        print(total, flush=True)
        """
    )
    with cluster.connect("a") as plane:
        part = plane.partition("p", stages={"s": ["x"]})
        for i in range(200):
            part.put({"x": np.full((1, 1 << 17), i, np.int64)})
        part.seal()
        assert line(consumer) == str(sum(range(200)))
        assert plane.stats()["arena"]["touched_bytes"] <= 16 << 20


def pss(pid: int) -> int:
    with open(f"/proc/{pid}/smaps_rollup") as rollup:
        fields = {row.split(":")[0]: row.split() for row in rollup if ":" in row}
    return int(fields["Pss"][1]) << 10


def test_memory_stays_flat_while_ten_arenas_flow_through(cluster: Cluster) -> None:
    cluster.start("a", arena="32MiB")
    consumer = cluster.worker(
        """
        import dataplane, sys
        part = dataplane.connect().partition("p")
        for batch in part.stream("s", groups=1):
            assert (batch.numpy("x") == batch.tags["i"][0] % 256).all()
        print("done", flush=True)
        sys.stdin.read()
        """
    )
    peer = cluster.peers["a"].pid
    sizes: dict[str, list[int]] = {"peer": [], "consumer": [], "producer": []}
    with cluster.connect("a") as plane:
        part = plane.partition("p", stages={"s": ["x"]}, group_size=4)
        for i in range(320):
            x = np.full((4, 1 << 18), i % 256, np.uint8)
            part.put({"x": x}, group=f"g{i}", tags={"i": i}, timeout=60)
            if i >= 160 and i % 20 == 0:
                pids = {"peer": peer, "consumer": consumer.pid, "producer": os.getpid()}
                for who, pid in pids.items():
                    sizes[who].append(pss(pid))
        part.seal()
        assert line(consumer) == "done"
    for who, seen in sizes.items():
        # The arena's pages are shared, so a process may be charged for all of them or for a third.
        assert max(seen) - min(seen) < (32 << 20) + (8 << 20), (who, seen)


def test_garbage_at_the_local_door_ends_only_that_connection(alone: Cluster) -> None:
    path = str(alone.run_dir / PLANE / "a.sock")
    with alone.connect("a") as plane:
        for junk in (b"\xff" * 64, struct.pack("<I", 1 << 31), b"\x05\x00\x00\x00hello"):
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(path)
                stranger.settimeout(10)
                stranger.recv(4096)
                stranger.sendall(junk)
                while stranger.recv(4096):
                    pass
        assert plane.stats()["clients"] == 1


def test_a_second_peer_of_the_same_name_is_refused(alone: Cluster) -> None:
    second = subprocess.run(peer_command("a", PLANE), capture_output=True, text=True, timeout=30)
    assert second.returncode == 2 and "'a'" in second.stderr
    with alone.connect("a") as plane:
        assert plane.stats()["peer"] == "a"


def test_an_address_in_use_is_refused(cluster: Cluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        mine = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        command = peer_command("b", PLANE, "--listen", mine, "--seeds", f"{mine},tcp://127.0.0.1:1")
        peer = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert peer.returncode == 2 and mine in peer.stderr


def test_a_stopped_consumer_keeps_its_views_and_its_rows(alone: Cluster) -> None:
    with alone.connect("a") as plane:
        part = plane.partition("p", stages={"s": ["x"]})
        part.put({"x": [np.zeros(9000)]}, key=["k"])
        holder = alone.worker(HOLDER.format(what="rows=1"))
        assert line(holder) == "holding k"
        holder.send_signal(signal.SIGSTOP)
        with pytest.raises(dataplane.ClaimTimeout, match="leased"):
            part.claim("s", rows=1, timeout=0.5)
        assert plane.stats()["arena"]["pinned_bytes"] > 0
        holder.kill()
        assert part.claim("s", rows=1, timeout=10).keys == ["k"]


def test_a_client_that_closes_while_another_thread_writes_has_it_write_over_nobody(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The room comes back when its process is gone."""
    cluster.start("a", arena="64MiB")
    writes, go_on = threading.Event(), threading.Event()
    closing = cluster.connect("a")
    view = closing._session.writes.view

    def slowly(offset: int, length: int) -> Any:
        found = view(offset, length)
        writes.set()
        go_on.wait(30)
        return found

    monkeypatch.setattr(closing._session.writes, "view", slowly)
    with cluster.connect("a") as plane, ThreadPoolExecutor(1) as pool:
        part = plane.partition("p", stages={"s": ["x"]})
        late = pool.submit(closing.partition("p").put, {"x": [np.zeros(8 << 20, np.uint8)]})
        assert writes.wait(30)
        closing.close()
        ones = np.ones(1 << 20, np.uint8)
        with pytest.raises(dataplane.BackPressure):
            for key in range(64):
                part.put({"x": [ones]}, key=[key], timeout=1)
        go_on.set()
        with pytest.raises(dataplane.ClientClosed):
            late.result(30)
        rows = part.get()
        assert len(rows) > 16 and all(np.array_equal(one, ones) for one in rows["x"])
