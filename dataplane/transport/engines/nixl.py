"""NIXL as a transport, over its UCX backend: one-sided reads of the owner's memory by lists of
addresses.

Runs in a bulk worker. NIXL has no notifications, so one thread polls it, and makes all calls of an
agent. Large reads are cut into pieces that take turns, so that a small read does not wait for them.
A posted piece is polled to its end, even if the read was cancelled, because NIXL cannot promise
that an abandoned piece writes nothing any more. Between peers of one host the reader's processor
copies the bytes: a second thread, with an agent of its own, then copies half of the pieces of a
large read.

The region is the arena, or device arenas that this process opened by their handles. Only an
attempt shows which of them a driver can register with a network card.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from dataplane.errors import (
    DataplaneError,
    TransferFailed,
    TransportMissing,
    Unavailable,
)
from dataplane.transport.bulk_frames import MAX_GET_ITEMS
from dataplane.transport.engines.cuda_ipc import this_host
from dataplane.transport.engines.region import AddressRange, AddressRanges, OpenRegion
from dataplane.transport.seam import (
    ReadRequest,
    Region,
    Remote,
    Transport,
)
from dataplane.transport.slices import cut
from dataplane.wire.frames import decoded
from dataplane.wire.tables import Owner

PIECE_BYTES = 16 << 20
HOST_MEMORY, GPU_MEMORY = "DRAM", "VRAM"


SPINS = 200
"""Polls in a row before the thread sleeps between two."""
BUSY_S = 0.000_05
HELD_S = 0.000_5
"""The pause between polls while readers hold chunks here: their wire-up needs an answer."""
AFTERWARDS_S = 0.01
"""The pause between polls for `LINGER_S` after that. A cancelled reader has left its connection,
but its piece cannot be revoked and may still wait for that answer."""
LINGER_S = 3.0
"""How long readers are answered after their chunks are released: longer than a cancelled read may
take (`engine.GRACE_S`)."""
IDLE_S = 0.5
CHECK_S = 0.05
SPARE_LIVES = 4
"""Earlier incarnations of an owner's worker that stay loaded."""
BACKEND = "UCX"

UCX_SETTINGS = {
    # slower than our TCP wherever it was measured, and its listeners admit any process
    "UCX_TLS": "^tcp",
    # error handling would silently exclude shared memory (7 → 0.7 GB/s); this keeps both
    "UCX_POSIX_ERROR_HANDLING": "y",
    # without NVLink, reads between GPUs are off unless asked for (0.5 against 49 GB/s reported)
    "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on",
    # UCX warns of variables that it does not know, such as those of another release
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    # UCX logs to standard output, which belongs to the user's program
    "UCX_LOG_FILE": "stderr",
}
"""How UCX is set up in a bulk worker. The user's own settings take precedence."""

Piece = tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]
"""Local and remote rows of address, length, device."""

logger = logging.getLogger(__name__)


class Card(msgspec.Struct, array_like=True, frozen=True):
    """The card of a region. metadata: of the owner's NIXL agent. on_gpu: whether NIXL treats the
    memory as GPU memory. host: of processes that may read each other's memory, see `this_host`;
    "" if unknown."""

    metadata: bytes
    ranges: list[AddressRange]
    on_gpu: bool
    host: str

    @property
    def memory(self) -> str:
        return GPU_MEMORY if self.on_gpu else HOST_MEMORY


_cards = msgspec.msgpack.Decoder(Card)


class NixlTransport(Transport):
    """The transport of this module."""

    name = "nixl"
    memory = frozenset({"host", "cuda"})

    def __init__(self, owner: Owner) -> None:
        super().__init__(owner)
        self._agent_name = f"{owner.peer}-{secrets.randbits(48):x}"
        self._host = _host()
        self._beside: NixlReads | None = None
        self._lock = threading.Lock()

    def register(self, region: Region) -> bytes:
        self._own = OpenRegion(region)
        self._memory = GPU_MEMORY if self._own.on_gpu else HOST_MEMORY
        self._own.bind()  # before an agent exists: UCX omits a GPU that is not current
        self._agent = _agent(self._agent_name)
        self._register(self._agent)
        try:
            metadata = self._agent.get_agent_metadata()
        except Exception as exc:
            raise TransportMissing(
                f"nixl cannot export the metadata of this peer's memory: {exc!r}. Choose another "
                "--transport"
            ) from exc
        self._reads = NixlReads(self._bound, self._memory)
        self._reads.start()
        host = "" if region.pools else self._host  # only host memory is copied by processors
        card = Card(metadata, list(self._own.ranges.all), self._own.on_gpu, host)
        return msgspec.msgpack.encode(card)

    def read(self, request: ReadRequest) -> None:
        card = decoded(_cards, request.card, "a nixl memory description")
        pieces = _pieces(request, self._own.ranges, AddressRanges(card.ranges))
        threads = self._threads(card, len(pieces))
        reads = []
        for number, thread in enumerate(threads):
            read = NixlRead(request, card, pieces[number :: len(threads)])
            reads.append(read)
            thread.submit(read)
        for read in reads:
            read.done.wait()
        for read in reads:
            if read.error is not None:
                raise read.error

    def holding(self, count: int) -> None:
        self._reads.holding(count)

    def forget(self, owner: Owner) -> None:
        for reads in self._all():
            reads.forget(owner)

    def _all(self) -> list[NixlReads]:
        return [self._reads] if self._beside is None else [self._reads, self._beside]

    def _threads(self, card: Card, pieces: int) -> list[NixlReads]:
        """Return the threads that share a read. The second thread is started when it is first
        useful, and takes part once it is ready."""
        if pieces < 2 or not self._host or card.host != self._host:
            return [self._reads]
        with self._lock:
            if self._beside is None:
                self._beside = NixlReads(self._another, self._memory, "nixl-second")
                self._beside.start()
        return [reads for reads in self._all() if reads.ready or reads is self._reads]

    def _bound(self) -> Any:
        self._own.bind()
        return self._agent

    def _another(self) -> Any:
        self._own.bind()
        agent = _agent(f"{self._agent_name}-second")
        self._register(agent)
        return agent

    def _register(self, agent: Any) -> None:
        own = self._own.ranges.all
        memory = [(one.address, one.nbytes, one.device, "") for one in own]
        try:
            agent.register_memory(memory, self._memory, [BACKEND])
        except Exception as exc:
            raise TransportMissing(
                f"nixl cannot register this peer's memory: {exc!r}. Choose another --transport"
            ) from exc


