"""UCX as a transport: one-sided reads of registered arenas, through ucxx (or ucx-py's `ucp`).

Runs in a bulk worker. One thread makes all of UCX's calls, in its blocking progress mode;
reading threads wait for it. A read is cut into pieces, so that a small one never waits for a
large one. Each read has an endpoint of its own: closing it by force stops the read at once,
whether the owner is stopped, dead or well. An endpoint whose read succeeded is kept for the next
read. Worker addresses and keys travel in the region's card, over authenticated connections.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import select
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from dataplane.errors import DataplaneError, ProtocolError, TransferFailed, TransportMissing
from dataplane.transport.engines.libucp import PENDING, UcpLine, UcpWorker, settle
from dataplane.transport.engines.region import OpenRegion, Stretch, Stretches
from dataplane.transport.seam import (
    Capabilities,
    Held,
    ReadRequest,
    Region,
    RegionKey,
    Remote,
    Transport,
)
from dataplane.wire.tables import Owner

CHECK_S = 0.1
START_S = 20.0


PIECE_BYTES = 256 << 10
"""The longest single get; a copy of this size stays in cache, and asking for one takes 4 us."""
WINDOW = 64
"""Gets of one read that are under way at once."""
WINDOW_BYTES = 16 << 20
MEMORY_WINDOW_BYTES = 1 << 20
"""Under way through shared memory in all. Its queue, one a worker, holds 2 MiB, and an owner that
finds it full spins: with 2 MiB under way reads were four times slower on busy cores."""
TURNS = 4
"""Steps of progress before reads are looked at again. One moves some 128 KiB through shared memory:
after many of them all that was asked for is here, and nothing is on its way."""
OWNERS_TURNS = 64
"""The same while this worker reads nothing itself: others wait for every step."""
IDLE_LINES = 8
"""End points kept per owner: as many as reads of it may run at once."""
NAPS_MS = (1000, 50)
"""The longest sleeps, without and with reads under way, should an event be missed."""

logger = logging.getLogger(__name__)

Column = npt.NDArray[np.uint64]


class Card(msgspec.Struct, array_like=True, frozen=True):
    """The card of a region. keys: the remote key of each address range."""

    worker: bytes
    stretches: list[Stretch]
    keys: list[bytes]


class UcxTransport(Transport):
    """Both sides of the transport. The owner's side only makes progress."""

    capabilities = Capabilities("ucx", frozenset({"host", "cuda"}), one_sided=True)

    def __init__(self, owner: Owner) -> None:
        super().__init__(owner)
        settle()
        self._binding = _binding()

    def register(self, region: Region) -> RegionKey:
        self._own = OpenRegion(region)
        self._reads = UcxReads(self._opened)
        self._reads.start()
        if not self._reads.opened.wait(START_S):
            raise TransportMissing(
                f"UCX did not start within {START_S:g} s: see the "
                "peer's log, or choose another --transport"
            )
        if self._reads.failure is not None:
            raise TransportMissing(
                f"UCX failed to start: {self._reads.failure}. See the "
                "peer's log, or choose another --transport"
            )
        return RegionKey(secrets.randbits(48), self._card)

    def read(self, request: ReadRequest) -> None:
        held = request.held
        assert held is not None
        fetches = self._fetches(request, held)
        for fetch in fetches:
            self._reads.submit(fetch)
        try:
            for fetch in fetches:
                while not fetch.done.wait(CHECK_S):
                    held.check()
                if fetch.error is not None:
                    raise fetch.error
        except BaseException:
            for fetch in fetches:
                self._reads.stop(fetch)
            for fetch in fetches:
                fetch.done.wait()  # nothing is written any more
            raise

    def forget(self, remote: Remote) -> None:
        self._reads.forget(remote.owner)

    def _opened(self) -> UcpWorker:
        """In the thread that will use it."""
        self._own.bind()  # before there is a context: where no GPU is current it leaves it out
        features = self._binding.Feature.RMA, self._binding.Feature.WAKEUP
        context = self._binding.UCXContext({}, feature_flags=features)
        worker = self._binding.UCXWorker(context)
        ucp = UcpWorker(int(context.handle), int(worker.handle))
        self._alive = context, worker  # for as long as there is anything of them
        own = self._own.stretches.all
        keys = [ucp.register(one.address, one.nbytes, self._own.on_gpu) for one in own]
        card = Card(ucp.address(), list(own), keys)
        self._card = msgspec.msgpack.encode(card)
        return ucp

    def _fetches(self, request: ReadRequest, held: Held) -> list[Fetch]:
        """One for the copies between each two stretches, of which an arena has one."""
        card = _card(held.key.card)
        theirs, keys = Stretches(card.stretches), card.keys
        copies, own = request.copies, self._own.stretches
        sources = theirs.descriptors(held.sources, copies["nbytes"])[:, 0]
        dests = own.descriptors(copies["dest"], copies["nbytes"])[:, 0]
        if len(own.all) == len(keys) == 1:
            target = Target(held.key.generation, card.worker, keys[0])
            return [Fetch(request.remote.owner, target, dests, sources, copies["nbytes"])]
        ways = theirs.which(held.sources) * len(own.all) + own.which(copies["dest"])
        fetches = []
        for way in np.unique(ways).tolist():
            some = ways == way
            remote, into = divmod(way, len(own.all))
            target = Target(held.key.generation, card.worker, keys[remote], into)
            columns = dests[some], sources[some], copies["nbytes"][some]
            fetches.append(Fetch(request.remote.owner, target, *columns))
        return fetches


