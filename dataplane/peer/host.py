"""State that all parts of a peer share: identity, memory, roster, the partitions that it serves,
how far its backup is behind, and whether it may serve at all.

`Host` holds this state, and calls wait here for its changes. The parts that change it (`puts`,
`claims`, …) get it in their constructors. All of it belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

import msgspec

from dataplane.errors import PartitionGone, StaleEpoch, Unavailable
from dataplane.events.ring import Ring
from dataplane.latest import Latest
from dataplane.memory.arena import Arena
from dataplane.memory.remote_references import RemoteReferences
from dataplane.memory.space import Space
from dataplane.metadata.roster.roster import Flags, Roster, Successors
from dataplane.metadata.shard.reasons import Notices
from dataplane.metadata.shard.replicas import Replicas
from dataplane.metadata.shard.stages import Stage
from dataplane.metadata.shard.store import Store
from dataplane.peer.rates import Rate
from dataplane.peer.tasks import Threads, in_time, within
from dataplane.wire.messages import OVERDUE
from dataplane.wire.tables import Owner, PoolHandle

MAX_LABELS = 10_000
MAX_SUMS = 64
MAX_GENERATIONS = 65_536
"""Generations that are remembered. An older one counts as lost, not dropped, if its shard was ever
lost."""
OTHER = "other"
LEASE_S = 1.0
"""A peer serves for this long after it sent the last request that its backup in sync confirmed, or
without one the roster keeper."""
SUCCESSION_S = 1.5
"""A promoted backup serves when its last confirmation is older than this: longer than LEASE_S, as
clocks differ in pace."""
SLOW_S = 2.0
"""A backup or keeper that has been silent for less than this may only be slow."""
POLL_S = 0.1


class CallContext(msgspec.Struct, frozen=True):
    """The call that is being served.

    until: when it must be answered (monotonic). notice: writes to the log of the process that made
    the call. stage: the stage of a claim, "" for any other call. delayed_s: how long it waited
    until this peer was sure that it may serve.
    """

    until: float = math.inf
    notice: Callable[[str], None] = logging.getLogger(__name__).warning
    stage: str = ""
    delayed_s: float = 0.0


call_context: ContextVar[CallContext] = ContextVar("call_context", default=CallContext())  # noqa: B039
"""Set by the doors for each request. The default is for work that no call waits for."""


CALL_S = 30.0
"""The deadline of work that no call waits for, and of calls without one."""


def call_end(now: float, timeout_s: float | None = None) -> float:
    """Return the deadline (monotonic) of requests to other peers for the current call: the call's
    own deadline, and `timeout_s` from now if that is earlier."""
    until = call_context.get().until
    if timeout_s is not None:
        return min(now + timeout_s, until)
    return now + CALL_S if until == math.inf else until


def waits_s(timeout_ms: int) -> float:
    """Return how long the current call may wait at its shard; -1 means as long as the call
    lives. A call that was repeated because the shard moved has less time left than its message
    says."""
    most_s = math.inf if timeout_ms < 0 else timeout_ms / 1000
    return min(most_s, call_context.get().until - time.monotonic())


def _bounded(label: str, among: Mapping[str, object]) -> str:
    """Return the label, or OTHER if it is new and `among` has MAX_SUMS labels."""
    return label if label in among or len(among) < MAX_SUMS else OTHER


class ByLabel:
    """Sums by a name that a user chose: one for each of the first MAX_SUMS names, and one for
    all others."""

    def __init__(self) -> None:
        self.sums: dict[str, int] = {}

    def add(self, label: str, amount: int) -> None:
        label = _bounded(label, self.sums)
        self.sums[label] = self.sums.get(label, 0) + amount


class Caller(msgspec.Struct, frozen=True):
    """The sender of a request: the peer, the client that it acts for, and its roster version."""

    address: str
    incarnation: int
    session: int = 0
    epoch: tuple[int, int] = (0, 0)

    @property
    def owner(self) -> Owner:
        return Owner(self.address, self.incarnation)


@dataclass(slots=True)
class Entry:
    """A partition whose shard this peer serves."""

    store: Store
    replicas: Replicas | None = None
    """with replicas=2: the replicas of what other peers wrote"""
    inherited: set[tuple[Owner, int]] = field(default_factory=set)
    """caller and number of changes that another peer applied before the partition moved here: a
    retry brings their values again"""
    acked_rates: dict[str, Rate] = field(default_factory=dict)
    """by stage, for stages that have acked rows here"""
    metered: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    """the sums of each stage that `Host.meter_stages` has seen"""
    is_metered: bool = True
    """no command has changed the store since then"""
    name: str = field(init=False)
    generation: int = field(init=False)
    key: tuple[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.name, self.generation = self.key = self.store.partition, self.store.generation
        if self.store.definition.replicas == 2:
            self.replicas = Replicas()
        self.metered = {name: _sums(stage) for name, stage in self.store.stages.items()}


def _sums(stage: Stage) -> tuple[int, int, int]:
    return stage.acked_rows, stage.released_rows, stage.redelivered_rows


class Progress:
    """How far the backup is behind, and the wait for it: no reply leaves before the backup has
    caught up."""

    def __init__(self) -> None:
        self.done = 0
        """log records of this peer's shards so far"""
        self.confirmed = 0
        """how many of them the backup has"""
        self.required = False
        """the roster calls the backup in sync, so it must have them"""
        self._held_by: asyncio.Future[None] | None = None
        self._held_why = ""
        self._waiting = OrderedDict[asyncio.Future[None], int]()
        """each with the number of records that it waits for, in ascending order"""
        self.on_awaited: Callable[[], None] = lambda: None
        """called when a call begins to wait for the backup"""
        self.is_slow: Callable[[], bool] = lambda: True
        """whether the backup confirmed something recently; asked if a call ran out of time"""
        self.backup: Callable[[], str] = lambda: ""
        """see `Serving.backup`"""

    @property
    def is_settled(self) -> bool:
        return self._may_go(self.done)

    def _may_go(self, done: int) -> bool:
        """Whether what depends on the first `done` records may leave."""
        return self._held_by is None and (not self.required or self.confirmed >= done)

    @property
    def is_awaited(self) -> bool:
        """Whether a call waits for the backup."""
        return bool(self._waiting)

    def move(self, confirmed: int) -> None:
        """Note how many records the backup has confirmed."""
        self.confirmed = confirmed
        self.wake()

    def hold(self, work: asyncio.Future[None], why: str) -> None:
        """Let no reply leave before `work` is done, however it ends. why: what the error says if a
        call times out before that."""
        self._held_by, self._held_why = work, why
        work.add_done_callback(self._release)

    def _release(self, work: asyncio.Future[None]) -> None:
        if self._held_by is work:
            self._held_by = None
            self.wake()

    def wake(self) -> None:
        waiting = self._waiting
        while waiting and self._may_go(next(iter(waiting.values()))):
            reached, _ = waiting.popitem(last=False)
            if not reached.done():
                reached.set_result(None)

    def reached(self, until: float) -> asyncio.Future[None]:
        """Return a future that is done when the backup has all records up to now. It fails
        with Unavailable at `until` (monotonic)."""
        reached: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.is_settled:
            reached.set_result(None)
        else:
            self._waiting[reached] = self.done
            reached.add_done_callback(self._forget_waiter)
            in_time(reached, until, self._late)
            self.on_awaited()
        return reached

    def _forget_waiter(self, reached: asyncio.Future[None]) -> None:
        """Forget a wait that has ended: calls may wait for an absent backup again and again."""
        self._waiting.pop(reached, None)

    def _late(self) -> Unavailable:
        why, check, is_slow = self._held_why, "", True
        if self._held_by is None:
            why = (
                f"the backup of this host's peer{self.backup()} did not confirm the call in time: "
                "it may be busy, suspended or cut off"
            )
            check = ". If the error persists, check the backup with `dataplane status`"
            is_slow = self.is_slow()
        return Unavailable(
            f"{why}. The call may have taken effect. Repeat the call (for a put, use the same keys)"
            f"{check}",
            **({OVERDUE: True} if is_slow else {}),
        )


