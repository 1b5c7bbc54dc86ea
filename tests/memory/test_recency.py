"""The order of last use, beside a plain list that does the same."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dataplane.memory.cache import Recency

SLOTS = st.integers(0, 40)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("use"), st.lists(SLOTS, max_size=9, unique=True)),
        st.tuples(st.just("forget"), st.lists(SLOTS, max_size=3, unique=True)),
        st.tuples(st.just("take"), st.integers(1, 9)),
        st.tuples(st.just("all but one"), st.integers(1, 9)),
    ),
    max_size=60,
)


def of(slots: list[int]) -> np.ndarray:
    return np.array(slots, np.intp)


@given(STEPS)
def test_slots_come_in_the_order_of_their_last_use(steps: list) -> None:
    recency, line = Recency(), []
    for step, given_ in steps:
        if step == "use":
            recency.use(of(given_))
            line = [slot for slot in line if slot not in given_] + given_
        elif step == "forget":
            recency.forget(of(given_))
            line = [slot for slot in line if slot not in given_]
        else:
            taken = recency.take(given_).tolist()
            assert taken == line[: len(taken)] and bool(taken) == bool(line)
            if step == "all but one":
                recency.put_back(of(taken[1:]))
                taken = taken[:1]
            recency.forget(of(taken))
            line = line[len(taken) :]


def test_memory_does_not_grow_with_uses() -> None:
    recency = Recency()
    for _ in range(5_000):
        recency.use(np.arange(100, dtype=np.intp))
    assert len(recency._line) <= 2_048
    assert recency.take(1 << 20).tolist() == list(range(100))
    assert not len(recency.take(1))
