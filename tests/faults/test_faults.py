"""The scenarios that damage a plane, short: each promise is kept, and the report says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.cli import main

SHORT = ["--seconds", "3", "--frames", "100"]


@pytest.mark.timeout(300)  # four hosts die one after the other, each when all are in sync again
@pytest.mark.parametrize(
    "scenario",
    [
        "killed_two_replicas",  # the others that kill take as long, and are no other code
        pytest.param("killed_authority", marks=pytest.mark.needs("etcd")),
        "frozen",
        "failing_calls",
        "slow_consumer",
        "corrupt_frames",
        "stranger",
    ],
)
def test_a_promise_is_kept_under_damage(scenario: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    main(["faults", "--only", scenario, *SHORT, "--json", str(report)])
    outcome = json.loads(report.read_text())["outcomes"][scenario]
    assert outcome.get("hanging", False) is False, outcome
    # Speed is for the bench to tell: a busy machine is slow to notice, and loses no row.
    for kept in (
        "lost_rows_not_named",
        "wrong_rows",
        "rows_left",
        "rows_delivered_twice",
        "accepted_at_peer_ports",
        "accepted_at_bulk_port",
    ):
        if kept in outcome:
            assert outcome[kept] == 0, outcome
    if scenario in ("killed_two_replicas", "killed_authority"):
        assert outcome["lost_rows"] == 0, outcome
    assert outcome.get("honest_undisturbed", True), outcome
    assert "error" not in outcome, outcome


def test_a_scenario_that_breaks_off_is_a_broken_promise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks() -> None:
        raise OSError("no room")

    monkeypatch.setattr("tests.faults.dying.frozen", breaks)
    report = tmp_path / "report.json"
    assert main(["faults", "--only", "frozen", "--json", str(report)]) == 1
    outcome = json.loads(report.read_text())["outcomes"]["frozen"]
    assert outcome == {"ok": False, "error": "OSError: no room"}


def test_what_a_machine_cannot_play_is_not_run_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    report = tmp_path / "report.json"
    assert main(["faults", "--only", "killed_authority", "--json", str(report)]) == 0
    told = json.loads(report.read_text())
    assert told["outcomes"] == {} and "no etcd" in told["not_run"]["killed_authority"]
