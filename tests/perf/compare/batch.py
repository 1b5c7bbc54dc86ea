"""The batch that every plane carries: rows of a vision-language step, ragged and mixed.

Text fields have a length a row, `pixel_values` a number of patches a row, two fields are dense. The
text is at most two fifths of the bytes; patches fill up to the size that was asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from bench.columns import fill
from bench.traces import PATCH_VALUES

Array = NDArray[Any]
Columns = dict[str, list[Array]]

ROWS = 256
DENSE = ("image_grid_thw", "reward")
RAGGED = (
    "input_ids",
    "attention_mask",
    "position_ids",
    "responses",
    "response_mask",
    "old_log_probs",
    "pixel_values",
)
FIELDS = (*RAGGED, *DENSE)

_TOKEN_BYTES = 5 * 8 + 4  # of all text fields, a token of response
_MEAN_TOKENS = 2_000
_TEXT_SHARE = 0.4
_PATCH_BYTES = 4 * PATCH_VALUES


def batch(nbytes: int, seed: int, rows: int = ROWS) -> Columns:
    """About `nbytes` in `rows` rows, the same for the same seed; one array a row and field."""
    rng = np.random.default_rng((seed, nbytes, rows))
    mean = min(_MEAN_TOKENS, _TEXT_SHARE * nbytes / rows / _TOKEN_BYTES)
    tokens = _spread(rng, rows, mean * rows)
    text = int(tokens.sum()) * _TOKEN_BYTES
    patches = _spread(rng, rows, max(nbytes - text, 0) / _PATCH_BYTES)
    made: Columns = {name: [] for name in FIELDS}
    for row in range(rows):
        shapes = {"pixel_values": (int(patches[row]), PATCH_VALUES), "reward": (1,)}
        for number, name in enumerate(FIELDS):
            floats = name in ("old_log_probs", "pixel_values", "reward")
            shape = shapes.get(name, (int(tokens[row]),))
            if name == "image_grid_thw":
                value = np.array([[1, 1, shapes["pixel_values"][0]]], np.int64)
            else:
                value = np.empty(shape, np.float32 if floats else np.int64)
                fill(value, (seed, row, number))
            made[name].append(value)
    return made


def _spread(rng: np.random.Generator, rows: int, total: float) -> NDArray[np.int64]:
    """Lognormal lengths (sigma 0.6) of at least 1 that sum up to about `total`."""
    weights = rng.lognormal(0, 0.6, rows)
    lengths: NDArray[np.int64] = np.round(weights * total / weights.sum()).astype(np.int64)
    return np.maximum(lengths, 1)


def size_of(columns: Columns) -> int:
    return sum(value.nbytes for values in columns.values() for value in values)


def digest(columns: Columns) -> int:
    """One number for the rows, in whatever order: field names, dtypes, shapes and every byte."""
    total = 0
    for row in range(len(columns[FIELDS[0]])):
        whole = xxhash.xxh3_64()
        for name in FIELDS:
            value = columns[name][row]
            whole.update(f"{name}{value.dtype.str}{value.shape}".encode())
            whole.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        total += whole.intdigest()
    return total & (1 << 64) - 1


def read(buffers: Iterable[Array]) -> int:
    """Read every byte of these contiguous buffers once: their sum as 64-bit words, with overflow.

    A reduction of numpy runs at the speed of memory, so that it hides no plane's cost.
    """
    total = 0
    for buffer in buffers:
        flat = buffer.reshape(-1).view(np.uint8)
        even = flat.size & ~7
        total += int(np.add.reduce(flat[:even].view(np.uint64)))
        total += int(np.add.reduce(flat[even:], dtype=np.uint64)) if even < flat.size else 0
    return total & (1 << 64) - 1
