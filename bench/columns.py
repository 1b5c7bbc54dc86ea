"""The columns of a row: who writes them, who needs them, their shapes and their bytes.

These are the fields of a verl row at their true dtypes. Advantages, returns and token-level
rewards are computed by the trainer where it stands and never travel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from bench.trace import PATCH_VALUES, Prompt, Task

Choice = Literal["needed", "all"]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Field:
    """`shared`: the n rows of a group carry the same value."""

    name: str
    number: int
    dtype: Literal["int64", "float32"]
    shared: bool = False


UID = Field("uid", 0, "int64")  # (prompt, sample): how the check knows a row again
_TEXT = (
    UID,
    Field("input_ids", 1, "int64"),
    Field("attention_mask", 2, "int64"),
    Field("position_ids", 3, "int64"),
    Field("responses", 4, "int64"),
    Field("response_mask", 5, "int64"),
    Field("old_log_probs", 6, "float32"),
)
_MEDIA = (
    Field("pixel_values", 7, "float32", shared=True),
    Field("image_grid_thw", 8, "int64", shared=True),
    Field("raw_frames", 9, "float32", shared=True),
)
SCORES = (Field("reward", 10, "float32"), Field("token_level_scores", 11, "float32"))

DEDUP = ("pixel_values", "raw_frames")
_REWARD_NEEDS = ("uid", "responses", "response_mask")
_TRAINER_LEAVES = ("raw_frames",)  # once there are pixel_values nobody reads the frames again


def rollout_fields(task: Task) -> tuple[Field, ...]:
    """What a rollout worker writes for each row."""
    return (*_TEXT, *_MEDIA) if task.name == "video" else _TEXT


def stage_fields(task: Task, columns: Choice) -> dict[str, list[str]]:
    """What each stage is sent: `needed`, or everything that is there, as verl does."""
    written = [field.name for field in rollout_fields(task)]
    scores = [field.name for field in SCORES]
    if columns == "all":
        return {"reward": written, "train": written + scores}
    needed = [name for name in written if name not in _TRAINER_LEAVES]
    return {"reward": list(_REWARD_NEEDS), "train": needed + scores}


def shape_of(field: Field, prompt: Prompt, sample: int) -> Shape:
    """The shape of one row's value."""
    response = prompt.response_tokens[sample]
    total = prompt.prompt_tokens + response
    clip = prompt.clip
    match field.name:
        case "uid":
            return (2,)
        case "reward":
            return (1,)
        case "position_ids":  # three axes where there are media (mRoPE)
            return (3, total) if clip else (total,)
        case "input_ids" | "attention_mask":
            return (total,)
        case "responses" | "response_mask" | "old_log_probs" | "token_level_scores":
            return (response,)
    if clip is None:
        raise ValueError(f"{field.name} is a field of media, and prompt {prompt.index} has none")
    if field.name == "image_grid_thw":
        return (1, 3)
    return (clip.pixel_rows, PATCH_VALUES) if field.name == "pixel_values" else clip.frames


def value_bytes(field: Field, prompt: Prompt, sample: int) -> int:
    return math.prod(shape_of(field, prompt, sample)) * (8 if field.dtype == "int64" else 4)


def group_bytes(fields: tuple[Field, ...], prompt: Prompt, dedup: bool) -> int:
    """Bytes of one group's values; with dedup a shared value counts once."""
    samples = len(prompt.response_tokens)
    total = 0
    for field in fields:
        once = dedup and field.name in DEDUP
        total += sum(value_bytes(field, prompt, i) for i in range(1 if once else samples))
    return total
