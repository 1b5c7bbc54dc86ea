"""Nothing waits in silence: what a waiting call says in the log of its process."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

import dataplane
from dataplane import Partition, Plane, aio, cli, tag
from dataplane.metadata.shard.reasons import FIRST_S, SOON_S
from tests.end_to_end.conftest import PLANE, Cluster, line, until


def lines(caplog: pytest.LogCaptureFixture, what: str) -> list[str]:
    return [
        record.message
        for record in caplog.records
        if record.levelno == logging.WARNING and what in record.message
    ]


def test_a_claim_that_only_this_process_could_satisfy_says_so_at_once(
    plane: Plane, caplog: pytest.LogCaptureFixture
) -> None:
    part = plane.partition("p", stages={"s": ["x"]})
    part.put({"x": [1, 2]})
    batch = part.claim("s", rows=2)
    with pytest.raises(dataplane.ClaimTimeout) as caught:
        part.claim("s", rows=1, timeout=SOON_S + 1)
    (line,) = lines(caplog, "claim of 1 row for stage 's' of partition 'p'")
    for text in (line, caught.value.message):
        assert f"2 rows have been leased by this process (pid {os.getpid()} on host " in text
        assert "only this process can end this wait: ack, release or drop" in text
    assert caught.value.details["only_own"] is True
    with pytest.raises(dataplane.ClaimTimeout) as caught:
        part.claim("s", rows=3, timeout=0.2)  # its batch has too few
    assert caught.value.message.endswith("(connected): call part.seal() if no more rows will come")
    assert caught.value.details["only_own"] is False
    plane.partition("q", stages={"s": ["x"]}).put({"x": [1, 2]})
    loaded = next(iter(plane.partition("q").loader("s", rows=2)))
    caplog.clear()
    with ThreadPoolExecutor() as other, pytest.raises(dataplane.ClaimTimeout) as caught:
        other.submit(part.claim, "s", rows=1, timeout=SOON_S + 1).result()
    assert "leased by this process (pid " in caught.value.message
    assert "only this process" not in caught.value.message + caplog.text, "this thread may ack"
    assert len(loaded) == 2
    batch.ack()


def test_after_ten_seconds_one_of_all_waiting_calls_of_a_host_says_why(
    plane: Plane, caplog: pytest.LogCaptureFixture
) -> None:
    part = plane.partition("p", stages={"s": ["x"], "t": ["x", "y"]}, group_size=2)
    part.put({"x": [1, 2]}, group="g", tags={"version": 1})
    part.put({"x": [1]}, group="h", tags={"version": 9})
    errors: list[BaseException] = []

    def claim(stage: str, **call: object) -> None:
        try:
            part.claim(stage, groups=1, timeout=FIRST_S + 3, **call)  # type: ignore[arg-type]
        except dataplane.ClaimTimeout as exc:
            errors.append(exc)

    async def by_await() -> None:
        async with aio.connect("a", run=PLANE) as other:
            with pytest.raises(dataplane.ClaimTimeout):
                await (await other.partition("p")).claim("t", groups=1, timeout=FIRST_S + 3)

    threads = [threading.Thread(target=claim, args=("t",)) for _ in range(3)]
    filtered = {"where": tag("version") > 5}
    threads.append(threading.Thread(target=claim, args=("s",), kwargs=filtered))
    threads.append(threading.Thread(target=lambda: __import__("asyncio").run(by_await())))
    threads.append(
        threading.Thread(
            target=lambda: pytest.raises(
                dataplane.ClaimTimeout, part.wait, "t", groups=9, timeout=FIRST_S + 3
            )
        )
    )
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (one,) = lines(caplog, "claim of 1 group for stage 't'")
    assert "and 3 others on this host" in one and "3 rows lack `y`, which stage 't' needs" in one
    assert "1 group is still open: 'h' has 1 of 2 rows" in one
    assert f"3 rows have been put so far, the last 10 s ago, by pid {os.getpid()} on host" in one
    (other,) = lines(caplog, "claim of 1 group for stage 's'")
    assert "the filter excludes 1 ready group" in other
    (waits,) = lines(caplog, "wait for stage 't'")
    assert "9 wanted" in waits
    assert len(errors) == 4 and all("excludes" in str(e) or "`y`" in str(e) for e in errors)


def test_what_is_asked_for_is_part_of_the_reason(plane: Plane) -> None:
    part = plane.partition("p", stages={"s": ["x"]})
    part.put({"x": [1, 2]}, tags={"n": [1, 9]})

    def said(wait: object, *args: object, **call: object) -> str:
        with pytest.raises(dataplane.ClaimTimeout) as caught:
            wait("s", *args, timeout=0.3, **call)  # type: ignore[operator]
        return caught.value.message.partition(": ")[2].partition("; the partition is not")[0]

    assert said(part.claim, budget={"n": 50}) == (
        "2 of 2 rows ready, and the claim returns once its budget of 50 (tag `n`) is full or "
        "the partition is sealed"
    )
    assert said(part.wait, below=2) == "2 of 2 rows ready, fewer than 2 unfinished wanted"
    stale = said(part.wait, below=1, where=tag("n") > 5)
    assert stale == (
        "1 of 2 rows ready, fewer than 1 unfinished wanted; the filter excludes 1 ready row"
    )
    part = plane.partition("forgotten", stages={"s": ["x"], "judge": ["x"]})
    part.put({"x": [1, 2]})
    with pytest.raises(
        dataplane.ClaimTimeout,
        match="2 rows are ready for stage 'judge', but no client has ever claimed from it",
    ):
        part.wait("judge", below=1, timeout=0.3)
    part = plane.partition("q", stages={"s": ["x"]}, group_size=2, groups=5)
    for group in range(2):
        part.put({"x": [1, 2]}, group=group)
    with pytest.raises(dataplane.ClaimTimeout, match=r"2 of its 5 groups have been closed"):
        part.claim("s", groups=3, timeout=0.3)
    with part.claim("s", rows=1):  # of group 0, of which a claim of groups now gets no rows
        split = r"rows of 1 group were claimed individually"
        with pytest.raises(dataplane.ClaimTimeout, match=split):
            part.claim("s", groups=2, timeout=0.3)
        with pytest.raises(dataplane.ClaimTimeout, match=split):
            part.wait("s", below=1, timeout=0.3)


def test_a_partition_that_nobody_declares_is_named_without_any_configuration(
    alone: Cluster,
) -> None:
    code = (
        "import dataplane\n"
        f"with dataplane.connect('a', run={PLANE!r}) as plane:\n"
        f"    try: plane.partition('step-1').claim('s', rows=1, timeout={FIRST_S + 3})\n"
        "    except dataplane.DataplaneError: pass\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (
        "attaching to partition 'step-1' has waited 10 s: no process has declared it" in done.stderr
    )


def test_status_has_a_line_a_stage_and_folds_what_is_drained(
    plane: Plane, capsys: pytest.CaptureFixture[str]
) -> None:
    old = plane.partition("step-0", stages={"s": ["x"]})
    old.put({"x": [1]})
    old.seal()
    for _batch in old.stream("s", rows=1):
        pass
    part = plane.partition("step-1", stages={"s": ["x"], "t": ["x", "y"]}, group_size=2)
    part.put({"x": [1, 2, 3, 4]}, group=["g", "g", "h", "h"])
    batch = part.claim("s", groups=1)
    assert cli.main(["status", "--run", PLANE]) == 0
    shown = capsys.readouterr().out
    assert f"run {PLANE}" in shown.splitlines()[0]
    assert "host a  [" in shown and "1 drained partition: step-0" in shown
    assert "partition step-1  open, 4 rows, 2 groups" in shown
    (line,) = [one for one in shown.splitlines() if one.startswith("    s  ")]
    assert "2 ready (1 whole group) | 2 leased: 2 by pid" in line and "rows/s" not in line
    assert cli.main(["status", "--run", PLANE, "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert run["peers"]["a"]["everywhere"]["partitions"]["step-1"]["rows"] == 4
    batch.ack()


def test_who_waits_for_a_sealed_partition_is_told_that_it_was_dropped(alone: Cluster) -> None:
    """And not that the stage has had every row: two were in somebody's hands."""
    told: list[BaseException] = []
    with alone.connect("a") as plane:
        part = plane.partition("p", {"s": ["x"]})
        part.put({"x": [1, 2]})
        part.seal()
        held = part.claim("s", rows=2, timeout=20)

        def claim() -> None:
            with pytest.raises(dataplane.DataplaneError) as caught:
                part.claim("s", rows=1, timeout=20)
            told.append(caught.value)

        waits = threading.Thread(target=claim)
        waits.start()
        until(lambda: plane.stats()["waiting_claims"] == 1, "the other claim waits")
        part.drop()
        waits.join()
        assert len(held) == 2 and isinstance(told[0], dataplane.PartitionGone)


