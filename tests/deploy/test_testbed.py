"""Hosts with links of their own: a cut cable, torchrun's discovery."""

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


def on_hosts(part: str) -> dict[str, Any]:
    """What became of one part; skips where this machine allows no namespaces."""
    outcomes = run("--only", part)
    if why := outcomes.get("skipped") or outcomes[part].get("skipped"):
        pytest.skip(f"no test bed here: {why}")
    found: dict[str, Any] = outcomes[part]
    assert found["ok"], found
    return found


@pytest.mark.needs("ip")
@pytest.mark.timeout(280)
def test_a_host_whose_cable_is_pulled_loses_nothing_and_returns_empty() -> None:
    found = on_hosts("cut")
    assert found["lost_rows"] == 0 and found["contents_ok"]
    assert found["call_at_the_cut_host"]["error"] == "Unavailable"
    assert found["works_again"]


@pytest.mark.needs("ip")
@pytest.mark.timeout(280)
def test_a_call_between_hosts_that_do_not_reach_each_other_ends_in_time() -> None:
    found = on_hosts("parted")
    assert found["call_across"] != "read"


@pytest.mark.needs("ip")
@pytest.mark.timeout(280)
def test_workers_of_torchrun_on_two_hosts_become_one_plane() -> None:
    assert on_hosts("torchrun")["seconds"] > 0


def test_a_machine_without_the_means_says_what_is_missing() -> None:
    outcomes = run("--only", "cut", PATH="/nonexistent")
    assert "apt-get install iproute2 util-linux" in outcomes["skipped"]
