"""TRL and OpenRLHF themselves, from PyPI, in their own environment: `make test-frameworks`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.processes import all_ending, ending

HERE = Path(__file__).parent
PYTHON = Path(sys.executable).parent.parent / "frameworks" / "bin" / "python"
SHIM = HERE.parents[1] / "packages" / "dataplane-as-transfer-queue"
LIMIT_S = 240
QUEUE = """
import sys, ray, threading, torch, transfer_queue as tq
from tensordict import TensorDict

@ray.remote(num_cpus=0)
class Worker:
    def put(self, key):
        tq.init()
        tq.kv_batch_put([key], "rollouts", TensorDict({"prompt": torch.ones(1, 3)}, 1), [{"x": 1}])
        return tq.kv_list()

ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
tq.init()
worker, rounds = Worker.remote(), 0
ended = threading.Thread(target=sys.stdin.readline)
ended.start()
while ended.is_alive():
    listed = ray.get(worker.put.remote(str(rounds)))
    assert listed == tq.kv_list() == {"rollouts": {str(rounds): {"x": 1}}}, listed
    assert list(tq.kv_batch_get([str(rounds)], "rollouts").keys()) == ["prompt"]
    tq.kv_clear([str(rounds)], "rollouts")
    rounds += 1
    print(rounds, flush=True)
tq.close()
ray.shutdown()
"""
"""Ray's job has a queue of a partition that is called as TRL's, and says when it was used again."""

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


def started(*command: str, **environment: str) -> subprocess.Popen[str]:
    pipes: Any = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")}
    own = {**os.environ, **environment}
    return subprocess.Popen([str(PYTHON), *command], text=True, env=own, **pipes)


def ended(process: subprocess.Popen[str], returncode: int = 0) -> str:
    with ending(process):
        out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == returncode, err[-3000:]
    return out


def test_trls_trainer_under_torchrun_trains_though_a_worker_dies_beside_a_queue_of_ray(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = started("-c", QUEUE, PYTHONPATH=str(SHIM), RAY_TMPDIR=str(folder))
    monkeypatch.setenv("DATAPLANE_RUN", "trl")
    script = str(HERE / "trl_training.py")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    lives = started(script, str(folder), "worker")
    dies = started(script, str(folder), "worker", "die")
    with all_ending([queue, lives, dies]):
        assert queue.stdout is not None and queue.stdout.readline() == "1\n"
        ended(started(*torchrun, script, str(folder)))
        assert len(ended(queue).splitlines()) > 1
        made = json.loads(ended(lives).splitlines()[-1])
        dies.communicate(timeout=LIMIT_S)
        assert dies.returncode in (0, -signal.SIGKILL)  # where it ever got a second batch
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
