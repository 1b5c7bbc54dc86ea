"""The tables of errors are made from the error classes."""

from __future__ import annotations

from tests.docs.make_error_table import BEGIN, END, classes, tables


def test_the_tables_of_errors_are_made_from_the_classes() -> None:
    for page, table in tables().items():
        assert f"{BEGIN}{table}{END}" in page.read_text(), (
            f"{page.name}: run python -m tests.docs.make_error_table"
        )


def test_every_error_says_when_it_is_raised_and_what_to_do() -> None:
    for kind in classes():
        when, step = vars(kind).get("__doc__"), vars(kind).get("next_step")
        assert when and step, kind.__name__  # its own, not its base class's
        for cell in (when, step):
            assert len(cell.split()) <= 30 and "|" not in cell, kind.__name__
