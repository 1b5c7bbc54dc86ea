"""Prometheus' own checker, where `make test-deploy` put it or the machine has it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def promtool(*arguments: str | Path) -> str:
    """What it prints; fails where it is not content, skips where it is not there."""
    beside = Path(sys.executable).parent / "promtool"
    found = str(beside) if beside.exists() else shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not here: make test-deploy brings it")
    done = subprocess.run(
        [found, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
