"""TRL and OpenRLHF themselves, from PyPI, in their own environment: `make test-frameworks`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
PYTHON = Path(sys.executable).parent.parent / "frameworks" / "bin" / "python"
LIMIT_S = 240

pytestmark = [
    pytest.mark.skipif(not PYTHON.exists(), reason="not installed: make test-frameworks"),
    pytest.mark.timeout(2 * LIMIT_S),
]


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("DATAPLANE_ARENA", "64MiB")
    monkeypatch.setenv("DATAPLANE_LINGER", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    with tempfile.TemporaryDirectory(prefix="dp-") as path:  # paths of sockets are short
        monkeypatch.setenv("DATAPLANE_RUN_DIR", path)
        yield Path(path)


def started(*command: str) -> subprocess.Popen[str]:
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([str(PYTHON), *command], text=True, **pipes)


def ended(process: subprocess.Popen[str], returncode: int = 0) -> str:
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == returncode, err[-3000:]
    return out


def test_trls_trainer_under_torchrun_gets_its_rollouts_from_workers_of_which_one_dies(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATAPLANE_RUN", "trl")
    script = str(HERE / "trl_training.py")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    lives = started(script, str(folder), "worker")
    dies = started(script, str(folder), "worker", "die")
    try:
        ended(started(*torchrun, script, str(folder)))
        made = json.loads(ended(lives).splitlines()[-1])
        dies.communicate(timeout=LIMIT_S)
        assert dies.returncode in (0, -signal.SIGKILL)  # where it ever got a second batch
    finally:
        lives.kill()
        dies.kill()
    ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert all(rank["steps"] == 3 and rank["loss"] for rank in ranks)
    assert ranks[0]["rewards"] == ranks[1]["rewards"]
    assert {version for version, _ in made} <= {0, 1, 2}  # of the weights that made them
    assert all(rank["makers"] for rank in ranks)


def test_openrlhfs_asynchronous_trainer_gets_from_the_queue_what_it_gets_from_rays(
    folder: Path,
) -> None:
    found = {}
    for which in ("ours", "rays"):
        out = ended(started(str(HERE / "openrlhf_loops.py"), which))
        (line,) = [line for line in out.splitlines() if line.startswith("RESULTS ")]
        found[which] = json.loads(line.removeprefix("RESULTS "))
    assert found["ours"]["queue"] == "dataplane.integrations.openrlhf"
    assert found["rays"]["queue"] == "ray.util.queue"
    assert found["ours"]["steps"] == found["rays"]["steps"]
    assert len(found["ours"]["steps"]) == 3
    assert found["ours"]["steps"][0]["sequences"][1] == [8, 7]
