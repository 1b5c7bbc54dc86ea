"""What the documentation shows is run."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(command: list[str]) -> str:
    environment = {**os.environ, "DATAPLANE_LINGER": "1", "DATAPLANE_ARENA": "256MiB"}
    environment |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
LAUNCHED = {"grpo_torchrun": TORCHRUN}
NEEDS = {"grpo_ray": "ray"}


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.stem)
def test_an_example_runs(example: Path, run_dir: Path) -> None:
    if (needs := NEEDS.get(example.stem)) and importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed: `make test-{needs}` does it")
    assert run([sys.executable, *LAUNCHED.get(example.stem, []), str(example)])


def test_the_readmes_quick_start_runs(run_dir: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert "[3. 2.]" in run([sys.executable, "-c", code])