@dataclass(slots=True)
class Host:
    plane: str
    name: str
    incarnation: int
    address: str
    roster: Roster
    arena: Arena
    space: Space
    numbers: Iterator[int]
    """of leases, claims and permits; changes have numbers of their own"""
    founding: tuple[int, int]
    """epoch of the first roster: equal seeds give equal ones"""
    remote_references: RemoteReferences = field(default_factory=RemoteReferences)
    """references to values here that shards at other peers hold"""
    successors: Successors = field(default_factory=Successors)
    entries: dict[str, Entry] = field(default_factory=dict)
    """partitions whose shards are here"""
    events: Ring = field(default_factory=Ring)
    """events of this peer"""
    notices: Notices = field(default_factory=Notices)
    """why calls of this host wait, and when that is logged"""
    labels: Latest[int, str] = field(default_factory=lambda: Latest(MAX_LABELS))
    """session → its client's label, for messages that name holders of rows"""
    progress: Progress = field(default_factory=Progress)
    spare: Flags | None = None
    """shards of this peer that a member without shards will get: they are empty, and stay empty
    until the next roster"""
    lost_shards: set[int] = field(default_factory=set)
    """shards that have ever lost both copies"""
    generations: Latest[int, int] = field(default_factory=lambda: Latest(MAX_GENERATIONS))
    """generation → its shard, of the last MAX_GENERATIONS seen since that shard was lost"""
    lost_rows: int = 0
    """rows of this peer's shards that were lost with another, also of dropped partitions"""
    sent_between: Counter[str] = field(default_factory=Counter)
    """messages to other peers so far, requests and answers, by kind"""
    sent_local: Counter[str] = field(default_factory=Counter)
    """messages to clients of this host so far, by kind"""
    released: ByLabel = field(default_factory=ByLabel)
    redelivered: ByLabel = field(default_factory=ByLabel)
    """by stage, rows of this peer's shards that returned without an ack and were granted again,
    also of dropped partitions"""
    acked_by_clients: ByLabel = field(default_factory=ByLabel)
    """by stage, rows that clients of this host have acked"""
    put_by_clients: int = 0
    """rows that clients of this host have put"""
    acked_rates: dict[str, Rate] = field(default_factory=dict)
    """of `acked_by_clients`"""
    put_rate: Rate = field(default_factory=lambda: Rate(time.monotonic()))
    metered_at: float = field(default_factory=lambda: time.monotonic())
    """when `meter` was called last"""
    on_first_rows: Callable[[], None] | None = None
    """called once, before the first rows of an empty peer are confirmed"""
    silent: bool = False
    """this peer's shards are about to move: they do not change until the next roster"""
    threads: Threads = field(default_factory=Threads)
    pools: list[PoolHandle] = field(default_factory=list)
    """the pools besides the arena, as clients of this host map them"""
    _turned: asyncio.Event = field(default_factory=asyncio.Event)
    serving: Serving = field(init=False)

    def __post_init__(self) -> None:
        self.serving = Serving(self)
        self.progress.is_slow = lambda: self.serving.is_slow
        self.progress.backup = lambda: self.serving.backup

    @property
    def owner(self) -> Owner:
        return Owner(self.address, self.incarnation)

    def caller(self, session: int = 0) -> Caller:
        """Return this peer as a caller, for one of its clients."""
        return Caller(self.address, self.incarnation, session)

    @property
    def rows(self) -> int:
        """The number of rows in the shards that this peer serves."""
        return sum(len(entry.store) for entry in self.entries.values())

    def speak(self) -> None:
        """Raise StaleEpoch while the shards of this peer are moving to another peer."""
        if self.silent:
            raise StaleEpoch(
                f"the peer at {self.address} is leaving, and its shards are moving to other "
                "peers: repeat the call",
                address=self.address,
            )

    def serves(self, partition: str) -> bool:
        """Whether this peer serves the partition's shard."""
        return self.roster.home(partition) == self.address

    @property
    def solo(self) -> bool:
        """Whether this peer has no other peers, now and later, because it was started without
        seeds."""
        return self.address == ""

    def entry(self, partition: str, generation: int) -> Entry | None:
        """Return the entry of this generation if this peer serves it, else None."""
        found = self.entries.get(partition)
        return found if found is not None and found.generation == generation else None

    def shard(self, partition: str, generation: int) -> Entry:
        """Return the entry of this generation. Raise PartitionGone if it no longer exists, and
        StaleEpoch if another peer serves it."""
        found = self.entries.get(partition)
        if found is not None and found.generation == generation:
            return found
        if not self.serves(partition):
            raise StaleEpoch(
                f"the shard of partition {partition!r} has moved to another peer: repeat the call"
            )
        raise self.gone(partition, generation)

    def check_still(self, entry: Entry, caller: Caller) -> None:
        """Check an entry after a wait. Raise StaleEpoch unless this peer still serves the
        partition and the caller is still a member, and PartitionGone if the partition was
        dropped."""
        if self.shard(entry.name, entry.generation) is entry and (
            caller.owner == self.owner or self.roster.has(caller.owner)
        ):
            return
        raise StaleEpoch(
            f"the roster changed while a write to partition {entry.name!r} was pending: repeat "
            "the call"
        )

    def gone(self, partition: str, generation: int) -> PartitionGone:
        """Return the error for a partition that no longer exists."""
        # Clocks cannot tell: generations are made by the clocks of several hosts.
        is_later = generation in self.generations
        lost = self.roster.bucket(partition) in self.lost_shards and not is_later
        why = (
            (
                "was lost because both hosts with its metadata died: declare it again "
                f"with plane.partition({partition!r}, stages=…) and put its rows again"
            )
            if lost
            else (
                "was dropped after this handle was opened: get a new handle with "
                f"plane.partition({partition!r}, …)"
            )
        )
        reason = "lost" if lost else "dropped"
        return PartitionGone(f"partition {partition!r} {why}", partition=partition, reason=reason)

    def lose(self, shards: Iterable[int]) -> None:
        """Note that no peer has the contents of these shards: callers get the reason "lost"
        instead of "dropped"."""
        lost = set(shards)
        self.lost_shards |= lost
        for generation in [one for one, shard in self.generations.items() if shard in lost]:
            del self.generations[generation]

    def note_generation(self, partition: str, generation: int) -> None:
        """Note that a generation exists."""
        self.generations[generation] = self.roster.bucket(partition)

    def turn(self, roster: Roster) -> None:
        """Apply a new roster and wake calls that wait for one."""
        self.lose(roster.lost_since(self.roster))
        self.roster = roster
        self.spare = None
        self._turned.set()
        self._turned = asyncio.Event()

    async def another_roster(self, than: Roster, until: float) -> bool:
        """Wait for another roster, at most until a time (monotonic). Return whether there is
        one."""
        with contextlib.suppress(TimeoutError):
            while self.roster is than:
                await within(until - self.now(), self._turned.wait())
        return self.roster is not than

    def meter(self) -> None:
        """Sample the totals of clients and stages for their rates: once a second, and before the
        rates are read."""
        now = self.now()
        self.put_rate.sample(now, self.put_by_clients)
        for stage, rows in self.acked_by_clients.sums.items():
            if stage not in self.acked_rates:
                self.acked_rates[stage] = Rate(self.metered_at)
            self.acked_rates[stage].sample(now, rows)
        for entry in self.entries.values():
            if not entry.is_metered:
                self.meter_stages(entry, now)
        self.metered_at = now

    def meter_stages(self, entry: Entry, now: float) -> None:
        """Add up what the stages of a partition did since the previous call: while this peer
        serves the partition, and when that ends."""
        entry.is_metered = True
        for name, stage in entry.store.stages.items():
            before, sums = entry.metered.get(name, (0, 0, 0)), _sums(stage)
            if sums == before:
                continue
            entry.metered[name] = sums
            acked, released, redelivered = sums
            if acked != before[0]:
                if name not in entry.acked_rates:
                    entry.acked_rates[name] = Rate(self.metered_at, before[0])
                entry.acked_rates[name].sample(now, acked)
            self.released.add(name, released - before[1])
            self.redelivered.add(name, redelivered - before[2])

    def label(self, holder: int, label: str) -> None:
        """Remember the name of a client of any host. The oldest names are forgotten."""
        if self.labels.get(holder) != label:
            self.labels[holder] = label

    def who(self, holder: int) -> str:
        """Return the name of a client of any host. 0 is a plan without a working rank."""
        known = self.labels.get(holder)
        return known or (f"client {holder:x}" if holder else "its plan")

    @staticmethod
    def now() -> float:
        return time.monotonic()  # looked up here, because the simulation replaces it


