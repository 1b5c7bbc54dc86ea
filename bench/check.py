"""Did every row arrive, once, in its group, with exactly the content that was put?

The ledger lives in the runner, outside of any plane: workers report digests of what they wrote and
of what the trainers read, and the two are compared when the run is over.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

Row = tuple[int, int]
_EXAMPLES = 5


@dataclass(slots=True)
class Ledger:
    """`samples`: rows of a group; `fields`: what a trainer must have got of each row."""

    prompts: int
    samples: int
    fields: list[str]
    _produced: dict[Row, dict[str, int]] = field(default_factory=dict)
    _trained: list[tuple[list[Row], dict[str, list[int]]]] = field(default_factory=list)

    @property
    def expected_rows(self) -> int:
        return self.prompts * self.samples

    @property
    def trained_rows(self) -> int:
        return sum(len(rows) for rows, _ in self._trained)

    def record(self, event: dict[str, Any]) -> None:
        """A `produced` or `trained` event of a worker; others are none of the ledger's business."""
        rows = [(int(p), int(s)) for p, s in event.get("rows", ())]
        if event["event"] == "produced":
            for name, digests in event["digests"].items():
                for row, digest in zip(rows, digests, strict=True):
                    self._produced.setdefault(row, {})[name] = digest
        elif event["event"] == "trained":
            self._trained.append((rows, event["digests"]))

    def problems(self) -> list[str]:
        """Every way in which the trained rows differ from what was put; empty when all is well."""
        found = [*self._missing(), *self._groups(), *self._contents()]
        more = len(found) - _EXAMPLES
        return found[:_EXAMPLES] + ([f"and {more} more"] if more > 0 else [])

    def _missing(self) -> list[str]:
        seen = Counter(row for rows, _ in self._trained for row in rows)
        expected = {(p, s) for p in range(self.prompts) for s in range(self.samples)}
        return [
            *(f"row {row} was never trained" for row in sorted(expected - seen.keys())),
            *(f"row {row} was never put" for row in sorted(seen.keys() - expected)),
            *(f"row {row} was trained {n} times" for row, n in seen.items() if n > 1),
        ]

    def _groups(self) -> list[str]:
        return [
            f"a batch mixes or splits groups: {len(rows)} rows of prompts {sorted(prompts)}"
            for rows, _ in self._trained
            if len(prompts := {p for p, _ in rows}) != 1 or len(set(rows)) != self.samples
        ]

    def _contents(self) -> list[str]:
        found = []
        for rows, columns in self._trained:
            if columns.keys() != set(self.fields):
                found.append(f"fields {sorted(columns)} arrived instead of {sorted(self.fields)}")
            for name, digests in columns.items():
                for row, digest in zip(rows, digests, strict=True):
                    put = self._produced.get(row, {}).get(name)
                    if put != digest:
                        found.append(f"{name} of row {row} is not what was put")
        return found
