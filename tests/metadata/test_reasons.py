"""What people are told of a wait: the sentence, and when it is due."""

from __future__ import annotations

from typing import Any

import pytest

from dataplane.metadata.shard.reasons import (
    FIRST_S,
    MOST_S,
    Facts,
    Notices,
    Subject,
    only_own,
    reason,
)

SUBJECT = Subject("claim", "p", "s")
ME, OTHER = "pid 1 on host a", "pid 7 on host b"


def told(**changes: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {
        **dict.fromkeys(
            ("ready", "units", "excluded", "alone", "open_groups", "producers", "before"), 0
        ),
        **{"missing": {}, "adders": {}, "leases": [], "sealed": False, "plan": ""},
    }
    return plain | changes


def test_what_the_shard_says_is_one_sentence() -> None:
    facts = Facts(
        "groups",
        **told(
            ready=509,
            units=512,
            missing={"reward": 3},
            adders={"reward": "judge"},
            leases=[[OTHER, "judge", 3, 90.2]],
            alone=1,
            open_groups=1,
            producers=2,
            before=1,
        ),
    )
    assert reason(facts, "train", "512 wanted") == (
        "509 of 512 groups ready, 512 wanted; 1 claim of its kind waits before it; 3 rows lack "
        "`reward`, a field of 'train' that stage 'judge' adds; 1 group is still open; 1 row has no "
        "group; 3 rows leased by pid 7 on host b for stage 'judge' for 90 s; 2 puts wait for room"
    )


def test_a_shard_that_says_nothing_is_named() -> None:
    assert reason(Facts("rows", silent="b at tcp://b:1"), "train", "") == (
        "peer b at tcp://b:1, which has the partition's shard, does not answer"
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"excluded": 2, "units": 2}, "2 ready rows are excluded by the filter"),
        ({"sealed": True, "units": 1}, "sealed and nothing that is left can come to this call"),
        ({"sealed": True, "ready": 1}, "the partition is sealed, so no new row comes"),
        ({"leases": [[ME, "s", 4, 1.0]]}, f"4 rows leased by this process ({ME}) for 1 s"),
        ({"leases": [[OTHER, "s", 1, float(n)] for n in range(5)]}, "for 2 s; and by 2 more"),
    ],
)
def test_each_reason_is_said(changes: dict[str, Any], says: str) -> None:
    assert says in reason(Facts("rows", **told(**changes)), "s", "4 wanted", ME)


@pytest.mark.parametrize(
    ("leases", "sealed", "alone", "own"),
    [
        ([(ME, "s", 1, 0.0)], True, False, True),
        ([(ME, "s", 1, 0.0)], False, True, True),
        ([(ME, "s", 1, 0.0)], False, False, False),
        ([(ME, "s", 1, 0.0), (OTHER, "s", 1, 0.0)], True, True, False),
        ([(ME, "t", 1, 0.0)], True, True, True),
        ([(ME, "t", 1, 0.0)], True, False, False),
        ([], True, True, False),
    ],
)
def test_a_wait_that_only_its_own_process_can_end_is_known(
    leases: list[tuple[str, str, int, float]], sealed: bool, alone: bool, own: bool
) -> None:
    assert only_own(Facts(leases=leases, sealed=sealed), "s", ME, alone) is own


def test_one_of_many_speaks_and_less_and_less_often() -> None:
    notices, now, lines = Notices(), 100.0, []
    for _ in range(8):
        notices.begin(SUBJECT, now)
    while now < 100 + 2 * 3600:
        now += notices.wait_s(SUBJECT, now)
        lines += [(now - 100, many) for _ in range(8) if (many := notices.take(SUBJECT, now))]
    assert [at for at, _ in lines[:4]] == [FIRST_S, 3 * FIRST_S, 7 * FIRST_S, 15 * FIRST_S]
    assert {many for _, many in lines} == {8}
    assert lines[-1][0] - lines[-2][0] == MOST_S
    for _ in range(8):
        notices.end(SUBJECT)
    assert len(notices) == 0
