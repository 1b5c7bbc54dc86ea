"""Hosts with links of their own: the bench's job over them, a cut cable, torchrun's discovery."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest


def run(*arguments: str, **environment: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "deploy.testbed", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env={**os.environ, **environment}
    )
    outcomes: dict[str, Any] = json.loads(done.stdout)
    assert (done.returncode == 0) == all(o["ok"] for o in outcomes.values() if "ok" in o), done
    return outcomes


def on_hosts(part: str, *arguments: str) -> dict[str, Any]:
    """What became of one part; skips where this machine allows no namespaces."""
    outcomes = run("--only", part, *arguments)
    if why := outcomes.get("skipped") or outcomes[part].get("skipped"):
        pytest.skip(f"no test bed here: {why}")
    found: dict[str, Any] = outcomes[part]
    assert found["ok"], found
    return found


@pytest.mark.needs("ip")
@pytest.mark.timeout(280)
def test_the_main_job_runs_over_true_network_crossings() -> None:
    (flow,) = on_hosts("flow", "--hosts", "3", "--prompts", "3")["runs"]
    assert flow["rows"] == flow["rows_expected"] > 0
    # The last host has no trainer: what is written there must travel.
    assert 0 < sum(flow["pulled_bytes"]) < sum(flow["received_bytes"])


@pytest.mark.needs("ip")
@pytest.mark.timeout(280)
def test_a_host_whose_cable_is_pulled_loses_nothing_and_returns_empty() -> None:
    found = on_hosts("cut")
    assert found["lost_rows"] == 0 and found["contents_ok"]
    assert found["call_at_the_cut_host"]["error"] == "Unavailable"
    assert found["works_again"]


@pytest.mark.needs("ip")
@pytest.mark.timeout(280)
def test_workers_of_torchrun_on_two_hosts_become_one_plane() -> None:
    assert on_hosts("torchrun")["seconds"] > 0


def test_a_machine_without_the_means_says_what_is_missing() -> None:
    outcomes = run("--only", "flow", PATH="/nonexistent")
    assert "ip and unshare and nsenter not installed" in outcomes["skipped"]