class Serving:
    """Whether this peer may answer for its shards: it must be sure that no other peer serves
    them."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.heard: float | None = None
        """when the last heartbeat that the keeper answered was sent (monotonic), or None"""
        self.authority = ""
        """where the keeper is, for messages"""
        self.name_of: Callable[[str], str] = lambda address: "?"
        """the name of the peer at an address"""
        self.waiting = 0
        """calls that wait until this peer is sure, which no later call overtakes"""
        self._confirmed_at = -math.inf
        self._confirmed_by: Owner | None = None
        self._not_before = -math.inf
        self._line = asyncio.Lock()

    def confirmed(self, by: Owner, asked: float) -> None:
        """Note that this peer's backup confirmed a request that was sent at this time
        (monotonic)."""
        if by != self._confirmed_by:
            self._confirmed_by, self._confirmed_at = by, asked
        self._confirmed_at = max(self._confirmed_at, asked)

    def succeed(self, confirmed_at: float) -> None:
        """Note that this peer takes over from a primary that may still run. This peer confirmed
        a request of that primary for the last time at `confirmed_at` (monotonic)."""
        self._not_before = max(self._not_before, confirmed_at + SUCCESSION_S)

    def is_sure(self) -> bool:
        if self.heard is None:
            return True
        roster, here, now = self.host.roster, self.host.address, self.host.now()
        if here not in roster.members or now < self._not_before:
            return False  # this peer is joining, or succeeds a primary that may still serve
        return now - self._confirmed < LEASE_S

    @property
    def is_slow(self) -> bool:
        """Whether the backup or keeper confirmed a request within SLOW_S. It is then slow, and not
        unreachable."""
        return self.host.now() - self._confirmed < SLOW_S

    @property
    def _confirmed(self) -> float:
        """Return when the last request was sent that the in-sync backup confirmed. Without such a
        backup, the keeper's confirmation counts."""
        backup, in_sync = self.host.roster.backup_of(self.host.address)
        if backup is None or not in_sync:
            return -math.inf if self.heard is None else self.heard
        by = self._confirmed_by
        return self._confirmed_at if by is not None and by.peer == backup else -math.inf

    async def until_sure(self, until: float) -> None:
        """Wait until this peer may serve. Calls continue in order of arrival. Raise Unavailable
        at `until` (monotonic)."""
        if self.is_sure() and not self.waiting:
            return
        self.waiting += 1
        try:
            await within(until - self.host.now(), self._become_sure())
        except TimeoutError as exc:
            slow = {OVERDUE: True} if self.is_slow else {}
            raise Unavailable(
                f"{self.reason}. Repeat the call. If the error persists, check the network "
                "between the peers",
                **slow,
            ) from exc
        finally:
            self.waiting -= 1

    async def _become_sure(self) -> None:
        async with self._line:
            while not self.is_sure():
                await asyncio.sleep(POLL_S)

    @property
    def backup(self) -> str:
        """The backup's name and address between commas, for messages; "" without a backup."""
        backup, _ = self.host.roster.backup_of(self.host.address)
        return "" if backup is None else f", peer {self.name_of(backup)} at {backup},"

    @property
    def reason(self) -> str:
        """Return why this peer may not serve now."""
        backup, in_sync = self.host.roster.backup_of(self.host.address)
        if backup is not None and in_sync:
            why = f"the backup of its partitions{self.backup} is not responding"
        else:
            why = (
                f"its partitions have no backup in sync, and the roster keeper{self.authority} "
                "is not responding"
            )
        return (
            f"peer {self.host.name!r} cannot serve requests now: {why}, so another peer may "
            "already have taken over its partitions"
        )
