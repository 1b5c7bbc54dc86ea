"""Every example runs, those without a launcher two at a time."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT_S = 100


def run(command: list[str]) -> str:
    """As a shell starts it: a launch of its own, and so a run of its own."""
    environment = {**os.environ, "DATAPLANE_LINGER": "1", "DATAPLANE_ARENA": "256MiB"}
    environment |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    # torchrun leaves a folder behind, and so do programs that show a checkpoint.
    with tempfile.TemporaryDirectory(prefix="dp-", ignore_cleanup_errors=True) as folder:
        try:
            done = subprocess.run(
                command,
                env={**environment, "TMPDIR": folder},
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                start_new_session=True,
            )
        except subprocess.TimeoutExpired as late:
            raise AssertionError(f"{late}: {(late.stderr or b'').decode()}") from late
    assert done.returncode == 0, done.stderr
    return done.stdout


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
LAUNCHED = {"grpo_torchrun": TORCHRUN}
NEEDS = {"grpo_ray": "ray"}


def command(example: Path) -> list[str]:
    if (needs := NEEDS.get(example.stem)) and importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed: `make test-{needs}` does it")
    return [sys.executable, *LAUNCHED.get(example.stem, []), str(example)]


EXAMPLES = pytest.mark.parametrize(
    "example", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.stem
)


@EXAMPLES
@pytest.mark.timeout(3 * LIMIT_S)
def test_an_example_runs_also_twice_at_once(example: Path, run_dir: Path) -> None:
    launch = command(example)
    times = 1 if example.stem in LAUNCHED else 2  # torchrun takes long to start four workers
    with ThreadPoolExecutor() as launches:
        assert all(launches.map(run, [launch] * times))