def under_way(plane: Plane) -> int:
    connections = plane._session.connections
    return len(connections._open) - len(connections._idle)


WAITS: dict[str, Callable[[Partition], object]] = {
    "claim": lambda part: part.claim("s", rows=1),
    "claim with a limit": lambda part: part.claim("s", rows=1, timeout=600),
    "stream": lambda part: next(iter(part.stream("s", rows=1))),
    "loader": lambda part: next(iter(part.loader("s", rows=1))),
    "wait": lambda part: part.wait("s", rows=1),
    "lost": lambda part: next(iter(part.lost())),
    "plan": lambda part: part.plan("s", rank=0, ranks=1),
    "undeclared": lambda part: part._handle.plane.partition("q").claim("s", rows=1),
}


@pytest.mark.parametrize("what", WAITS)
def test_a_call_ends_when_another_thread_closes_its_client(
    peer: Cluster, plane: Plane, what: str
) -> None:
    plane.partition("p", stages={"s": ["x"]})
    closing = peer.connect("a")
    with ThreadPoolExecutor(1) as other:
        call = other.submit(WAITS[what], closing.partition("p"))
        until(lambda: under_way(closing) == 1, "the call is at the peer")
        closing.close()
        with pytest.raises(dataplane.ClientClosed, match="call dataplane.connect"):
            call.result(30)
    until(lambda: plane.stats()["clients"] == 1, "the peer has seen it leave")
    until(lambda: plane.stats()["waiting_claims"] == 0, "its call has ended there")


