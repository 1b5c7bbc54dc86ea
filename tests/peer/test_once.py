from __future__ import annotations

import random

import pytest

from dataplane.errors import ProtocolError
from dataplane.peer import once
from dataplane.peer.once import Repeats


def test_a_retry_is_answered_as_the_first_time() -> None:
    operations = Repeats()
    assert operations.recall(5) is None
    operations.remember(5, 0, 55)
    assert operations.recall(5) == 55


def test_answers_below_the_floor_are_forgotten_and_refused() -> None:
    operations = Repeats()
    operations.remember(5, 0, 55)
    operations.remember(7, 6, 77)
    with pytest.raises(ProtocolError, match="no longer stores"):
        operations.recall(5)
    assert operations.recall(6) is None
    assert operations.recall(7) == 77
    operations.remember(3, 6, 33)
    assert len(operations) == 1


def test_a_session_that_never_raises_its_floor_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(once, "MAX_ANSWERS", 10)
    operations = Repeats()
    for op in range(1, 31):
        operations.remember(op, 0, op)
    assert len(operations) == 10
    assert operations.recall(21) == 21
    with pytest.raises(ProtocolError):
        operations.recall(20)


def test_an_operation_that_comes_late_is_new_however_many_were_answered_since(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was refused as one that had been answered, and was never carried out."""
    monkeypatch.setattr(once, "MAX_ANSWERS", 4)
    operations = Repeats()
    late = {3, 17}
    for op in sorted(set(range(1, 41)) - late, key=lambda op: (op % 3, op)):
        operations.remember(op, 1, op)
    for op in range(1, 41):
        if op in late:
            assert operations.recall(op) is None
            continue
        try:
            assert operations.recall(op) == op
        except ProtocolError as exc:
            assert exc.details["op"] == op
    operations.remember(41, 41, 41)
    assert len(operations) == 1
    with pytest.raises(ProtocolError):
        operations.recall(3)


@pytest.mark.parametrize("seed", range(20))
def test_spans_are_a_set_of_numbers(seed: int) -> None:
    numbers, spans = random.Random(seed).sample(range(60), 40), once.NumberSet()
    for count, number in enumerate(numbers, 1):
        spans.add(number)
        assert [n for n in range(60) if n in spans] == sorted(numbers[:count])
    spans.forget(30)
    assert [n for n in range(30, 60) if n in spans] == sorted(n for n in numbers if n >= 30)
    for number in set(range(60)) - set(numbers):
        if number >= 30:
            spans.add(number)
    assert len(spans) == 1
