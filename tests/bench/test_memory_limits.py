"""A host's memory limit is a true one: the kernel enforces it, and a kill is an outcome."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench import limits, run
from bench.cli import main
from bench.limits import NoLimits, OutOfMemory, host_cgroups
from bench.planes.base import Job
from bench.run import execute
from tests import leaks

MIB = 1 << 20
_TOUCH = "import sys; x = bytearray(int(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
_SHARE = """
import mmap, os, sys
arena = mmap.mmap(-1, 64 << 20)
arena[:] = bytes(1) * (64 << 20)
if os.fork() == 0:
    assert sum(arena[:: 4096]) == 0
    os._exit(0)
os.wait()
print("held", flush=True)
sys.stdin.read()
"""


def may_limit() -> bool:
    try:
        with host_cgroups(1, 64 * MIB):
            return True
    except NoLimits:
        return False


needs_cgroup = pytest.mark.skipif(
    not may_limit(), reason="this machine lets nobody make a memory cgroup: not run"
)


def silent(rows: int, expected: int) -> None:
    """No progress bar."""


def start(argv: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


@needs_cgroup
def test_a_process_over_the_hosts_limit_is_killed_and_counted() -> None:
    with host_cgroups(2, 96 * MIB) as (first, second):
        with start(first.wrap([sys.executable, "-c", _TOUCH, str(256 * MIB)])) as process:
            assert process.wait() == -9
        assert (first.kills(), second.kills()) == (1, 0)
        with pytest.raises(OutOfMemory, match="host 0 reached its limit of 96 MiB"):
            limits.check([first, second])
    assert not first.path.exists() and not second.path.exists()


@needs_cgroup
def test_a_kill_below_the_limit_is_the_machines_and_not_the_hosts() -> None:
    """As when the machine runs out: a limit above the host's kills, and counts at the host too."""
    with host_cgroups(1, 96 * MIB) as (host,):
        inner = limits.HostCgroup(host.path / "inner", host.files, 64 * 1024 * MIB)
        inner.path.mkdir()
        try:
            with start(inner.wrap([sys.executable, "-c", _TOUCH, str(256 * MIB)])) as process:
                assert process.wait() == -9
            assert inner.kills() == 1 and not inner.met_limit()
            with pytest.raises(limits.MachineFull, match="host 0 was below its limit"):
                limits.check([inner])
        finally:
            inner.close()


@needs_cgroup
def test_all_processes_of_a_host_count_together_and_shared_pages_once() -> None:
    with host_cgroups(1, 512 * MIB) as (host,):
        with start(host.wrap([sys.executable, "-c", _SHARE])) as sharing:
            assert sharing.stdout and sharing.stdout.readline() == b"held\n"
            shared = host.held_bytes()
            touch = host.wrap([sys.executable, "-c", _TOUCH, str(64 * MIB)])
            with start(touch) as second:
                assert second.stdout and second.stdout.readline() == b"held\n"
                both = host.held_bytes()
        assert 64 * MIB <= shared < 110 * MIB
        assert 60 * MIB <= both - shared < 90 * MIB
        assert host.kills() == 0


@needs_cgroup
def test_a_group_is_removed_together_with_those_who_are_left_in_it() -> None:
    with host_cgroups(1, 96 * MIB) as (host,):
        process = start(host.wrap([sys.executable, "-c", _TOUCH, "1"]))
        assert process.stdout and process.stdout.readline() == b"held\n"
    with process:
        assert process.wait() == -9
    assert not host.path.exists()


@needs_cgroup
def test_the_controller_dies_of_a_batch_that_its_host_cannot_hold() -> None:
    job = Job(
        plane="controller", trace="video", dedup=False, prompts=2, hosts=1, trainers=1,
        memory_limit_bytes=1024 * MIB,
    )  # fmt: skip
    told = execute(job, silent)
    assert told["status"] == "oom", told["error"]
    assert told["killed"]["host"] == 0
    assert "reached its limit of 1024 MiB" in told["error"]
    (host,) = told["memory_curve"]["hosts"]
    assert len(host) == len(told["memory_curve"]["seconds"]) > 5
    assert max(host) == told["peak_host_bytes"][0] <= 1024 * MIB
    assert not leaks.children()


@needs_cgroup
def test_a_kill_beside_a_run_does_not_make_it_one_that_ran_out_of_memory() -> None:
    """A worker is killed by hand while the kernel kills another program for its memory."""
    ended: list[str] = []

    def progress(rows: int, expected: int) -> None:
        children = [] if ended else psutil.Process().children()
        trainers = [child for child in children if '"role":"train"' in str(child.cmdline())]
        if trainers:
            script = (
                "import subprocess, sys; from bench.limits import host_cgroups\n"
                "with host_cgroups(1, 96 << 20) as (host,):\n"
                "    print(subprocess.run(host.wrap(sys.argv[1:])).returncode)"
            )
            touch = [sys.executable, "-c", _TOUCH, str(256 * MIB)]
            beside = [sys.executable, "-c", script, *touch]
            ended.append(subprocess.run(beside, capture_output=True, text=True).stdout.strip())
            trainers[0].kill()

    told = execute(Job(plane="controller", trace="math", prompts=4, dedup=False), progress)
    assert ended == ["-9"]
    assert told["status"] == "error"
    assert "train-" in told["error"] and "signal 9" in told["error"]
    assert not leaks.children()


