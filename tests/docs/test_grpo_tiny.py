"""The example that trains: its rewards rise, also when workers are killed on the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo_tiny"
pytestmark = pytest.mark.timeout(300)


def train(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "DATAPLANE_LINGER": "1", "DATAPLANE_ARENA": "64MiB"}
    command = [sys.executable, str(EXAMPLE / "run.py"), "--out", str(out), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)


def steps_of(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]


def test_rewards_rise_though_a_rollout_worker_and_a_trainer_are_killed(
    tmp_path: Path, run_dir: Path
) -> None:
    done = train(tmp_path, "--steps", "24", "--lag", "1", "--kill", "rollout", "train")
    assert done.returncode == 0, done.stderr
    assert all(
        f"('{stage}', 1) died, restarting it" in done.stdout for stage in ("rollout", "train")
    )
    steps = steps_of(tmp_path)
    # Killed between the weights and the ack, a step is trained on once more.
    again = len(steps) - 24
    assert again in (0, 1) and [step["step"] for step in steps] == list(range(1, 25 + again))
    assert max(step["lag"] for step in steps) <= 1 + again
    first, last = (sum(step["reward"] for step in part) / 4 for part in (steps[:4], steps[-4:]))
    assert last > first + 0.1
    assert (tmp_path / "reward.png").stat().st_size > 0


def test_a_controller_trains_too_and_ends_with_its_worker(tmp_path: Path) -> None:
    done = train(tmp_path, "--steps", "6", "--plane", "controller", "--kill", "rollout")
    assert done.returncode != 0 and "('rollout', 1) died, which ends the run" in done.stderr
    assert 3 < len(steps_of(tmp_path)) < 6


def test_it_is_small() -> None:
    files = [*EXAMPLE.glob("*.py")]
    assert files and sum(len(file.read_text().splitlines()) for file in files) <= 300
