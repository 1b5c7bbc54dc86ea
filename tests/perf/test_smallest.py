"""The smallest limit that survives is found between two real runs."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bench import limits
from bench.cli import main
from bench.limits import NoLimits, host_cgroups
from bench.planes.base import Job
from tests.perf import smallest
from tests.perf.smallest import limits_to_try

MIB = 1 << 20


def may_limit() -> bool:
    try:
        with host_cgroups(1, 64 * MIB):
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


class Played:
    """Runs that survive from so many bytes a prompt on, and are counted."""

    def __init__(self, need: int, status: str = "ok") -> None:
        self.need, self.status = need, status
        self.tried: list[tuple[int, int]] = []

    def __call__(self, job: Job, bar: object) -> dict[str, object]:
        self.tried.append((job.prompts, job.memory_limit_bytes))
        enough = job.memory_limit_bytes >= self.need * job.prompts
        told = dict.fromkeys(smallest._KEPT)
        return told | {"status": self.status if enough else "oom", "error": "it needs ray"}


def found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, played: Played
) -> tuple[int, list[dict[str, Any]]]:
    monkeypatch.setattr(smallest, "execute", played)
    path = tmp_path / "memory.json"
    options = ["--prompts", "8,4", "--least", "256MiB", "--most", "2GiB", "--json", str(path)]
    code = main(["memory", "--trace", "video", "--planes", "ray-store", *options])
    return code, json.loads(path.read_text())["memory"]


def test_what_is_beyond_all_limits_with_few_prompts_is_tried_once_with_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    played = Played(need=1024 * MIB)
    code, cases = found(monkeypatch, tmp_path, played)
    assert code == 0 and [case["smallest_bytes"] for case in cases] == [None] * 4
    assert [limit for prompts, limit in played.tried if prompts == 8] == [2048 * MIB] * 2
    assert "> 2048" in capsys.readouterr().out


def test_a_plane_that_is_not_installed_is_reported_and_no_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    played = Played(need=0, status="not installed")
    code, cases = found(monkeypatch, tmp_path, played)
    assert code == 0 and {case["status"] for case in cases} == {"not installed"}
    assert len(played.tried) == len(cases)  # nobody asks twice
    assert "ray-store: not installed: it needs ray" in capsys.readouterr().out


def test_a_plane_that_fails_for_another_reason_is_not_said_to_lack_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found(monkeypatch, tmp_path, Played(need=0, status="error"))
    assert "> 2048 (error)" in capsys.readouterr().out


def test_where_no_limit_can_be_set_nothing_is_reported_as_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> None:
        raise PermissionError(13, "Permission denied", "/sys/fs/cgroup/memory/x")

    monkeypatch.setattr(limits, "_parent", refuse)
    path = tmp_path / "memory.json"
    assert main(["memory", "--trace", "math", "--prompts", "1", "--json", str(path)]) == 1
    assert "cannot set a memory limit on this machine" in capsys.readouterr().out
    (case,) = json.loads(path.read_text())["memory"]
    assert (case["status"], case["smallest_bytes"]) == ("not run", None)
