"""Causes planted in steps of real peers and workers are named, and none where nothing is wrong.

CI plays the quickest cases. `make chaos` plays all, on hosts with links of their own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from dataplane.timeline.causes import Cause
from tests.timeline.job import CASES, Plane, running

TRIES = 3
IN_CI = ["unacked batch", "skewed lengths", "too few reward workers", "bound by the trainer"]
ALL = bool(os.environ.get("CHAOS"))


@pytest.fixture(scope="module")
def plane() -> Iterator[Plane]:
    try:
        with running(links=ALL) as found:
            yield found
    except PermissionError as exc:
        pytest.skip(str(exc))


@pytest.mark.parametrize("name", CASES if ALL else IN_CI)
def test_the_first_sentence_names_what_was_planted(plane: Plane, name: str) -> None:
    for _ in range(TRIES):
        found = plane.play(CASES[name].job.stretch(plane.stretch()))
        if CASES[name].is_named(found):
            return
        # This machine is so busy that a peer truly stood still: what was planted came second.
        assert Cause.STARVED_PEER in {share.cause for share in found.shares[:2]}, found.sentence
    pytest.fail(found.sentence)
