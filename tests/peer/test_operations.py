from __future__ import annotations

import random

import pytest

from dataplane.errors import ProtocolError
from dataplane.peer import once
from dataplane.peer.once import Operations


def test_a_retry_is_answered_as_the_first_time() -> None:
    operations: Operations[str] = Operations()
    assert operations.recall(1, 5) is None
    operations.remember(1, 5, 0, "five")
    assert operations.recall(1, 5) == "five"
    assert operations.recall(2, 5) is None


def test_answers_below_the_floor_are_forgotten_and_refused() -> None:
    operations: Operations[str] = Operations()
    operations.remember(1, 5, 0, "five")
    operations.remember(1, 7, 6, "seven")
    with pytest.raises(ProtocolError, match="no longer stored"):
        operations.recall(1, 5)
    assert operations.recall(1, 6) is None
    assert operations.recall(1, 7) == "seven"
    operations.remember(1, 3, 6, "late")
    assert len(operations) == 1


def test_a_session_that_never_raises_its_floor_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(once, "MAX_ANSWERS_PER_SESSION", 10)
    operations: Operations[int] = Operations()
    for op in range(1, 31):
        operations.remember(1, op, 0, op)
    assert len(operations) == 10
    assert operations.recall(1, 21) == 21
    with pytest.raises(ProtocolError):
        operations.recall(1, 20)


def test_an_operation_that_comes_late_is_new_however_many_were_answered_since(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was refused as one that had been answered, and was never carried out."""
    monkeypatch.setattr(once, "MAX_ANSWERS_PER_SESSION", 4)
    operations: Operations[int] = Operations()
    late = {3, 17}
    for op in sorted(set(range(1, 41)) - late, key=lambda op: (op % 3, op)):
        operations.remember(1, op, 1, op)
    for op in range(1, 41):
        if op in late:
            assert operations.recall(1, op) is None
            continue
        try:
            assert operations.recall(1, op) == op
        except ProtocolError as exc:
            assert exc.details["op"] == op
    operations.remember(1, 41, 41, 41)
    assert len(operations) == 1
    with pytest.raises(ProtocolError):
        operations.recall(1, 3)


@pytest.mark.parametrize("seed", range(20))
def test_spans_are_a_set_of_numbers(seed: int) -> None:
    numbers, spans = random.Random(seed).sample(range(60), 40), once.Spans()
    for count, number in enumerate(numbers, 1):
        spans.add(number)
        assert [n for n in range(60) if n in spans] == sorted(numbers[:count])
    spans.forget(30)
    assert [n for n in range(30, 60) if n in spans] == sorted(n for n in numbers if n >= 30)
    for number in set(range(60)) - set(numbers):
        if number >= 30:
            spans.add(number)
    assert len(spans) == 1


def test_nothing_is_left_of_a_session_that_ended() -> None:
    operations: Operations[str] = Operations()
    operations.remember(1, 5, 3, "five")
    operations.end(1)
    operations.end(1)
    assert len(operations) == 0
    assert operations.recall(1, 5) is None
