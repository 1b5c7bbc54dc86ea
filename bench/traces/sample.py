"""The parts of a trace: prompts, the samples drawn from each, their turns and media.

Lengths are in tokens and times in seconds, as recorded or drawn. There are no contents here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

PATCH_VALUES = 1176  # 2 frames × 3 channels × 14 × 14 pixels: one row of pixel_values


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the model, and the tool call that ends it."""

    tokens: int
    seconds: float = 0.0  # of the engine
    tool_seconds: float = 0.0
    tool_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """One response: what the model wrote and what tools returned, in turns."""

    turns: tuple[Turn, ...]
    reward: float = 0.0
    reward_seconds: float = 0.0

    @property
    def tokens(self) -> int:
        """Length of the response: tool texts are in it, as in a verl row (masked from the loss)."""
        return sum(turn.tokens + turn.tool_tokens for turn in self.turns)

    @property
    def rollout_seconds(self) -> float:
        return sum(turn.seconds + turn.tool_seconds for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Medium:
    """An image or a video: the processor's grid (time, height, width in patches of 14 pixels).
    Equal `content` means equal bytes."""

    content: int
    grid: tuple[int, int, int]

    @property
    def pixel_rows(self) -> int:
        return math.prod(self.grid)

    @property
    def pixel_bytes(self) -> int:
        return self.pixel_rows * PATCH_VALUES * 4

    @property
    def visual_tokens(self) -> int:
        """The model merges 2 × 2 patches into one token (Qwen2-VL, arXiv 2409.12191)."""
        return self.pixel_rows // 4


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of the stages for a recorded group, and of the optimiser after the step's last."""

    reference: float
    train: float
    optimiser: float


class StageReplay(msgspec.Struct, frozen=True):
    """How a replay runs a stage of a recorded job. workers: processes on all hosts. least, most:
    groups that a claim takes."""

    role: str
    workers: int
    least: int
    most: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """A group: one prompt with its media, and its samples. `index` counts through all steps. times:
    of the stages of a recorded job; None: they follow from the lengths."""

    index: int
    step: int
    prompt_tokens: int
    samples: tuple[Sample, ...]
    media: tuple[Medium, ...] = ()
    times: StageTimes | None = None

    @property
    def response_tokens(self) -> tuple[int, ...]:
        return tuple(sample.tokens for sample in self.samples)

    @property
    def rollout_seconds(self) -> float:
        """Until the slowest row is done."""
        return max(sample.rollout_seconds for sample in self.samples)

    @property
    def pixel_rows(self) -> int:
        return sum(medium.pixel_rows for medium in self.media)

    @property
    def media_bytes(self) -> int:
        """Bytes of the media, once."""
        return sum(medium.pixel_bytes for medium in self.media)

    @property
    def survives(self) -> bool:
        """Dynamic sampling (DAPO, arXiv 2503.14476) drops groups whose rewards are all equal:
        their advantages are all zero."""
        return len({sample.reward for sample in self.samples}) > 1
