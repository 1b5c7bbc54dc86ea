"""The ledger finds every way in which rows can go wrong between rollout and trainer."""

from __future__ import annotations

from typing import Any

import pytest

from bench.check import Ledger

FIELDS = ["tokens", "reward"]


def group(prompt: int) -> dict[str, Any]:
    rows = [[prompt, 0], [prompt, 1]]
    return {"rows": rows, "digests": {name: [prompt * 10, prompt * 10 + 1] for name in FIELDS}}


def ledger(*trained: dict[str, Any]) -> Ledger:
    kept = Ledger(prompts=2, samples=2, fields=FIELDS)
    for prompt in range(2):
        kept.record({"event": "produced", **group(prompt)})
    for event in trained:
        kept.record({"event": "trained", **event})
    return kept


def test_a_complete_run_has_no_problems() -> None:
    complete = ledger(group(0), group(1))
    assert complete.problems() == []
    assert complete.trained_rows == complete.expected_rows == 4


def test_events_may_arrive_in_any_order() -> None:
    kept = Ledger(prompts=1, samples=2, fields=FIELDS)
    kept.record({"event": "trained", **group(0)})
    kept.record({"event": "produced", **group(0)})
    assert kept.problems() == []


def mixed() -> list[dict[str, Any]]:
    first, second = group(0), group(1)
    first["rows"][1], second["rows"][1] = second["rows"][1], first["rows"][1]
    for name in FIELDS:
        columns = first["digests"][name], second["digests"][name]
        columns[0][1], columns[1][1] = columns[1][1], columns[0][1]
    return [first, second]


def altered() -> list[dict[str, Any]]:
    event = group(1)
    event["digests"]["tokens"][1] += 1
    return [group(0), event]


def without_a_field() -> list[dict[str, Any]]:
    event = group(1)
    del event["digests"]["reward"]
    return [group(0), event]


@pytest.mark.parametrize(
    ("trained", "problem"),
    [
        ([group(0)], "row (1, 0) was never trained on"),
        ([group(0), group(1), group(1)], "trained on 2 times"),
        ([group(0), group(1), group(2)], "row (2, 0) was never put"),
        (mixed(), "does not consist of one whole group"),
        (altered(), "field 'tokens' of row (1, 1) differs from what was put"),
        (without_a_field(), "arrived, expected"),
    ],
)
def test_a_wrong_row_is_named(trained: list[dict[str, Any]], problem: str) -> None:
    assert any(problem in found for found in ledger(*trained).problems())


def test_many_problems_are_cut_short() -> None:
    empty = Ledger(prompts=50, samples=8, fields=FIELDS)
    assert empty.problems()[-1] == "and 395 more"


def filtering(*events: dict[str, Any]) -> Ledger:
    kept = Ledger(prompts=3, samples=2, fields=FIELDS, filtered={1, 2})
    kept.record({"event": "produced", **group(0)})
    kept.record({"event": "trained", **group(0)})
    for event in events:
        kept.record(event)
    return kept


def filtered(*prompts: int) -> dict[str, Any]:
    return {"event": "filtered", "prompts": list(prompts)}


def test_filtered_groups_are_accounted_for() -> None:
    complete = filtering(filtered(1), filtered(2))
    assert complete.problems() == []
    assert complete.expected_rows == complete.trained_rows == 2
    assert complete.filtered_rows == 4


@pytest.mark.parametrize(
    ("events", "problem"),
    [
        ([filtered(1)], "group 2 should have been filtered"),
        ([filtered(1, 2, 0)], "group 0 should not have been filtered"),
        ([filtered(1, 2), filtered(2)], "group 2 was filtered 2 times"),
        ([filtered(1, 2), {"event": "trained", **group(1)}], "was filtered, but trained on"),
    ],
)
def test_a_group_that_was_filtered_wrongly_is_named(
    events: list[dict[str, Any]], problem: str
) -> None:
    assert any(problem in found for found in filtering(*events).problems())
