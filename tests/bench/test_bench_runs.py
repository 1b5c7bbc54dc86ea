"""The bench as a user runs it: whole runs with real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
from msgspec.structs import replace

from bench.cli import main
from bench.flow import advantages
from bench.planes.base import Job
from bench.run import execute
from tests import leaks
from tests.processes import ending

CHECKOUT = Path(__file__).resolve().parents[2]
MATH = Job(plane="controller", trace="math", dedup=False, prompts=4)


def silent(rows: int, expected: int) -> None:
    """No progress bar."""


def descendants(role: str) -> list[psutil.Process]:
    """Processes of this run whose command line names the role."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if f'"role":"{role}"' in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def killing(role: str) -> Callable[[int, int], None]:
    killed: list[int] = []

    def progress(rows: int, expected: int) -> None:
        for process in [] if killed else descendants(role)[:1]:
            killed.append(process.pid)
            process.kill()

    return progress


def test_where_stages_are_apart_every_group_crosses_to_those_who_read_it() -> None:
    run = execute(Job(plane="dataplane", trace="math", prompts=2, apart=True), silent)
    assert (run["status"], run["error"], run["apart"]) == ("ok", "", True)
    assert run["pulled_bytes"][0] < run["pulled_bytes"][1]
    assert run["pulled_bytes"][1] >= run["bytes_unique"] // 2


def test_one_host_cannot_be_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--trace", "math", "--hosts", "1", "--apart"]) == 2
    assert "--apart needs at least two hosts" in capsys.readouterr().err


@pytest.mark.parametrize("hosts", [1, 2])
def test_the_controller_moves_every_row(hosts: int) -> None:
    run = execute(replace(MATH, prompts=3, hosts=hosts, trainers=3), silent)
    assert (run["status"], run["error"]) == ("ok", "")
    assert run["rows"] == run["rows_expected"] == 48
    assert run["seconds"] > 0
    assert (sum(run["pulled_bytes"]) > 0) == (hosts > 1)
    workers = {
        "rollout-0",
        "reward-0",
        "reference-0",
        "train-0",
        "train-1",
        "train-2",
        "controller",
    }
    assert workers <= run["peak_memory_bytes"].keys()
    assert run["latency_ms"].keys() >= {"rollout", "reward", "train"}
    put = run["latency_ms"]["rollout"]["put"]  # over all workers of the role
    assert put["times"] == 3
    assert 0 < put["p50"] <= put["p90"] <= put["p99"] <= put["max"] < 1e3 * run["seconds"]
    assert not leaks.children()


@pytest.mark.parametrize(
    ("plane", "staleness"), [("controller", 1), ("controller-stream", 1), ("dataplane", 0)]
)
def test_rollout_is_never_further_ahead_of_training_than_the_staleness_bound(
    plane: str, staleness: int
) -> None:
    job = Job(plane=plane, trace="math", prompts=2, steps=4, staleness=staleness, timeout_s=60)
    run = execute(job, silent)
    assert (run["status"], run["error"]) == ("ok", "")
    assert run["rows"] == run["rows_expected"] == 4 * 2 * 16
    starts, ends = run["step_starts"], run["step_ends"]
    assert len(starts) == len(ends) == 4 and ends == sorted(ends)
    behind = 1 + staleness
    assert all(start >= end for start, end in zip(starts[behind:], ends, strict=False))


def test_dedup_moves_media_once_and_without_it_once_a_row() -> None:
    job = Job(plane="controller", trace="image", prompts=1, trainers=1, apart=True)
    moved = {}
    for dedup in (False, True):
        run = execute(replace(job, dedup=dedup), silent)
        assert run["status"] == "ok", run["error"]
        moved[dedup] = sum(run["pulled_bytes"])
    assert 7 < moved[False] / moved[True] < 8


@pytest.mark.parametrize("role", ["rollout", "reward", "train"])
def test_a_killed_worker_ends_the_run_with_an_error_and_nobody_stays(
    role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run = execute(MATH, killing(role))
    assert run["status"] == "error"
    assert f"{role}-" in run["error"] and "signal 9" in run["error"]
    (kept,) = tmp_path.iterdir()
    assert str(kept) in run["error"]
    assert {"controller.log", f"{role}-0.log"} <= {log.name for log in kept.iterdir()}
    assert not leaks.children()


def test_a_run_that_hangs_ends_at_its_deadline_and_says_what_it_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopping(rows: int, expected: int) -> None:
        for process in descendants("train"):
            process.send_signal(signal.SIGSTOP)

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run = execute(replace(MATH, timeout_s=6), stopping)
    assert run["status"] == "error"
    assert "timed out while waiting for the workers to" in run["error"]
    assert "train-0 is suspended" in run["error"] or "train-1 is suspended" in run["error"]
    assert not leaks.children()


def test_nothing_stays_of_a_runner_that_is_stopped_or_killed(tmp_path: Path) -> None:
    """A runner that is killed with -9 leaves its folder, which the next runner removes. One that is
    told to stop leaves nothing, even if it is told so twice."""
    command = [sys.executable, "-m", "bench", "run", "--trace", "math", "--planes", "controller"]
    for signals in ([signal.SIGKILL], [signal.SIGHUP, signal.SIGINT]):
        left = set(tmp_path.iterdir())
        runner = subprocess.Popen(
            [*command, "--hosts", "1", "--link", "none", "--prompts", "2", "--pace", "1"],
            cwd=CHECKOUT,
            env={**os.environ, "TMPDIR": str(tmp_path)},
            stdout=subprocess.DEVNULL,
            # under nohup, which tests may run under, a runner goes on after SIGHUP
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL) and None,
        )
        with ending(runner):
            while not {log.parent for log in tmp_path.glob("bench-*/train-*.log")} - left:
                assert runner.poll() is None
                time.sleep(0.01)
            children = psutil.Process(runner.pid).children()
            for number in signals:
                runner.send_signal(number)
            runner.wait(60)
        _, alive = psutil.wait_procs(children, timeout=20)
        assert children and alive == []
    assert runner.returncode == 128 + signal.SIGHUP
    assert list(tmp_path.iterdir()) == []


