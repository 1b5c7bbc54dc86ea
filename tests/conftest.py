"""What every test shares: a private run directory, and no launcher's variables."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

_LAUNCHERS = ("DATAPLANE_", "SLURM_", "RAY_", "LWS_", "TORCHELASTIC_", "KUBERNETES_", "JOB_")
_TORCHRUN = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests must not join a plane of the machine or job that they run in."""
    for name in os.environ:
        if name.startswith(_LAUNCHERS) or name in _TORCHRUN:
            monkeypatch.delenv(name)


@pytest.fixture
def run_dir(monkeypatch: pytest.MonkeyPatch, no_launcher: None) -> Iterator[Path]:
    """A run directory of the test's own. Not `tmp_path`: paths of sockets must stay short."""
    path = Path(tempfile.mkdtemp(prefix="dp-"))
    monkeypatch.setenv("DATAPLANE_RUN_DIR", str(path))
    yield path
    shutil.rmtree(path)
