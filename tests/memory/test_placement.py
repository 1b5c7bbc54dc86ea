"""The layout rule that peer and client share."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.errors import LimitExceeded
from dataplane.memory.extents import placed
from dataplane.wire.packed import EXTENT
from tests.placing import fitting, place


def extents(*pieces: tuple[int, int]) -> np.ndarray:
    return np.array(list(pieces), EXTENT)


def test_chunks_follow_each_other_at_multiples_of_64() -> None:
    assert place([1, 64, 65, 0, 100], extents((8192, 4096))).tolist() == [
        8192,
        8256,
        8320,
        8448,
        8512,
    ]


def test_a_range_that_does_not_fit_goes_to_the_next_extent_and_leaves_a_gap() -> None:
    where = extents((40960, 4096), (0, 8192))
    offsets = place([4000, 128, 8000], where)
    assert offsets.tolist() == [40960, 0, 128]
    assert placed([4000, 128, 8000], where.tolist())[1] == [(44992, 64), (8128, 64)]


def test_too_little_space_says_how_many_fit() -> None:
    where = extents((0, 4096), (8192, 4096))
    assert fitting([4096, 4096, 1], where) == 2
    with pytest.raises(LimitExceeded, match="2 of this call's 3") as caught:
        place([4096, 4096, 1], where)
    assert caught.value.details == {"chunks": 3, "fitting": 2}


def test_no_ranges_and_no_extents_are_fine() -> None:
    assert place([], extents()).tolist() == []
    assert fitting([5], extents()) == 0
    assert placed([], [(64, 128)]) == ([], [(64, 128)])


@given(
    st.lists(st.integers(0, 9000), max_size=40),
    st.lists(st.integers(1, 5), max_size=10),
    st.randoms(),
)
def test_ranges_never_overlap_and_never_straddle(sizes, pages, random) -> None:  # type: ignore[no-untyped-def]
    slots = [(16384 * 4096 * n, p * 4096) for n, p in enumerate(pages)]
    random.shuffle(slots)
    where = extents(*slots)
    count = fitting(sizes, where)
    offsets = place(sizes[:count], where)
    position, at = 0, 0  # the rule, written plainly
    for size, offset in zip(sizes[:count], offsets.tolist(), strict=True):
        room = max(64, -(-size // 64) * 64)
        while position + room > slots[at][1]:
            at, position = at + 1, 0
        assert offset == slots[at][0] + position
        position += room
    if count < len(sizes):
        room = max(64, -(-sizes[count] // 64) * 64)
        rest = (
            [slots[at][1] - position, *(length for _, length in slots[at + 1 :])] if slots else []
        )
        assert all(room > length for length in rest)
    left = placed(sizes[:count], slots)[1]
    used = sum(max(64, -(-s // 64) * 64) for s in sizes[:count])
    assert sum(length for _, length in left) + used == sum(length for _, length in slots)
