"""Sums by a name that a user chose: bounded, as the names are not."""

from __future__ import annotations

MAX_LABELS = 64
OTHER = "other"


class ByLabel:
    """The first MAX_LABELS names, and the rest together."""

    def __init__(self) -> None:
        self.sums: dict[str, int] = {}

    def add(self, label: str, amount: int) -> None:
        if label not in self.sums and len(self.sums) >= MAX_LABELS:
            label = OTHER
        self.sums[label] = self.sums.get(label, 0) + amount
