"""What a partition may take of an arena: charged, promised, and given back to the byte."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.errors import ValueTooLarge
from dataplane.memory.admission import Admission
from dataplane.memory.budgets import PROMISE_S, Budgets
from dataplane.memory.space import Space

MIB = 1 << 20


def written(space: Space, nbytes: int, account: int) -> np.ndarray:
    sizes = np.array([nbytes], np.uint64)
    done, extents = space.reserve(1, Admission.OPEN, [sizes])
    assert done == 1
    extents["length"] = nbytes
    return space.commit(1, extents, 1, Admission.OPEN, account)


def test_ranges_count_for_their_account_until_they_are_freed() -> None:
    space = Space(MIB)
    mine, other = space.budgets.open(MIB // 2), space.budgets.open(MIB)
    first, second = written(space, 5000, mine), written(space, 64, other)
    uncounted = written(space, 640, 0)
    assert [space.budgets[a].used_bytes for a in (mine, other)] == [5056, 64]
    pin = space.pin(2, first)
    space.release(first)
    assert space.budgets[mine].used_bytes == 5056  # somebody reads it
    space.unpin(2, [pin])
    space.release(np.concatenate((second, uncounted)))
    assert [space.budgets[a].used_bytes for a in (mine, other)] == [0, 0]


def test_an_account_goes_with_its_partition_and_the_last_range() -> None:
    space = Space(MIB)
    account = space.budgets.open(MIB)
    ranges = written(space, 100, account)
    space.budgets.close(account)
    assert account in space.budgets
    space.release(ranges)
    assert account not in space.budgets
    late = written(space, 100, account)  # a put that was under way
    space.release(late)
    assert not len(space.budgets)


def test_a_promise_is_used_by_a_put_and_ends_by_itself() -> None:
    budgets = Budgets()
    budget = budgets[budgets.open(1000)]
    budget.promise(7, 600, now=0.0)
    assert budget.left_bytes(1.0) == 400 and budget.has_room(1000)
    budget.redeem(7, 200)
    assert budget.left_bytes(1.0) == 600
    assert budget.left_bytes(PROMISE_S) == 1000
    budget.redeem(7, 400)
    assert budget.left_bytes(1.0) == 1000


def test_a_put_has_room_only_within_the_budget() -> None:
    budgets = Budgets()
    account = budgets.open(1000)
    budgets.charge(account, 600)
    assert budgets[account].has_room(400) and not budgets[account].has_room(401)


def test_what_can_never_fit_is_refused() -> None:
    budgets = Budgets()
    with pytest.raises(ValueTooLarge, match="host_bytes"):
        budgets[budgets.open(1000)].check_unit(1001)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9000)), max_size=40))
def test_accounts_are_exact_whatever_comes_and_goes(steps: list[tuple[int, int]]) -> None:
    space = Space(4 * MIB)
    accounts = [0, *(space.budgets.open(MIB) for _ in range(3))]
    live: dict[int, list[tuple[int, np.ndarray]]] = {a: [] for a in accounts}
    for which, nbytes in steps:
        account = accounts[which]
        if live[account] and nbytes % 3 == 0:
            space.release(live[account].pop(nbytes % len(live[account]))[1])
        else:
            live[account].append((-(-nbytes // 64) * 64, written(space, nbytes, account)))
        for one in accounts[1:]:
            assert space.budgets[one].used_bytes == sum(size for size, _ in live[one])
