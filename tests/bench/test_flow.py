"""The flow of a step: who puts what when, what is dropped, and what a paced run is held against."""

from __future__ import annotations

from typing import Any

import pytest

from bench.columns import group_bytes, rollout_fields
from bench.pace import OPTIMISER_SECONDS, TRAIN_SECONDS, ideal_seconds
from bench.planes.base import Job
from bench.run import execute


def job(trace: str, **changes: Any) -> Job:
    return Job(plane="dataplane", trace=trace, **({"prompts": 8} | changes))


def test_a_third_of_open_math_survives() -> None:
    many = job("math_open", prompts=600)
    assert 0.2 < sum(map(many.is_trained, many.generate())) / 600 < 0.36
    assert many.phases() == (("reward",), ("reference",), ("train",))
    assert "reward" in many.stages()["reference"]


def test_the_ideal_run_is_the_slowest_row_then_what_follows_it() -> None:
    told = job("math", prompts=1, hosts=1, trainers=1, pace=2.0)
    (prompt,) = told.generate()
    slowest = max(sample.rollout_seconds for sample in prompt.samples)
    tokens = 16 * prompt.prompt_tokens + sum(prompt.response_tokens)
    scored = max(sum(s.reward_seconds for s in prompt.samples), 2e-5 * tokens)
    whole = slowest + scored + TRAIN_SECONDS * tokens + OPTIMISER_SECONDS
    assert ideal_seconds(told) == pytest.approx(whole / 2)
    assert ideal_seconds(job("math")) == 0  # nothing is waited for


def test_a_stale_policy_lets_rollout_run_on() -> None:
    ideal = [ideal_seconds(job("straggler", steps=6, staleness=k, pace=1.0)) for k in (0, 1, 2)]
    assert ideal[0] > ideal[1] >= ideal[2]


def run(plane: str, trace: str, **changes: Any) -> dict[str, Any]:
    job = Job(plane=plane, trace=trace, timeout_s=90, **changes)
    told = execute(job, lambda rows, expected: None)
    assert (told["status"], told["error"]) == ("ok", "")
    return told


@pytest.mark.parametrize("plane", ["dataplane", "controller"])
def test_dynamic_sampling_drops_groups_and_the_rest_is_trained(plane: str) -> None:
    told = run(plane, "math_open", prompts=12, steps=2)
    assert told["rows_filtered"] > 0 < told["rows"]
    assert told["rows"] + told["rows_filtered"] == 12 * 2 * 8
    assert told["rows"] == told["rows_expected"]


def test_values_that_cross_with_a_grant_are_counted() -> None:
    """They are not read from there, being small; and the only trainer is on the other host."""
    told = run("dataplane", "math_open", prompts=12, trainers=1)
    flow = job("math_open", prompts=12)
    fields = rollout_fields(flow.task)
    crossing = [p for p in flow.generate() if p.index % 2 and flow.is_trained(p)]
    assert crossing
    assert told["pulled_bytes"][0] >= sum(group_bytes(fields, p, dedup=True) for p in crossing)


def test_a_paced_run_takes_at_least_its_recorded_time() -> None:
    told = run("dataplane", "search", prompts=4, steps=2, pace=40.0)
    assert 0 < 2 * told["recorded_step_seconds"] / 40 <= told["step_ends"][-1]
