"""Makes the tables of errors in docs/troubleshooting.md and protocol/README.md from the classes in
`dataplane.errors`.

Run as `python -m tests.docs.make_error_table` after a change to an error class.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from dataplane import errors

ROOT = Path(__file__).parents[2]
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


def tables() -> dict[Path, str]:
    """The table of each page: users read what to do, authors of other clients what a code says."""
    every = [(f"`{kind.__name__}`", _when(kind), kind.next_step, kind.retry) for kind in classes()]
    base = (f"`{errors.DataplaneError.__name__}`", _when(errors.DataplaneError), "no")
    codes = [base, *((code, when, retry) for code, when, _, retry in every)]
    return {
        ROOT / "docs/troubleshooting.md": _table(
            ("error", "raised when", "what to do", "repeat the call?"), every
        ),
        ROOT / "protocol/README.md": _table(("code", "raised when", "repeat the call?"), codes),
    }


def _when(kind: type[errors.DataplaneError]) -> str:
    return " ".join((kind.__doc__ or "").split())


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    first, *others = [f"| {' | '.join(line)} |\n" for line in (head, *rows)]
    return "".join([first, f"|{'---|' * len(head)}\n", *others])


def main() -> None:
    for page, table in tables().items():
        before, rest = page.read_text().split(BEGIN)
        _, after = rest.split(END)
        page.write_text(before + BEGIN + table + END + after)


if __name__ == "__main__":
    main()