def test_a_task_ends_when_another_closes_its_client(plane: Plane) -> None:
    async def main() -> None:
        closing = await aio.connect("a")
        part = await closing.partition("p", stages={"s": ["x"]})
        claim = asyncio.create_task(part.claim("s", rows=1))
        while not plane.stats()["waiting_claims"]:
            await asyncio.sleep(0.01)
        await closing.close()
        with pytest.raises(dataplane.ClientClosed, match="call dataplane.aio.connect"):
            await asyncio.wait_for(claim, 30)

    asyncio.run(main())


def test_a_client_of_a_stopped_peer_closes_and_its_call_ends(peer: Cluster, plane: Plane) -> None:
    closing = peer.connect("a")
    part = closing.partition("p", stages={"s": ["x"]})
    with ThreadPoolExecutor(1) as other:
        call = other.submit(part.claim, "s", rows=1)
        until(lambda: plane.stats()["waiting_claims"] == 1, "the claim waits at the peer")
        peer.peers["a"].send_signal(signal.SIGSTOP)
        try:
            began = time.monotonic()
            closing.close()
            assert time.monotonic() - began < 5  # it was 7 s
            with pytest.raises(dataplane.ClientClosed):
                call.result(30)
        finally:
            peer.peers["a"].send_signal(signal.SIGCONT)