def _host() -> str:
    """Return the name of this host's kernel, or "" if it is unknown: then no read is shared."""
    try:
        return this_host()
    except OSError:
        return ""


def _pieces(request: ReadRequest, own: AddressRanges, theirs: AddressRanges) -> list[Piece]:
    """Return the pieces of a request, with neighbours joined."""
    copies = request.copies.copy()
    copies["start"] = request.sources
    apart = np.zeros(len(copies) - 1, bool)
    for name, ranges in (("start", theirs), ("dest", own)):
        places = copies[name]
        apart |= places[1:] != places[:-1] + copies["nbytes"][:-1]
        apart |= np.diff(ranges.which(places)) != 0
    heads = np.flatnonzero(np.concatenate([[True], apart]))
    joined = copies[heads]
    joined["nbytes"] = np.add.reduceat(copies["nbytes"], heads)
    return [
        (
            own.descriptors(part.copies["dest"], part.copies["nbytes"]),
            theirs.descriptors(part.copies["start"], part.copies["nbytes"]),
        )
        for part in cut(joined, PIECE_BYTES, MAX_GET_ITEMS)
    ]


def _agent(name: str) -> Any:
    """Return a NIXL agent with only the UCX backend. Raise TransportMissing if there is none."""
    for variable, value in (UCX_SETTINGS | {"NIXL_LOG_LEVEL": "WARN"}).items():
        os.environ.setdefault(variable, value)  # before UCX is loaded, which reads them once
    nixl = _imported()
    try:
        config = nixl.nixl_agent_config(enable_prog_thread=False, backends=[BACKEND])
        agent = nixl.nixl_agent(name, config)
    except Exception as exc:
        raise TransportMissing(
            f"nixl failed to start: {exc!r}. See the peer's log, or choose another --transport"
        ) from exc
    if BACKEND not in agent.backends:
        raise TransportMissing(
            f"the installed nixl has no {BACKEND} plugin: reinstall the nixl wheel"
        )
    return agent


def _imported() -> Any:
    """Import the NIXL package for the installed CUDA."""
    with suppress(ImportError):
        from nixl_cu13 import _api

        return _api
    with suppress(ImportError):
        from nixl_cu12 import _api

        return _api
    try:
        from nixl import _api
    except ImportError as exc:
        raise TransportMissing(
            f"nixl cannot be imported ({exc}): reinstall the nixl wheel"
        ) from exc
    return _api


class NixlRead:
    """A read in flight: the pieces that are left, and the one that is posted.

    card: of the owner's region.
    """

    def __init__(self, request: ReadRequest, card: Card, pieces: Iterable[Piece]) -> None:
        self.remote = request.remote
        self.card = card
        self.pieces = deque(pieces)
        self.handle: Any = None
        self.error: DataplaneError | None = None
        self.done = threading.Event()
        self._check = request.check
        self._checked = time.monotonic()

    def check(self) -> None:
        """Note whether the bytes are no longer needed. Called rarely, because it costs a system
        call."""
        if self.error is None and time.monotonic() - self._checked > CHECK_S:
            self._checked = time.monotonic()
            try:
                self._check()
            except DataplaneError as exc:
                self.error = exc


