"""NIXL as a transport: one-sided reads of the owner's memory by lists of addresses.

Runs in a bulk worker, all of it in one thread: NIXL tells nothing of its own accord, so somebody
must poll, and its agent is then never used from two threads. Large reads go in pieces, in turn, so
that a small one does not wait for them. A piece that was posted is polled to its end, whatever
becomes of the read: NIXL cannot promise that a piece given up writes nothing any more.

The region is the arena, or device arenas that this process opened by their handles. Which of them
a driver lets a network card register, only trying it tells.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import threading
import time
from collections import OrderedDict, deque
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from dataplane.errors import (
    DataplaneError,
    ProtocolError,
    TransferFailed,
    TransportMissing,
    Unavailable,
)
from dataplane.transport.bulk_frames import MAX_PULL_ITEMS
from dataplane.transport.seam import (
    Capabilities,
    Held,
    ReadRequest,
    Region,
    RegionKey,
    Remote,
    Transport,
)
from dataplane.transport.slices import cut
from dataplane.transport.stretches import OpenRegion, Stretch, Stretches
from dataplane.transport.ucx_settings import settle
from dataplane.wire.tables import Owner

PIECE_BYTES = 16 << 20
SPINS = 200
"""Polls in a row before the thread sleeps between two."""
BUSY_S = 0.000_05
HELD_S = 0.000_5
"""Between polls while readers hold ranges here: their wire-up needs an answer."""
AFTERWARDS_S = 0.01
"""Between polls for `LINGER_S` after that: a reader that was cancelled has left its connection, and
its piece, which cannot be called back, may still wait for that answer."""
LINGER_S = 3.0
"""Longer than a cancelled read may take, see `engine.GRACE_S`."""
IDLE_S = 0.5
CHECK_S = 0.05
SPARE_LIVES = 4
"""Earlier lives of an owner's workers that are kept loaded."""
BACKEND = "UCX"
HOST_MEMORY, GPU_MEMORY = "DRAM", "VRAM"

logger = logging.getLogger(__name__)


class Card(msgspec.Struct, array_like=True, frozen=True):
    """metadata: of the owner's NIXL agent. address: of the arena there; of device memory
    `stretches` has all, and `on_gpu` says whether NIXL knows it as such."""

    address: int
    nbytes: int
    metadata: bytes
    stretches: list[Stretch] = []
    on_gpu: bool = False

    @property
    def memory(self) -> str:
        return GPU_MEMORY if self.on_gpu else HOST_MEMORY

    def region(self) -> Stretches:
        return Stretches(self.stretches or [Stretch(0, self.address, self.nbytes)])


_cards = msgspec.msgpack.Decoder(Card)


class _Read:
    """A read on its way: the pieces that are left, and the one that is posted."""

    def __init__(self, request: ReadRequest, held: Held, own: Stretches) -> None:
        self.request = request
        self.held = held
        self.card = _card(held.key)
        self.pieces = deque(_pieces(request, held, own, self.card.region()))
        self.handle: Any = None
        self.error: DataplaneError | None = None
        self.done = threading.Event()
        self._checked = time.monotonic()

    def check(self) -> None:
        """Notes that nobody needs the bytes any more; seldom, as it asks the kernel."""
        if self.error is None and time.monotonic() - self._checked > CHECK_S:
            self._checked = time.monotonic()
            try:
                self.held.check()
            except DataplaneError as exc:
                self.error = exc


