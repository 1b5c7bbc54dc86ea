"""The columns of a row: which stage writes them, which stages read them, their shapes and bytes.

These are the fields of a verl row with their real dtypes. The trainer computes advantages,
returns and token-level rewards locally, so they never travel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from bench.traces import PATCH_VALUES, Prompt, Task

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
)
_REWARD = (Field("reward", 10, "float32"), Field("token_level_scores", 11, "float32"))
_REFERENCE = (Field("ref_log_prob", 12, "float32"),)
ADDED = {"reward": _REWARD, "reference": _REFERENCE}  # by the stages on the way

DEDUP = ("pixel_values",)
_REWARD_NEEDS = ("uid", "responses", "response_mask")


def rollout_fields(task: Task) -> tuple[Field, ...]:
    """The fields that a rollout worker writes for each row. A video's raw frames are left out,
    because no stage reads them once there are pixel values."""
    return (*_TEXT, *_MEDIA) if task.media else _TEXT


def all_fields(task: Task) -> tuple[Field, ...]:
    """All fields of a finished row."""
    return (*rollout_fields(task), *_REWARD, *_REFERENCE)


def stage_fields(task: Task, has_reference: bool = True) -> dict[str, list[str]]:
    """The fields that each stage reads."""
    everything = [field.name for field in all_fields(task)]
    if not has_reference:
        everything = [name for name in everything if name != _REFERENCE[0].name]
    model = [field.name for field in rollout_fields(task) if field.name != "old_log_probs"]
    if task.survive is not None:  # it waits for the groups that the reward stage leaves
        model.append("reward")
    stages = {"reward": list(_REWARD_NEEDS), "reference": model, "train": everything}
    return stages if has_reference else {s: f for s, f in stages.items() if s != "reference"}


def shape_of(field: Field, prompt: Prompt, sample: int) -> Shape:
    """The shape of one row's value."""
    response = prompt.samples[sample].tokens
    total = prompt.prompt_tokens + response
    match field.name:
        case "uid":
            return (2,)
        case "reward":
            return (1,)
        case "position_ids":  # three axes where there are media (mRoPE)
            return (3, total) if prompt.media else (total,)
        case "input_ids" | "attention_mask":
            return (total,)
        case "pixel_values":
            return (prompt.pixel_rows, PATCH_VALUES)
        case "image_grid_thw":
            return (len(prompt.media), 3)
    return (response,)


def value_bytes(field: Field, prompt: Prompt, sample: int) -> int:
    return math.prod(shape_of(field, prompt, sample)) * (8 if field.dtype == "int64" else 4)


def group_bytes(fields: tuple[Field, ...], prompt: Prompt, dedup: bool) -> int:
    """Bytes of one group's values; with dedup a shared value counts once."""
    samples = len(prompt.samples)
    total = 0
    for field in fields:
        once = dedup and field.name in DEDUP
        total += sum(value_bytes(field, prompt, i) for i in range(1 if once else samples))
    return total
