"""The sentences of the first screen, from runs alone."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from bench import headline
from bench.cli import main
from bench.headline import sentences
from bench.planes import PLANES
from bench.planes.base import Job

GIB = 1 << 30
FULL = {
    "prompts": 64, "recorded_seconds": 60.0, "link_bits_per_second": 100e9, "link_seconds": 0.5,
}  # fmt: skip


def run(plane: str, trace: str, hosts: int, steps: list[float], **told: Any) -> dict[str, Any]:
    return {
        "plane": plane, "trace": trace, "hosts": hosts, "step_seconds": steps, "status": "ok",
        "dedup": True, "link": "400mbit", "memory_limit_bytes": None, "prompts": hosts,
        "error": "", "peak_host_bytes": [], "apart": False, "phased": False,
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
        "The benchmark runs one video step on 6 hosts with 400 Mbit/s links. If rollout has its "
        "own hosts, the step's data takes 5 s through dataplane, 6 s through a streaming "
        "controller and 7 s through a controller with barriers. If every host runs every stage: "
        "0.4 s, 10 s and 22 s."
    )
    assert shares == (
        "In the trace, rollout and training of the step take 30 s. Moving data is 14% (dataplane), "
        "17% (a streaming controller) and 19% (a controller with barriers) of the step. If every "
        "host runs every stage: 1%, 25% and 42%."
    )
    assert computed == (
        "Computed for 64 prompts a step and 100 Gbit/s links: the busiest link is busy for 0.5 s "
        "(dataplane), 0.5 s (a streaming controller) and 0.5 s (a controller with barriers). If "
        "every host runs every stage: 0.5 s, 0.5 s and 0.5 s. Rollout and training take 60 s. At "
        "that rate links alone are no reason to choose a plane."
    )
    assert faster == "No controller was faster in any job of this set."


def test_small_transfers_hardly_matter() -> None:
    short = [{**one, "step_seconds": [0.1, 0.1, 0.1]} for one in TOGETHER]
    assert "Moving data is at most 0.3% of the step and hardly matters." in sentences(short)[1]


def test_other_traces_follow_the_first_and_memory() -> None:
    math = [{**one, "trace": "math"} for one in TOGETHER]
    told = sentences([*TOGETHER, *math])
    moved = [said.split()[4] for said in told if "the step's data takes" in said]
    assert moved == ["video", "math"]


def test_transfer_queue_is_in_a_comparison_in_which_nobody_has_dedup() -> None:
    queued = [
        run(plane, "video", 4, [9.0, seconds], dedup=False, apart=True)
        for plane, seconds in (("dataplane", 2.0), ("transfer_queue", 20.0))
    ]
    told = sentences([*TOGETHER, *queued])
    assert told[:2] == sentences(TOGETHER)[:2]
    assert told[-2] == (
        "The benchmark runs one video step on 4 hosts with 400 Mbit/s links, without dedup. If "
        "rollout has its own hosts, the step's data takes 2 s through dataplane and 20 s through "
        "TransferQueue."
    )


@pytest.mark.parametrize("installed", [True, False])
def test_the_headline_runs_transfer_queue_where_it_is_installed(
    installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[Job] = []

    def carry_out(plan: list[Job], *_: object) -> int:
        planned.extend(plan)
        return 0

    packages = ("numpy",) if installed else ("no-such-package",)
    monkeypatch.setattr(PLANES["transfer_queue"], "packages", packages)
    monkeypatch.setattr(headline, "carry_out", carry_out)
    assert main(["headline"]) == 0
    queued = [job for job in planned if job.plane == "transfer_queue"]
    both = [(trace, apart) for trace in ("video", "math") for apart in (True, False)]
    assert [(job.trace, job.apart) for job in queued] == (both if installed else [])
    for job in queued:
        beside = {other.plane for other in planned if replace(other, plane=job.plane) == job}
        assert beside == {"dataplane", "controller-stream", "transfer_queue"} and not job.dedup


def test_where_we_lose_is_said_with_its_figures() -> None:
    loopback: dict[str, Any] = {"link": None, "full_step": None}
    slow = run("dataplane", "math", 2, [1.0, 0.4], **loopback)
    fast = run("controller", "math", 2, [1.0, 0.1], **loopback)
    assert sentences([*TOGETHER, slow, fast])[-1] == (
        "Where dataplane is slower: math on 2 hosts with unlimited links if every host runs every "
        "stage (0.4 s, a controller with barriers 0.1 s)."
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
        "A step of 16 video prompts runs with 3 GiB of memory a host. With dedup, dataplane needed "
        "2 GiB (2 GiB if no stage overlaps rollout) and a controller with barriers needed 2 GiB. "
        "Without dedup, dataplane needed 2 GiB and a controller with barriers was killed by the "
        "kernel."
    )
    unmeasured = [{**one, "status": "not run", "error": "no cgroup"} for one in runs]
    assert sentences(unmeasured)[0] == "Memory was not measured: no cgroup."


def test_a_plane_that_failed_is_named_beside_those_that_finished() -> None:
    before = {"status": "error", "error": "as well", "step_seconds": []}
    failed = {"status": "error", "error": "ProcessDied: a\nlog", "failed_before": before}
    told = sentences([{**TOGETHER[0], **failed}, *TOGETHER[1:]])[0]
    assert "takes 10 s through a streaming controller and 22 s through a controller" in told
    assert told.endswith(
        "Dataplane has no figure if every host runs every stage: its run ended with 'error' "
        "twice (ProcessDied: a)."
    )
    nobody = sentences([{**one, **failed} for one in TOGETHER])
    assert "If every host runs every stage, no plane has a figure." in nobody[0]
    assert nobody[-1] == "No controller was faster in any job of this set."


def test_planes_are_named_again_if_others_finished_on_the_other_placement() -> None:
    failed = {**TOGETHER[1], "status": "oom", "step_seconds": []}
    told = sentences([*APART, TOGETHER[0], failed, TOGETHER[2]])[0]
    taken = "the step's data takes 0.4 s through dataplane and 22 s through a controller with"
    assert f"If every host runs every stage, {taken} barriers." in told
    shares = sentences([*APART, TOGETHER[0], failed, TOGETHER[2]])[1]
    assert shares.endswith(": 1% (dataplane) and 42% (a controller with barriers).")
