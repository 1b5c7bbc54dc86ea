"""What other peers' shards hold of this arena, and what comes back when one is lost."""

from __future__ import annotations

import numpy as np

from dataplane.memory.remote_references import RemoteReferences
from dataplane.wire.packed import U4
from dataplane.wire.tables import Owner
from tests.chunk_numbers import chunk_numbers, indexes

B, B_ANEW = Owner("tcp://b:1", 1), Owner("tcp://b:1", 2)


def chunks(*ids: int) -> np.ndarray:
    return chunk_numbers([(i, 7) for i in ids])


def test_what_a_lost_peer_held_comes_back_once() -> None:
    held = RemoteReferences()
    held.add(B, chunks(1, 2, 2))
    held.add(B_ANEW, chunks(3))
    found, counts = held.lost(B)
    assert dict(zip(indexes(found), counts.tolist(), strict=True)) == {1: 1, 2: 2}
    assert len(held.lost(B)[0]) == 0
    assert len(held) == 1, "another life of that peer is another peer"


def test_a_peer_releases_no_more_than_it_holds() -> None:
    held = RemoteReferences()
    held.add(B, chunks(1, 1, 2))
    assert held.release(B, chunks(1, 1, 9), np.array([1, 5, 1], U4)).tolist() == [1, 1, 0]
    assert held.release(B, chunks(1), np.ones(1, U4)).tolist() == [0]
    assert held.release(B_ANEW, chunks(2), np.ones(1, U4)).tolist() == [0]
    assert held.release(B, chunks(2), np.ones(1, U4)).tolist() == [1]
    assert len(held) == 0
