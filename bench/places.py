"""Hosts with a network of their own, where a run has such: `deploy.testbed` makes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Places(Protocol):
    """Without one, the hosts of a run are groups of processes that meet on loopback."""

    def address(self, host: int) -> str:
        """By which the other hosts reach it."""

    def wrap(self, host: int, argv: Sequence[str]) -> list[str]:
        """A command line that enters the host and then becomes `argv`, with the same pid."""
