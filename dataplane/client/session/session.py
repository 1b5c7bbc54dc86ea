"""What one client knows and holds: ids, extents, pins, leases, and its connections.

Runs in the client, shared by all its threads and event loops. One short lock guards the counters
and is never held while waiting. A session sends nothing: `client/_sync` and `client/_async` do.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate, chain
from queue import Empty, SimpleQueue
from struct import Struct
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from dataplane.client.session.connection import Connection, Connections
from dataplane.client.session.slabs import IDLE_S, POOL_AHEAD, Slabs
from dataplane.client.session.telemetry import Tally, spans_of
from dataplane.errors import ClientClosed, PeerLost, counted, few
from dataplane.gpu.direct import DirectCopies
from dataplane.memory.arena import Pin, ReadMap, WriteMaps
from dataplane.memory.extents import Extent
from dataplane.metadata.tables.keys import RUN_KEYS, mint_many
from dataplane.wire.messages import (
    Body,
    Defined,
    Finish,
    GiveBack,
    HelloDone,
    Request,
    Welcome,
)
from dataplane.wire.packed import EXTENT, KEY
from dataplane.wire.tables import Definition, Owner

if TYPE_CHECKING:
    from dataplane.gpu.client.pools import OpenPools

log = logging.getLogger(__name__)

MAX_KNOWN_KEYS = 65_536
_KNOWN_BYTES = MAX_KNOWN_KEYS * KEY.itemsize
_KEYS = Struct(f"{KEY.itemsize}s")
SHARD_FULL_S = 1.0
"""After the shard refused small values, puts do not offer it any for this many seconds."""
MAX_WARNED = 64
MAX_ORPHANS = 64
"""The most connections of abandoned calls that a stopped peer has not ended. Grants to later ones
return at the end of the session."""

T = TypeVar("T")


class Bell:
    """Wakes the housekeeper. Finalizers ring it too, so it takes no lock. It wakes once until the
    housekeeper looks. A wake per discarded batch would compete with the caller for the interpreter,
    and find no work, because due messages go with the next call.
    """

    __slots__ = ("_rings", "rung")

    def __init__(self) -> None:
        self._rings: SimpleQueue[None] = SimpleQueue()  # its put is reentrant
        self.rung = False
        """whether it rang and the housekeeper has not looked since"""

    def ring(self) -> None:
        """Wake the housekeeper. Record its work first."""
        if not self.rung:
            self.rung = True
            self._rings.put(None)

    def wait(self, timeout_s: float | None) -> bool:
        """Sleep until the bell rings. Return False after `timeout_s`."""
        try:
            self._rings.get(timeout=timeout_s)
        except Empty:
            return False
        return True

    def reset(self) -> None:
        """Let the bell ring again. Call this before looking for work, so that none is
        overlooked."""
        self.rung = False


class Session:
    """One client's side of its session at the peer."""

    def __init__(
        self,
        welcome: Welcome,
        done: HelloDone,
        connections: Connections,
        reads: ReadMap,
        writes: WriteMaps,
        pools: OpenPools | None = None,
    ) -> None:
        self.id = done.session
        self.plane = welcome.plane
        self.peer = welcome.peer
        self.incarnation = welcome.incarnation
        self.owner = Owner(welcome.address, welcome.incarnation)
        """the peer, as messages name it"""
        self.max_rows = welcome.max_rows
        self.quota_bytes = done.quota_bytes
        self.welcome, self.found = welcome, done
        self.connections = connections
        connections.orphaned = self._orphaned
        self.reads = reads
        self.writes = writes
        self.pools = pools
        """pools of the peer that this client opens, if there are any"""
        sizes = [pool.nbytes for pool in welcome.pools]
        self._pool_bases = list(accumulate(sizes, initial=welcome.arena_bytes))[:-1]
        self.slabs = [
            Slabs(done.quota_bytes[0]),
            *[Slabs(size, size // POOL_AHEAD) for size in sizes],
        ]
        """by memory: the host arena, then each pool"""
        self.known_keys = KnownKeys()
        self.tally = Tally()
        self.spans = spans_of(self.plane)
        self.leases, self.permits = Holdings(), Holdings()
        self.producers: set[tuple[str, int]] = set()
        """Partitions with the threads and tasks in the body of a loop over `producing`."""
        self.restoring: set[str] = set()
        """Partitions that a `restore` of this client is restoring."""
        self.closed: str | None = None
        self.peer_died = False
        self.farewell: PeerLost | None = None
        """what the peer said when it ended, if it did"""
        self.bell = Bell()
        """wakes the housekeeper"""
        self.tend: Callable[[], None] = lambda: None
        """starts the housekeeper, if there is work for it"""
        self.settle: Callable[[float], None] = lambda until: None
        """returns to the peer what it granted to abandoned calls; waits at most until this time"""
        self.close_arena: Callable[[], object] = lambda: None
        """closes the arena's descriptor, which is open for `writes`"""
        self.direct = DirectCopies(reads, self._call_housekeeper)
        """copies from the arena directly to tensors on devices"""
        self._lock = threading.Lock()
        self._last_op = 0
        self.unanswered: set[int] = set()
        """operation ids of requests that may be sent again"""
        self._minted = 0
        self.due: SimpleQueue[Abandoned | Body | list[int]] = SimpleQueue()
        """what the next call sends along: leases and grants to return, and numbers of pins whose
        last view is gone. SimpleQueue.put is reentrant, so the collector may call it anywhere"""
        self.unsent: SimpleQueue[Request] = SimpleQueue()
        """one-way requests that did not leave this process; they are sent again under their
        numbers"""
        self._warned: set[tuple[str, str]] = set()
        """causes that were logged: by stage how a batch was dropped without an end, and unknown
        tags"""
        self._unpin: Callable[[list[int]], None] = self.due.put
        if pools is not None and pools.in_place:  # whose streams may still read
            self._unpin = pools.ends
        self._orphans: SimpleQueue[Connection] = SimpleQueue()
        self._pins = 0

    # identity of requests and rows

    def request(
        self,
        body: Body,
        deadline_ms: int = 0,
        waits: bool = False,
        *,
        one_way: bool = False,
        parting: bool = False,
    ) -> Request:
        """The envelope of a request under a new operation id, which also identifies the reply;
        one-way bodies have rid 0. The id counts as unanswered until `answered`, for as long as the
        same envelope may be sent again. parting: a closed session may send it too. waits: for rows,
        perhaps for days. Such an id does not count as unanswered, or the peer would have to
        remember every later reply."""
        with self._lock:
            if self.closed is not None and not parting:
                raise ClientClosed(self.closed)
            self._last_op = op = self._last_op + 1
            unanswered = self.unanswered
            if not waits:
                unanswered.add(op)
            floor = min(unanswered) if unanswered else op
        rid = 0 if one_way else op
        return Request(rid, self.id, op, floor, deadline_ms, body)  # type: ignore[arg-type]

    def answered(self, request: Request) -> None:
        """Note that a request has its reply, or will never be repeated. Callable from a finalizer,
        so it takes no lock."""
        self.unanswered.discard(request.op)

    def abandon_replies(self, connection: Connection | None, requests: Sequence[Request]) -> None:
        """Note that no caller waits for the replies to these requests. On an orphan the peer may
        not have read them yet: if a later request said that they will not be repeated, the peer
        would refuse them and keep what they name. So they count as unanswered until the orphan has
        ended."""
        if connection is not None and connection.left and connection.is_open:
            connection.unread += requests
        else:
            for request in requests:
                self.answered(request)

    def mint_keys(self, n: int) -> bytes:
        """Return n new row keys (KEY records). Up to 256 of them are a run, which shards store as
        one. Keys that are skipped for that are never used."""
        with self._lock:
            first = self._minted
            if first % RUN_KEYS + n > RUN_KEYS:
                first += -first % RUN_KEYS
            self._minted = first + n
        return mint_many(self.id, first, n)

    # leases and pins that end without a call

    def pinned(self, *pins: int) -> Pin:
        """Return one object for the pins of a reply. When its last view dies, the pins are
        released."""
        held = [p for p in pins if p]
        if not held:
            return self.reads.pin(0)
        with self._lock:
            self._pins += len(held)
        pin = self.reads.pin(held[0], partial(_let_go, self._unpin, self.bell, held))
        self.tend()
        return pin

    def keep(self, extents: list[Extent]) -> None:
        """Keep granted space for the next write, or return it to the peer later. Written space
        stays mapped while the peer runs. Empties the list in the same step, so a caller that was
        interrupted calls again with what is left."""
        memories = {bisect_right(self._pool_bases, offset) for offset, _ in extents}
        if len(memories) > 1:
            apart = [
                [one for one in extents if bisect_right(self._pool_bases, one[0]) == memory]
                for memory in memories
            ]
            try:
                for some in apart:
                    self.keep(some)
            finally:
                extents[:] = chain.from_iterable(apart)
            return
        for memory in memories:
            self.slabs[memory].keep(extents)
            self.give_back(extents)
            self.tend()

    def give_back(self, extents: list[Extent]) -> None:
        """Return extents with the next call, and empty the list. Callable from a finalizer, so it
        takes no lock."""
        if extents:
            message = GiveBack(np.array(extents, EXTENT).tobytes())
            del extents[:]  # no interrupt can come between this and the next line
            self.due.put(message)
            self.bell.ring()

    def abandon_grants(self, undoing: Sequence[Body]) -> None:
        """Undo what a reply granted that no caller gets."""
        for body in undoing:
            self.due.put(body)
        self.tend()
        self.bell.ring()

    def idle_grants(self, idle_s: float = IDLE_S) -> list[GiveBack]:
        """Return the messages for grants that no put has used for this long, in all memories."""
        idle = [slabs.take_idle(idle_s) for slabs in self.slabs]
        return [GiveBack(np.array(slabs, EXTENT).tobytes()) for slabs in idle if slabs]

    def keep_when_finished(self, extents: Sequence[Extent], copies: object) -> None:
        """Return granted extents of a failed copy once nothing writes to them. copies: keeps the
        sources alive."""
        assert self.pools is not None
        self.pools.ends([], extents, copies)
        self._call_housekeeper()

    def _call_housekeeper(self) -> None:
        self.tend()
        self.bell.ring()

    def settle_pools(self, timeout_s: float | None = None) -> None:
        """Mark as due what waited for copies of pools that are done. For the housekeeper."""
        self.direct.settle()
        if self.pools is None or not self.pools.ending:
            return
        for pins, extents in self.pools.finished(*([] if timeout_s is None else [timeout_s])):
            self.due.put(pins)
            self.keep([*extents])

    def leased(self, lease: int, partition: str, ahead: bool = False) -> None:
        """Note a new lease. ahead: a loader claimed it, and its loop has not reached it yet."""
        self.leases.add(lease, partition, ahead)
        self.tend()

    def abandon(self, lease: Abandoned, unwritten: list[Extent]) -> None:
        """End a lease without an ack: return its rows and the extents that were written for it.
        Callable from a finalizer, so it takes no lock and writes no log."""
        self.due.put(lease)
        self.give_back(unwritten)
        self.bell.ring()

    def _orphaned(self, connection: Connection) -> None:
        if self.closed is not None:
            connection.close()
            return
        self._orphans.put(connection)
        self._call_housekeeper()

    def look_later(self, connection: Connection) -> None:
        """Keep an orphan that the peer has not ended yet."""
        if self._orphans.qsize() < MAX_ORPHANS:
            self._orphans.put(connection)
        else:
            self.end_orphan(connection)

    def end_orphan(self, connection: Connection) -> None:
        """Close an orphan, which the peer has ended or the client gives up."""
        connection.close()
        for request in connection.unread:
            self.answered(request)

    @property
    def orphaned(self) -> bool:
        """Return whether there are connections of abandoned calls."""
        return not self._orphans.empty()

    def orphans(self) -> list[Connection]:
        """Drain the connections of abandoned calls, whose replies are to be undone."""
        return _drain(self._orphans)

    def drain_unsent(self) -> list[Request]:
        """Drain the one-way requests that may not have left this process with their call."""
        return _drain(self.unsent)

    def drain_due(self) -> tuple[list[Body], list[int]]:
        """Drain what is due: one-way messages for abandoned leases and for extents to return, and
        pins whose last view is gone. The caller tells the peer of these pins, or calls
        `requeue_pins`. A batch that was dropped without an end is logged, once per stage and
        cause."""
        due: list[Body] = []
        pins: list[int] = []
        for one in _drain(self.due):
            if isinstance(one, list):
                pins += one
            elif isinstance(one, Body):
                due.append(one)
            elif (partition := self.leases.discard(one.lease)) is not None:
                due.append(Finish(one.lease, "release"))
                if one.forgotten and partition:
                    self.warn_once((one.stage, one.forgotten[0]), str(one))
        if pins:
            with self._lock:
                self._pins -= len(pins)
        return due, pins

    def warn_once(self, cause: tuple[str, str], text: str) -> None:
        """Log a text, unless one of this cause was logged before."""
        if cause not in self._warned and len(self._warned) < MAX_WARNED:
            self._warned.add(cause)
            log.warning("%s", text)

    def warn_of_tags(self, partition: str, unknown: Mapping[str, Sequence[str]]) -> None:
        """Log each tag of a filter that no row has ever had, once."""
        for tag, others in unknown.items():
            known = few(list(map(repr, others)), len(others)) or "none"
            self.warn_once(
                ("where", tag),
                f"partition {partition!r}: where= names tag {tag!r}, but no row has this tag "
                f"(existing tags: {known}). Logged once per tag",
            )

    def resend(self, request: Request) -> None:
        """Send a one-way request again, which may not have left this process with its call."""
        self.unsent.put(request)
        self._call_housekeeper()

    def requeue_pins(self, pins: list[int]) -> None:
        """Release these pins with a later call, because the peer may not have got them. The peer
        releases a pin once, however often a request names it."""
        if pins:
            with self._lock:
                self._pins += len(pins)
            self.due.put(pins)
            self.bell.ring()

    @property
    def pins(self) -> int:
        """The number of pins that this client holds."""
        return self._pins

    def peer_is_gone(self) -> None:
        """Handle the death of the peer: unmap its arena except for live views, so that the next
        peer can have the memory."""
        self.peer_died = True
        self.idle_grants(0)
        self.direct.close()
        self.writes.close()
        self.reads.close()
        self.close_arena()

    def poison(self) -> None:
        """Make the session unusable in a forked child. The granted extents are not mapped there,
        and its locks may be held for ever."""
        self._lock = threading.Lock()
        self.slabs = [Slabs(0) for _ in self.slabs]
        self.known_keys, self.tally, self.spans = KnownKeys(), Tally(), None
        self.pools = None
        self.direct.poison()
        self.closed = (
            "this client belongs to the parent of this forked process; "
            "call dataplane.connect() in the child"
        )
        self.connections.close(self.closed)


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


class Abandoned(NamedTuple):
    """A lease whose batch is gone. rows: the number of unfinished rows. forgotten: if this looks
    like a mistake, what happened to the batch (with {} for its rows), and what to do."""

    lease: int
    partition: str
    stage: str
    rows: int
    forgotten: tuple[str, str] | None = None

    def __str__(self) -> str:
        happened, advice = self.forgotten or ("a batch of {} was discarded", "")
        return (
            f"partition {self.partition!r}, stage {self.stage!r}: "
            f"{happened.format(counted(self.rows, 'row'))} without ack, release or drop, so the "
            f"stage will receive its rows again. {advice}. Logged once per stage and cause"
        )


_NOBODY = "", 0
"""The holder of leases and permits of partitions that have ended."""


class Holdings:
    """Leases or permits by number, and the thread or task that took each. A thread that waits may
    itself hold what it waits for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: dict[int, tuple[str, int]] = {}
        self._hands: dict[tuple[str, int], int] = {}
        self._ahead = set[int]()
        """leases that were claimed ahead and not handed to a caller yet"""

    def add(self, number: int, partition: str, ahead: bool = False) -> None:
        hand = partition, caller()
        with self._lock:
            self._taken[number] = hand
            if ahead:
                self._ahead.add(number)
            self._hands[hand] = self._hands.get(hand, 0) + 1

    def discard(self, number: int) -> str | None:
        """Remove a lease or permit. Return its partition, "" if that has ended; None if unknown."""
        with self._lock:
            hand = self._taken.pop(number, None)
            self._ahead.discard(number)
            if hand is None:
                return None
            if hand in self._hands:
                self._hands[hand] -= 1
                if not self._hands[hand]:
                    del self._hands[hand]
            return hand[0]

    def end(self, partition: str) -> None:
        """Note that a partition has ended. No call waits for its leases or permits, but the peer
        still has them."""
        with self._lock:
            for number, hand in self._taken.items():
                if hand[0] == partition:
                    self._taken[number] = _NOBODY
            for hand in [hand for hand in self._hands if hand[0] == partition]:
                del self._hands[hand]

    def hand_over(self, number: int) -> None:
        """Assign a lease that was claimed ahead to the caller."""
        self._ahead.discard(number)

    def clear(self) -> list[tuple[int, bool]]:
        """Remove all leases. Return each one, and whether a caller had got it."""
        with self._lock:
            taken = [(number, number not in self._ahead) for number in self._taken]
            self._taken, self._ahead = {}, set()
            self._hands.clear()
            return taken

    def mine(self, partition: str, but: int | None = None) -> bool:
        """Return whether the calling thread or task has a lease or permit of this partition. but:
        the number of one to ignore."""
        if not self._hands:
            return False
        hand = partition, caller()
        return self._hands.get(hand, 0) > (but is not None and self._taken.get(but) == hand)


def caller() -> int:
    """Return a number for the calling thread or task."""
    # `current_task` raises without a running loop, which is slower than this check
    task = None if asyncio._get_running_loop() is None else asyncio.current_task()
    return threading.get_ident() if task is None else id(task)


class KnownKeys:
    """Groups and keys that this client has put or leased: writing to them again is `continuing`. By
    the generation of their partition: the next step's partition has groups of the same names.

    Columns are noted as they come and only looked into when a reservation asks. Keeps between one
    and two times the last MAX_KNOWN_KEYS: the older half is forgotten at once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._noted: deque[tuple[int, bytes]] = deque()
        self._noted_bytes = 0
        self._newer: dict[int, set[bytes]] = {}
        self._older: dict[int, set[bytes]] = {}
        self._newer_count = 0

    def note(self, generation: int, keys: bytes) -> None:
        """keys: KEY records."""
        if not keys:
            return
        keys = keys[-_KNOWN_BYTES:]
        with self._lock:
            self._noted.append((generation, keys))
            self._noted_bytes += len(keys)
            while self._noted_bytes > 2 * _KNOWN_BYTES:
                self._noted_bytes -= len(self._noted.popleft()[1])

    def knows(self, generation: int, key: bytes) -> bool:
        """Return whether this key was noted. An empty key never is."""
        if not key:
            return False
        with self._lock:
            for of, keys in self._noted:
                if self._newer_count >= MAX_KNOWN_KEYS:
                    self._older, self._newer, self._newer_count = self._newer, {}, 0
                self._newer.setdefault(of, set()).update(split_keys(keys))
                self._newer_count += len(keys) // KEY.itemsize
            self._noted.clear()
            self._noted_bytes = 0
            return key in self._newer.get(generation, ()) or key in self._older.get(generation, ())


def split_keys(column: bytes) -> Iterable[bytes]:
    """Return the keys of a column of KEY records."""
    return chain.from_iterable(_KEYS.iter_unpack(column))


def _let_go(unpin: Callable[[list[int]], None], bell: Bell, pins: list[int]) -> None:
    """Release the pins whose views are gone."""
    unpin(pins)
    bell.ring()


def _drain(queue: SimpleQueue[T]) -> list[T]:
    taken: list[T] = []
    while not queue.empty():
        try:
            taken.append(queue.get_nowait())
        except Empty:  # another thread was faster
            break
    return taken
