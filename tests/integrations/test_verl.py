"""verl 0.9.1 itself on the module `transfer_queue`, ours and TransferQueue's, in Ray actors.

It has an environment of its own (`make test-verl`): verl, torch and TransferQueue beside dataplane.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PYTHON = Path(sys.executable).parent.parent / "verl" / "bin" / "python"
TESTS = PYTHON.parent.parent / "own" / "tests"
OWN = [
    "test_protocol_on_cpu.py",
    "test_protocol_v2_on_cpu.py",
    "trainer/test_multi_trajectories_advantage_on_cpu.py",
    "trainer/ppo/test_metric_utils_on_cpu.py",
    "experimental/agent_loop/test_agent_loop_extra_fields_schema_on_cpu.py",
    "experimental/agent_loop/test_multimodal_position_ids_on_cpu.py",
]
SHIM = ROOT / "packages" / "dataplane-as-transfer-queue"
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
    assert "different values of meta_info['temperature'], 1.0 and 0.5" in found["error"]
    assert found["claimed"] == [2, True]


def test_verls_own_tests_of_its_data_do_on_the_module_what_they_do_on_transfer_queue() -> None:
    with ThreadPoolExecutor() as both:
        ours, theirs = both.map(ended_of_own, (str(SHIM), ""))
    assert ours == theirs and list(ours.values()).count("PASSED") > 80


def ended_of_own(path: str) -> dict[str, str]:
    """How each of verl's own tests ended, in an environment of its own with what is in a path."""
    plugin = ["-c", os.devnull, "-p", "no:cacheprovider", "-o", "asyncio_mode=auto"]
    with tempfile.TemporaryDirectory(prefix="dp-") as folder:
        environment = {
            **os.environ,
            "PYTHONPATH": path,
            "DATAPLANE_RUN_DIR": folder,
            "RAY_TMPDIR": folder,  # else `ray.init` joins another cluster of this machine
            "RAY_USAGE_STATS_ENABLED": "0",
            "VERL_USE_EXTERNAL_PLUGINS": "none",
        }
        done = subprocess.run(
            [str(PYTHON), "-m", "pytest", "-q", "-rA", *plugin, *(str(TESTS / n) for n in OWN)],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            env=environment,
        )
    found = re.findall(r"^(PASSED|FAILED|ERROR|SKIPPED) (\S+)", done.stdout, re.MULTILINE)
    assert found and done.returncode in (0, 1), done.stdout[-3000:] + done.stderr[-1000:]
    return {test: how for how, test in found}
