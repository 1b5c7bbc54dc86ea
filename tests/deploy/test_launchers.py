"""The batch script runs as it is, with commands in Slurm's place that start its tasks here; systemd
reads the unit."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "deploy/slurm/grpo.sbatch"
UNIT = ROOT / "deploy/systemd/dataplane@.service"


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """A directory with this checkout's `dataplane` and `python`, and Slurm's commands."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in (ROOT / "tests/deploy/slurm").iterdir():
        (folder / tool.name).write_text(f'#!/bin/sh\nexec "{sys.executable}" "{tool}" "$@"\n')
    (folder / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (folder / "dataplane").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m dataplane "$@"\n')
    for command in folder.iterdir():
        command.chmod(0o755)
    return folder


@pytest.fixture
def number() -> int:
    """Of a job whose peers' port is free on the nodes."""
    for number in range(os.getpid(), os.getpid() + 1000):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for node in range(1, 4):
                at = (f"127.0.0.{node}", 20_000 + number % 10_000)
                stack.enter_context(socket.create_server(at))
            return number
    raise AssertionError("no port is free")


def job(commands: Path, run_dir: Path, number: int, nodes: int) -> subprocess.CompletedProcess[str]:
    home = commands.parent / "home"
    home.mkdir(exist_ok=True)
    slurm = {
        "SLURM_JOB_ID": str(number),
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_JOB_NODELIST": f"127.0.0.[1-{nodes}]",
    }
    running = subprocess.Popen(
        ["bash", str(SCRIPT)],
        env={
            **os.environ,
            **slurm,
            "PATH": f"{commands}:{os.environ['PATH']}",
            "HOME": str(home),
            "CHECKOUT": str(ROOT),
            "PYTHONPATH": str(ROOT),
            "NODES_DIR": str(run_dir),
            "DATAPLANE_ARENA": "64MiB",
            "GRPO_PROGRAM": str(ROOT / "examples/grpo_step.py"),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = running.communicate(timeout=110)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(running.args, running.returncode, out, err)


def test_a_slurm_job_runs_a_step_on_three_nodes(commands: Path, run_dir: Path, number: int) -> None:
    done = job(commands, run_dir, number, 3)
    assert done.returncode == 0, done.stdout + done.stderr
    groups = {line.split()[0] for line in done.stdout.splitlines() if line.startswith("prompt-")}
    assert groups == {f"prompt-{n}" for n in range(16)}, done.stderr
    assert not list((commands.parent / "home").iterdir()), "the token went with the job"
    for node in range(1, 4):
        serving = f"peer '127.0.0.{node}' of run 'slurm-{number}': serving"
        assert serving in done.stderr, done.stderr


def test_a_slurm_job_of_too_few_nodes_says_so(commands: Path, run_dir: Path) -> None:
    done = job(commands, run_dir, 1, 2)
    assert done.returncode == 2
    assert "three nodes at least" in done.stderr


def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not on this machine")
    unit = tmp_path / "dataplane@plane.service"
    unit.write_text(UNIT.read_text().replace("/opt/dataplane/bin/dataplane", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    about_it = [line for line in done.stderr.splitlines() if unit.name in line]
    assert done.returncode == 0 and not about_it, done.stderr


def test_a_unit_that_is_stopped_hands_over_first() -> None:
    text = UNIT.read_text()
    assert "KillMode=mixed" in text, "bulk workers live on while the peer hands over"
    (stop,) = (line for line in text.splitlines() if line.startswith("TimeoutStopSec="))
    assert int(stop.partition("=")[2]) >= 75, "a peer hands over for up to 60 s"
