"""Clients that stop, die while they wait, or come late: bytes are never reused under them."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest

import dataplane
from dataplane import aio
from dataplane.errors import ShardFull
from dataplane.launch import rundir
from tests.end_to_end.attacks import no_leaks, used_bytes
from tests.end_to_end.conftest import PLANE, Cluster, in_sync, line, until

MIB = 1 << 20

STOPPED = """
    import dataplane, numpy as np, sys
    plane = dataplane.connect()
    part = plane.partition("p")
    batch = part.claim("s", rows=2, timeout=20, lease={lease})
    x = batch["x"]
    batch.add(y=[np.full(1 << 20, 50 + i, np.uint8) for i in range(2)])
    print("holding", flush=True)
    sys.stdin.readline()
    print(int(x[0].min()), int(x[0].max()), int(x[1].min()), int(x[1].max()), flush=True)
    try:
        batch.ack()
        print("acked", flush=True)
    except dataplane.LeaseExpired:
        print("expired", flush=True)
    del batch, x
    part.put({{"x": [np.zeros(1 << 20, np.uint8)]}}, key=["late"], timeout=20)
    print("put", flush=True)
    sys.stdin.readline()
"""


def tell(worker: object) -> None:
    worker.stdin.write("\n")  # type: ignore[attr-defined]
    worker.stdin.flush()  # type: ignore[attr-defined]


@pytest.mark.parametrize("lease", [None, 0.5])
def test_a_stopped_client_wakes_up_to_the_bytes_that_it_held(
    cluster: Cluster, lease: float | None
) -> None:
    cluster.start("a", arena="32MiB")
    with cluster.connect("a") as plane:
        part = plane.partition("p", stages={"s": ["x"], "t": ["x", "y"]})
        part.put({"x": [np.full(MIB, i + 1, np.uint8) for i in range(2)]}, key=["k1", "k2"])
        holder = cluster.worker(STOPPED.format(lease=lease))
        assert line(holder) == "holding"
        holder.send_signal(signal.SIGSTOP)
        # Others write over everything that is free, twice; a lease with a limit ends meanwhile.
        for i in range(40):
            part.put({"x": [np.full(MIB, 99, np.uint8)]}, key=[f"f{i}"], timeout=5)
            part.drop(keys=[f"f{i}"])
        if lease is not None:
            with part.claim("s", rows=2, timeout=5) as again:
                assert again.keys == ["k1", "k2"]
                again.add(y=[np.full(10, 7, np.uint8)] * 2)
            del again
        else:
            with pytest.raises(dataplane.ClaimTimeout, match="leased"):
                part.claim("s", rows=2, timeout=0.3)
        assert plane.stats()["arena"]["pinned_bytes"] >= 2 * MIB
        assert plane.stats()["arena"]["granted_bytes"] >= 2 * MIB
        holder.send_signal(signal.SIGCONT)
        tell(holder)
        assert line(holder) == "1 1 2 2"
        assert line(holder) == ("acked" if lease is None else "expired")
        assert line(holder) == "put"
        with part.claim("t", rows=2, timeout=5) as batch:
            assert [y[0] for y in batch["y"]] == ([50, 51] if lease is None else [7, 7])
        del batch
        until(lambda: plane.stats()["arena"]["pinned_bytes"] == 0, "views went")
        holder.kill()
        holder.wait()
        part.drop()
        no_leaks(plane)
        until(lambda: used_bytes(plane) == 0, "every byte came back")


@pytest.mark.parametrize("interrupted", [False, True], ids=["at the deadline", "by Ctrl-C"])
def test_a_put_that_did_not_leave_keeps_no_room_and_no_lease(
    cluster: Cluster, interrupted: bool
) -> None:
    """Its message is larger than what the kernel takes for a peer that does not read."""
    cluster.start("a", arena="32MiB")
    with cluster.connect("a") as plane:
        part = plane.partition("p", {"s": ["x"]}, free="drop")
        many = {"x": [np.full(1100, 1, np.uint8)] * 4000}
        first, second = ([f"{'k' * 100}{put}-{n}" for n in range(4000)] for put in range(2))
        part.put(many, key=first)  # its answer grants the room of the next one
        batch = part.claim("s", rows=1, timeout=20)
        cluster.peers["a"].send_signal(signal.SIGSTOP)
        assert batch.state == "leased"
        del batch  # goes back ahead of the put
        if interrupted:
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            with signal_raises(signal.SIGALRM), pytest.raises(KeyboardInterrupt):
                part.put(many, key=second)
        else:
            with pytest.raises(dataplane.DeadlineExceeded):
                part.put(many, key=second, timeout=0.5)
        cluster.peers["a"].send_signal(signal.SIGCONT)
        with part.claim("s", rows=4000, timeout=20):
            assert len(part.rows()) == 4000
        part.drop()
        no_leaks(plane)
        until(lambda: used_bytes(plane) == 0, "every byte came back")


@contextmanager
def signal_raises(number: signal.Signals) -> Iterator[None]:
    """The signal does what Ctrl-C does."""
    before = signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(number, before)


LEAVER = """
    import dataplane, sys, threading
    plane = dataplane.connect()
    part, ready = plane.partition("p"), threading.Barrier(8)

    def ask(timeout):
        ready.wait()
        try:
            part.wait("s", rows=1, timeout=timeout)
        except dataplane.DataplaneError as exc:
            print(type(exc).__name__ + "\\n", end="", flush=True)

    def all_ask(timeout):
        threads = [threading.Thread(target=ask, args=(timeout,)) for _ in range(8)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()

    all_ask(0.5)  # each of them has a connection from here on
    sys.stdin.readline()
    all_ask(0.5)
    print("exits", flush=True)
"""


AIO_LEAVER = """
    import asyncio, contextlib, dataplane, sys
    from dataplane import aio

    async def main():
        plane = await aio.connect()
        part = await plane.partition("p")
        print("connected", flush=True)
        await asyncio.to_thread(sys.stdin.readline)

        async def ask():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(part.stats(), 0.3)

        await asyncio.gather(*(ask() for _ in range(24)))
        print("ends", flush=True)

    asyncio.run(main())
"""


def test_an_event_loop_ends_soon_though_its_peer_is_stopped(cluster: Cluster) -> None:
    """Its calls were cancelled before they had connections, for which threads of the loop wait."""
    cluster.start("a")
    with cluster.connect("a") as plane:
        plane.partition("p", {"s": ["x"]})
        leaver = cluster.worker(AIO_LEAVER)
        assert line(leaver) == "connected"
        cluster.freeze("a")
        tell(leaver)
        assert line(leaver) == "ends"
        assert leaver.wait(10) == 0
        cluster.wake("a")
        no_leaks(plane)


def test_a_process_exits_soon_though_its_peer_is_stopped(cluster: Cluster) -> None:
    """However many of its calls were given up, and have no answer yet."""
    cluster.start("a")
    with cluster.connect("a") as plane:
        plane.partition("p", {"s": ["x"]})
        leaver = cluster.worker(LEAVER)
        assert [line(leaver) for _ in range(8)] == ["ClaimTimeout"] * 8
        cluster.peers["a"].send_signal(signal.SIGSTOP)
        tell(leaver)
        assert [line(leaver) for _ in range(8)] == ["DeadlineExceeded"] * 8
        assert line(leaver) == "exits"
        assert leaver.wait(10) == 0
        cluster.peers["a"].send_signal(signal.SIGCONT)
        no_leaks(plane)


def test_an_ack_holds_that_a_stopped_peer_reads_after_the_limit_of_its_lease(
    cluster: Cluster,
) -> None:
    cluster.start("a")
    with cluster.connect("a") as plane:
        part = plane.partition("p", {"s": ["x"]}, free="drop")
        part.put({"x": [1, 2]}, key=["acked", "held"])
        batch = part.claim("s", rows=2, lease=2.0, timeout=20)
        cluster.peers["a"].send_signal(signal.SIGSTOP)
        with ThreadPoolExecutor(1) as pool:
            acking = pool.submit(batch.rows([batch.keys.index("acked")]).ack, timeout=30)
            time.sleep(2.5)  # the lease and more
            cluster.peers["a"].send_signal(signal.SIGCONT)
            acking.result(20)
        with part.claim("s", rows=1, timeout=20) as again:
            assert again.keys == ["held"]  # its limit still came
        with pytest.raises(dataplane.LeaseExpired):
            batch.ack()


@pytest.mark.parametrize("kind", ["stream", "loader", "plan"])
def test_leaving_a_loop_at_a_stopped_peer_takes_its_time_out_once(
    cluster: Cluster, kind: str
) -> None:
    """The ack, the release and the rows that were claimed ahead share one timeout."""
    timeout_s, longest_s, rows = 5.0, 9.0, 3000
    cluster.start("a")
    with cluster.connect("a") as plane:
        part = plane.partition("p", {"s": ["x"]}, free="drop")
        part.put({"x": list(range(rows))}, tags={"n": 1})
        part.seal()
        began = 0.0
        with pytest.raises(dataplane.DeadlineExceeded):
            if kind == "plan":
                ahead = part.plan("s", rank=0, ranks=1, budget={"n": 1}, prefetch=rows)
                with ahead as plan:
                    next(iter(next(iter(plan))))
                    cluster.freeze("a")  # while the plan fetches another micro-batch
                    began = time.monotonic()
                    plan.release(timeout=timeout_s)
            else:
                with getattr(part, kind)("s", rows=1, timeout=timeout_s) as batches:
                    for _ in batches:
                        cluster.freeze("a")
                        began = time.monotonic()
        assert time.monotonic() - began < longest_s
        cluster.wake("a")
        part.claim("s", rows=rows, min=rows - 1, timeout=20).ack()  # it may have the first ack
        part.drop()
        no_leaks(plane)


@pytest.mark.parametrize("outcome", ["ack", "release", "drop"])
def test_a_batch_can_be_finished_after_the_peer_of_its_shard_had_not_answered(
    cluster: Cluster, outcome: str
) -> None:
    """A call that got no answer may have taken effect. Its failure answers no later call."""
    cluster.start("a", "b")
    with cluster.connect("a") as plane, cluster.connect("b") as there:
        in_sync(plane)
        for number in range(40):
            part = plane.partition(f"p{number}", {"s": ["x"]}, free="drop")
            if part.name in there.stats()["partitions"]:
                break
        part.put({"x": list(range(6))}, key=list(range(6)))
        batch = part.claim("s", rows=6, timeout=20)
        batch.add(y=[np.full(9000, row, np.uint8) for row in range(6)])
        half = batch[0:3]
        cluster.freeze("b")
        with pytest.raises(dataplane.DeadlineExceeded):
            getattr(half, outcome)(timeout=0.5)
        cluster.wake("b")
        with pytest.raises(dataplane.InvalidRows, match="already acked, released or dropped"):
            batch.ack(timeout=20)
        getattr(half, outcome)(timeout=20)  # it had taken effect
        batch[3:6].ack(timeout=20)
        counts = part.stats()["stages"]["s"]
        assert counts["leased_rows"] == 0
        assert counts["acked_rows"] == (6 if outcome == "ack" else 3)
        assert counts["ready_rows"] == (3 if outcome == "release" else 0)
        del batch, half


@pytest.mark.parametrize("part_of_it", [True, False])
def test_an_ack_whose_reply_was_late_is_repeated_with_its_values(
    cluster: Cluster, part_of_it: bool
) -> None:
    """Both took effect, or neither: the caller need not know which."""

    async def work() -> None:
        async with aio.connect("a", run=PLANE) as client:
            batch = await (await client.partition(name)).claim("s", rows=6, timeout=20)
            await batch.add(y=[np.full(9000, row, np.uint8) for row in range(6)])
            some = batch[0:3] if part_of_it else batch
            cluster.freeze("b")
            with pytest.raises(dataplane.DeadlineExceeded):
                await some.ack(timeout=0.5)
            cluster.wake("b")
            await some.ack(timeout=20)
            if part_of_it:
                await batch.ack(timeout=20)
            assert batch.state == "acked"

    cluster.start("a", "b")
    with cluster.connect("a") as plane, cluster.connect("b") as there:
        in_sync(plane)
        for number in range(40):
            name = f"p{number}"
            part = plane.partition(name, {"s": ["x"]}, free="drop")
            if name in there.stats()["partitions"]:
                break
        part.put({"x": list(range(6))}, key=list(range(6)))
        asyncio.run(work())
        counts = part.stats()["stages"]["s"]
        assert (counts["leased_rows"], counts["acked_rows"]) == (0, 6)
        rows = part.get(keys=list(range(6)))
        assert [int(value[0]) for value in rows["y"]] == list(range(6))
        del rows
        part.drop()
        no_leaks(plane)
        until(lambda: used_bytes(plane) == 0, "every byte came back")


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_ack_of_a_plan_whose_reply_was_late_is_repeated(cluster: Cluster, ranks: int) -> None:
    """The first ack took effect. It ended the plan, or left it to the other rank."""
    cluster.start("a", "b")
    with cluster.connect("a") as plane, cluster.connect("b") as there:
        in_sync(plane)
        for number in range(40):
            part = plane.partition(f"p{number}", {"s": ["x"]})
            if part.name in there.stats()["partitions"]:
                break
        part.put({"x": list(range(6))}, key=list(range(6)))
        part.seal()
        plan = part.plan("s", rank=0, ranks=ranks, timeout=20)
        rest = [
            there.partition(part.name).plan("s", rank=rank, ranks=ranks, timeout=20)
            for rank in range(1, ranks)
        ]
        cluster.freeze("b")
        with pytest.raises(dataplane.DeadlineExceeded):
            plan.ack(timeout=0.5)
        cluster.wake("b")
        plan.ack(timeout=20)
        assert plan.state == "acked"
        for other in rest:
            other.ack(timeout=20)
        part.wait("s", below=1, timeout=20)
        assert part.stats()["stages"]["s"]["acked_rows"] == 6


def test_an_ack_that_timed_out_is_repeated_after_a_thousand_other_calls(cluster: Cluster) -> None:
    cluster.start("a")
    with cluster.connect("a") as plane:
        part = plane.partition("p", {"s": ["x"], "other": ["x"]}, free="drop")
        part.put({"x": list(range(1100))}, key=list(range(1100)))
        batch = part.claim("s", rows=6, timeout=20)
        batch.add(y=[np.full(9000, row, np.uint8) for row in range(6)])
        half, others = batch[0:3], part.claim("other", rows=1100, timeout=20)
        cluster.freeze("a")
        with pytest.raises(dataplane.DeadlineExceeded):
            half.ack(timeout=0.5)
        cluster.wake("a")
        for row in range(1100):
            others[row : row + 1].ack(timeout=20)
        half.ack(timeout=20)
        assert part.stats()["stages"]["s"]["acked_rows"] == 3
        batch.ack(timeout=20)
        assert part.stats()["stages"]["s"]["acked_rows"] == 6
        del batch, half, others


def _not_served_by(there: dataplane.Plane, plane: dataplane.Plane) -> dataplane.Partition:
    """A partition that the peer of `there` backs up and does not serve."""
    in_sync(plane)
    for number in range(40):
        part = plane.partition(f"p{number}", {"s": ["x"]})
        if part.name not in there.stats()["partitions"]:
            return part
    raise AssertionError("the other peer serves all partitions")


def test_a_put_into_a_full_arena_says_what_fills_it_while_the_backup_is_stopped(
    cluster: Cluster,
) -> None:
    cluster.start("a", "b", arena="32MiB")
    with cluster.connect("a") as plane, cluster.connect("b") as there:
        part = _not_served_by(there, plane)
        with pytest.raises(dataplane.BackPressure):
            for _ in range(32):
                part.put({"x": [np.zeros(MIB, np.uint8)]}, timeout=0.5)
        cluster.freeze("b")
        with pytest.raises(dataplane.BackPressure, match="no client has ever claimed from it"):
            part.put({"x": [np.zeros(MIB, np.uint8)]}, timeout=0.5)
        with pytest.raises(dataplane.DataplaneError, match="backup of .*, peer b at tcp://"):
            part.put({"x": [1]}, key=["small"], timeout=0.3)
        cluster.wake("b")
        part.drop()
        no_leaks(plane)


def test_a_put_without_space_for_its_names_says_so_while_the_backup_is_stopped(
    cluster: Cluster,
) -> None:
    cluster.start("a", "b", arena="32MiB")
    with cluster.connect("a") as plane, cluster.connect("b") as there:
        part = _not_served_by(there, plane)

        def put(first: int) -> None:
            part.put({"x": [0] * 4096}, key=[f"{first + n:0500}" for n in range(4096)], timeout=2)

        with pytest.raises(ShardFull):
            for number in range(32):
                put(4096 * number)
        cluster.freeze("b")
        with pytest.raises(ShardFull, match="peer 'a'"):
            put(1 << 30)
        cluster.wake("b")
        part.drop()
        no_leaks(plane)


def test_a_stream_ends_within_its_time_out_at_a_stopped_peer(cluster: Cluster) -> None:
    cluster.start("a")
    with cluster.connect("a") as plane:
        part = plane.partition("p", {"s": ["x"]})
        part.put({"x": list(range(6))})
        streams = [part.stream("s", rows=1, timeout=1) for _ in range(3)]
        loops = [iter(stream) for stream in streams]
        for loop in loops:
            assert len(next(loop)) == 1
        loader = part.loader("s", rows=1, timeout=1)
        assert len(next(iter(loader))) == 1
        cluster.peers["a"].send_signal(signal.SIGSTOP)
        began = time.monotonic()
        for loop in loops[:2]:
            with pytest.raises(dataplane.DeadlineExceeded):
                next(loop)
        for stream in streams:
            with pytest.raises(dataplane.DeadlineExceeded):
                stream.close()
        assert time.monotonic() - began < 5 * 3
        cluster.peers["a"].send_signal(signal.SIGCONT)
        del loops, streams, loop, stream
        no_leaks(plane)


WAITER = """
    import dataplane, numpy as np
    part = dataplane.connect().partition("p")
    print("putting", flush=True)
    part.put({"x": [np.zeros(6 << 20, np.uint8)]}, timeout=60)
    print("put", flush=True)
"""


def test_a_client_that_dies_in_the_line_for_room_leaves_it(cluster: Cluster) -> None:
    cluster.start("a", arena="16MiB")
    with cluster.connect("a") as plane:
        part = plane.partition("p", free="drop")
        part.put({"x": [np.zeros(8 * MIB, np.uint8)]}, key=["first"])
        waiters = []
        for _ in range(3):  # one after the other, so that their order is known
            waiters.append(cluster.worker(WAITER))
            assert line(waiters[-1]) == "putting"
            until(lambda: plane.stats()["waiting_puts"] == len(waiters), "it waits")
        waiters[0].kill()  # the head of the line
        waiters[1].send_signal(signal.SIGSTOP)
        until(lambda: plane.stats()["waiting_puts"] == 2, "its place is free")
        waiters[1].kill()
        until(lambda: plane.stats()["waiting_puts"] == 1, "its place is free")
        part.drop(keys=["first"])
        assert line(waiters[2]) == "put"
        waiters[2].communicate()
        part.drop()
        no_leaks(plane)
        until(lambda: used_bytes(plane) == 0, "every byte came back")


def test_late_calls_under_a_lease_that_ended_on_another_host_are_fenced_off(
    cluster: Cluster,
) -> None:
    cluster.start("a", "b")
    with cluster.connect("a") as a, cluster.connect("b") as b:
        part = a.partition("p", stages={"s": ["x"], "t": ["x", "y"]})
        far = b.partition("p")
        part.put({"x": [np.full(5000, i) for i in range(4)]}, key=list("abcd"))
        late = far.claim("s", rows=2, lease=0.4, timeout=5)
        kept = late["x"]
        late.add(y=[np.full(5000, -1.0)] * 2)
        again = part.claim("s", rows=4, timeout=10)
        assert sorted(again.keys) == list("abcd")
        with pytest.raises(dataplane.LeaseExpired):
            late.ack()
        with pytest.raises(dataplane.LeaseExpired):
            late.add(z=[1, 2])
        again.add(y=[np.full(5000, 1.0)] * 4)
        again.ack()
        with part.claim("t", rows=4, timeout=5) as batch:
            assert all((y == 1).all() for y in batch["y"])
        assert (kept[1] == 1).all()
        del late, kept, again, batch
        no_leaks(a, b)
        until(lambda: used_bytes(a) == used_bytes(b) == 0, "every byte came back")


def test_leases_end_in_any_order_over_hosts(cluster: Cluster) -> None:
    cluster.start("a", "b")
    with cluster.connect("a") as a, cluster.connect("b") as b:
        parts = [a.partition("p", stages={"s": ["x"]}), b.partition("p")]
        keys = [f"k{i}" for i in range(40)]
        for i, key in enumerate(keys):
            parts[i % 2].put({"x": [np.full(2000, i)]}, key=[key])
        for turn in range(5):
            held = [parts[i % 2].claim("s", rows=4, timeout=10) for i in range(10)]
            assert sorted(k for batch in held for k in batch.keys) == sorted(keys)
            order = np.random.default_rng(turn).permutation(10)
            threads = [threading.Thread(target=held[i].release) for i in order]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(20)
        parts[1].seal()
        got = sorted(k for part in parts for batch in part.stream("s", rows=3) for k in batch.keys)
        assert got == sorted(keys)
        del held
        no_leaks(a, b)


async def test_a_stopped_peer_is_given_up_at_the_deadline(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dataplane.client.session.connection.GRACE_S", 600.0)  # of peers that run
    cluster.start("a")
    with cluster.connect("a") as plane:
        async with aio.connect("a", run=PLANE) as other:
            assert plane.stats()["peer"] == (await other.stats())["peer"] == "a"
            cluster.peers["a"].send_signal(signal.SIGSTOP)
            try:
                with pytest.raises(dataplane.DeadlineExceeded, match="within 0.3 s"):
                    plane.stats(timeout=0.3)
                with pytest.raises(dataplane.DeadlineExceeded, match="within 0.3 s"):
                    await other.stats(timeout=0.3)
            finally:
                cluster.peers["a"].send_signal(signal.SIGCONT)
            assert plane.stats()["peer"] == (await other.stats())["peer"] == "a"


def test_calls_end_in_time_where_a_stopped_peer_has_a_full_queue_of_connections(
    cluster: Cluster,
) -> None:
    cluster.start("a", arena="32MiB")
    with cluster.connect("a") as plane:
        part = plane.partition("p", {"s": ["x"]})
        path = str(rundir.living_peers(rundir.plane_dir(PLANE))[0].socket)
        cluster.peers["a"].send_signal(signal.SIGSTOP)
        with pytest.raises(BlockingIOError):
            while True:  # what was closed stays in the queue
                with socket.socket(socket.AF_UNIX) as one:
                    one.setblocking(False)
                    one.connect(path)
        with ThreadPoolExecutor(3) as pool:  # two of them over connections of their own
            calls = [pool.submit(part.claim, "s", rows=1, timeout=0.5) for _ in range(3)]
            for call in calls:
                with pytest.raises(dataplane.DeadlineExceeded, match="'a' did not answer within"):
                    call.result(10)
        cluster.peers["a"].send_signal(signal.SIGCONT)
        part.put({"x": [1]})
        with part.claim("s", rows=1, timeout=20) as batch:
            assert list(batch["x"]) == [1]
