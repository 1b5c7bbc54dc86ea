"""What every part of a peer shares: identity, memory, roster, and the partitions it has rows of.

Only state and its names; the parts that act on it (`writing`, `claims`, …) get it in their
constructors. All of it belongs to the one event loop.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field

from dataplane.errors import PartitionGone
from dataplane.memory.arena import Arena
from dataplane.memory.space import Space
from dataplane.metadata.directory import Directory
from dataplane.metadata.operations import Operations
from dataplane.metadata.roster import Roster
from dataplane.metadata.store import Store
from dataplane.wire.messages import Body
from dataplane.wire.tables import Definition, Owner

MAX_LABELS = 10_000

call_deadline: ContextVar[float] = ContextVar("call_deadline", default=math.inf)
"""Until when the client's call that is being served must be answered (monotonic)."""


@dataclass(slots=True)
class Entry:
    """One generation of a partition at this peer."""

    name: str
    generation: int
    definition: Definition
    store: Store
    sealed: bool = False
    told_closed: int = 0
    """closed groups as last told to the partition's home"""

    @property
    def key(self) -> tuple[str, int]:
        return self.name, self.generation


@dataclass(slots=True)
class Host:
    plane: str
    name: str
    incarnation: int
    address: str
    roster: Roster
    arena: Arena
    space: Space
    operations: Operations[Body]
    lease_numbers: Iterator[int]
    directory: Directory
    entries: dict[str, Entry] = field(default_factory=dict)
    labels: dict[int, str] = field(default_factory=dict)
    """session → what people call it, for messages that say who holds rows"""

    @property
    def owner(self) -> Owner:
        return Owner(self.address, self.incarnation)

    @property
    def solo(self) -> bool:
        return len(self.roster.members) == 1

    def entry(self, partition: str, generation: int) -> Entry | None:
        """The entry of this generation; None where this peer has none yet.

        PartitionGone where the generation is older than the one in force here.
        """
        found = self.entries.get(partition)
        if found is None:
            return None
        if generation < found.generation:
            raise PartitionGone(
                f"partition {partition!r} was dropped and made anew; get a new handle with "
                f"plane.partition({partition!r})",
                partition=partition,
            )
        return found if found.generation == generation else None

    def label(self, holder: int, label: str) -> None:
        """Remember what a client of any host is called; the oldest are forgotten."""
        self.labels[holder] = label
        while len(self.labels) > MAX_LABELS:
            del self.labels[next(iter(self.labels))]

    @staticmethod
    def now() -> float:
        return time.monotonic()
