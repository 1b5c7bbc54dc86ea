"""Seeded traces of a task. A prompt depends only on (seed, task, its index and its step), so that
a run of fewer prompts a step is drawn from the same, and contents are known by their numbers.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from bench.traces.sample import Medium, Prompt, Sample, Turn
from bench.traces.tasks import TOKEN_SECONDS, Images, Task, Tools

_BLOCK_ROWS = 64  # that reward times are stated for
_ROUND_SIDE = 0.6  # a grid's shorter side, at least, of the square's
# A medium's content is known by one number of 63 bits: of its step, its prompt and itself.
_NUMBER_BITS, _MEDIUM_BITS = 32, 8
MOST_PROMPTS = 1 << _NUMBER_BITS
MOST_STEPS = 1 << 63 - _NUMBER_BITS - _MEDIUM_BITS
_REWARDS_STREAM = MOST_PROMPTS  # beyond every prompt's number


def generate(task: Task, prompts: int, seed: int, steps: int = 1) -> list[Prompt]:
    """`prompts` prompts of the task in each of `steps` steps, the same for the same seed."""
    return list(drawn(task, prompts, seed, steps))


def drawn(task: Task, prompts: int, seed: int, steps: int) -> Iterator[Prompt]:
    """Like `generate`, but yields the prompts one by one."""
    for step in range(steps):
        for number in range(prompts):
            yield draw(task, seed, step, step * prompts + number, number)


def draw(task: Task, seed: int, step: int, index: int, number: int) -> Prompt:
    """One prompt, the `number`-th of its step."""
    rng = np.random.default_rng((seed, task.number, number, step))
    content = (step << _NUMBER_BITS | number) << _MEDIUM_BITS
    tokens, media = _prompt(task, rng, content)
    lengths = _lengths(task, step, rng)
    rewards = _rewards(task, rng)
    seconds = _reward_seconds(task, seed, step, number)
    samples = (
        Sample(_turns(task, int(length), rng), float(reward), seconds)
        for length, reward in zip(lengths, rewards, strict=True)
    )
    return Prompt(index, step, tokens, tuple(samples), media)


def _lengths(task: Task, step: int, rng: np.random.Generator) -> NDArray[np.int64]:
    # One normal variable a response, of which `between` of the variance is the prompt's own.
    common = math.sqrt(task.between) * rng.standard_normal()
    normals = common + math.sqrt(1 - task.between) * rng.standard_normal(task.samples)
    lengths = task.response.at(normals)
    for tail in task.tails:
        chosen, other = rng.random(task.samples) < tail.share, rng.standard_normal(task.samples)
        if step >= tail.from_step:
            drawn = np.clip(tail.tokens.at(other), 1, task.response.cap).astype(np.int64)
            lengths = np.where(chosen, drawn, lengths)
    return lengths


def _prompt(task: Task, rng: np.random.Generator, content: int) -> tuple[int, tuple[Medium, ...]]:
    if task.videos:
        shares = tuple(cluster.share for cluster in task.videos)
        cluster = task.videos[_one_of(shares, rng)]
        return cluster.prompt_tokens, (Medium(content, cluster.grid),)
    text = int(task.prompt.at(rng.standard_normal(1))[0])
    media = _images(task.images, rng, content) if task.images else ()
    return text + sum(medium.visual_tokens for medium in media), media


def _images(images: Images, rng: np.random.Generator, content: int) -> tuple[Medium, ...]:
    count = 1 + _one_of(images.counts, rng)
    tokens = images.visual_tokens.at(rng.standard_normal(count))
    return tuple(Medium(content + i, _grid(int(t), rng)) for i, t in enumerate(tokens))


def _grid(tokens: int, rng: np.random.Generator) -> tuple[int, int, int]:
    """Even sides whose 2 × 2 blocks are `tokens`, or a little less; either side is the longer."""
    side = math.isqrt(tokens)
    sides = range(max(1, math.ceil(_ROUND_SIDE * side)), side + 1)
    short = min(sides, key=lambda s: (tokens % s, -s))
    high, wide = 2 * short, 2 * (tokens // short)
    return (1, high, wide) if rng.random() < 0.5 else (1, wide, high)


def _turns(task: Task, length: int, rng: np.random.Generator) -> tuple[Turn, ...]:
    if task.tools is None:
        return (Turn(length, length * TOKEN_SECONDS),)
    tools = task.tools
    count = 1 + _one_of(tools.turns, rng)
    written = _written(tools, task, count, length, rng)
    texts = [*tools.text.at(rng.standard_normal(count - 1)), 0]
    waits = [*tools.seconds.at(rng.standard_normal(count - 1)), 0.0]
    turns, left = [], tools.session_cap
    for tokens, text, wait in zip(written, texts, waits, strict=True):
        tokens = min(int(tokens), left)
        left -= tokens
        text = min(int(text), left)
        left -= text
        turns.append(Turn(tokens, tokens * TOKEN_SECONDS, float(wait), text))
    return tuple(turns)


def _written(
    tools: Tools, task: Task, count: int, length: int, rng: np.random.Generator
) -> Sequence[int]:
    if tools.last_turn is None:  # a session's total, cut at random places
        length = max(length, count)
        spare = length - count  # each turn has one token at least
        cuts = [0, *sorted(rng.integers(0, spare + 1, count - 1).tolist()), spare]
        return [after - before + 1 for before, after in itertools.pairwise(cuts)]
    if count == 1:
        return [int(tools.last_turn.at(rng.standard_normal(1))[0])]
    others = task.response.at(rng.standard_normal(count - 2))
    return [length, *others, int(tools.last_turn.at(rng.standard_normal(1))[0])]


def _rewards(task: Task, rng: np.random.Generator) -> NDArray[np.float64]:
    rewards = rng.integers(0, 2, task.samples).astype(np.float64)
    if task.survive is None:
        return rewards
    rewards[0], rewards[-1] = 1.0, 0.0
    return rewards if rng.random() < task.survive else np.full(task.samples, rewards[1])


def _reward_seconds(task: Task, seed: int, step: int, number: int) -> float:
    """The seconds of one row: those of the block of 64 rows in which it is scored."""
    low, high = task.reward_seconds
    block = number * task.samples // _BLOCK_ROWS
    rng = np.random.default_rng((seed, task.number, step, _REWARDS_STREAM + block))
    return float(rng.uniform(low, high))


def _one_of(shares: tuple[float, ...], rng: np.random.Generator) -> int:
    # Much quicker than Generator.choice, which a session with tools would wait for.
    total = sum(shares)
    ends = [part / total for part in itertools.accumulate(shares[:-1])]
    return bisect.bisect_right(ends, rng.random())
