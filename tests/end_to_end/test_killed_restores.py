"""Restores whose process is killed, at any step: the shards drop what was restored, at one and two
hosts, also if a backup was promoted or the restorer's host is lost."""

from __future__ import annotations

import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataplane import PartitionConflict, PartitionGone, Plane
from dataplane.client._sync import restore
from tests.end_to_end.conftest import Cluster, in_sync, line, until
from tests.end_to_end.test_attacks_peers import Addressed, hosts
from tests.end_to_end.test_succession import GO_ON_S, planes

__all__ = ["hosts", "planes"]

DIED_S = 30.0
"""Generous: a peer that was killed is no member after two seconds."""

STEPS = """
    import os, signal, sys, threading, dataplane
    from dataplane.client._sync import restore
    folder, at, how = sys.stdin.readline().split()
    steps = 0
    def counting(step):
        def counted(*args, **kwargs):
            for then in ("before", "after"):
                global steps
                steps += 1
                if steps == int(at):
                    if how == "PAUSE":
                        print(step.__name__, then, flush=True)
                        sys.stdin.readline()
                    else:
                        os.kill(os.getpid(), getattr(signal, how))
                        threading.Event().wait()
                if then == "before":
                    done = step(*args, **kwargs)
            return done
        return counted
    for name in ("define", "_put", "ask"):
        setattr(restore, name, counting(getattr(restore, name)))
    plane = dataplane.connect()
    print("connected", flush=True)
    try:
        plane.restore(folder)
        print("restored", flush=True)
    except dataplane.DataplaneError as exc:
        print(type(exc).__name__, exc, flush=True)
    sys.stdin.readline()
"""
"""A restore that is killed, or pauses, before or after one of its steps."""


def saved(plane: Plane, names: list[str], folder: Path) -> None:
    """Save a checkpoint of partitions of 12 rows, the last one sealed, and drop them."""
    for name in names:
        part = plane.partition(name, stages={"s": ["x"]}, group_size=4)
        for g in range(3):
            values = [np.full(5_000, g, np.uint8) for _ in range(4)]
            part.put({"x": values}, group=f"g{g}", key=[f"g{g}.{i}" for i in range(4)])
    plane.partition(names[-1]).seal()
    plane.checkpoint(folder)
    for name in names:
        plane.partition(name).drop()


def check(plane: Plane, names: list[str]) -> None:
    """Every row is there, and claimable, once."""
    assert plane.partitions() == sorted(names)
    for name in names:
        part = plane.partition(name)
        batch: Any = part.claim("s", groups=3, timeout=GO_ON_S)
        assert len({*batch.keys}) == 12
        for key, value in zip(batch.keys, batch["x"], strict=True):
            assert (np.asarray(value) == int(key[1])).all() and len(value) == 5_000
        part.drop()


def begin(cluster: Cluster, folder: Path, at: int, how: str, peer: str) -> subprocess.Popen[str]:
    worker = cluster.worker(STEPS, DATAPLANE_PEER=peer)
    assert worker.stdin is not None
    worker.stdin.write(f"{folder} {at} {how}\n")
    worker.stdin.flush()
    assert line(worker) == "connected"
    return worker


def killed_at_every_step(
    cluster: Cluster, plane: Plane, peer: str, names: list[str], folder: Path, how: str
) -> int:
    """Kill a restore at every step, and restore again at once. Return how many were killed."""
    saved(plane, names, folder)
    for step in range(1, 100):
        worker = begin(cluster, folder, step, how, peer)
        assert worker.stdout is not None
        if worker.stdout.readline():  # it has fewer steps
            check(plane, names)
            return step - 1
        assert worker.wait(10) == -getattr(signal, how)
        if plane.partitions():  # it was killed after the last step
            check(plane, names)
            continue
        plane.restore(folder, timeout=GO_ON_S)
        check(plane, names)
    raise AssertionError("the restore has no end")


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM"])
def test_a_restore_killed_at_any_step_is_repeated_at_once(
    how: str, alone: Cluster, plane: Plane, tmp_path: Path
) -> None:
    assert killed_at_every_step(alone, plane, "a", ["p", "q"], tmp_path / "c", how) >= 12


def test_the_same_where_the_other_host_has_the_partitions(hosts: Addressed, tmp_path: Path) -> None:
    hosts.start_all("a", "b")
    with hosts.connect("a") as a, hosts.connect("b") as b:
        in_sync(a)
        names = [hosts.homed("b"), hosts.homed("a")]
        assert killed_at_every_step(hosts, b, "a", names, tmp_path / "c", "SIGKILL") >= 12


