"""The index for dedup: an entry ends with its chunk, and living chunks bound its size."""

from __future__ import annotations

import numpy as np

from dataplane.memory.chunks import Chunks, Digests
from dataplane.wire.packed import DIGEST


def digests(*numbers: int) -> np.ndarray:
    column = np.zeros(len(numbers), DIGEST)
    column["hash"] = [n.to_bytes(16, "little") for n in numbers]
    column["nbytes"] = 4096
    return column


def add(chunks: Chunks, count: int) -> np.ndarray:
    return chunks.add([(0, 4096)] * count, 0)


def test_a_digest_leads_to_its_range_within_its_partition() -> None:
    chunks = Chunks()
    index = Digests(chunks)
    live = add(chunks, 2)
    index.enter("step-1", digests(1, 2), live)
    assert index.lookup("step-1", digests(2, 3, 1)).tolist() == [
        live[1].item(),
        0,
        live[0].item(),
    ]
    assert not index.lookup("step-2", digests(1)).any()
    other = digests(1)
    other["nbytes"] = 4097
    assert not index.lookup("step-1", other).any()


def test_a_dead_range_is_unknown_even_when_its_id_lives_again() -> None:
    chunks = Chunks()
    index = Digests(chunks)
    live = add(chunks, 1)
    index.enter("p", digests(1), live)
    chunks.release(live)
    assert not index.lookup("p", digests(1)).any()
    again = add(chunks, 1)
    assert not index.lookup("p", digests(1)).any()
    index.enter("p", digests(1), again)
    assert index.lookup("p", digests(1)).tolist() == again.tolist()


def test_dead_entries_never_outnumber_the_living_for_long() -> None:
    chunks = Chunks()
    index = Digests(chunks)
    kept = add(chunks, 100)
    index.enter("kept", digests(*range(100)), kept)
    for round_ in range(50):
        live = add(chunks, 500)
        index.enter(f"p{round_}", digests(*range(500)), live)
        chunks.release(live)
        assert len(index) <= 1600
    assert index.lookup("kept", digests(*range(100))).all()


def test_a_dropped_partition_is_forgotten() -> None:
    chunks = Chunks()
    index = Digests(chunks)
    index.enter("p", digests(1, 2), add(chunks, 2))
    index.drop("p")
    index.drop("p")
    assert len(index) == 0
    assert not index.lookup("p", digests(1)).any()
