"""Seeded traces: how long every prompt and response is, and what media a prompt carries.

The distributions are those of "RL in the Wild" (arXiv 2509.25279) and its PolyTrace suite, tasks
`video` and `math`. Lengths come from the trace, bytes from the shapes that verl gives its fields;
a prompt depends only on (seed, task, index), so a smaller run is a prefix of a larger one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

PATCH_VALUES = 1176  # 2 frames × 3 channels × 14 × 14 pixels: one row of pixel_values
RUNAWAY_SHARE = 0.0003  # video responses that never stop by themselves
RUNAWAY_TOKENS = 16_000


@dataclass(frozen=True, slots=True)
class Clip:
    """One video: the processor's grid (time, height, width in patches) and the raw frames."""

    grid: tuple[int, int, int]
    frames: tuple[int, int, int, int]

    @property
    def pixel_rows(self) -> int:
        return math.prod(self.grid)

    @property
    def pixel_bytes(self) -> int:
        return self.pixel_rows * PATCH_VALUES * 4

    @property
    def frame_bytes(self) -> int:
        return math.prod(self.frames) * 4


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt with the lengths of its n responses."""

    index: int
    prompt_tokens: int
    response_tokens: tuple[int, ...]
    clip: Clip | None = None


# Share, prompt tokens and clip of each cluster. The pixel rows (1,920 … 16,560) and the bytes of
# the frames are the suite's; grids and frame sizes are the ones that give exactly those.
VIDEO_CLUSTERS: tuple[tuple[float, int, Clip], ...] = (
    (0.011, 550, Clip((2, 30, 32), (4, 3, 480, 528))),
    (0.294, 1_063, Clip((4, 30, 32), (8, 3, 480, 528))),
    (0.011, 2_500, Clip((7, 36, 46), (14, 3, 504, 644))),
    (0.336, 3_830, Clip((9, 36, 46), (18, 3, 504, 644))),
    (0.348, 4_245, Clip((10, 36, 46), (20, 3, 504, 644))),
)


@dataclass(frozen=True, slots=True)
class Task:
    """A task's marginal distributions; `between` is the prompts' share of log-length variance."""

    name: str
    number: int
    samples: int
    between: float
    response: Callable[[Floats, np.random.Generator], NDArray[np.int64]]
    prompt: Callable[[np.random.Generator], tuple[int, Clip | None]]


def generate(task: Task, prompts: int, seed: int) -> list[Prompt]:
    """`prompts` prompts of the task, the same for the same seed."""
    return [_prompt(task, index, seed) for index in range(prompts)]


def _prompt(task: Task, index: int, seed: int) -> Prompt:
    rng = np.random.default_rng((seed, task.number, index))
    tokens, clip = task.prompt(rng)
    # One normal variable a response, of which `between` of the variance is the prompt's own.
    normal = math.sqrt(task.between) * rng.standard_normal()
    normals = normal + math.sqrt(1 - task.between) * rng.standard_normal(task.samples)
    lengths = task.response(normals, rng)
    return Prompt(index, tokens, tuple(int(length) for length in lengths), clip)


def _video_prompt(rng: np.random.Generator) -> tuple[int, Clip | None]:
    shares = np.array([share for share, _, _ in VIDEO_CLUSTERS])
    _, tokens, clip = VIDEO_CLUSTERS[int(rng.choice(len(shares), p=shares / shares.sum()))]
    return tokens, clip


def _video_response(normals: Floats, rng: np.random.Generator) -> NDArray[np.int64]:
    lengths = np.maximum(np.exp(5.06 + 0.35 * normals), 1)
    lengths[rng.random(len(normals)) < RUNAWAY_SHARE] = RUNAWAY_TOKENS
    return np.minimum(lengths, RUNAWAY_TOKENS).astype(np.int64)


def _math_prompt(rng: np.random.Generator) -> tuple[int, Clip | None]:
    return int(48.4 + 80.1 * math.exp(0.532 * rng.standard_normal())), None


def _math_response(normals: Floats, rng: np.random.Generator) -> NDArray[np.int64]:
    uniform = np.array([0.5 * (1 + math.erf(z / math.sqrt(2))) for z in normals])
    lengths = 195 + 3847 * gamma_quantile(2.438, uniform)
    return np.minimum(lengths, 32_000).astype(np.int64)


@cache
def _gamma_table(shape: float) -> tuple[Floats, Floats]:
    grid = np.linspace(0, shape + 40 * math.sqrt(shape), 200_001)
    density = np.zeros_like(grid)
    density[1:] = np.exp((shape - 1) * np.log(grid[1:]) - grid[1:] - math.lgamma(shape))
    cumulative = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return cumulative / cumulative[-1], grid


def gamma_quantile(shape: float, uniform: Floats) -> Floats:
    """Quantiles of the standard gamma distribution, from a table of its integral."""
    cumulative, grid = _gamma_table(shape)
    return np.interp(uniform, cumulative, grid)


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("video", 1, 8, 0.11, _video_response, _video_prompt),
        Task("math", 2, 16, 0.30, _math_response, _math_prompt),
    )
}
