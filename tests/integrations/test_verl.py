"""verl 0.9.1 itself on the module `transfer_queue`, ours and TransferQueue's, in Ray actors.

It has an environment of its own (`make test-verl`): verl, torch and TransferQueue beside dataplane.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PYTHON = Path(sys.executable).parent.parent / "verl" / "bin" / "python"
SHIM = ROOT / "packages" / "dataplane-transfer-queue"
LIMIT_S = 240

pytestmark = [
    pytest.mark.skipif(not PYTHON.exists(), reason="verl is not installed: make test-verl"),
    pytest.mark.timeout(2 * LIMIT_S),
]


def play(script: str, *arguments: str, path: str = "") -> dict[str, Any]:
    """What a script tells, in verl's environment and a run of its own."""
    with tempfile.TemporaryDirectory(prefix="dp-") as folder:
        environment = {
            **os.environ,
            "PYTHONPATH": path,
            "DATAPLANE_RUN_DIR": folder,
            "DATAPLANE_ARENA": "256MiB",
            "TQ_NUM_THREADS": "1",
            "VERL_USE_EXTERNAL_PLUGINS": "none",
        }
        played = subprocess.run(
            [str(PYTHON), str(HERE / script), *arguments],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            env=environment,
        )
    assert played.returncode == 0, played.stderr[-3000:]
    (line,) = [line for line in played.stdout.splitlines() if line.startswith("RESULTS ")]
    found: dict[str, Any] = json.loads(line.removeprefix("RESULTS "))
    return found


def test_a_step_of_verls_trainer_gives_what_it_gives_on_transfer_queue() -> None:
    ours = play("verl_calls.py", "4", "40000", path=str(SHIM))
    theirs = play("verl_calls.py", "4", "40000")
    assert ours["told"]["of"] == theirs["told"]["of"] == "0.9.1"
    assert str(SHIM) in ours["told"]["by"] and str(SHIM) not in theirs["told"]["by"]
    assert ours["steps"] == theirs["steps"]
    assert ours["resumed"] == theirs["resumed"] and ours["resumed"]["same"]
    assert ours["resumed"]["again"] == 2 and ours["resumed"]["left"] == {}
    assert len(ours["steps"]["async"]["keys"]) == 16 and not ours["steps"]["async"]["cleared"]


def test_a_data_proto_goes_in_and_comes_out() -> None:
    found = play("verl_dataproto.py")
    assert found["tensors"]
    assert found["names"] == [
        ["input_ids", "log_probs", "score"],
        ["index", "multi_modal_inputs", "raw_prompt_ids", "uid"],
    ]
    assert found["raw_prompt_ids"] == [[1, 2, 0], [3], [1, 2, 10], [3]]
    assert found["index"] == ["int64", [0, 1, 10, 11]]
    assert found["media"] == "Tensor" and found["tuple"]
    assert found["meta_info"] == {"temperature": 1.0, "eos": [1, 2]}
    assert "meta_info 'temperature' differs" in found["error"]
    assert found["claimed"] == [2, True]
