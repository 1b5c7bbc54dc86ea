"""The example that trains: its rewards rise, also when a worker is killed half-way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parents[2] / "examples" / "grpo_tiny" / "run.py"
STEPS = 24


def train(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "DATAPLANE_LINGER": "1", "DATAPLANE_ARENA": "64MiB"}
    command = [sys.executable, str(RUN), "--steps", str(STEPS), "--out", str(out), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)


def steps_of(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]


def risen(steps: list[dict[str, float]]) -> bool:
    first, last = (sum(s["reward"] for s in part) / 4 for part in (steps[:4], steps[-4:]))
    return last > first + 0.1


@pytest.mark.timeout(300)
def test_a_killed_rollout_worker_costs_no_step(tmp_path: Path, run_dir: Path) -> None:
    done = train(tmp_path / "out", "--lag", "2", "--kill", "rollout")
    assert done.returncode == 0, done.stderr
    assert "('rollout', 1)" in done.stdout
    steps = steps_of(tmp_path / "out")
    assert [s["step"] for s in steps] == list(range(1, STEPS + 1))
    assert risen(steps)
    assert (tmp_path / "out" / "reward.png").stat().st_size > 0


@pytest.mark.timeout(300)
def test_after_a_killed_trainer_training_goes_on_where_it_was(
    tmp_path: Path, run_dir: Path
) -> None:
    done = train(tmp_path / "out", "--kill", "trainer")
    assert done.returncode == 0, done.stderr
    assert "('train', 1)" in done.stdout
    steps = steps_of(tmp_path / "out")
    # Killed between the weights and the ack, a step is trained on once more.
    assert [s["step"] for s in steps] == list(range(1, len(steps) + 1))
    assert len(steps) - STEPS == sum(s["lag"] for s in steps) <= 1
    assert risen(steps)


@pytest.mark.timeout(300)
def test_a_controller_trains_too_and_ends_with_its_worker(tmp_path: Path) -> None:
    done = train(tmp_path / "out", "--plane", "controller", "--kill", "rollout")
    assert done.returncode != 0 and "('rollout', 1) died, and with it the run" in done.stderr
    assert STEPS // 2 < len(steps_of(tmp_path / "out")) < STEPS
