"""Pulled copies, beside a plain list in the order of last use."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dataplane.memory.space import Space
from dataplane.wire.packed import U8
from tests.chunk_numbers import chunk_numbers

PAGE = 4096
READER = 1
OWNERS = st.sampled_from((11, 12))
NUMBERS = st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), OWNERS, NUMBERS),
        st.tuples(st.just("look up"), OWNERS, NUMBERS),
        st.tuples(st.just("drop"), OWNERS, NUMBERS),
        st.tuples(st.just("drop owner"), OWNERS, NUMBERS),
        st.tuples(st.just("pin"), OWNERS, NUMBERS),
        st.tuples(st.just("evict"), st.integers(1, 9), NUMBERS),
    ),
    max_size=40,
)


def remote(numbers: list[int]) -> np.ndarray:
    return chunk_numbers([(number, 5) for number in numbers])


@given(STEPS)
def test_copies_are_found_dropped_and_evicted_as_in_a_list(
    steps: list[tuple[str, int, list[int]]],
) -> None:
    space = Space(1_024 * PAGE)
    copies, line, pinned = space.copies, list[tuple[int, int]](), set[tuple[int, int]]()
    for step, owner, numbers in steps:
        named = [(owner, number) for number in numbers]
        here = [one for one in named if one in line]
        if step == "insert":
            made = space.for_copies(np.full(len(numbers), PAGE, U8))
            assert made is not None
            copies.insert(owner, remote(numbers), made[1])
            line += [one for one in named if one not in line]
        elif step in ("look up", "pin"):
            found = copies.lookup(owner, remote(numbers))
            assert [one in line for one in named] == (found > 0).tolist()
            line = [one for one in line if one not in here] + here
            if step == "pin":
                space.pin(READER, found[found > 0])
                pinned |= {*here}
        elif step == "evict":
            wanted = [one for one in line if one not in pinned][:owner]
            last = line.index(wanted[-1]) + 1 if len(wanted) == owner else len(line)
            used = [one for one in line[:last] if one in pinned]
            assert copies.evict(owner * PAGE) == len(wanted) * PAGE
            line = [one for one in line if one not in {*wanted, *used}] + used
        else:
            gone = here if step == "drop" else [one for one in line if one[0] == owner]
            freed = copies.drop(owner, remote(numbers)) if step == "drop" else None
            freed = copies.drop_owner(owner) if freed is None else freed
            assert freed == len([one for one in gone if one not in pinned]) * PAGE
            line = [one for one in line if one not in gone]
            pinned -= {*gone}
        assert len(copies) == len(line) and copies.cached_bytes == len(line) * PAGE
        assert copies.evictable_bytes == len([one for one in line if one not in pinned]) * PAGE
    assert copies.evict(1 << 30) == len([one for one in line if one not in pinned]) * PAGE
