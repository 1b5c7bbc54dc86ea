"""The generator against the figures of the suite, written here once more from their source.

Tolerances are five standard errors. Where a form is stated, one sample of each prompt (they are
independent of each other) is held against it by the Kolmogorov-Smirnov distance.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import pytest

from bench.traces import TASKS, Prompt, Turn, generate
from bench.traces.distributions import gamma_quantile

PROMPTS = 2000
SIGMAS = 5
# The distance that one sample in a million exceeds (Massart's bound).
KS_LIMIT = math.sqrt(math.log(2e6) / (2 * PROMPTS))


@cache
def trace(name: str) -> list[Prompt]:
    return generate(TASKS[name], PROMPTS, seed=7)


def prompt_tokens(name: str) -> np.ndarray:
    return np.array([prompt.prompt_tokens for prompt in trace(name)], float)


def one_of_each(name: str) -> np.ndarray:
    """Tokens that the model wrote in the first sample of each prompt."""
    return np.array([sum(t.tokens for t in p.samples[0].turns) for p in trace(name)], float)


def responses(name: str) -> np.ndarray:
    return np.array([prompt.response_tokens for prompt in trace(name)], float)


def share_is(hits: np.ndarray, expected: float) -> bool:
    """Is the share of hits what it should be, up to five standard errors? Independent draws."""
    error = SIGMAS * math.sqrt(expected * (1 - expected) / len(hits))
    return abs(float(hits.mean()) - expected) <= error


def quantile_is(values: np.ndarray, share: float, expected: float) -> bool:
    """Values are whole numbers: the quantile may lie within the rounding."""
    error = SIGMAS * math.sqrt(share * (1 - share) / len(values))
    below = float((values <= expected - 1).mean()), float((values <= expected + 1).mean())
    return below[0] - error <= share <= below[1] + error


def distance(values: np.ndarray, cdf: Callable[[np.ndarray], np.ndarray]) -> float:
    """Kolmogorov-Smirnov, at the whole numbers: all mass of the number n lies below n + 1/2."""
    numbers, counts = np.unique(values, return_counts=True)
    return float(np.abs(np.cumsum(counts) / len(values) - cdf(numbers + 0.5)).max())


def normal_cdf(z: np.ndarray) -> np.ndarray:
    return np.array([0.5 * (1 + math.erf(x / math.sqrt(2))) for x in z])


def lognormal_cdf(mu: float, sigma: float, loc: float = 0.0) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: normal_cdf((np.log(np.maximum(x - loc, 1e-9)) - mu) / sigma)


# task: mu, sigma, shift and cap of the stated lognormal
PROMPT_FORMS = {
    "math": (math.log(80.1), 0.532, 48.4, 10**9),
    "math_open": (5.04, 0.29, 0.0, 617),
    "programming": (6.02, 0.59, 0.0, 1_777),
}
RESPONSE_FORMS = {
    "tool_use": (math.log(767), 0.822, 4.9, 32_000),
    "video": (5.06, 0.35, 0.0, 16_000),
    "math_open": (6.04, 0.93, 0.0, 32_768),
    "programming": (8.90, math.hypot(0.77, 0.22), 0.0, 16_000),
    "image": (math.log(2000), 0.9, 0.0, 16_384),
    "image_open": (math.log(200), 0.5, 0.0, 2_048),
}


@pytest.mark.parametrize("name", PROMPT_FORMS)
def test_prompt_lengths_have_their_stated_form(name: str) -> None:
    mu, sigma, loc, cap = PROMPT_FORMS[name]
    lengths = prompt_tokens(name)
    assert lengths.max() <= cap
    assert distance(lengths[lengths < cap], lognormal_cdf(mu, sigma, loc)) < KS_LIMIT + 0.01


@pytest.mark.parametrize("name", RESPONSE_FORMS)
def test_response_lengths_have_their_stated_form_up_to_the_cap(name: str) -> None:
    mu, sigma, loc, cap = RESPONSE_FORMS[name]
    lengths, cdf = one_of_each(name), lognormal_cdf(mu, sigma, loc)

    def capped(x: np.ndarray) -> np.ndarray:
        return np.where(x > cap, 1.0, cdf(x))

    assert lengths.max() <= cap
    # A session has at least one token a turn, and .03 % of the videos run away.
    assert distance(lengths, capped) < KS_LIMIT + 0.002


def test_math_responses_are_the_stated_gamma() -> None:
    lengths = one_of_each("math")
    draws = np.sort(195 + 3847 * np.random.default_rng(0).gamma(2.438, size=400_000))
    draws[draws > 32_000] = 32_000
    assert lengths.max() <= 32_000
    assert distance(lengths, lambda x: np.searchsorted(draws, x) / len(draws)) < KS_LIMIT + 0.002
    assert abs(lengths.mean() - 9_600) < 50 + SIGMAS * lengths.std() / math.sqrt(PROMPTS)
    assert quantile_is(lengths, 0.99, 28_900)
    prompts = prompt_tokens("math")
    assert abs(prompts.mean() - 141) < 1 + SIGMAS * prompts.std() / math.sqrt(PROMPTS)


def test_normal_prompts_have_their_means_and_spreads() -> None:
    for name, mean, sigma in (("tool_use", 250, 30), ("search", 318, 2)):
        lengths = prompt_tokens(name)
        assert abs(lengths.mean() - mean) < SIGMAS * sigma / math.sqrt(PROMPTS)
        rounded = math.sqrt(sigma**2 + 1 / 12)
        assert abs(lengths.std() / rounded - 1) < SIGMAS / math.sqrt(2 * PROMPTS)


TURNS = {
    "tool_use": (0.019, 0.078, 0.432, 0.073, 0.203, 0.143, 0.038, 0.008, 0.003, 0.004),
    "search": (0.072, 0.430, 0.342, 0.106, 0.049),
}


@pytest.mark.parametrize("name", TURNS)
def test_sessions_have_their_numbers_of_turns(name: str) -> None:
    turns = np.array([len(s.turns) for p in trace(name) for s in p.samples])
    total = sum(TURNS[name])
    assert turns.max() == len(TURNS[name])
    for number, share in enumerate(TURNS[name], 1):
        assert share_is(turns == number, share / total)


@pytest.mark.parametrize("name", sorted(set(TASKS) - set(TURNS)))
def test_other_tasks_have_one_turn_and_no_tools(name: str) -> None:
    for prompt in trace(name)[:200]:
        for sample in prompt.samples:
            (turn,) = sample.turns
            assert turn.tool_tokens == turn.tool_seconds == 0


def calls(name: str) -> list[Turn]:
    """The first turn of one session of each prompt, where it called a tool."""
    return [p.samples[0].turns[0] for p in trace(name) if len(p.samples[0].turns) > 1]


def test_tools_answer_with_the_stated_lengths_and_latencies() -> None:
    use, search = calls("tool_use"), calls("search")
    texts = np.array([turn.tool_tokens for turn in use])
    assert abs(texts.mean() - 470) < SIGMAS * 60 / math.sqrt(len(texts))
    assert abs(texts.std() / 60 - 1) < SIGMAS / math.sqrt(2 * len(texts))
    latencies = np.array([turn.tool_seconds for turn in use])
    assert share_is(latencies <= 0.16, 0.5) and share_is(latencies <= 2.7, 0.99)
    texts = np.array([turn.tool_tokens for turn in search])
    assert quantile_is(texts, 0.5, 521) and quantile_is(texts, 0.99, 1_467)
    latencies = np.array([turn.tool_seconds for turn in search])
    for share, seconds in ((0.5, 0.161), (0.9, 1.13), (0.99, 2.69)):
        assert share_is(latencies <= seconds, share)
    assert latencies.max() <= 3.8


def test_search_turns_are_short_until_the_last_and_a_session_ends_at_its_cap() -> None:
    first = np.array([turn.tokens for turn in calls("search")])
    assert quantile_is(first, 0.5, 34) and quantile_is(first, 0.99, 453)
    alone = [p.samples[k].turns for p in trace("search") for k in range(8)]
    last = np.array([turns[-1].tokens for turns in alone if len(turns) == 1])
    assert quantile_is(last, 0.5, 83) and quantile_is(last, 0.99, 318)
    assert responses("search").max() == 3_000


VIDEOS = {  # prompt tokens: share, pixel rows, MB of pixel values
    550: (0.011, 1_920, 9.0),
    1_063: (0.294, 3_840, 18.1),
    2_500: (0.011, 11_592, 54.5),
    3_830: (0.336, 14_904, 70.1),
    4_245: (0.348, 16_560, 77.9),
}


def test_videos_come_in_their_clusters_with_the_measured_bytes() -> None:
    lengths = prompt_tokens("video")
    assert set(lengths) == set(VIDEOS)
    for tokens, (share, rows, pixels) in VIDEOS.items():
        assert share_is(lengths == tokens, share)
        of_it = {p.media[0].grid: p.media for p in trace("video") if p.prompt_tokens == tokens}
        ((example,),) = of_it.values()
        assert example.pixel_rows == rows
        assert round(example.pixel_bytes / 1e6, 1) == pixels
    megabytes = np.array([p.media_bytes for p in trace("video")]) / 1e6
    assert abs(megabytes.mean() - 56.7) < SIGMAS * megabytes.std() / math.sqrt(PROMPTS)


def test_videos_run_away_rarely_and_from_step_21_on_in_the_tail() -> None:
    lengths = responses("video")
    expected = 0.0003 * lengths.size
    assert abs(int((lengths == 16_000).sum()) - expected) < SIGMAS * math.sqrt(expected)
    steps = generate(TASKS["video"], 400, seed=3, steps=23)
    late = np.array([p.samples[0].tokens for p in steps if p.step >= 21])
    early = np.array([p.samples[0].tokens for p in steps if p.step < 21])
    assert 316 <= np.quantile(early, 0.99) < 400
    assert share_is(late > 2_400, 0.01) and share_is(late > 1_000, 0.02 * 0.928)


def test_image_prompts_have_the_stated_images() -> None:
    counts = np.array([len(p.media) for p in trace("image")])
    for number, share in enumerate((0.80, 0.07, 0.07, 0.02), 1):
        assert share_is(counts == number, share)
    assert share_is(counts > 4, 0.04) and counts.max() <= 9
    images = [p.media[0] for p in trace("image")]
    tokens = np.array([medium.visual_tokens for medium in images])
    # A grid has whole sides: up to 2 % of the tokens fall away.
    assert 690 * 0.95 < np.median(tokens) < 690 * 1.05
    assert 1_222 * 0.97 < np.quantile(tokens, 0.9) < 1_222 * 1.02
    assert tokens.max() <= 1_280
    megabytes = np.array([medium.pixel_bytes for medium in images]) / 1e6
    assert abs(megabytes.mean() - 12.9) < 0.15 + SIGMAS * megabytes.std() / math.sqrt(PROMPTS)
    text = prompt_tokens("image") - [sum(m.visual_tokens for m in p.media) for p in trace("image")]
    assert quantile_is(text, 0.5, 106) and quantile_is(text, 0.9, 2_000)


def test_open_images_have_one_of_256_to_800_tokens_and_bounded_prompts() -> None:
    for prompt in trace("image_open"):
        (image,) = prompt.media
        assert 250 <= image.visual_tokens <= 800
        assert 4.6e6 < image.pixel_bytes < 15.1e6
        assert prompt.prompt_tokens <= 4_096


def test_grids_have_even_sides_of_moderate_proportion() -> None:
    for prompt in trace("image")[:500]:
        for _, high, wide in (medium.grid for medium in prompt.media):
            assert high % 2 == wide % 2 == 0
            assert prompt.media[0].visual_tokens < 64 or max(high, wide) < 4 * min(high, wide)


BETWEEN = {"video": 0.11, "math_open": 0.08, "programming": 0.93, "image": 0.3, "straggler": 0.3}


@pytest.mark.parametrize("name", BETWEEN)
def test_prompts_explain_their_share_of_the_log_length_variance(name: str) -> None:
    response = dataclasses.replace(TASKS[name].response, cap=1 << 40)  # which hides differences
    task = dataclasses.replace(TASKS[name], response=response, tails=())
    logs = np.log([prompt.response_tokens for prompt in generate(task, PROMPTS, seed=7)])
    within = logs.var(axis=1, ddof=1).mean()
    between = 1 - within / logs.var()
    assert (
        abs(between - BETWEEN[name]) < SIGMAS * math.sqrt(2 / PROMPTS) * (1 - BETWEEN[name]) + 0.01
    )


def test_a_seventh_of_the_programs_reaches_the_cap() -> None:
    assert 0.13 < (responses("programming") == 16_000).mean() < 0.18  # .15 as measured


def test_stragglers_are_ten_times_the_median() -> None:
    lengths = one_of_each("straggler")
    median = float(np.median(lengths))
    assert quantile_is(lengths, 0.5, 1_000) and quantile_is(lengths, 0.99, 10_000)
    assert 8 < np.quantile(lengths, 0.99) / median < 12


def test_a_third_of_the_open_math_groups_survives_dynamic_sampling() -> None:
    survived = np.array([prompt.survives for prompt in trace("math_open")])
    assert 0.28 < survived.mean() < 0.35
    assert np.array([p.survives for p in trace("math")]).mean() > 0.99


def test_rewards_of_programs_take_37_to_125_seconds_a_64_rows() -> None:
    for name, low, high in (("programming", 37, 125), ("math", 0, 1)):
        blocks = [64 * sample.reward_seconds for prompt in trace(name) for sample in prompt.samples]
        assert low <= min(blocks) and max(blocks) <= high
    first = {sample.reward_seconds for p in trace("programming")[:8] for sample in p.samples}
    assert len(first) == 1  # they are scored in one block
    assert len({p.samples[0].reward_seconds for p in trace("programming")}) == PROMPTS // 8


SIZES = {
    "image": (512, 8),
    "math": (256, 16),
    "tool_use": (256, 16),
    "video": (64, 8),
    "math_open": (96, 8),
    "programming": (16, 8),
    "search": (256, 8),
    "image_open": (512, 5),
}


def test_steps_have_the_stated_groups_of_the_stated_size() -> None:
    assert SIZES.keys() | {"straggler"} == TASKS.keys()
    for name, (prompts, samples) in SIZES.items():
        assert (TASKS[name].prompts, TASKS[name].samples) == (prompts, samples)
        assert {len(prompt.samples) for prompt in trace(name)} == {samples}


@pytest.mark.parametrize("name", TASKS)
def test_the_same_seed_gives_the_same_trace_and_another_seed_another(name: str) -> None:
    task = TASKS[name]
    assert generate(task, 20, 1, 2) == generate(task, 20, 1, 2)
    assert generate(task, 20, 1) != generate(task, 20, 2)


@pytest.mark.parametrize("name", TASKS)
def test_a_smaller_step_is_the_beginning_of_a_larger_one(name: str) -> None:
    task = TASKS[name]
    assert generate(task, 5, 0) == generate(task, 9, 0)[:5]
    first, second = generate(task, 3, 0, 2)[3:], generate(task, 4, 0, 2)[4:7]
    assert [p.samples for p in first] == [p.samples for p in second]
    assert [p.index for p in generate(task, 3, 0, 2)] == list(range(6))


def test_media_are_told_apart_by_their_content() -> None:
    contents: Sequence[int] = [
        m.content for p in generate(TASKS["image"], 50, 0, 3) for m in p.media
    ]
    assert len(set(contents)) == len(contents)


def test_gamma_quantiles_match_draws_of_numpys_gamma() -> None:
    draws = np.random.default_rng(0).gamma(2.438, size=100_000)
    for share in (0.01, 0.25, 0.5, 0.9, 0.99):
        expected = float(gamma_quantile(2.438, np.array([share]))[0])
        assert share_is(draws <= expected, share)
