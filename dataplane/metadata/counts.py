"""What one store reports about one lane: how many units are ready, may come, or are not yet done.

Told by the stores, read by the homes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from dataplane.wire.messages import Want


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class Lane:
    """One distinct form of demand. `where` is the filter's MessagePack form, b"" without one, so
    that lanes can be compared and kept in dicts."""

    unit: Literal["rows", "groups"]
    where: bytes = b""
    budget_tag: str | None = None

    @staticmethod
    def of(want: Want) -> Lane:
        where = b"" if want.where is None else msgspec.msgpack.encode(want.where)
        return Lane(want.unit, where, want.budget_tag)

    @property
    def filter(self) -> list[Any] | None:
        """The filter as messages carry it."""
        return msgspec.msgpack.decode(self.where, type=list[Any]) if self.where else None
