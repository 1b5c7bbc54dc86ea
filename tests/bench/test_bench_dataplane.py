"""The bench drives this project's own plane: peers as hosts, the same checks as for any plane."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from bench.planes.base import Job
from bench.run import execute
from tests import leaks


def silent(rows: int, expected: int) -> None:
    """No progress bar."""


@pytest.mark.parametrize("hosts", [1, 2])
def test_rows_move_between_hosts_without_a_controller(hosts: int) -> None:
    # One trainer, on the first host: what the second host rolls out has to cross.
    job = Job(plane="dataplane", trace="math", prompts=3, hosts=hosts, trainers=1, timeout_s=60)
    run = execute(job, silent)
    assert (run["status"], run["error"]) == ("ok", "")
    assert run["rows"] == run["rows_expected"] == 48
    assert (sum(run["pulled_bytes"]) > 0) == (hosts > 1)
    assert {"peer-host0", "arena of peer-host0", "train-0"} <= run["peak_memory_bytes"].keys()
    assert not leaks.children()


def test_media_flow_through_an_arena_smaller_than_they_are() -> None:
    job = Job(
        plane="dataplane",
        trace="video",
        prompts=4,
        hosts=1,
        trainers=1,
        arena_bytes=256 << 20,
        timeout_s=90,
    )
    run = execute(job, silent)
    assert (run["status"], run["error"]) == ("ok", "")
    assert run["peak_memory_bytes"]["arena of peer-host0"] <= 256 << 20 < run["bytes_unique"]


def test_a_killed_peer_ends_the_run_with_an_error_and_nobody_stays(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []

    def progress(rows: int, expected: int) -> None:
        if killed:
            return
        running = [(p, p.cmdline()) for p in psutil.Process().children()]
        if any("bench.flow" in command for _, command in running):
            peer = next(process for process, command in running if "peer" in command)
            killed.append(peer.pid)
            peer.kill()

    monkeypatch.setattr("tempfile.tempdir", str(run_dir))  # short enough for a socket's path
    run = execute(Job(plane="dataplane", trace="math", prompts=40, timeout_s=60), progress)
    assert run["status"] == "error"
    assert killed
    assert "signal 9" in run["error"] or "PeerLost" in run["error"]
    assert not leaks.children()
    assert not [name for name in Path("/dev/shm").iterdir() if name.name.startswith("dataplane")]