class NixlTransport(Transport):
    """See the module."""

    capabilities = Capabilities(
        name="nixl",
        memory=frozenset({"host", "cuda"}),
        one_sided=True,
        needs_target_progress=True,
    )

    def __init__(self, owner: Owner) -> None:
        super().__init__(owner)
        self._generation = secrets.randbits(48)
        self._agent = _agent(f"{owner.peer}-{self._generation:x}")
        self._arrivals: queue.SimpleQueue[_Read | Remote | None] = queue.SimpleQueue()
        self._reads: list[_Read] = []
        self._known: dict[Owner, OrderedDict[int, str]] = {}
        self._holds = 0
        self._answers_until = 0.0
        self._closed = False

    def register(self, region: Region) -> RegionKey:
        self._own = OpenRegion(region)
        self._memory = GPU_MEMORY if self._own.on_gpu else HOST_MEMORY
        stretches = self._own.stretches
        self._own.bind()
        try:
            self._agent.register_memory(
                [(one.address, one.nbytes, one.device, "") for one in stretches.all],
                self._memory,
                [BACKEND],
            )
            metadata = self._agent.get_agent_metadata()
        except Exception as exc:
            raise TransportMissing(f"nixl cannot register the memory here: {exc!r}") from exc
        threading.Thread(target=self._live, name="nixl", daemon=True).start()
        card = Card(region.address, region.nbytes, metadata)
        if region.pools:
            card = Card(0, 0, metadata, list(stretches.all), self._own.on_gpu)
        return RegionKey(self._generation, msgspec.msgpack.encode(card))

    def read(self, request: ReadRequest) -> None:
        assert request.held is not None
        read = _Read(request, request.held, self._own.stretches)
        self._arrivals.put(read)
        read.done.wait()
        if read.error is not None:
            raise read.error

    def holding(self, count: int) -> None:
        self._holds = count
        self._answers_until = time.monotonic() + LINGER_S
        self._arrivals.put(None)

    def forget(self, remote: Remote) -> None:
        self._arrivals.put(remote)

    def close(self) -> None:
        self._closed = True
        self._arrivals.put(None)

    # the thread

    def _live(self) -> None:
        try:
            self._own.bind()
            self._run()
        except BaseException:
            # Reads would wait for ever. The peer starts another worker.
            logger.exception("nixl: its thread failed, the bulk worker ends")
            os._exit(1)

    def _run(self) -> None:
        spins = 0
        while not self._closed:
            moved = self._take(self._patience(spins))
            for read in list(self._reads):
                moved |= self._advance(read)
            spins = 0 if moved else spins + 1
            if self._is_answering() or (self._reads and not moved):
                self._agent.get_new_notifs()  # nobody sends any; this makes UCX go on
        for read in self._reads:
            read.error = TransferFailed("the bulk worker stops")
            read.done.set()

    def _patience(self, spins: int) -> float:
        if self._reads:
            return 0 if spins < SPINS else BUSY_S
        if self._holds:
            return HELD_S
        return AFTERWARDS_S if self._is_answering() else IDLE_S

    def _is_answering(self) -> bool:
        """Whether readers may need this side to go on."""
        return bool(self._holds) or time.monotonic() < self._answers_until

    def _take(self, patience_s: float) -> bool:
        try:
            arrived = self._arrivals.get(timeout=patience_s) if patience_s else self._at_once()
        except queue.Empty:
            return False
        if isinstance(arrived, _Read):
            self._reads.append(arrived)
        elif isinstance(arrived, Remote):
            for generation in list(self._known.get(arrived.owner, ())):
                self._unload(arrived.owner, generation)
        return True

    def _at_once(self) -> _Read | Remote | None:
        return self._arrivals.get_nowait()

    def _advance(self, read: _Read) -> bool:
        """Posts or polls one piece. Whether anything happened."""
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

    def _post(self, read: _Read) -> bool:
        local, remote = read.pieces.popleft()
        name = self._loaded(read)
        sides = (local, self._memory), (remote, read.card.memory)
        descriptors = (self._agent.get_xfer_descs(*side) for side in sides)
        read.handle = self._agent.initialize_xfer("READ", *descriptors, name, b"", [BACKEND])
        return self._poll(read, self._agent.transfer(read.handle))

    def _poll(self, read: _Read, state: str) -> bool:
        if state == "PROC":
            return False
        handle, read.handle = read.handle, None
        handle.release()
        if state != "DONE" and read.error is None:
            read.error = self._failed(read, "the engine reports an error")
        if read.error is not None or not read.pieces:
            self._reads.remove(read)
            read.done.set()
        return True

    def _failed(self, read: _Read, why: str) -> DataplaneError:
        owner = read.request.remote.owner
        self._unload(owner, read.held.key.generation)
        logger.warning("nixl: a read from peer %r failed: %s", owner.peer, why)
        return TransferFailed(
            f"the transfer from peer {owner.peer!r} over nixl broke off: {why}; it may be retried",
            peer=owner.peer,
        )

    def _loaded(self, read: _Read) -> str:
        """The remote agent of this generation; the oldest of too many is let go."""
        remote, generation = read.request.remote, read.held.key.generation
        known = self._known.setdefault(remote.owner, OrderedDict())
        if generation not in known:
            while len(known) >= len(remote.addresses) + SPARE_LIVES:
                self._unload(remote.owner, next(iter(known)))
            known[generation] = self._load(remote, read.card)
        known.move_to_end(generation)
        return known[generation]

    def _load(self, remote: Remote, card: Card) -> str:
        try:
            name = self._agent.add_remote_agent(card.metadata)
        except Exception as exc:
            raise Unavailable(
                f"nixl does not reach peer {remote.owner.peer!r}: {exc!r}; its UCX may share no "
                "network with this host's",
                peer=remote.owner.peer,
            ) from exc
        return name.decode() if isinstance(name, bytes) else str(name)

    def _unload(self, owner: Owner, generation: int) -> None:
        known = self._known.get(owner, OrderedDict())
        loaded = known.pop(generation, None)
        if not known:
            self._known.pop(owner, None)
        if loaded is not None:
            try:
                self._agent.remove_remote_agent(loaded)
            except Exception as exc:
                logger.debug("nixl: %s could not be let go: %r", loaded, exc)


