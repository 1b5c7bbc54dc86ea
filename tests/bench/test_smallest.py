"""The smallest limit that survives is found between two real runs."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from bench import limits
from bench.cli import main
from bench.limits import NoLimits, limited_hosts
from bench.smallest import limits_to_try

MIB = 1 << 20


def may_limit() -> bool:
    try:
        with limited_hosts(1, 64 * MIB):
            return True
    except NoLimits:
        return False


def test_limits_rise_in_small_steps_from_the_least_to_the_most() -> None:
    tried = limits_to_try(256 * MIB, 8192 * MIB)
    assert (tried[0], tried[-1]) == (256 * MIB, 8192 * MIB)
    assert all(1 < above / below < 1.14 for below, above in pairwise(tried))
    assert limits_to_try(512 * MIB, 512 * MIB) == [512 * MIB]


@pytest.mark.skipif(not may_limit(), reason="this machine lets nobody make a memory cgroup")
def test_the_answer_is_bracketed_by_a_run_that_survived_and_one_that_did_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out" / "memory.json"
    options = ["--trace", "math", "--prompts", "1", "--hosts", "1", "--trainers", "1"]
    bounds = ["--planes", "controller", "--least", "32MiB", "--most", "512MiB"]
    assert main(["memory", *options, *bounds, "--json", str(path)]) == 0
    assert "smallest memory limit" in capsys.readouterr().out
    told = json.loads(path.read_text())
    assert told["machine"]["cores"] >= 1 and told["command"].startswith("python -m bench memory")
    for case in told["memory"]:
        outcome = {run["limit_bytes"]: run["status"] for run in case["runs"]}
        smallest = case["smallest_bytes"]
        assert outcome[smallest] == "ok"
        below = max(limit for limit in outcome if limit < smallest)
        assert outcome[below] != "ok" and smallest / below < 1.6


def test_where_no_limit_can_be_set_nothing_is_reported_as_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> None:
        raise PermissionError(13, "Permission denied", "/sys/fs/cgroup/memory/x")

    monkeypatch.setattr(limits, "_parent", refuse)
    path = tmp_path / "memory.json"
    assert main(["memory", "--trace", "math", "--prompts", "1", "--json", str(path)]) == 1
    assert "no memory limit can be set here" in capsys.readouterr().out
    (case,) = json.loads(path.read_text())["memory"]
    assert (case["status"], case["smallest_bytes"]) == ("not run", None)