def test_without_another_restore_the_partition_is_dropped(
    alone: Cluster, plane: Plane, tmp_path: Path
) -> None:
    saved(plane, ["p", "q"], tmp_path / "c")
    worker = begin(alone, tmp_path / "c", 10, "PAUSE", "a")
    assert line(worker) == "_put after"
    part = plane.partition("q")
    batch = part.claim("s", groups=1, timeout=GO_ON_S)
    worker.kill()
    until(lambda: not plane.stats()["partitions"], "the shard drops both", GO_ON_S)
    with pytest.raises(PartitionGone):
        part.claim("s", groups=1, timeout=GO_ON_S)
    assert len(batch["x"]) == 4  # what was read stays


def test_a_promoted_backup_drops_it_as_well(
    hosts: Addressed, planes: dict[str, Plane], tmp_path: Path
) -> None:
    names = [hosts.homed("b"), hosts.homed("c", prefix="i")]  # restored in this order
    saved(planes["a"], names, tmp_path / "c")
    worker = begin(hosts, tmp_path / "c", 6, "PAUSE", "a")
    assert line(worker) == "_put after"
    hosts.kill("b")
    until(lambda: served("a", "c", planes=planes) == names[:1], "its backup is promoted", DIED_S)
    with pytest.raises(PartitionConflict, match="is being restored by"):
        planes["c"].restore(tmp_path / "c")
    worker.kill()
    worker.wait()
    planes["c"].restore(tmp_path / "c", timeout=DIED_S)
    check(planes["c"], names)


def test_a_new_backup_learns_who_restores(
    hosts: Addressed, planes: dict[str, Plane], tmp_path: Path
) -> None:
    names = [hosts.homed("b")]
    saved(planes["a"], names, tmp_path / "c")
    worker = begin(hosts, tmp_path / "c", 6, "PAUSE", "a")
    assert line(worker) == "_put after"
    hosts.kill("c")  # `a` backs up `b` now, and begins with a snapshot
    until(lambda: len(planes["a"].stats()["peers"]) == 2, "c is no member any more", DIED_S)
    in_sync(planes["a"])
    hosts.kill("b")
    until(lambda: served("a", planes=planes) == names, "its backup is promoted", DIED_S)
    worker.kill()
    worker.wait()
    until(lambda: not served("a", planes=planes), "the partition is dropped", DIED_S)
    planes["a"].restore(tmp_path / "c", timeout=DIED_S)
    check(planes["a"], names)


def test_with_the_host_of_the_restore_its_partitions_go(
    hosts: Addressed, planes: dict[str, Plane], tmp_path: Path
) -> None:
    names = [hosts.homed("c")]
    saved(planes["a"], names, tmp_path / "c")
    worker = begin(hosts, tmp_path / "c", 6, "PAUSE", "b")
    assert line(worker) == "_put after"
    assert served("a", "c", planes=planes) == names
    hosts.kill("b")
    until(lambda: not served("a", "c", planes=planes), "it is dropped", DIED_S)
    planes["a"].restore(tmp_path / "c", timeout=DIED_S)
    check(planes["a"], names)


def served(*names: str, planes: dict[str, Plane]) -> list[str]:
    """The partitions that these peers serve, restored ones as well."""
    return [part for name in names for part in planes[name].stats()["partitions"]]


def test_while_a_restore_runs_its_partitions_are_its_own(
    alone: Cluster, plane: Plane, tmp_path: Path
) -> None:
    saved(plane, ["p", "q"], tmp_path / "c")
    worker = begin(alone, tmp_path / "c", 6, "PAUSE", "a")
    assert line(worker) == "_put after"
    with pytest.raises(PartitionConflict, match=f"'p' is being restored by pid {worker.pid} "):
        plane.restore(tmp_path / "c")
    assert plane.partitions() == []
    plane.checkpoint(tmp_path / "empty")
    assert plane.restore(tmp_path / "empty") == []
    assert plane.partition("p").stats()["rows"] == 12
    assert worker.stdin is not None
    worker.stdin.write("\n")
    worker.stdin.flush()
    assert line(worker) == "restored"
    with pytest.raises(PartitionConflict, match="already has 2 partitions"):
        plane.restore(tmp_path / "c")
    worker.kill()
    worker.wait()
    check(plane, ["p", "q"])


def test_a_second_restore_in_one_process_leaves_the_first_one_alone(
    plane: Plane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(plane, ["p"], tmp_path / "c")
    put, is_there, go_on = restore._put, threading.Event(), threading.Event()

    def paused(*args: Any) -> Any:
        is_there.set()
        assert go_on.wait(30)
        return put(*args)

    monkeypatch.setattr(restore, "_put", paused)
    first = threading.Thread(target=plane.restore, args=[tmp_path / "c"])
    first.start()
    assert is_there.wait(30)
    with pytest.raises(PartitionConflict, match="is being restored by this process"):
        plane.restore(tmp_path / "c")
    go_on.set()
    first.join(30)
    check(plane, ["p"])
