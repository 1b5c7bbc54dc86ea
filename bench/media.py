"""Contents: cheap, seeded, different for every value, and identified by a digest.

A value is one random block of 16 KiB, repeated, and each repetition is XORed with its number. It
therefore costs a memory write to make, holds valid token ids and finite floats, and no two of
its blocks are equal.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from bench.columns import Field, shape_of
from bench.traces import Prompt, Sample

Array = NDArray[Any]

BLOCK_BYTES = 16 * 1024
TOKEN_IDS = 1 << 17
_SIGN_AND_EXPONENT = 0xBF800000  # floats in (-2, -1]: log-probs, and never a NaN
_MANTISSA = 1 << 23


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
        out = self._room(field, shape)
        if field.shared:  # equal media have equal bytes, wherever in the trace they come
            fill(out, (self.seed, field.number, *(medium.content for medium in prompt.media)))
        else:
            fill(out, (self.seed, prompt.index, sample + 1, field.number))
        return out

    def _room(self, field: Field, shape: tuple[int, ...]) -> Array:
        size = int(np.prod(shape))
        if field.name != "pixel_values" or self._media.size < size:
            return np.empty(shape, field.dtype)
        return self._media[:size].view(field.dtype).reshape(shape)


def response_mask(sample: Sample) -> Array:
    """1 where the model wrote, 0 where a tool did."""
    lengths = [n for turn in sample.turns for n in (turn.tokens, turn.tool_tokens)]
    return np.repeat(np.tile(np.array([1, 0], np.int64), len(sample.turns)), lengths)


def fill(out: Array, key: tuple[int, ...]) -> None:
    """Fill a contiguous int64 or float32 array with the content that belongs to `key`."""
    rng = np.random.Generator(np.random.SFC64(key))
    words: Array
    if out.dtype == np.float32:
        words = out.reshape(-1).view(np.uint32)
        length = min(words.size, BLOCK_BYTES // 4)
        block = rng.integers(0, _MANTISSA, length, np.uint32) | np.uint32(_SIGN_AND_EXPONENT)
    else:
        words = out.reshape(-1).view(np.uint64)
        length = min(words.size, BLOCK_BYTES // 8)
        block = rng.integers(0, TOKEN_IDS, length, np.uint64)
    if not length:
        return
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
