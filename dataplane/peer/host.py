"""What every part of a peer shares: identity, memory, roster, and the partitions it has rows of.

Only state and its names; the parts that act on it (`writing`, `claims`, …) get it in their
constructors. All of it belongs to the one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal

from dataplane.errors import PartitionGone, StaleEpoch, Unavailable
from dataplane.memory.arena import Arena
from dataplane.memory.device import PoolHandle
from dataplane.memory.host_memory import HostMemory
from dataplane.memory.lent import Lent
from dataplane.memory.space import Space
from dataplane.metadata.copies import Copies
from dataplane.metadata.heirs import Heirs
from dataplane.metadata.journal import JournaledStore
from dataplane.metadata.losses import LostNames
from dataplane.metadata.operations import Operations
from dataplane.metadata.reasons import Notices
from dataplane.metadata.roster import Flags, Roster
from dataplane.peer.progress import Progress
from dataplane.wire.messages import Body
from dataplane.wire.tables import Definition, Owner

MAX_LABELS = 10_000
INFORMED_S = 20.0

call_deadline: ContextVar[float] = ContextVar("call_deadline", default=math.inf)
"""Until when the client's call that is being served must be answered (monotonic)."""
call_notice: ContextVar[Callable[[str], None]] = ContextVar(
    "call_notice", default=logging.getLogger(__name__).warning
)
"""Says something in the log of the process whose call is being served."""
call_stage: ContextVar[str] = ContextVar("call_stage", default="")
"""The stage whose claim is being served; "" for anything else, and for what no call waits for."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: the peer, under which roster, and the client operation on whose behalf."""

    address: str
    incarnation: int
    session: int = 0
    op: int = 0
    floor: int = 0
    epoch: tuple[int, int] = (0, 0)

    @property
    def owner(self) -> Owner:
        return Owner(self.address, self.incarnation)


@dataclass(slots=True)
class Entry:
    """One generation of a partition at this peer."""

    name: str
    generation: int
    definition: Definition
    store: JournaledStore
    sealed: bool = False
    told_closed: int = 0
    """closed groups as last told to the partition's home"""
    losses: LostNames = field(default_factory=LostNames)
    """rows that were lost with a peer, anybody's, as far as told here"""
    copies: Copies | None = None
    """with replicas=2: the second copies of what other peers wrote"""

    def __post_init__(self) -> None:
        if self.definition.replicas == 2:
            self.copies = Copies()

    @property
    def key(self) -> tuple[str, int]:
        return self.name, self.generation

    @property
    def phase(self) -> Literal["open", "sealing", "sealed"]:
        return "sealed" if self.sealed else "sealing" if self.store.sealing else "open"


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
    founding: tuple[int, int]
    """epoch of the first roster: equal seeds give equal ones"""
    lent: Lent = field(default_factory=Lent)
    """references to values here that shards at other peers hold"""
    heirs: Heirs = field(default_factory=Heirs)
    entries: dict[str, Entry] = field(default_factory=dict)
    notices: Notices = field(default_factory=Notices)
    """what calls of this host wait for, and when that is said"""
    labels: dict[int, str] = field(default_factory=dict)
    """session → what people call it, for messages that say who holds rows"""
    progress: Progress = field(default_factory=Progress)
    spare: Flags | None = None
    """shards of this peer that go to one without any: nothing lives in them, and nothing may before
    the next roster"""
    untold: dict[str, Flags] = field(default_factory=dict)
    """peers that have yet to tell what they know of shards that this one was given: one flag a
    shard"""
    unanswered: dict[int, list[int]] = field(default_factory=dict)
    """by session, operations that another peer did not answer: it must not forget them yet"""
    lost_rows: int = 0
    """rows of the plane that were lost, as far as this peer heard, also of dropped partitions"""
    sent_between: Counter[str] = field(default_factory=Counter)
    """messages to other peers so far, requests and answers, by kind"""
    sent_local: Counter[str] = field(default_factory=Counter)
    """messages to clients of this host so far, by kind"""
    silent: bool = False
    """this peer is about to hand its shards over: until the next roster they change no more"""
    _turned: asyncio.Event = field(default_factory=asyncio.Event)
    _told: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def owner(self) -> Owner:
        return Owner(self.address, self.incarnation)

    @property
    def pools(self) -> list[PoolHandle]:
        """The device arenas, as clients of this host open them."""
        space = self.space
        return [a.handle for a in space.devices] if isinstance(space, HostMemory) else []

    def reads_in_place(self, session: int, pools: Sequence[int]) -> None:
        """This session has opened these pools, 1 is the first."""
        if pools and isinstance(self.space, HostMemory):
            self.space.reads_in_place(session, pools)

    def speak(self) -> None:
        """StaleEpoch while the shards of this peer are about to become another's."""
        if self.silent:
            raise StaleEpoch(
                f"the peer at {self.address} leaves, and its shards move: call again",
                address=self.address,
            )

    def serves(self, partition: str) -> bool:
        """Whether the partition's shard is here."""
        return self.roster.home(partition) == self.address

    @property
    def solo(self) -> bool:
        """A peer without others, now and later: it was given no seeds."""
        return self.address == ""

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

    def heir(self, owner: Owner) -> Owner:
        """Who serves what this peer's shards held: itself, or who took them over."""
        return self.heirs.heir(owner)

    def serving(self, owner: Owner) -> str | None:
        """The address of who serves what this peer's shards held; None where all of it is lost."""
        heir = self.heirs.heir(owner)
        return heir.peer if self.roster.has(heir) else None

    def turn(self, roster: Roster) -> None:
        """From now on this roster is in force here; who waits for another one goes on."""
        self.roster = roster
        self.spare = None
        self._turned.set()
        self._turned = asyncio.Event()

    async def another_roster(self, than: Roster, until: float) -> bool:
        """Wait for one, until a time at most. Whether there is one."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, until - self.now())):
                while self.roster is than:
                    await self._turned.wait()
        return self.roster is not than

    def told(self) -> None:
        """Nobody is left to tell: who waits for that goes on."""
        self._told.set()
        self._told = asyncio.Event()

    async def informed(self) -> None:
        """Until this peer knows what the homes that it took over knew. Unavailable, with the peers
        that did not tell; StaleEpoch where that went on to another peer meanwhile."""
        began = self.roster
        until = min(INFORMED_S, call_deadline.get() - self.now())
        try:
            async with asyncio.timeout(max(0.0, until) if self.untold else None):
                while self.untold:
                    await self._told.wait()
        except TimeoutError:
            raise Unavailable(
                f"the roster changed, and {', '.join(sorted(self.untold))} did not tell yet what "
                "was kept elsewhere before: call again"
            ) from None
        if self.roster is not began and not self.roster.places_like(began):
            raise StaleEpoch(f"the roster changed while {self.address} learned the one before")

    def label(self, holder: int, label: str) -> None:
        """Remember what a client of any host is called; the oldest are forgotten."""
        self.labels[holder] = label
        while len(self.labels) > MAX_LABELS:
            del self.labels[next(iter(self.labels))]

    @staticmethod
    def now() -> float:
        return time.monotonic()