class NixlReads(threading.Thread):
    """The thread that makes all calls of an agent.

    opened: called in this thread, returns an agent that has the region registered. memory: the
    kind of memory of the region for NIXL. Without an agent `ready` stays False and nothing is
    read.
    """

    def __init__(self, opened: Callable[[], Any], memory: str, name: str = "nixl") -> None:
        super().__init__(name=name, daemon=True)
        self._opened = opened
        self._memory = memory
        self._agent: Any = None
        self.ready = False
        self._arrivals: queue.SimpleQueue[NixlRead | Owner | None] = queue.SimpleQueue()
        self._reads: list[NixlRead] = []
        self._known: dict[Owner, OrderedDict[bytes, str]] = {}
        self._holds = 0
        self._answers_until = 0.0

    # from any thread

    def submit(self, read: NixlRead) -> None:
        self._arrivals.put(read)

    def holding(self, count: int) -> None:
        self._holds = count
        self._answers_until = time.monotonic() + LINGER_S
        self._arrivals.put(None)

    def forget(self, owner: Owner) -> None:
        self._arrivals.put(owner)

    # the thread

    def run(self) -> None:
        try:
            self._agent = self._opened()
        except TransportMissing as exc:
            logger.warning("%s: %s", self.name, exc.message)
            return
        self.ready = True
        logger.info("%s: ready to transfer values", self.name)
        try:
            self._serve()
        except BaseException:
            # Otherwise reads would wait for ever. The peer starts another worker.
            logger.exception("nixl: the transfer thread failed, stopping the bulk worker")
            os._exit(1)

    def _serve(self) -> None:
        spins = 0
        while True:
            moved = self._take(self._patience(spins))
            for read in list(self._reads):
                moved |= self._advance(read)
            spins = 0 if moved else spins + 1
            if self._is_answering() or (self._reads and not moved):
                self._agent.get_new_notifs()  # no peer sends any, but this call drives UCX

    def _patience(self, spins: int) -> float:
        if self._reads:
            return 0 if spins < SPINS else BUSY_S
        if self._holds:
            return HELD_S
        return AFTERWARDS_S if self._is_answering() else IDLE_S

    def _is_answering(self) -> bool:
        """Whether readers may need this side to poll."""
        return bool(self._holds) or time.monotonic() < self._answers_until

    def _take(self, patience_s: float) -> bool:
        try:
            arrived = self._arrivals.get(patience_s > 0, patience_s or None)
        except queue.Empty:
            return False
        if isinstance(arrived, NixlRead):
            self._reads.append(arrived)
        elif isinstance(arrived, Owner):
            for metadata in list(self._known.get(arrived, ())):
                self._unload(arrived, metadata)
        return True

    def _advance(self, read: NixlRead) -> bool:
        """Post or poll one piece. Return whether anything happened."""
        try:
            read.check()
            if read.handle is not None:
                return self._poll(read, self._agent.check_xfer_state(read.handle))
            if read.error is None and read.pieces:
                return self._post(read)
        except DataplaneError as exc:
            read.error = exc
        except Exception as exc:
            read.error = self._failed(read, repr(exc))
        if read.handle is None:
            self._reads.remove(read)
            read.done.set()
        return True

    def _post(self, read: NixlRead) -> bool:
        local, remote = read.pieces.popleft()
        name = self._loaded(read)
        sides = (local, self._memory), (remote, read.card.memory)
        descriptors = (self._agent.get_xfer_descs(*side) for side in sides)
        read.handle = self._agent.initialize_xfer("READ", *descriptors, name, b"", [BACKEND])
        return self._poll(read, self._agent.transfer(read.handle))

    def _poll(self, read: NixlRead, state: str) -> bool:
        if state == "PROC":
            return False
        handle, read.handle = read.handle, None
        handle.release()
        if state != "DONE" and read.error is None:
            read.error = self._failed(read, "nixl reported an error")
        if read.error is not None or not read.pieces:
            self._reads.remove(read)
            read.done.set()
        return True

    def _failed(self, read: NixlRead, why: str) -> DataplaneError:
        owner = read.remote.owner
        self._unload(owner, read.card.metadata)
        logger.warning("nixl: read from peer %r failed: %s", owner.peer, why)
        return TransferFailed(
            f"the transfer from peer {owner.peer!r} over nixl was interrupted: {why}; repeat the "
            "call",
            peer=owner.peer,
        )

    def _loaded(self, read: NixlRead) -> str:
        """Return the remote agent with this metadata. Drop the oldest if there are too many."""
        remote, metadata = read.remote, read.card.metadata
        known = self._known.setdefault(remote.owner, OrderedDict())
        if metadata not in known:
            while len(known) > SPARE_LIVES:
                self._unload(remote.owner, next(iter(known)))
            known[metadata] = self._load(remote, metadata)
        known.move_to_end(metadata)
        return known[metadata]

    def _load(self, remote: Remote, metadata: bytes) -> str:
        try:
            name = self._agent.add_remote_agent(metadata)
        except Exception as exc:
            raise Unavailable(
                f"nixl cannot reach peer {remote.owner.peer!r}: {exc!r}; check that UCX "
                "uses the same network on both hosts",
                peer=remote.owner.peer,
            ) from exc
        return name.decode() if isinstance(name, bytes) else str(name)

    def _unload(self, owner: Owner, metadata: bytes) -> None:
        known = self._known.get(owner, OrderedDict())
        loaded = known.pop(metadata, None)
        if not known:
            self._known.pop(owner, None)
        if loaded is not None:
            try:
                self._agent.remove_remote_agent(loaded)
            except Exception as exc:
                logger.debug("nixl: could not remove remote agent %s: %r", loaded, exc)
