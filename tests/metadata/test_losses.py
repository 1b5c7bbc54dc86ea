"""Names of lost rows: numbered, bounded, and whoever asks late is told what is missing."""

from __future__ import annotations

from dataplane.metadata.tables.remembered import LostNames
from dataplane.wire.limits import MAX_LOST_PER_MESSAGE


def test_names_come_in_order_and_each_once() -> None:
    lost = LostNames()
    assert lost.after(0) == ([], 0, 0)
    lost.note(["a", 7])
    assert lost.after(0) == (["a", 7], 2, 0)
    lost.note(["b"])
    assert lost.after(2) == (["b"], 3, 0)
    assert lost.after(3) == ([], 3, 0)
    assert repr(lost) == "<LostNames 3 rows, 3 kept>"


def test_the_oldest_names_go_first_and_are_counted() -> None:
    lost = LostNames(max_kept=2)
    lost.note(["a", "b", "c"])
    assert lost.total == 3
    assert lost.after(0) == (["b", "c"], 3, 1)
    assert lost.after(2) == (["c"], 3, 0)


def test_many_names_come_in_messages_of_bounded_size() -> None:
    lost = LostNames()
    lost.note(range(MAX_LOST_PER_MESSAGE + 1))
    first, number, _ = lost.after(0)
    assert len(first) == number == MAX_LOST_PER_MESSAGE
    assert lost.after(number) == ([MAX_LOST_PER_MESSAGE], number + 1, 0)
    assert lost.latest()[-1] == MAX_LOST_PER_MESSAGE


def test_a_number_from_nowhere_gets_what_there_is() -> None:
    lost = LostNames()
    lost.note(["a"])
    assert lost.after(-5)[0] == ["a"]
    assert lost.after(99) == ([], 1, 0)
