"""Corrupt frames at every door, while honest clients of two hosts go on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import dataplane
from dataplane.launch.token import new_token
from tests.end_to_end.conftest import PLANE, Cluster

COUNT = 300
"""At each door; `python -m tests.faults.strangers` does it with 100,000."""


class Honest:
    """Rows that travel from host to host until they are told to stop."""

    def __init__(self, here: dataplane.Plane, there: dataplane.Plane) -> None:
        self.steps = 0
        self.failure: Exception | None = None
        self._planes = here, there
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Honest:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        here, there = self._planes
        try:
            while not self._stop.is_set():
                part = here.partition(f"step-{self.steps}", {"s": ["x"]})
                part.put({"x": np.full((2, 3000), float(self.steps))})
                batch = there.partition(part.name).claim("s", rows=2, timeout=20)
                assert np.all(batch.numpy("x") == self.steps)
                batch.ack()
                part.drop()
                self.steps += 1
        except Exception as failure:
            self.failure = failure


@pytest.mark.parametrize("token", [False, True], ids=["without a token", "with a token"])
def test_corrupt_frames_disturb_nobody(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: bool
) -> None:
    if token:
        file = tmp_path / "token"
        file.touch(0o600)
        file.write_text(new_token())
        monkeypatch.setenv("DATAPLANE_TOKEN_FILE", str(file))
    cluster.start("a", "b", arena="64MiB")
    command = [sys.executable, "-m", "tests.faults.strangers", "--name", "b", "--run", PLANE]
    with (
        cluster.connect("a") as here,
        cluster.connect("b") as there,
        Honest(here, there) as honest,
    ):
        attack = subprocess.run(
            [*command, "--count", str(COUNT)],
            capture_output=True,
            text=True,
            timeout=110,
            env={**os.environ, "PYTHONWARNINGS": "default"},
        )
        assert attack.returncode == 0, attack.stdout + attack.stderr
    assert honest.failure is None and honest.steps > 3
    outcome = json.loads(attack.stdout)
    assert outcome["ok"] and set(outcome["sent"]) == {"local", "peer", "streams", "bulk"}
    lines = cluster.log("b").count("refused a connection")
    assert 0 < lines < 5 * outcome["seconds"] + 100, "strangers decide how much is logged"
    assert "internal error" not in cluster.log("b")
