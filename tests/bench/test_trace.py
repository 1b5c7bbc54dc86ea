"""The generator against the figures of the suite. Tolerances are five standard errors."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bench.columns import group_bytes, rollout_fields, shape_of, stage_fields, value_bytes
from bench.trace import TASKS, VIDEO_CLUSTERS, Prompt, gamma_quantile, generate

PROMPTS = 4000
SIGMAS = 5


@pytest.fixture(scope="module")
def video() -> list[Prompt]:
    return generate(TASKS["video"], PROMPTS, seed=7)


@pytest.fixture(scope="module")
def maths() -> list[Prompt]:
    return generate(TASKS["math"], PROMPTS, seed=7)


def responses(prompts: list[Prompt]) -> np.ndarray:
    return np.array([prompt.response_tokens for prompt in prompts], float)


def quantile_is(values: np.ndarray, share: float, expected: float, effective: float) -> bool:
    """Is the share of values below `expected` what it should be, up to the sampling error?"""
    error = SIGMAS * math.sqrt(share * (1 - share) / effective)
    return abs(float((values <= expected).mean()) - share) <= error


def test_the_same_seed_gives_the_same_trace_and_another_seed_another() -> None:
    task = TASKS["video"]
    assert generate(task, 20, 1) == generate(task, 20, 1)
    assert generate(task, 20, 1) != generate(task, 20, 2)


def test_a_smaller_trace_is_the_beginning_of_a_larger_one() -> None:
    for task in TASKS.values():
        assert generate(task, 5, 0) == generate(task, 9, 0)[:5]


def test_groups_have_the_tasks_number_of_samples(video: list[Prompt], maths: list[Prompt]) -> None:
    assert {len(prompt.response_tokens) for prompt in video} == {8}
    assert {len(prompt.response_tokens) for prompt in maths} == {16}


def test_video_clusters_come_in_their_shares(video: list[Prompt]) -> None:
    for share, tokens, clip in VIDEO_CLUSTERS:
        of_it = [prompt for prompt in video if prompt.prompt_tokens == tokens]
        assert all(prompt.clip == clip for prompt in of_it)
        error = SIGMAS * math.sqrt(share * (1 - share) / PROMPTS)
        assert abs(len(of_it) / PROMPTS - share) < error


def test_clips_have_the_measured_rows_and_bytes() -> None:
    clips = [clip for _, _, clip in VIDEO_CLUSTERS]
    assert [clip.pixel_rows for clip in clips] == [1920, 3840, 11_592, 14_904, 16_560]
    assert [round(clip.pixel_bytes / 1e6, 1) for clip in clips] == [9.0, 18.1, 54.5, 70.1, 77.9]
    assert [round(clip.frame_bytes / 1e6, 1) for clip in clips] == [12.2, 24.3, 54.5, 70.1, 77.9]


def test_a_video_prompt_carries_115_megabytes_of_media_on_average(video: list[Prompt]) -> None:
    megabytes = [(p.clip.pixel_bytes + p.clip.frame_bytes) / 1e6 for p in video if p.clip]
    error = SIGMAS * np.std(megabytes) / math.sqrt(PROMPTS)
    assert abs(np.mean(megabytes) - 115) < error


def test_video_responses_follow_their_lognormal(video: list[Prompt]) -> None:
    lengths = responses(video)
    # Samples of one prompt share .11 of the variance: fewer independent draws than rows.
    effective = lengths.size / (1 + 7 * 0.11)
    for z, share in ((-1.0, 0.15866), (0.0, 0.5), (1.0, 0.84134), (2.0, 0.97725)):
        assert quantile_is(lengths + 1, share, math.exp(5.06 + 0.35 * z) + 0.5, effective)
    runaways = int((lengths == 16_000).sum())
    expected = 0.0003 * lengths.size
    assert abs(runaways - expected) < SIGMAS * math.sqrt(expected)


def test_math_prompts_and_responses_have_the_stated_moments(maths: list[Prompt]) -> None:
    prompts = np.array([prompt.prompt_tokens for prompt in maths])
    assert abs(prompts.mean() - 141) < SIGMAS * prompts.std() / math.sqrt(PROMPTS)
    lengths = responses(maths)
    effective = lengths.size / (1 + 15 * 0.30)
    stated_mean, rounding = 9_600, 50
    assert abs(lengths.mean() - stated_mean) < rounding + SIGMAS * lengths.std() / effective**0.5
    assert lengths.max() <= 32_000
    assert quantile_is(lengths, 0.99, 28_900, effective)


@pytest.mark.parametrize("name", TASKS)
def test_prompts_explain_their_share_of_the_log_length_variance(
    name: str, request: pytest.FixtureRequest
) -> None:
    lengths = responses(request.getfixturevalue({"video": "video", "math": "maths"}[name]))
    logs = np.log(np.where(lengths == 16_000, np.nan, lengths))
    within = np.nanvar(logs, axis=1, ddof=1).mean()
    share = 1 - within / np.nanvar(logs)
    # The share's own standard error, and for the gamma the difference between its logarithm and
    # the normal variable that carries the correlation.
    assert abs(share - TASKS[name].between) < SIGMAS * math.sqrt(2 / PROMPTS) + 0.02


def test_gamma_quantiles_match_draws_of_numpys_gamma() -> None:
    draws = np.random.default_rng(0).gamma(2.438, size=100_000)
    for share in (0.01, 0.25, 0.5, 0.9, 0.99):
        expected = float(gamma_quantile(2.438, np.array([share]))[0])
        assert quantile_is(draws, share, expected, draws.size)


def test_text_fields_have_the_shapes_of_a_verl_row(video: list[Prompt]) -> None:
    prompt = video[0]
    response = prompt.response_tokens[3]
    total = prompt.prompt_tokens + response
    shapes = {field.name: shape_of(field, prompt, 3) for field in rollout_fields(TASKS["video"])}
    assert prompt.clip is not None
    assert shapes["input_ids"] == shapes["attention_mask"] == (total,)
    assert shapes["position_ids"] == (3, total)
    assert shapes["responses"] == shapes["old_log_probs"] == (response,)
    assert shapes["pixel_values"] == (prompt.clip.pixel_rows, 1176)


def test_dedup_counts_the_media_of_a_group_once(video: list[Prompt]) -> None:
    fields = rollout_fields(TASKS["video"])
    media = sum(
        value_bytes(f, video[0], 0) for f in fields if f.name in ("pixel_values", "raw_frames")
    )
    difference = group_bytes(fields, video[0], False) - group_bytes(fields, video[0], True)
    assert difference == 7 * media


def test_needed_columns_leave_frames_and_other_stages_fields_behind() -> None:
    needed, everything = (stage_fields(TASKS["video"], choice) for choice in ("needed", "all"))
    assert "raw_frames" not in needed["train"] and "raw_frames" in everything["reward"]
    assert "pixel_values" not in needed["reward"]
    for fields in (needed, everything):
        assert {"reward", "token_level_scores"} <= set(fields["train"])
        assert "uid" in fields["reward"]
