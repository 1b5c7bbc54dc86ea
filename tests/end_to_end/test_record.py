"""`dataplane record`: what it leaves of a real run, however it ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest

import dataplane
from dataplane import cli, cli_record
from tests.end_to_end.conftest import Cluster, until


@pytest.fixture
def plane(cluster: Cluster) -> Iterator[dataplane.Plane]:
    cluster.start("a")
    with cluster.connect("a") as connected:
        yield connected


def work(plane: dataplane.Plane, name: str) -> None:
    """One step of two groups."""
    stages = {"reward": ["x"], "train": ["x", "reward"]}
    part = plane.partition(name, stages=stages, group_size=2, groups=2)
    for group in range(2):
        part.put({"x": [np.zeros(1_000)] * 2}, group=group)
    for batch in part.stream("reward", groups=1):
        batch.add(reward=[0.0, 1.0])
    for _ in part.stream("train", groups=2):
        pass


@contextlib.contextmanager
def recorder_of(
    plane: dataplane.Plane, folder: Path, stderr: int | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A recorder that has started."""
    argv = [sys.executable, "-m", "dataplane", "record", "-o", str(folder), "--run", plane.name]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=stderr, text=True) as recorder:
        try:
            assert recorder.stdout is not None
            assert recorder.stdout.readline().startswith(f"recording run {plane.name} to ")
            yield recorder
        finally:
            recorder.kill()


def index(folder: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((folder / "recording.json").read_text())
    return told


def record(plane: dataplane.Plane, folder: Path, *more: str) -> int:
    return cli.main(["record", "-o", str(folder), "--run", plane.name, *more])


def test_steps_of_before_and_of_now_are_recorded(plane: dataplane.Plane, tmp_path: Path) -> None:
    for step in range(3):
        work(plane, f"step-{step}")
    folder = tmp_path / "rec"
    assert record(plane, folder, "--steps", "2") == 0
    found = index(folder)
    assert [step["partition"] for step in found["steps"]] == ["step-0", "step-1"]
    assert (found["ended"], found["left_out"], found["lost_events"]) == ("--steps 2", [], 0)
    groups = pyarrow.parquet.read_table(folder / "step-000001.parquet").to_pylist()
    nbytes = 16_000 + 64  # the values, and the lengths in front of them
    assert [(g["rows"], g["nbytes"], g["trained"]) for g in groups] == [(2, nbytes, True)] * 2
    assert {one["stage"] for one in groups[0]["stages"]} == {"reward", "train"}


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_recorder_that_is_ended_leaves_what_is_complete(
    how: signal.Signals, plane: dataplane.Plane, tmp_path: Path
) -> None:
    folder = tmp_path / "rec"
    with recorder_of(plane, folder) as recorder:
        assert recorder.stdout is not None
        work(plane, "step-0")
        assert recorder.stdout.readline().startswith("step-0: 2 groups, 4 rows, 31.4 KiB, ")
        plane.partition("step-1", stages={"train": ["x"]}).put({"x": [1]})
        if how is signal.SIGKILL:  # the line is printed before the index is written
            until(lambda: bool(index(folder)["steps"]), "the index lists the step")
        recorder.send_signal(how)
        rest = recorder.stdout.read()
    found = index(folder)
    assert [step["partition"] for step in found["steps"]] == ["step-0"]
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["recording.json", "step-000000.parquet"]
    if how is signal.SIGKILL:
        assert found["ended"] is None
    else:
        assert (recorder.returncode, found["ended"]) == (0, "stopped")
        assert "1 step recorded (stopped), " in rest


def test_recording_goes_on_while_other_hosts_work_and_when_its_peer_is_lost(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_record, "QUIET_S", 0.2)
    cluster.start("b", "a")  # b keeps the roster
    folder = tmp_path / "rec"
    with cluster.connect("b") as plane, ThreadPoolExecutor(1) as other:

        def job() -> None:
            try:
                work(plane, "step-0")
                until(lambda: (folder / "step-000000.parquet").exists(), "step-0 is recorded")
                time.sleep(1.0)  # peer a has no client but the recorder, and nothing happens
                cluster.kill("a")
                until(lambda: index(folder)["lost_peers"] == ["a"], "the index names the lost peer")
            finally:
                if not ended.is_set():
                    os.kill(os.getpid(), signal.SIGINT)

        ended, working = threading.Event(), other.submit(job)
        assert record(plane, folder, "--peer", "a") == 0
        ended.set()
        working.result()
    found = index(folder)
    assert (found["ended"], found["lost_peers"]) == ("stopped", ["a"])
    assert [step["partition"] for step in found["steps"]] == ["step-0"]


def test_a_recording_whose_run_ended_says_so(cluster: Cluster, tmp_path: Path) -> None:
    cluster.start("a")
    with cluster.connect("a") as plane, ThreadPoolExecutor(1) as other:
        work(plane, "step-0")

        def kill() -> None:
            until((tmp_path / "rec" / "step-000000.parquet").exists, "step-0 is recorded")
            cluster.kill("a")

        killed = other.submit(kill)
        assert record(plane, tmp_path / "rec") == 0
        killed.result()
    found = index(tmp_path / "rec")
    assert (found["ended"], found["lost_peers"]) == ("the run ended", [])


def test_what_cannot_be_recorded_is_said(
    plane: dataplane.Plane, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(folder: Path, *more: str) -> str:
        assert record(plane, folder, *more) == 2
        return capsys.readouterr().err

    (tmp_path / "notes.txt").write_text("mine")
    assert "is not empty (it contains 'notes.txt')" in said(tmp_path)
    assert "File exists" in said(tmp_path / "notes.txt")
    assert "--steps 0 is out of range: use a value of at least 1" in said(
        tmp_path / "rec", "--steps", "0"
    )
    assert cli.main(["record", "-o", str(tmp_path / "rec"), "--run", "nobody"]) == 2
    assert "no peer of run 'nobody'" in capsys.readouterr().err
    assert not (tmp_path / "rec").exists()
    with recorder_of(plane, tmp_path / "rec", stderr=subprocess.PIPE) as recorder:
        recorder.send_signal(signal.SIGINT)
        _, errors = recorder.communicate()
    assert recorder.returncode == 2
    assert "no complete step was recorded (stopped): no step was seen" in errors
    assert not (tmp_path / "rec").exists()
