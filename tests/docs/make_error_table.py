"""Makes the table of errors in docs/troubleshooting.md from the classes in `dataplane.errors`.

Run as `python -m tests.docs.make_error_table` after a change to an error class.
"""

from __future__ import annotations

from pathlib import Path

from dataplane import errors

PAGE = Path(__file__).parents[2] / "docs/troubleshooting.md"
BEGIN, END = "<!-- errors: begin -->\n", "<!-- errors: end -->\n"


def classes() -> list[type[errors.DataplaneError]]:
    """Every error class but the base, in alphabetical order."""
    found = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type)
        and issubclass(kind, errors.DataplaneError)
        and kind is not errors.DataplaneError
    ]
    return sorted(found, key=lambda kind: kind.__name__)


def table() -> str:
    lines = ["| error | raised when | what to do | repeat the call? |", "|---|---|---|---|"]
    for kind in classes():
        when = " ".join((kind.__doc__ or "").split())
        lines.append(f"| `{kind.__name__}` | {when} | {kind.next_step} | {kind.retry} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    before, rest = PAGE.read_text().split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(before + BEGIN + table() + END + after)


if __name__ == "__main__":
    main()
