"""When everybody waits for everybody, and when not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import pytest

from dataplane.peer.room.standstill import LOOKS, Standstill, is_standstill
from dataplane.wire.peering import Activity

FULL = Activity(filled=["p"], busy=[], held=False, claims=0, claimable=False, done=7)
IDLE = Activity(filled=[], busy=[], held=False, claims=0, claimable=False, done=0)


class OneRow:
    """As much of a shard's store as is looked at, with a row that nobody takes."""

    leases = ()
    stages: ClassVar[dict[str, Any]] = {}
    definition = SimpleNamespace(free="acked")

    def __len__(self) -> int:
        return 1


def but(answer: Activity, **changed: Any) -> Activity:
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
def test_somebody_who_could_free_space_is_none(answers: list[Activity]) -> None:
    assert not is_standstill(answers)
    assert not is_standstill(answers[::-1])


def test_clients_of_other_partitions_are_nobodys_hope() -> None:
    assert is_standstill([FULL, but(IDLE, busy=["another"])])


def test_who_waits_after_others_were_told_is_told_of_what_is_seen_from_then_on() -> None:
    """Whoever could free rows may have come in between."""
    entry = SimpleNamespace(name="p", store=OneRow())
    host: Any = SimpleNamespace(
        solo=True, entries={"p": entry}, progress=SimpleNamespace(done=7), now=lambda: 0.0
    )
    peer: Any = SimpleNamespace(
        host=host, mesh=SimpleNamespace(handlers={}), sessions=[], spilling=None,
        claims=SimpleNamespace(waiting=0), room=SimpleNamespace(starved=0),
    )  # fmt: skip
    standstill = Standstill(peer)
    for _ in range(2):
        assert [standstill.lasts(False, True) for _ in range(LOOKS)] == [False, False, True]
