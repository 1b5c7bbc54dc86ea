"""How many units of a stage, or of those that match a filter, are ready, may come, or are not yet
done."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counts:
    """ready: claimable now. remaining: neither leased nor done: ready, or may still become ready.
    outstanding: not yet acked, dropped or lost for the stage (leased ones included). lost_rows:
    went with the peer that had their bytes, before the stage was done with them."""

    ready_rows: int = 0
    ready_groups: int = 0
    remaining_rows: int = 0
    remaining_groups: int = 0
    outstanding_rows: int = 0
    outstanding_groups: int = 0
    lost_rows: int = 0

    def ready(self, unit: str) -> int:
        return self.ready_rows if unit == "rows" else self.ready_groups

    def remaining(self, unit: str) -> int:
        return self.remaining_rows if unit == "rows" else self.remaining_groups

    def outstanding(self, unit: str) -> int:
        return self.outstanding_rows if unit == "rows" else self.outstanding_groups
