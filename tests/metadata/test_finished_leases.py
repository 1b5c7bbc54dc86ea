"""What a store says to a finish that comes again, because the peer that had it first was lost."""

from __future__ import annotations

import pytest

from dataplane.wire.messages import Finish, Want
from dataplane.wire.tables import Column
from tests.metadata.stores import finish, put, store, take, values


@pytest.mark.parametrize(("outcome", "known"), [("ack", True), ("drop", True), ("release", False)])
def test_only_what_was_not_merely_released_counts_as_finished(outcome: str, known: bool) -> None:
    one = store()
    put(one, ["a"])
    lease = take(one, "reward", Want("rows", 1, 1)).lease
    assert lease is not None and not one.has_finished(lease, None)
    one.finish(Finish(lease, outcome))
    assert one.has_finished(lease, None) == known


def test_a_release_with_progress_is_known_again_and_one_that_never_came_is_not() -> None:
    one = store()
    put(one, ["a"])
    first = take(one, "reward", Want("rows", 1, 1))
    finish(one, first, "release", columns=[Column("so_far", values(1))])
    assert first.lease is not None and one.has_finished(first.lease, None)
    second = take(one, "reward", Want("rows", 1, 1))
    one.release_holder(1)
    assert second.lease is not None and not one.has_finished(second.lease, None)
