"""A client's handle of one partition."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from dataplane.client.session.session import Session
from dataplane.wire.messages import Defined
from dataplane.wire.tables import Definition

SHARD_FULL_S = 1.0
"""After the shard refused small values, puts do not offer it any for this many seconds."""


class Handle(msgspec.Struct, eq=False):
    """A partition, its session, and its definition.

    Batches, streams and plans of a partition refer to its handle, and so keep the plane connected.
    """

    session: Session
    name: str
    defined: Defined | None = None
    """The peer's reply; None until this handle has attached."""
    plane: Any = None
    """The `Plane`, which disconnects when nothing refers to it."""
    full_until: float = 0.0

    def takes_inline(self) -> bool:
        """Return whether the shard may have space for small values: it has not refused any
        recently."""
        return time.monotonic() >= self.full_until

    def shard_is_full(self) -> None:
        """Note that the shard has no space for small values, so that the next puts send none."""
        self.full_until = time.monotonic() + SHARD_FULL_S

    @property
    def generation(self) -> int:
        """The generation of the partition that this handle has attached to."""
        assert self.defined is not None
        return self.defined.generation

    @property
    def definition(self) -> Definition:
        return self.defined.definition if self.defined is not None else Definition()

    @property
    def unit(self) -> str:
        """The unit that `claim` and `wait` count by default: "rows" or "groups"."""
        defined = self.defined
        grouped = defined is not None and defined.definition.group_size is not None
        return "groups" if grouped else "rows"