@needs_cgroup
def test_a_run_without_a_limit_says_that_the_memory_it_runs_under_ran_out(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    bench = [sys.executable, "-m", "bench", "run", "--trace", "video", "--planes", "controller"]
    options = ["--prompts", "2", "--hosts", "1", "--dedup", "off"]
    argv = [*bench, *options, "--link", "none", "--json", str(report)]
    with host_cgroups(1, 1024 * MIB) as (host,), start(host.wrap(argv)) as runner:
        assert runner.wait() == 1
    (told,) = json.loads(report.read_text())["runs"]
    assert told["status"] == "disturbed" and "ran out of memory" in told["error"]
    assert "signal 9" in told["error"], told["error"]


@needs_cgroup
def test_dataplane_moves_more_than_its_host_may_hold() -> None:
    job = Job(
        plane="dataplane", trace="video", dedup=True, prompts=26, hosts=1, trainers=1,
        memory_limit_bytes=1152 * MIB,
    )  # fmt: skip
    told = execute(job, silent)
    assert (told["status"], told["error"], told["killed"]) == ("ok", "", None)
    assert told["bytes_unique"] > 1152 * MIB > told["peak_host_bytes"][0]
    assert told["arena_bytes"] == 288 * MIB


@needs_cgroup
def test_dataplane_refuses_a_group_that_its_host_can_never_hold() -> None:
    job = Job(
        plane="dataplane", trace="video", dedup=False, prompts=2, hosts=1, trainers=1,
        memory_limit_bytes=1152 * MIB,
    )  # fmt: skip
    told = execute(job, silent)
    assert (told["status"], told["killed"]) == ("refused", None), told["error"]
    assert "ValueTooLarge" in told["error"]


def version_2(folder: Path, pids: list[int]) -> tuple[Path, Path]:
    """Files as a delegated group of version 2 has them: (the mount, /proc)."""
    group = folder / "cgroup" / "user" / "run.scope"
    group.mkdir(parents=True)
    (group / "cgroup.controllers").write_text("cpu memory pids\n")
    (group / "cgroup.subtree_control").write_text("\n")
    (group / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in pids))
    (folder / "self").mkdir()
    (folder / "self" / "cgroup").write_text("0::/user/run.scope\n")
    return folder / "cgroup", folder


def test_with_version_2_the_runner_steps_down_and_lets_groups_be_limited(tmp_path: Path) -> None:
    root, proc = version_2(tmp_path, [os.getpid()])
    group, files = limits._parent(root, proc)
    assert group == root / "user" / "run.scope" and files.limit == "memory.max"
    assert (group / "cgroup.subtree_control").read_text() == "+memory"
    leaf = group / "dataplane-bench-runner"
    assert (leaf / "cgroup.procs").read_text() == str(os.getpid())
    (proc / "self" / "cgroup").write_text("0::/user/run.scope/dataplane-bench-runner\n")
    assert limits._parent(root, proc) == (group, files)  # the second run of the same runner


def test_with_version_2_other_processes_in_the_group_are_named_as_the_obstacle(
    tmp_path: Path,
) -> None:
    root, proc = version_2(tmp_path, [os.getpid(), 1])
    with pytest.raises(NoLimits, match=r"1 other process\. .* systemd-run --user --scope"):
        limits._parent(root, proc)
    assert [path.name for path in (root / "user" / "run.scope").iterdir() if path.is_dir()] == []


def test_a_host_of_version_2_tells_what_it_holds_without_file_pages(tmp_path: Path) -> None:
    (tmp_path / "memory.stat").write_text("anon 300\nfile 500\nshmem 400\n")
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.events").write_text("low 0\nhigh 0\nmax 7\noom 1\noom_kill 2\n")
    host = limits.HostCgroup(tmp_path, limits._V2, 1000)
    assert (host.held_bytes(), host.kills(), host.met_limit()) == (800, 2, True)


def test_where_no_group_can_be_made_the_run_is_reported_as_not_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> Any:
        raise PermissionError(13, "Permission denied", "/sys/fs/cgroup/memory/x")

    monkeypatch.setattr(limits, "_parent", refuse)
    told = run.execute(Job(plane="controller", trace="math", memory_limit_bytes=MIB), silent)
    assert told["status"] == "not run"
    assert "cannot set a memory limit on this machine" in told["error"]
    assert told["seconds"] is None and told["rows"] == 0
    options = ["--trace", "math", "--planes", "controller", "--memory-limit", "1GiB"]
    assert main(["run", *options]) == 1
    assert "not run" in capsys.readouterr().out
