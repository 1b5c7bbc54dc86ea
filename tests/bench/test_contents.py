"""Contents are seeded, valid for their field, and told apart by their digests."""

from __future__ import annotations

import numpy as np
import pytest

from bench.columns import BLOCK_BYTES, TOKEN_IDS, Source, digest, fill, rollout_fields
from bench.traces import TASKS, Prompt, Sample, Turn

PROMPT = Prompt(3, 0, 120, tuple(Sample((Turn(n),)) for n in (50, 2500, 50, 1)))


@pytest.mark.parametrize("dtype", ["int64", "float32"])
@pytest.mark.parametrize("size", [0, 1, 7, BLOCK_BYTES // 4, BLOCK_BYTES + 5, 10 * BLOCK_BYTES])
def test_contents_depend_on_the_key_alone(dtype: str, size: int) -> None:
    first, again, other = (np.zeros(size, dtype) for _ in range(3))
    fill(first, (0, 1, 2, 3))
    fill(again, (0, 1, 2, 3))
    fill(other, (0, 1, 3, 3))
    assert np.array_equal(first, again)
    assert size < 2 or not np.array_equal(first, other)


def test_no_two_blocks_of_a_value_are_equal() -> None:
    value = np.zeros(BLOCK_BYTES // 4 * 50, np.float32)
    fill(value, (0,))
    assert len(np.unique(value.reshape(50, -1), axis=0)) == 50


def test_floats_are_finite_and_token_ids_within_the_vocabulary() -> None:
    floats, tokens = np.zeros(300_000, np.float32), np.zeros(300_000, np.int64)
    fill(floats, (1,))
    fill(tokens, (1,))
    assert np.isfinite(floats).all() and (floats < 0).all()
    assert tokens.min() >= 0 and tokens.max() < TOKEN_IDS


def test_rows_differ_even_where_their_lengths_are_equal() -> None:
    source = Source(seed=0)
    for field in rollout_fields(TASKS["math"]):
        values = source.column(field, PROMPT)
        same = digest(values[0]) == digest(values[2])
        assert same == (field.name in ("attention_mask", "response_mask", "position_ids"))


def test_a_digest_sees_one_bit_the_shape_and_the_dtype() -> None:
    value = np.zeros((4, 6), np.int64)
    changed = value.copy()
    changed[3, 5] ^= 1
    others = [changed, value.reshape(6, 4), value.view(np.uint64), value[:3]]
    assert len({digest(array) for array in (value, *others)}) == 5
    assert digest(value) == digest(np.zeros((4, 6), np.int64))
