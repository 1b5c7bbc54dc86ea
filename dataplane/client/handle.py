"""One partition as this client knows it."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from dataplane.client.session.session import Session
from dataplane.wire.messages import Defined
from dataplane.wire.tables import Definition

SHARD_FULL_S = 1.0
"""A shard that had no room for small values is asked again after this time."""


class Handle(msgspec.Struct, eq=False):
    """A partition, its session, and what the peer has said about it.

    Everything that a partition hands out (batches, streams, plans) has its handle, and so keeps the
    plane connected.
    """

    session: Session
    name: str
    defined: Defined | None = None
    """None until this handle has attached."""
    plane: Any = None
    """The `Plane`, which disconnects when nothing refers to it."""
    full_until: float = 0.0
    producers: set[int] = set()
    """Threads and tasks in the body of a loop over `producing`."""

    def takes_inline(self) -> bool:
        """Whether the shard may have room for small values: it has not refused any recently."""
        return time.monotonic() >= self.full_until

    def shard_is_full(self) -> None:
        """Note that the shard had no room for small values, so that the next puts do not ask."""
        self.full_until = time.monotonic() + SHARD_FULL_S

    @property
    def generation(self) -> int:
        """The generation that this handle has attached to."""
        assert self.defined is not None
        return self.defined.generation

    @property
    def definition(self) -> Definition:
        return self.defined.definition if self.defined is not None else Definition()

    @property
    def unit(self) -> str:
        """What `claim` and `wait` count by default."""
        return "groups" if self.definition.group_size is not None else "rows"