def _card(raw: bytes) -> Card:
    try:
        card = msgspec.msgpack.decode(raw, type=Card)
    except msgspec.MsgspecError as exc:
        raise ProtocolError(
            f"received an invalid ucx card: {exc}. Install the same dataplane release everywhere"
        ) from exc
    if len(card.keys) != len(card.stretches):
        raise ProtocolError(
            f"invalid ucx card: expected one key per memory range, got {len(card.keys)} "
            f"keys for {len(card.stretches)} ranges. Install the same dataplane release everywhere"
        )
    return card


def _binding() -> Any:
    """The module that has the context and the worker, which both packages make alike."""
    try:
        from ucxx._lib import libucxx

        return libucxx
    except (ImportError, OSError) as exc:
        reasons = f"ucxx: {exc}"
    try:
        from ucp._libs import ucx_api

        return ucx_api
    except (ImportError, OSError) as exc:
        raise TransportMissing(
            f"neither ucxx nor ucp can be imported ({reasons}; ucp: {exc}): reinstall the one that "
            "this host uses"
        ) from exc


class Target(NamedTuple):
    """The remote side of a read. generation: of the owner's region. worker, key: its UCX
    worker's address and the remote key. into: the number of the local address range."""

    generation: int
    worker: bytes
    key: bytes
    into: int = 0


class Fetch:
    """One read. `done` is set when it has ended, and `error` says how. Nothing writes after
    that."""

    def __init__(
        self, owner: Owner, target: Target, dests: Column, sources: Column, sizes: Column
    ) -> None:
        self.owner = owner
        self.target = target
        self.done = threading.Event()
        self.error: DataplaneError | None = None
        pieces = _pieces(dests, sources, sizes)
        self.left = deque(zip(*(column.tolist() for column in pieces), strict=True))
        self.under_way: deque[tuple[int, int]] = deque()
        self.bytes_under_way = 0
        self.line: UcpLine | None = None
        self.in_memory = False

    @property
    def follows(self) -> bool:
        """Whether reads of one owner run one after another: through shared memory, parallel
        reads gain nothing, and took a third longer."""
        return self.in_memory and bool(self.left)