def test_refused_memory_is_an_outcome_of_its_own(tmp_path: Path) -> None:
    report = tmp_path / "out" / "report.json"
    limit = 'ulimit -v 4000000 && exec "$@"'
    bench = [sys.executable, "-m", "bench", "run", "--trace", "video", "--planes", "controller"]
    options = ["--prompts", "16", "--dedup", "off", "--link", "none", "--json", str(report)]
    done = subprocess.run(
        ["bash", "-c", limit, "bash", *bench, *options],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    (run,) = json.loads(report.read_text())["runs"]
    assert run["status"] == "oom"
    assert "controller ended with exit code 1" in run["error"]
    assert "oom" in done.stdout


def test_the_command_prints_a_table_and_writes_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    options = ["--trace", "math", "--planes", "controller", "--prompts", "2", "--json", str(path)]
    assert main(["run", *options]) == 0
    assert "controller" in capsys.readouterr().out
    report = json.loads(path.read_text())
    assert report["machine"]["cores"] >= 1 and report["machine"]["memory_bytes"] > 0
    (run,) = report["runs"]
    for key in ("plane", "trace", "status", "rows", "bytes_unique", "seconds"):
        assert key in run
    assert all(nbytes > 0 for nbytes in run["peak_memory_bytes"].values())
    assert set(run["bench_seconds"]) == {"generate", "digest", "check", "memory_sampling"}


@pytest.mark.parametrize(
    "options",
    [
        ["--trace", "chess"],
        ["--trace", "math", "--planes", "carrier-pigeon"],
        ["--trace", "math", "--prompts", "0"],
        ["--trace", "math", "--arena", "lots"],
        ["--trace", "math", "--dedup", "perhaps"],
        ["--trace", "math", "--pace", "0"],
        ["--trace", "math", "--seed", "-1"],
        ["--trace", "math", "--timeout", "nan"],
        ["--trace", "math", "--link", "fast"],
        ["--trace", "math", "--link", "10mbps"],
        ["--trace", "math", "--link", "1kbit"],
        ["--trace", "math", "--hosts", "65"],
        ["--trace", "math", "--json", "/dev/null/report.json"],
        ["--trace", "math", "--json", "page.html"],
    ],
)
def test_a_wrong_option_is_refused_before_anything_starts(options: list[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["run", *options])
    assert refused.value.code == 2


class Planned(Exception):
    """What a command would run."""


def planned(monkeypatch: pytest.MonkeyPatch, *options: str) -> list[tuple[str, bool]]:
    """(plane, dedup) of each run of `bench run`."""

    def carry_out(plan: list[Job], *_: object) -> int:
        raise Planned([(job.plane, job.dedup) for job in plan])

    monkeypatch.setattr("bench.run_command.carry_out", carry_out)
    with pytest.raises(Planned) as stopped:
        main(["run", *options])
    return list(stopped.value.args[0])


def test_all_planes_dedup_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    video = ["--trace", "video", "--planes", "dataplane,controller"]
    on, off = ([(plane, way) for plane in ("dataplane", "controller")] for way in (True, False))
    assert planned(monkeypatch, *video) == on
    assert planned(monkeypatch, *video, "--dedup", "off") == off
    assert planned(monkeypatch, *video, "--dedup", "both") == [*on, *off]


def test_a_plane_without_dedup_runs_without_it_once_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    video = ["--trace", "video", "--planes", "dataplane,transfer_queue", "--dedup"]
    assert planned(monkeypatch, *video, "on") == [("dataplane", True), ("transfer_queue", False)]
    assert "transfer_queue has no dedup, so it runs without it" in capsys.readouterr().out
    assert sorted(planned(monkeypatch, *video, "both")) == [
        ("dataplane", False), ("dataplane", True), ("transfer_queue", False),
    ]  # fmt: skip


def test_advantages_are_relative_to_the_group_and_zero_where_all_are_equal() -> None:
    weights = advantages(np.array([0, 1, 1, 0], np.float32))
    assert abs(weights.sum()) < 1e-5 and weights[1] > 0.99
    assert (advantages(np.ones(8, np.float32)) == 0).all()


def test_a_run_that_fails_is_repeated_once_and_its_logs_are_shown_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ok = execute(replace(MATH, prompts=1, hosts=1, trainers=1), silent)
    why = "peer-host0 ended with signal 9; its last log lines:\n  dropped the call"
    failed = {**ok, "status": "error", "error": why, "step_seconds": []}
    attempts = [failed, ok]
    monkeypatch.setattr("bench.run.execute", lambda job, bar: attempts.pop(0))
    path = tmp_path / "r.json"
    math = ["run", "--trace", "math", "--planes", "controller", "--link", "none"]
    assert main([*math, "--json", str(path)]) == 0
    (run,) = json.loads(path.read_text())["runs"]
    assert run["failed_before"] == {
        name: failed[name] for name in ("status", "error", "step_seconds")
    }
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count("dropped the call") == 1 and "repeats this run once" in shown
    assert "repeated once, after the first attempt ended with 'error': peer-host0 ended" in shown
    assert "first attempt: error" in path.with_suffix(".html").read_text()
