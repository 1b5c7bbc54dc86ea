"""The sentences of the first screen, from runs alone."""

from __future__ import annotations

from typing import Any

import pytest

from bench import headline
from bench.cli import main
from bench.headline import sentences
from bench.planes import PLANES
from bench.run_command import Planned

GIB = 1 << 30
FULL = {
    "prompts": 64, "recorded_seconds": 60.0, "link_bits_per_second": 100e9, "link_seconds": 0.5,
}  # fmt: skip


def run(plane: str, trace: str, hosts: int, steps: list[float], **told: Any) -> dict[str, Any]:
    return {
        "plane": plane, "trace": trace, "hosts": hosts, "step_seconds": steps, "status": "ok",
        "dedup": True, "link": "400mbit", "memory_limit_bytes": None, "computed_link": None,
        "prompts": hosts, "error": "", "peak_host_bytes": [], "apart": False, "phased": False,
        "recorded_step_seconds": 30.0, "full_step": FULL,
    } | told  # fmt: skip


TOGETHER = [
    run("dataplane", "video", 6, [9.0, 0.4, 0.5, 0.3]),
    run("controller-stream", "video", 6, [9.0, 10.0, 10.0, 10.0]),
    run("controller", "video", 6, [9.0, 20.0, 30.0, 22.0]),
]
APART = [
    {**one, "apart": True, "step_seconds": [9.0, seconds, seconds, seconds]}
    for one, seconds in zip(TOGETHER, (5.0, 6.0, 7.0), strict=True)
]


def test_transfers_are_told_for_each_plane_apart_first_with_medians() -> None:
    transfers, shares, computed, faster = sentences([*TOGETHER, *APART])
    assert transfers == (
        "Video, 6 hosts, links of 400mbit: a step spends 5 s in dataplane, 6 s in a streaming "
        "controller and 7 s in a controller with barriers if rollout has hosts of its own; 0.4 s "
        "in dataplane, 10 s in a streaming controller and 22 s in a controller with barriers if "
        "every host has every stage."
    )
    assert shares == (
        "Beside 30 s of recorded rollout and training that is 14%, 17% and 19%; 1%, 25% and 42% "
        "of a step."
    )
    assert computed == (
        "Computed for 64 prompts a step and links of 100 Gbit/s, the busiest link is busy for "
        "0.5 s, 0.5 s and 0.5 s; 0.5 s, 0.5 s and 0.5 s, beside 60 s recorded: at that rate links "
        "alone are no reason to choose a plane."
    )
    assert faster == "In no job of this set was a controller faster."


def test_small_transfers_hardly_matter() -> None:
    short = [{**one, "step_seconds": [0.1, 0.1, 0.1]} for one in TOGETHER]
    assert "that is at most 0.3% of a step: it hardly matters." in sentences(short)[1]


def test_other_traces_follow_the_first_and_memory() -> None:
    math = [{**one, "trace": "math"} for one in TOGETHER]
    told = sentences([*TOGETHER, *math])
    assert [said.split(",")[0] for said in told if "a step spends" in said] == ["Video", "Math"]


def test_transfer_queue_is_in_a_comparison_in_which_nobody_has_dedup() -> None:
    queued = [
        run(plane, "video", 4, [9.0, seconds], dedup=False, apart=True)
        for plane, seconds in (("dataplane", 2.0), ("transfer_queue", 20.0))
    ]
    told = sentences([*TOGETHER, *queued])
    assert told[:2] == sentences(TOGETHER)[:2]
    assert told[-2] == (
        "Video, 4 hosts, links of 400mbit, dedup off: a step spends 2 s in dataplane and 20 s in "
        "TransferQueue if rollout has hosts of its own."
    )


@pytest.mark.parametrize("installed", [True, False])
def test_the_headline_runs_transfer_queue_where_it_is_installed(
    installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[Planned] = []

    def carry_out(plan: list[Planned], *_: object) -> int:
        planned.extend(plan)
        return 0

    packages = ("numpy",) if installed else ("no-such-package",)
    monkeypatch.setattr(PLANES["transfer_queue"], "packages", packages)
    monkeypatch.setattr(headline, "carry_out", carry_out)
    assert main(["headline"]) == 0
    queued = [(job.trace, job.apart) for job, plane, _ in planned if plane == "transfer_queue"]
    both = [(trace, apart) for trace in ("video", "math") for apart in (True, False)]
    assert queued == (both if installed else [])
    for job, _, dedup in (one for one in planned if one[1] == "transfer_queue"):
        beside = {plane for other, plane, way in planned if (other, way) == (job, dedup)}
        assert beside == {"dataplane", "controller-stream", "transfer_queue"} and not dedup


def test_where_we_lose_is_said_with_its_figures() -> None:
    loopback: dict[str, Any] = {"link": None, "full_step": None}
    slow = run("dataplane", "math", 2, [1.0, 0.4], **loopback)
    fast = run("controller", "math", 2, [1.0, 0.1], **loopback)
    assert sentences([*TOGETHER, slow, fast])[-1] == (
        "Where we lose: a math step on 2 hosts with no limit on links takes 0.4 s in "
        "dataplane and 0.1 s in a controller with barriers (4.0 × as long)."
    )


def test_memory_is_told_by_dedup_with_the_fate_of_each_plane() -> None:
    limit: dict[str, Any] = {"memory_limit_bytes": 3 * GIB, "prompts": 16, "link": None}
    needed = {"peak_host_bytes": [2 * GIB, GIB]}
    runs = [
        run("dataplane", "video", 2, [1.0], **limit, **needed),
        run("controller", "video", 2, [1.0], **limit, **needed),
        run("dataplane", "video", 2, [1.0], **limit, **needed, **{"dedup": False}),
        run("controller", "video", 2, [], **limit, **{"dedup": False, "status": "oom"}),
        run("dataplane", "video", 2, [1.0], **limit, **needed, **{"phased": True}),
    ]
    assert sentences(runs)[0] == (
        "Under 3 GiB a host, with 16 video prompts: with dedup on dataplane needed 2 GiB, a "
        "controller with barriers needed 2 GiB and dataplane needed 2 GiB where no stage overlaps "
        "rollout; with dedup off dataplane needed 2 GiB and a controller with barriers was killed "
        "by the kernel."
    )
    unmeasured = [{**one, "status": "not run", "error": "no cgroup"} for one in runs]
    assert sentences(unmeasured)[0] == "Memory was not measured: no cgroup."


def test_a_plane_that_failed_is_named_beside_those_that_finished() -> None:
    before = {"status": "error", "error": "as well", "step_seconds": []}
    failed = {"status": "error", "error": "ProcessDied: a\nlog", "failed_before": before}
    told = sentences([{**TOGETHER[0], **failed}, *TOGETHER[1:]])[0]
    assert "spends 10 s in a streaming controller and 22 s in a controller" in told
    assert told.endswith(
        "Dataplane has no figure if every host has every stage: its run ended with 'error' "
        "twice (ProcessDied: a)."
    )
    nobody = sentences([{**one, **failed} for one in TOGETHER])
    assert "spends no time that was measured" in nobody[0]
    assert nobody[-1] == "In no job of this set was a controller faster."
