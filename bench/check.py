"""Checks that every row arrived once, in its group, with exactly the content that was put.

The ledger is in the runner, outside of any plane. Workers report digests of what they wrote and
of what the trainers read, and the runner compares the two after the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

Row = tuple[int, int]
_EXAMPLES = 5


@dataclass(slots=True)
class Ledger:
    """samples: rows of a group. fields: what trainers must get. filtered: groups that they must not
    get."""

    prompts: int
    samples: int
    fields: list[str]
    filtered: Collection[int] = frozenset()
    _produced: dict[Row, dict[str, int]] = field(default_factory=dict)
    _trained: list[tuple[list[Row], dict[str, list[int]]]] = field(default_factory=list)
    _filtered: list[int] = field(default_factory=list)

    @property
    def expected_rows(self) -> int:
        return (self.prompts - len(self.filtered)) * self.samples

    @property
    def trained_rows(self) -> int:
        return sum(len(rows) for rows, _ in self._trained)

    @property
    def filtered_rows(self) -> int:
        return len(self._filtered) * self.samples

    def record(self, event: dict[str, Any]) -> None:
        """Record a worker's event about rows. Other events are ignored."""
        rows = [(int(p), int(s)) for p, s in event.get("rows", ())]
        if event["event"] == "produced":
            for name, digests in event["digests"].items():
                for row, digest in zip(rows, digests, strict=True):
                    self._produced.setdefault(row, {})[name] = digest
        elif event["event"] == "trained":
            self._trained.append((rows, event["digests"]))
        elif event["event"] == "filtered":
            self._filtered += [int(prompt) for prompt in event["prompts"]]

    def problems(self) -> list[str]:
        """The differences between the trained rows and the rows that were put. Empty if there are
        none."""
        found = [*self._missing(), *self._drops(), *self._groups(), *self._contents()]
        more = len(found) - _EXAMPLES
        return found[:_EXAMPLES] + ([f"and {more} more"] if more > 0 else [])

    def _missing(self) -> list[str]:
        kept = set(range(self.prompts)).difference(self.filtered)
        expected = {(p, s) for p in kept for s in range(self.samples)}
        seen = Counter(row for rows, _ in self._trained for row in rows)
        return [
            *(f"row {row} was never trained on" for row in sorted(expected - seen.keys())),
            *(f"row {row} was {self._absent(row)}" for row in sorted(seen.keys() - expected)),
            *(f"row {row} was trained on {n} times" for row, n in seen.items() if n > 1),
        ]

    def _absent(self, row: Row) -> str:
        return "filtered, but trained on" if row[0] in self.filtered else "never put"

    def _drops(self) -> list[str]:
        told, expected = Counter(self._filtered), set(self.filtered)
        return [
            *(f"group {p} should have been filtered" for p in sorted(expected - told.keys())),
            *(f"group {p} should not have been filtered" for p in sorted(told.keys() - expected)),
            *(f"group {p} was filtered {n} times" for p, n in told.items() if n > 1),
        ]

    def _groups(self) -> list[str]:
        return [
            f"a batch does not consist of one whole group: {len(rows)} rows of prompts "
            f"{sorted(prompts)}"
            for rows, _ in self._trained
            if len(prompts := {p for p, _ in rows}) != 1 or len(set(rows)) != self.samples
        ]

    def _contents(self) -> list[str]:
        found = []
        for rows, columns in self._trained:
            if columns.keys() != set(self.fields):
                found.append(f"fields {sorted(columns)} arrived, expected {sorted(self.fields)}")
            for name, digests in columns.items():
                for row, digest in zip(rows, digests, strict=True):
                    put = self._produced.get(row, {}).get(name)
                    if put != digest:
                        found.append(f"field {name!r} of row {row} differs from what was put")
        return found
