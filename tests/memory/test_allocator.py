"""Free space: where it is handed out, and that it comes back whole."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.memory.allocator import Allocator

PAGE = 4096


def free(allocator: Allocator, *pieces: tuple[int, int]) -> None:
    allocator.free(pieces)


def test_the_lowest_address_goes_first() -> None:
    allocator = Allocator(8 * PAGE)
    starts = [allocator.allocate(PAGE) for _ in range(4)]
    assert starts == [0, PAGE, 2 * PAGE, 3 * PAGE]
    free(allocator, (2 * PAGE, PAGE), (0, PAGE))
    assert allocator.allocate(PAGE) == 0
    assert allocator.allocate(2 * PAGE) == 4 * PAGE
    assert allocator.allocate(PAGE) == 2 * PAGE
    assert allocator.high_water == 6 * PAGE


def test_neighbours_that_come_back_become_one_stretch() -> None:
    allocator = Allocator(4 * PAGE)
    assert allocator.allocate(4 * PAGE) == 0
    assert allocator.allocate(PAGE) is None
    assert allocator.largest_free == 0
    free(allocator, (3 * PAGE, PAGE), (PAGE, PAGE), (0, PAGE), (2 * PAGE, PAGE))
    assert allocator.largest_free == allocator.free_bytes == 4 * PAGE
    assert allocator.allocate(4 * PAGE) == 0


def test_pieces_of_pages_count_as_free_and_are_handed_out_as_pages() -> None:
    allocator = Allocator(4 * PAGE)
    allocator.allocate(4 * PAGE)
    free(allocator, (64, 2 * PAGE))
    assert allocator.free_bytes == 2 * PAGE
    assert allocator.largest_free == PAGE
    assert allocator.allocate(2 * PAGE) is None
    assert allocator.allocate(PAGE) == PAGE
    free(allocator, (PAGE, PAGE), (0, 64), (2 * PAGE + 64, 2 * PAGE - 64))
    assert allocator.allocate(4 * PAGE) == 0


def test_the_preferred_stretch_is_taken_where_it_is_free() -> None:
    allocator = Allocator(16 * PAGE)
    assert allocator.allocate(2 * PAGE, [(8 * PAGE, 4 * PAGE)]) == 8 * PAGE
    assert allocator.allocate(2 * PAGE, [(8 * PAGE, 4 * PAGE)]) == 10 * PAGE
    assert allocator.allocate(2 * PAGE, [(8 * PAGE, 4 * PAGE)]) == 0
    free(allocator, (10 * PAGE, PAGE))
    assert allocator.allocate(PAGE, [(64, 64), (8 * PAGE, 4 * PAGE)]) == 10 * PAGE


def test_freeing_twice_is_noticed() -> None:
    allocator = Allocator(4 * PAGE)
    allocator.allocate(2 * PAGE)
    free(allocator, (0, PAGE), (0, PAGE))
    with pytest.raises(AssertionError, match="twice"):
        _ = allocator.largest_free


def test_freeing_twice_is_noticed_among_many_holes() -> None:
    allocator = Allocator(4096 * PAGE)
    allocator.allocate(4096 * PAGE)
    free(allocator, *((2 * n * PAGE, PAGE) for n in range(2000)))
    assert allocator.largest_free == PAGE
    free(allocator, (4 * PAGE, PAGE))
    with pytest.raises(AssertionError, match="twice"):
        _ = allocator.largest_free


@pytest.mark.parametrize("holes", [0, 3000])
@given(data=st.data())
def test_random_traffic_matches_a_bitmap(holes: int, data: st.DataObject) -> None:
    """With many holes, single pieces are merged in by another path than whole columns."""
    lines, line = 80, 1024
    base = 2 * holes * PAGE
    allocator = Allocator(base + lines * line)
    if holes:
        assert allocator.allocate(base) == 0
        free(allocator, *((2 * n * PAGE, 64) for n in range(holes)))
    used, touched = np.zeros(lines, bool), 0
    for _ in range(data.draw(st.integers(1, 12))):
        if data.draw(st.booleans()) or not used.any():
            pages = data.draw(st.integers(1, 4))
            width = pages * PAGE // line
            fits = [
                at
                for at in range(0, lines - width + 1, PAGE // line)
                if not used[at : at + width].any()
            ]
            got = allocator.allocate(pages * PAGE)
            assert got == (base + fits[0] * line if fits else None)
            if fits:
                used[fits[0] : fits[0] + width] = True
                touched = max(touched, fits[0] + width)
        else:
            taken = data.draw(
                st.lists(st.sampled_from(np.flatnonzero(used).tolist()), unique=True, min_size=1)
            )
            free(allocator, *((base + at * line, line) for at in taken))
            used[taken] = False
        assert allocator.free_bytes == 64 * holes + line * int((~used).sum())
        assert allocator.largest_touched == _longest_pages(used[:touched], PAGE // line) * PAGE


def _longest_pages(used: np.ndarray, lines: int) -> int:
    """The most neighbouring pages of so many lines that are wholly free."""
    longest = run = 0
    for page in range(len(used) // lines):
        run = 0 if used[page * lines : (page + 1) * lines].any() else run + 1
        longest = max(longest, run)
    return longest
