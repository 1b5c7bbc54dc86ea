"""What a store says to a finish that comes again, because the peer that had it first was lost."""

from __future__ import annotations

import pytest

from dataplane.wire.messages import Want
from tests.metadata.stores import put, store, take


@pytest.mark.parametrize(("outcome", "known"), [("ack", True), ("drop", True), ("release", False)])
def test_only_what_was_not_released_counts_as_finished(outcome: str, known: bool) -> None:
    one = store()
    put(one, ["a"])
    lease = take(one, "reward", Want("rows", 1, 1)).lease
    assert lease is not None and not one.has_finished(lease, None)
    one.finish(lease, outcome, None, [], [], [], {})
    assert one.has_finished(lease, None) == known
