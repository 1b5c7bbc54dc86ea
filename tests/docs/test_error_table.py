"""The table of errors in docs/troubleshooting.md is made from the error classes."""

from __future__ import annotations

from tests.docs.make_error_table import PAGE, classes, table


def test_the_table_of_errors_is_made_from_the_classes() -> None:
    assert table() in PAGE.read_text(), "run python -m tests.docs.make_error_table"


def test_every_error_says_when_it_is_raised_and_what_to_do() -> None:
    for kind in classes():
        when, step = vars(kind).get("__doc__"), vars(kind).get("next_step")
        assert when and step, kind.__name__  # its own, not its base class's
        for cell in (when, step):
            assert len(cell.split()) <= 30 and "|" not in cell, kind.__name__