def test_a_forgotten_seal_a_dead_producer_and_a_misspelt_run_read_differently(
    alone: Cluster,
) -> None:
    producer = (
        "import dataplane, sys\n"
        "with dataplane.connect('a', run=sys.argv[1]) as plane:\n"
        "    plane.partition('p').put({'x': [1]})\n"
        "    print('put', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    with alone.connect("a") as plane:
        part = plane.partition("p", stages={"s": ["x"]})

        def why() -> str:
            with pytest.raises(dataplane.ClaimTimeout) as caught:
                part.claim("s", rows=1, timeout=0.2)
            return caught.value.message

        assert "no rows have been put into it: start its producer" in why()
        piped = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        other = subprocess.Popen([sys.executable, "-c", producer, PLANE], **piped)  # type: ignore[call-overload]
        assert other.stdout.readline() == b"put\n"
        part.claim("s", rows=1, timeout=20).ack()
        assert f"by pid {other.pid} on host a, `" in why()
        assert "(connected): call part.seal() if no more rows will come" in why()
        other.kill()
        other.communicate()
        until(lambda: "(disconnected" in why(), "the peer has seen it end")
        assert "no producer is connected, so restart one" in why()
        run = alone.run_dir / "other"
        with dataplane.connect(run=run.name) as elsewhere:
            elsewhere.partition("q", stages={"s": ["x"]})
            part = plane.partition("q", stages={"s": ["x"]})
            until(lambda: "also exists in run 'other'" in why(), "its card names the partition")
            assert "connect both sides to the same run" in why()


def test_a_producer_that_died_at_another_host_is_told_of_soon(cluster: Cluster) -> None:
    """Although this host has asked about it just before."""
    cluster.start("a", "b")
    with cluster.connect("a") as plane:
        part = plane.partition("p", stages={"s": ["x"]}, group_size=2)
        producer = cluster.worker(
            "import dataplane, sys\n"
            "part = dataplane.connect('b').partition('p')\n"
            "part.put({'x': [1]}, group='g')\n"
            "print('put', flush=True)\n"
            "sys.stdin.read()\n"
        )
        assert line(producer) == "put"

        def why() -> str:
            with pytest.raises(dataplane.ClaimTimeout) as caught:
                part.claim("s", groups=1, timeout=0.2)
            return caught.value.message

        assert f"pid {producer.pid} on host b, `" in why() and "(connected)" in why()
        producer.kill()
        producer.wait()
        until(lambda: "no producer is connected, so restart one" in why(), "it is known", 4)


def test_the_line_after_ten_seconds_asks_again_who_is_connected(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """The reason is looked for after 5 s, and the producer dies after that."""
    cluster.start("a", "b")
    with cluster.connect("a") as plane, ThreadPoolExecutor() as pool:
        part = plane.partition("p", stages={"s": ["x"]})
        producer = cluster.worker(
            "import dataplane, sys\n"
            "part = dataplane.connect('b').partition('p')\n"
            "part.put({'x': [1]})\n"
            "print('put', flush=True)\n"
            "sys.stdin.read()\n"
        )
        assert line(producer) == "put"

        def why() -> str:
            with pytest.raises(dataplane.ClaimTimeout) as caught:
                part.claim("s", rows=3, timeout=0.2)
            return caught.value.message

        claim = pool.submit(part.claim, "s", rows=2, timeout=FIRST_S + 4)
        looked_for = lambda: any(one["why"] for one in plane.stats()["waits"])  # noqa: E731
        until(looked_for, "its reason was looked for", 20)
        assert f"pid {producer.pid} on host b, `" in why() and "(connected)" in why()
        producer.kill()
        producer.wait()
        with pytest.raises(dataplane.ClaimTimeout, match="restart one, or call part.seal"):
            claim.result()
        (told,) = lines(caplog, "claim of 2 rows for stage 's' of partition 'p'")
        assert "has waited 10 s" in told and "(disconnected" in told
        assert "no producer is connected, so restart one" in told


def test_a_call_that_waits_for_its_peers_backup_says_so_and_counts_that_time(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.start("a", "b")
    with cluster.connect("a") as plane, cluster.connect("b") as other:
        part = next(  # one that peer a serves
            one
            for one in (plane.partition(f"p{n}", {"s": ["x"]}) for n in range(9))
            if one.name not in other.stats()["partitions"]
        )

        def is_unsure() -> bool:
            with pytest.raises(dataplane.DataplaneError) as told:
                part.claim("s", rows=1, timeout=0.1)
            return "cannot serve requests now" in told.value.message

        cluster.peers["b"].send_signal(signal.SIGSTOP)
        try:
            until(is_unsure, "peer a misses its backup")
            with ThreadPoolExecutor() as pool:
                call = pool.submit(part.claim, "s", rows=1, timeout=FIRST_S + 2)
                until(lambda: "cannot serve" in caplog.text, "the wait was told", FIRST_S + 2)
                cluster.peers["b"].send_signal(signal.SIGCONT)
                with pytest.raises(dataplane.ClaimTimeout, match="timed out after 12 s: no row"):
                    call.result()
        finally:
            cluster.peers["b"].send_signal(signal.SIGCONT)
    (line,) = lines(caplog, "cannot serve requests now")
    assert line.startswith(f"a call on partition {part.name!r} has waited 10 s: peer 'a' cannot")
    assert "the backup of its partitions, peer b at tcp://" in line
