"""When everybody waits for everybody, and when not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dataplane.peer.watch.deadlock import is_standstill
from dataplane.wire.peering import Stirring

FULL = Stirring(filled=["p"], busy=[], held=False, claims=0, claimable=False, done=7)
IDLE = Stirring(filled=[], busy=[], held=False, claims=0, claimable=False, done=0)


def but(answer: Stirring, **changed: Any) -> Stirring:
    return msgspec.structs.replace(answer, **changed)


def test_rows_that_nobody_can_claim_are_a_standstill() -> None:
    assert is_standstill([FULL])
    assert is_standstill([FULL, IDLE])


def test_a_claim_that_waits_for_more_rows_than_fit_is_a_standstill() -> None:
    assert is_standstill([but(FULL, claimable=True), but(IDLE, claims=1)])


@pytest.mark.parametrize(
    "answers",
    [
        [but(FULL, held=True), IDLE],
        [FULL, but(IDLE, held=True)],
        [but(FULL, claimable=True), IDLE],
        [FULL, but(IDLE, busy=["p"])],
        [but(FULL, busy=["q"]), but(IDLE, filled=["q"])],
        [IDLE, IDLE],
    ],
    ids=["leased", "leased there", "claimable", "a client there", "another's rows", "empty"],
)
def test_somebody_who_could_free_space_is_none(answers: list[Stirring]) -> None:
    assert not is_standstill(answers)
    assert not is_standstill(answers[::-1])


def test_clients_of_other_partitions_are_nobodys_hope() -> None:
    assert is_standstill([FULL, but(IDLE, busy=["another"])])