def _card(key: RegionKey) -> Card:
    try:
        return _cards.decode(key.card)
    except msgspec.MsgspecError as exc:
        raise ProtocolError(f"not a card of nixl: {exc}") from exc


def _pieces(
    request: ReadRequest, held: Held, own: Stretches, theirs: Stretches
) -> list[tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]]:
    """Local and remote (address, length, device) rows of each piece; neighbours are joined."""
    copies = request.copies.copy()
    copies["start"] = held.sources
    apart = np.zeros(len(copies) - 1, bool)
    for name, stretches in (("start", theirs), ("dest", own)):
        places = copies[name]
        apart |= places[1:] != places[:-1] + copies["nbytes"][:-1]
        apart |= np.diff(stretches.which(places)) != 0
    heads = np.flatnonzero(np.concatenate([[True], apart]))
    joined = copies[heads]
    joined["nbytes"] = np.add.reduceat(copies["nbytes"], heads)
    return [
        (
            own.descriptors(part.copies["dest"], part.copies["nbytes"]),
            theirs.descriptors(part.copies["start"], part.copies["nbytes"]),
        )
        for part in cut(joined, PIECE_BYTES, MAX_PULL_ITEMS)
    ]


def _agent(name: str) -> Any:
    """A NIXL agent with the UCX backend alone. TransportMissing says why there is none."""
    settle()
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    nixl = _imported()
    try:
        config = nixl.nixl_agent_config(enable_prog_thread=False, backends=[BACKEND])
        agent = nixl.nixl_agent(name, config)
    except Exception as exc:
        raise TransportMissing(f"nixl does not start here: {exc!r}; see the peer's log") from exc
    if BACKEND not in agent.backends:
        raise TransportMissing(f"this nixl has no {BACKEND} plugin: install its wheel again")
    return agent


def _imported() -> Any:
    """NIXL by the name of the CUDA that it was made for."""
    with suppress(ImportError):
        from nixl_cu13 import _api

        return _api
    with suppress(ImportError):
        from nixl_cu12 import _api

        return _api
    try:
        from nixl import _api
    except ImportError as exc:
        raise TransportMissing(f"nixl cannot be imported ({exc}): make nixl") from exc
    return _api
