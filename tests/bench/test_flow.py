"""The flow of a step: who puts what when, what is dropped, and what a paced run is held against."""

from __future__ import annotations

from typing import Any

import pytest

from bench.columns import group_bytes, rollout_fields
from bench.pace import OPTIMISER_SECONDS, TRAIN_SECONDS, ideal_seconds
from bench.planes import PLANES
from bench.planes.base import Job, Plane
from bench.run import Settings, execute
from bench.schedule import Piece, schedule
from bench.traces import Prompt


def job(trace: str, **changes: Any) -> Job:
    told = {"prompts": 8, "seed": 0, "hosts": 2, "trainers": 2, "dedup": True, "columns": "needed"}
    told |= {"arena_bytes": 0, "folder": "/nowhere", "parent": 0, **changes}
    return Job(trace=trace, **told)


def kinds(pieces: list[Piece], prompt: Prompt) -> list[str]:
    return [piece.kind for piece in pieces if piece.prompt is prompt]


def test_groups_of_one_turn_are_put_whole_when_their_slowest_row_is_done() -> None:
    told = job("straggler")
    pieces = schedule(told, told.generate(), takes_pieces=True)
    assert {piece.kind for piece in pieces} == {"group"}
    ends = [max(s.rollout_seconds for s in piece.prompt.samples) for piece in pieces]
    assert [piece.at for piece in pieces] == sorted(ends)


def test_sessions_are_opened_grow_and_finish_row_by_row() -> None:
    told = job("search")
    pieces = schedule(told, told.generate(), takes_pieces=True)
    assert [piece.at for piece in pieces] == sorted(piece.at for piece in pieces)
    for prompt in told.generate():
        of_it = kinds(pieces, prompt)
        several = sum(len(sample.turns) > 1 for sample in prompt.samples)
        assert of_it[0] == "open"
        assert (of_it.count("grow"), of_it.count("row")) == (several, 8)
        rows = {
            piece.samples[0] for piece in pieces if (piece.prompt, piece.kind) == (prompt, "row")
        }
        assert rows == set(range(8))


def test_a_plane_that_takes_whole_groups_gets_whole_groups() -> None:
    told = job("search", abort=0.5)
    pieces = schedule(told, told.generate(), takes_pieces=False)
    for prompt in told.generate():
        expected = "abort" if told.fate(prompt) == "aborted" else "group"
        assert kinds(pieces, prompt) == [expected]


def test_a_group_is_aborted_after_its_first_row_and_before_its_second() -> None:
    told = job("math", abort=0.5)
    pieces = schedule(told, told.generate(), takes_pieces=True)
    fates = {prompt.index: told.fate(prompt) for prompt in told.generate()}
    assert set(fates.values()) == {"aborted", "trained"}
    for prompt in told.generate():
        of_it = kinds(pieces, prompt)
        assert ("abort" in of_it) == (fates[prompt.index] == "aborted")
        assert "abort" not in of_it or of_it[:4] == ["open", "row", "abort", "row"]


def test_a_share_of_groups_is_aborted_and_a_third_of_open_math_survives() -> None:
    many = job("math_open", prompts=600, abort=0.1)
    fates = [many.fate(prompt) for prompt in many.generate()]
    assert 0.06 < fates.count("aborted") / 600 < 0.14
    assert 0.2 < fates.count("trained") / 600 < 0.36
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


PIECES = ["dataplane", "controller"]


def run(plane: str, trace: str, **changes: Any) -> dict[str, Any]:
    settings = Settings(trace=trace, planes=(plane,), timeout_s=90, **changes)
    told = execute(settings, plane, True, lambda rows, expected: None)
    assert (told["status"], told["error"]) == ("ok", "")
    return told


@pytest.mark.parametrize("plane", PIECES)
def test_dynamic_sampling_drops_groups_and_the_rest_is_trained(plane: str) -> None:
    told = run(plane, "math_open", prompts=12, steps=2)
    assert told["rows_dropped"]["filtered"] > 0 < told["rows"]
    assert told["rows"] + told["rows_dropped"]["filtered"] == 12 * 2 * 8
    assert told["rows"] == told["rows_expected"]


@pytest.mark.parametrize("plane", PIECES)
def test_who_puts_rows_of_a_cancelled_group_is_told(plane: str) -> None:
    # A cancelled group counts as dropped only when its producer was told so.
    told = run(plane, "search", prompts=12, abort=0.3)
    assert told["rows_dropped"]["aborted"] > 0
    assert told["rows"] + told["rows_dropped"]["aborted"] == 12 * 8


@pytest.mark.parametrize("plane", PIECES)
def test_media_of_a_group_that_grows_are_put_once(plane: str) -> None:
    told = run(plane, "image_open", prompts=8, hosts=1, abort=0.2)
    assert told["rows_dropped"]["aborted"] > 0
    assert told["moved"]["copied_in"] < 1.6 * told["bytes_unique"]


@pytest.mark.parametrize("plane", PIECES)
def test_all_tensor_parallel_ranks_get_the_batches_of_their_trainer(plane: str) -> None:
    told = run(plane, "image_open", prompts=4, trainers=1, tp=3)
    trainers = [name for name in told["workers"] if name.startswith("train-")]
    assert len(trainers) == 3
    pulled = told["pulled_bytes"]
    assert len(pulled) == 2 and sum(pulled) == told["moved"]["across"] > 0


def test_values_that_cross_with_a_grant_are_counted() -> None:
    """They are not read from there, being small; and the only trainer is on the other host."""
    told = run("dataplane", "math_open", prompts=12, trainers=1)
    flow = job("math_open", prompts=12)
    fields = rollout_fields(flow.task, "all")
    crossing = [p for p in flow.generate() if p.index % 2 and flow.fate(p) == "trained"]
    assert crossing
    assert told["pulled_bytes"][0] >= sum(group_bytes(fields, p, dedup=True) for p in crossing)


def test_a_host_pulls_a_batch_once_for_all_its_ranks() -> None:
    alone = run("dataplane", "image_open", prompts=4, trainers=1)
    many = run("dataplane", "image_open", prompts=4, trainers=1, tp=4)
    # Reward and reference workers of the other host may take what was put here, or not.
    assert sum(many["pulled_bytes"]) < 2 * many["bytes_unique"]
    assert max(alone["pulled_bytes"]) < alone["bytes_unique"]
    assert max(many["pulled_bytes"]) < many["bytes_unique"]


def test_a_paced_run_takes_at_least_its_recorded_time() -> None:
    told = run("dataplane", "search", prompts=4, steps=2, pace=40.0)
    assert 0 < told["paced_seconds"] <= told["seconds"]
    assert told["plane_share"] == pytest.approx(1 - told["paced_seconds"] / told["seconds"])


def test_a_plane_that_cannot_fan_out_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PLANES["controller"], "fans_out", False)
    settings = Settings(trace="math", planes=("controller",), prompts=1, tp=2)
    told = execute(settings, "controller", False, lambda rows, expected: None)
    assert told["status"] == "error" and "leave --tp out" in told["error"]


def test_planes_take_whole_groups_unless_they_say_otherwise() -> None:
    assert not Plane.pieces and not Plane.fans_out
