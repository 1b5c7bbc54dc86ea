"""Hosts with links of their own: the report says what they carried, and nothing of them is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.links import NODE_BITS, bits_per_second, fair_rate

RUN = ["-m", "bench", "run", "--trace", "math", "--prompts", "3", "--hosts", "3", "--steps", "2"]


def bench(file: Path, *options: str, path: str | None = None) -> tuple[str, dict[str, Any]]:
    environment = os.environ | ({"PATH": path} if path is not None else {})
    command = [sys.executable, *RUN, *options, "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(file.read_text())
    return done.stdout, report


def over_links(file: Path, *options: str) -> dict[str, Any]:
    """A run's report; skips where this machine allows no namespaces."""
    _, report = bench(file, *options)
    if why := report["machine"]["no_links"]:
        pytest.skip(f"no hosts with links here: {why}")
    (run,) = report["runs"]
    assert isinstance(run, dict)
    return run


@pytest.mark.needs("ip")
@pytest.mark.parametrize(("plane", "rate"), [("dataplane", "500mbit"), ("controller", "40mbit")])
def test_what_crosses_hosts_crosses_their_links(plane: str, rate: str, tmp_path: Path) -> None:
    # Where stages share hosts, dataplane keeps rows where they are.
    run = over_links(tmp_path / "r.json", "--planes", plane, "--link", rate, "--apart")
    assert run["status"] == "ok" and run["link"] == rate and run["trainers"] == 3
    assert len(run["step_seconds"]) == 2 and sum(run["step_seconds"]) <= run["seconds"]
    busiest = run["busiest_link"]
    assert busiest["bytes"] == busiest["received_bytes"] + busiest["sent_bytes"]
    assert 0 < sum(run["pulled_bytes"]) < 3 * busiest["bytes"]
    assert 0 <= busiest["busy_share"] <= 1
    if plane == "controller":  # every byte that crosses goes through a trainer's host
        assert busiest["host"] == 1 and busiest["bytes"] > sum(run["pulled_bytes"])
        assert busiest["busy_share"] > 0.5


SMALL = ("--planes", "controller", "--prompts", "1", "--hosts", "2", "--steps", "1")


def test_without_the_tools_the_run_says_so_and_computes_from_counted_bytes(tmp_path: Path) -> None:
    said, report = bench(tmp_path / "r.json", *SMALL, "--apart", path="/nonexistent")
    assert "apt-get install iproute2" in " ".join(said.splitlines()[:3])
    assert "iproute2" in report["machine"]["no_links"]
    (run,) = report["runs"]
    assert run["link"] is None and run["busiest_link"] is None
    full = run["full_step"]  # a link carries as much as its host pulled, or more the other way
    pulled = max(run["pulled_bytes"]) * full["prompts"] / run["prompts"]
    assert full["link_seconds"] >= pulled * 8 / NODE_BITS > 0


def test_none_is_loopback(tmp_path: Path) -> None:
    said, report = bench(tmp_path / "r.json", *SMALL, "--link", "none")
    assert "links of their own" not in said
    assert report["runs"][0]["link"] is None


@pytest.mark.needs("ip")
@pytest.mark.parametrize("ended", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_however_a_run_ends_nothing_is_left(ended: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, *RUN, "--planes", "controller", "--link", "2mbit"]
    runner = subprocess.Popen(command, cwd=Path.cwd(), stdout=subprocess.PIPE, text=True)
    below: list[psutil.Process] = []
    try:
        _until(lambda: runner.poll() is not None or _works(runner.pid))
        if runner.returncode == 0 and runner.stdout:
            said = runner.stdout.readline()
            assert "no links" in said, said  # with links of this rate it takes minutes
            pytest.skip(said)
        below = psutil.Process(runner.pid).children(recursive=True)
        runner.send_signal(ended)
        code = runner.wait(30)
    finally:
        runner.kill()
        runner.wait()
        if runner.stdout:
            runner.stdout.close()
    assert code == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[ended]
    assert below
    _until(lambda: not any(p.is_running() and p.status() != "zombie" for p in below))
    assert "dp-br" not in Path("/proc/net/dev").read_text()


def _works(runner: int) -> bool:
    return any("bench.flow" in _told(process) for process in psutil.Process(runner).children())


def _told(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def _until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not _quietly(true):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _quietly(true: Callable[[], bool]) -> bool:
    try:
        return true()
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("rate", "bits"), [("400mbit", 4e8), ("2.5gbit", 2.5e9), ("100000kbit", 1e8)]
)
def test_rates_are_written_as_tc_does(rate: str, bits: float) -> None:
    assert bits_per_second(rate) == bits


@pytest.mark.parametrize("rate", ["", "fast", "400", "-1mbit", "400 mbit", "1kbit", "9999gbit"])
def test_other_rates_are_refused(rate: str) -> None:
    with pytest.raises(ValueError, match="rate such as 400mbit|out of range"):
        bits_per_second(rate)


def test_the_default_is_to_the_cores_of_a_host_as_a_nodes_link_is_to_its_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    assert bits_per_second(fair_rate(1)) == 1e11
    assert bits_per_second(fair_rate(64)) == pytest.approx(1e11 / 64, rel=0.05)
