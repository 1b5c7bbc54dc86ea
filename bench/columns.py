"""The columns of a verl row, with their real dtypes: who writes and reads each, shapes, bytes and
contents. Advantages, returns and token-level rewards never travel: the trainer computes them.

Contents are cheap, seeded and all different: one random block of 16 KiB, repeated, each repetition
XORed with its number. Making one costs a memory write; token ids are valid and floats finite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from bench.traces import PATCH_VALUES, Prompt, Sample, Task

Array = NDArray[Any]

BLOCK_BYTES = 16 * 1024
TOKEN_IDS = 1 << 17
_SIGN_AND_EXPONENT = 0xBF800000  # floats in (-2, -1]: log-probs, and never a NaN
_MANTISSA = 1 << 23


@dataclass(frozen=True, slots=True)
class Field:
    """`shared`: the n rows of a group carry the same value."""

    name: str
    number: int
    dtype: Literal["int64", "float32"]
    shared: bool = False


_TEXT = (
    Field("uid", 0, "int64"),  # (prompt, sample), which identifies the row in the check
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
    """The fields that rollout writes: no raw frames of videos, because no stage reads them."""
    return (*_TEXT, *_MEDIA) if task.media else _TEXT


def all_fields(task: Task) -> tuple[Field, ...]:
    return (*rollout_fields(task), *_REWARD, *_REFERENCE)


def stage_fields(task: Task, has_reference: bool = True) -> dict[str, list[str]]:
    everything = [field.name for field in all_fields(task)]
    if not has_reference:
        everything = [name for name in everything if name != _REFERENCE[0].name]
    model = [field.name for field in rollout_fields(task) if field.name != "old_log_probs"]
    if task.survive is not None:  # it waits for groups that the reward stage keeps
        model.append("reward")
    stages = {"reward": list(_REWARD_NEEDS), "reference": model, "train": everything}
    return stages if has_reference else {s: f for s, f in stages.items() if s != "reference"}


def shape_of(field: Field, prompt: Prompt, sample: int) -> tuple[int, ...]:
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


class Source:
    """Makes the values of one rollout worker. Media are in a buffer that the next prompt reuses."""

    def __init__(self, seed: int, media_bytes: int = 0) -> None:
        """media_bytes: of the prompt with the largest media."""
        self.seed = seed
        # Touched here, so that no run pays for first touch of memory that is not a plane's.
        self._media = np.ones(media_bytes // 4, np.uint32)

    def column(self, field: Field, prompt: Prompt) -> list[Array]:
        """One value per row. A shared value is one array, n times."""
        samples = range(len(prompt.samples))
        if field.shared:
            return [self.value(field, prompt, 0)] * len(samples)
        return [self.value(field, prompt, sample) for sample in samples]

    def value(self, field: Field, prompt: Prompt, sample: int) -> Array:
        shape = shape_of(field, prompt, sample)
        if field.name == "uid":
            return np.array([prompt.index, sample], np.int64)
        if field.name == "attention_mask":
            return np.ones(shape, np.int64)
        if field.name == "response_mask":
            return response_mask(prompt.samples[sample])
        if field.name == "position_ids":
            return np.ascontiguousarray(np.broadcast_to(np.arange(shape[-1]), shape))
        if field.name == "image_grid_thw":
            return np.array([medium.grid for medium in prompt.media], np.int64)
        size = math.prod(shape)
        if field.name == "pixel_values" and size <= self._media.size:
            out = self._media[:size].view(field.dtype).reshape(shape)
        else:
            out = np.empty(shape, field.dtype)
        if field.shared:  # equal media have equal bytes, wherever in the trace they come
            fill(out, (self.seed, field.number, *(medium.content for medium in prompt.media)))
        else:
            fill(out, (self.seed, prompt.index, sample + 1, field.number))
        return out


def response_mask(sample: Sample) -> Array:
    """1 where the model wrote, 0 where a tool did."""
    lengths = [n for turn in sample.turns for n in (turn.tokens, turn.tool_tokens)]
    return np.repeat(np.tile(np.array([1, 0], np.int64), len(sample.turns)), lengths)


def fill(out: Array, key: tuple[int, ...]) -> None:
    """Fill a contiguous int64 or float32 array with the content that belongs to `key`."""
    rng = np.random.Generator(np.random.SFC64(key))
    unsigned = np.dtype(f"u{out.itemsize}")
    words: Array = out.reshape(-1).view(unsigned)
    length = min(words.size, BLOCK_BYTES // out.itemsize)
    if not length:
        return
    is_float = out.dtype == np.float32
    block = rng.integers(0, _MANTISSA if is_float else TOKEN_IDS, length, unsigned)
    if is_float:
        block |= np.uint32(_SIGN_AND_EXPONENT)
    whole = words.size // length
    numbers = np.arange(whole + 1, dtype=words.dtype)
    body = words[: whole * length].reshape(whole, length)
    np.bitwise_xor(block, numbers[:whole, None], out=body)
    rest = words[whole * length :]
    np.bitwise_xor(block[: rest.size], numbers[whole], out=rest)


def digest(value: Array) -> int:
    """64 bits of dtype, shape and every byte of a value."""
    form = xxhash.xxh3_64_intdigest(f"{value.dtype.str}{value.shape}".encode())
    contiguous = np.ascontiguousarray(value)
    return xxhash.xxh3_64_intdigest(contiguous.reshape(-1).view(np.uint8).data, seed=form)
