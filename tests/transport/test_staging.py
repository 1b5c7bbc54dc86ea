"""Scattered ranges through one stretch of memory: every byte, in order, and none beside."""

from __future__ import annotations

import numpy as np
import pytest

from dataplane.transport.staging import DIRECT_BYTES, STAGING_BYTES, Staging, runs
from dataplane.transport.stream import IOV_MAX, iovecs

SIZE = 4 << 20


def scattered(memory: np.ndarray, longest: int, seed: int) -> np.ndarray:
    """Vectors of random lengths, each in a slot of its own, in random order."""
    rng = np.random.default_rng(seed)
    slots = rng.permutation(SIZE // (longest + 1))
    lengths = rng.integers(1, longest + 1, len(slots))
    offsets = slots * (longest + 1)
    return iovecs(np.uint64(memory.ctypes.data) + offsets.astype(np.uint64), lengths)


@pytest.mark.parametrize("longest", [3, 100, 5_000, 2 * DIRECT_BYTES, STAGING_BYTES])
def test_runs_cover_every_vector_once_and_fit(longest: int) -> None:
    memory = np.zeros(SIZE, np.uint8)
    vectors = scattered(memory, longest, 1)
    found = list(runs(vectors))
    assert np.array_equal(np.concatenate(found), vectors)
    for run in found:
        assert len(run) == 1 or (run["length"].sum() <= STAGING_BYTES and len(run) <= IOV_MAX)
        assert len(run) == 1 or (run["length"] < DIRECT_BYTES).all()


@pytest.mark.parametrize("longest", [3, 100, 5_000])
def test_what_is_gathered_is_scattered_again(longest: int) -> None:
    memory = np.zeros((2, SIZE), np.uint8)
    source, sink = memory
    source[:] = np.arange(SIZE, dtype=np.uint32).astype(np.uint8)
    there = scattered(source, longest, 2)
    back = there.copy()
    back["base"] += np.uint64(SIZE)
    offsets = (there["base"] - np.uint64(source.ctypes.data)).tolist()
    expected, staging = np.zeros(SIZE, np.uint8), Staging()
    for offset, nbytes in zip(offsets, there["length"].tolist(), strict=True):
        expected[offset : offset + nbytes] = source[offset : offset + nbytes]
    for gathered, to in zip(runs(there), runs(back), strict=True):
        staging.gather(gathered)
        staging.scatter(to)
    assert np.array_equal(sink, expected)
    staging.close()


def test_memory_that_is_not_there_is_an_error() -> None:
    staging = Staging()
    nowhere = iovecs(np.array([16, 64], np.uint64), np.array([8, 8], np.uint64))
    with pytest.raises(OSError, match="could not be staged"):
        staging.gather(nowhere)
    staging.close()
