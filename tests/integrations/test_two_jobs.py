"""Jobs of two frameworks on one host at once, which know nothing of each other and use one name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import all_ending

pytest.importorskip("torch")
pytest.importorskip("tensordict", reason="make test installs it")
pytest.importorskip("omegaconf", reason="make test installs it")
pytest.importorskip("dataplane_transfer_queue", reason="make test installs it")

ROOT = Path(__file__).parents[2]
TOGETHER = "import sys; print('here', flush=True); sys.stdin.readline()\n"
"""Each job says that it has put, and goes on when all have."""
JOBS = {
    "verl": """
import torch
import dataplane_transfer_queue as tq
from tensordict import TensorDict
tq.init()
tq.kv_batch_put(["a", "b"], "train", TensorDict({"x": torch.arange(2)}, 2))
TOGETHER
assert {name: sorted(rows) for name, rows in tq.kv_list().items()} == {"train": ["a", "b"]}
tq.close()
""",
    "nemo": """
import torch
from dataplane_transfer_queue.nemo_rl import DataPlaneClient
from tensordict import TensorDict
client = DataPlaneClient()
client.put_samples(["a", "c", "d"], "train", TensorDict({"x": torch.ones(3)}, 3))
TOGETHER
assert client.list_sample_ids("train") == ["a", "c", "d"]
assert client.claim_meta("train", "train", ["x"], 3).size == 3
client.close()
""",
    "openrlhf": """
from dataplane.integrations.openrlhf import Queue
queue = Queue(4, name="train")
queue.put({"step": 1})
TOGETHER
assert queue.get() == {"step": 1} and queue.empty()
queue.close()
""",
    "trl": """
import dataplane
from dataplane.integrations.trl import Rollouts
with dataplane.connect() as plane:
    rollouts = Rollouts(plane, name="train")
    rollouts.partition.put({"prompt": ["p"]})
    TOGETHER
    assert [batch["prompt"][0] for batch in rollouts.partition.stream("rollout", rows=1, batches=1)]
""",
}


def test_each_job_has_a_plane_of_its_own(run_dir: Path) -> None:
    environment = {**os.environ, "DATAPLANE_ARENA": "64MiB", "DATAPLANE_LINGER": "0.5"}
    jobs = {}
    for name, script in JOBS.items():
        indent = "    " if name == "trl" else ""
        script = script.replace(f"{indent}TOGETHER\n", indent + TOGETHER)
        jobs[name] = subprocess.Popen(  # as a shell starts it: a launch of its own
            [sys.executable, "-c", script],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    with all_ending(list(jobs.values())):
        for job in jobs.values():
            assert job.stdout is not None and job.stdout.readline() == b"here\n"
        for name, job in jobs.items():
            _, told = job.communicate(b"\n", timeout=60)
            assert job.returncode == 0, f"{name}: {told.decode()[-2000:]}"