class UcxReads(threading.Thread):
    """The thread that makes all of UCX's calls. It runs the reads that other threads submit. A
    failure in it ends the bulk worker, because nothing else could tell what UCX still writes.

    open_worker: called in this thread; its error is in `failure` when `opened` is set.
    """

    def __init__(self, open_worker: Callable[[], UcpWorker]) -> None:
        super().__init__(name="ucx", daemon=True)
        self._open_worker = open_worker
        self.opened = threading.Event()
        self.failure: BaseException | None = None
        self._asked: queue.SimpleQueue[Callable[[UcpWorker], None]] = queue.SimpleQueue()
        self._live: list[Fetch] = []
        self._moving: list[Fetch] = []
        """of them those whose turn it is"""
        self._memory_bytes = 0
        """under way through shared memory"""
        self._idle: defaultdict[Owner, list[tuple[Target, UcpLine]]] = defaultdict(list)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    # from any thread

    def submit(self, fetch: Fetch) -> None:
        self._ask(lambda ucp: self._begin(ucp, fetch))

    def stop(self, fetch: Fetch) -> None:
        """End a read soon, with an error unless it has ended."""
        self._ask(lambda ucp: self._stop(ucp, fetch))

    def forget(self, owner: Owner) -> None:
        """Close what is kept for an owner."""
        self._ask(lambda _: self._forget(owner))

    def _ask(self, what: Callable[[UcpWorker], None]) -> None:
        self._asked.put(what)
        os.eventfd_write(self._wake, 1)

    # the thread

    def run(self) -> None:
        try:
            ucp = self._open_worker()
        except BaseException as exc:
            self.failure = exc
            self.opened.set()
            return
        self.opened.set()
        try:
            self._serve(ucp)
        except BaseException:
            logger.exception("ucx: the transfer thread failed, stopping the bulk worker")
            os._exit(1)

    def _serve(self, ucp: UcpWorker) -> None:
        """Runs thousands of times a GB: what Python does here counts as much as UCX's copies."""
        poll = select.poll()
        poll.register(ucp.event_fd, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while True:
            while not self._asked.empty():
                self._asked.get_nowait()(ucp)  # nobody else takes any
            moved = False
            for fetch in self._moving:
                moved |= self._advance(ucp, fetch)
            turns = TURNS if self._live else OWNERS_TURNS
            while turns and ucp.progress():
                turns -= 1
                moved = True
            if not moved and self._asked.empty() and ucp.arm():
                self._sleep(poll)

    def _sleep(self, poll: select.poll) -> None:
        for fd, _ in poll.poll(NAPS_MS[bool(self._live)]):
            if fd == self._wake:
                os.eventfd_read(fd)

    def _begin(self, ucp: UcpWorker, fetch: Fetch) -> None:
        self._live.append(fetch)
        try:
            fetch.line = self._line(ucp, fetch)
        except DataplaneError as exc:
            self._end(ucp, fetch, exc)
            return
        fetch.in_memory = fetch.line.in_memory
        self._take_turns()

    def _stop(self, ucp: UcpWorker, fetch: Fetch) -> None:
        if fetch in self._live:
            self._end(
                ucp,
                fetch,
                TransferFailed(
                    "the caller cancelled the read: repeat the call if the values are still needed"
                ),
            )

    def _forget(self, owner: Owner) -> None:
        for _, line in self._idle.pop(owner, []):
            line.close()

    def _take_turns(self) -> None:
        moving, led = [], set()
        for fetch in self._live:
            if not fetch.follows or fetch.owner not in led:
                moving.append(fetch)
            if fetch.follows:
                led.add(fetch.owner)
        self._moving = moving

    def _advance(self, ucp: UcpWorker, fetch: Fetch) -> bool:
        """Whether anything of it has come."""
        try:
            came = bool(fetch.under_way) and self._reap(ucp, fetch)
            if fetch.left and (came or not fetch.under_way):
                self._post(fetch)
        except DataplaneError as exc:
            self._end(ucp, fetch, exc)
            return True
        if not fetch.left and not fetch.under_way:
            self._end(ucp, fetch, None)
            return True
        return came

    def _reap(self, ucp: UcpWorker, fetch: Fetch) -> bool:
        under_way, came = fetch.under_way, 0
        while under_way and (status := ucp.status(under_way[0][0])) != PENDING:
            came += under_way.popleft()[1]
            if status:
                raise TransferFailed(
                    f"a read from peer {fetch.owner.peer!r} was interrupted: {ucp.text(status)}; "
                    "repeat the call",
                    status=status,
                )
        if came:
            self._count(fetch, -came)
        return came > 0

    def _post(self, fetch: Fetch) -> None:
        """A read may always have one get under way, whatever others have."""
        assert fetch.line is not None
        left, under_way, get, asked = fetch.left, fetch.under_way, fetch.line.get, 0
        room = WINDOW_BYTES - fetch.bytes_under_way
        if fetch.in_memory:
            room = MEMORY_WINDOW_BYTES - self._memory_bytes
        while left and len(under_way) < WINDOW and (room > asked or not under_way):
            dest, source, nbytes = left.popleft()
            if request := get(dest, nbytes, source):
                under_way.append((request, nbytes))
                asked += nbytes
        self._count(fetch, asked)
        if not left:
            self._take_turns()

    def _count(self, fetch: Fetch, nbytes: int) -> None:
        fetch.bytes_under_way += nbytes
        if fetch.in_memory:
            self._memory_bytes += nbytes

    def _line(self, ucp: UcpWorker, fetch: Fetch) -> UcpLine:
        """One kept for these stretches; those for earlier lives of the owner's worker, and others
        that were used later, are closed."""
        target = fetch.target
        kept = self._idle[fetch.owner]
        while kept:
            of, line = kept.pop()
            if of == target:
                return line
            line.close()
        line = ucp.connect(target.worker, target.key, target.into)
        logger.info("ucx: reading from peer %r over %s", fetch.owner.peer, ", ".join(line.lanes))
        return line

    def _end(self, ucp: UcpWorker, fetch: Fetch, error: DataplaneError | None) -> None:
        """Nothing of it writes afterwards."""
        self._live.remove(fetch)
        self._count(fetch, -fetch.bytes_under_way)
        line, fetch.line, fetch.error = fetch.line, None, error
        if line is not None:
            kept = self._idle[fetch.owner]
            if error is None and len(kept) < IDLE_LINES:
                kept.append((fetch.target, line))
            else:
                line.close()
                self._drain(ucp, fetch)
        self._take_turns()
        fetch.done.set()

    def _drain(self, ucp: UcpWorker, fetch: Fetch) -> None:
        """Requests of a closed end point end with the next steps, whoever is at its other end."""
        while fetch.under_way:
            ucp.progress()
            if ucp.status(fetch.under_way[0][0]) != PENDING:
                fetch.under_way.popleft()


def _pieces(dests: Column, sources: Column, sizes: Column) -> tuple[Column, Column, Column]:
    """Neighbours on both sides joined, then cut to PIECE_BYTES."""
    apart = (sources[1:] != sources[:-1] + sizes[:-1]) | (dests[1:] != dests[:-1] + sizes[:-1])
    first = np.flatnonzero(np.concatenate(([True], apart)))
    sizes = np.add.reduceat(sizes, first)
    dests, sources = dests[first], sources[first]
    limit = np.uint64(PIECE_BYTES)
    count = ((sizes + limit - np.uint64(1)) // limit).astype(np.int64)
    of = np.repeat(np.arange(len(sizes)), count)
    nth = np.arange(len(of)) - np.repeat(np.cumsum(count) - count, count)
    offset = nth.astype(np.uint64) * limit
    return dests[of] + offset, sources[of] + offset, np.minimum(sizes[of] - offset, limit)
