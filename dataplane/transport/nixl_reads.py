"""The thread that makes all of a NIXL agent's calls: it reads what others submit.

Runs in a bulk worker. NIXL tells nothing of its own accord, so somebody must poll, and an agent is
then never used from two threads. Large reads go in pieces, in turn, so that a small one does not
wait for them. A piece that was posted is polled to its end, whatever becomes of the read: NIXL
cannot promise that a piece given up writes nothing any more.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.errors import DataplaneError, TransferFailed, TransportMissing, Unavailable
from dataplane.transport.seam import ReadRequest, Remote
from dataplane.wire.tables import Owner

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

Piece = tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]
"""Local and remote rows of address, length, device."""

logger = logging.getLogger(__name__)


class NixlRead:
    """A read on its way: the pieces that are left, and the one that is posted.

    generation, metadata, memory: of the owner's region, its agent, and what NIXL takes it for.
    check: as `Held.check`.
    """

    def __init__(
        self,
        request: ReadRequest,
        pieces: Iterable[Piece],
        generation: int,
        metadata: bytes,
        memory: str,
        check: Callable[[], None],
    ) -> None:
        self.request = request
        self.pieces = deque(pieces)
        self.generation = generation
        self.metadata = metadata
        self.memory = memory
        self.handle: Any = None
        self.error: DataplaneError | None = None
        self.done = threading.Event()
        self._check = check
        self._checked = time.monotonic()

    def check(self) -> None:
        """Notes that nobody needs the bytes any more; seldom, as it asks the kernel."""
        if self.error is None and time.monotonic() - self._checked > CHECK_S:
            self._checked = time.monotonic()
            try:
                self._check()
            except DataplaneError as exc:
                self.error = exc


class NixlReads(threading.Thread):
    """opened: called in this thread, gives an agent that has the region registered. memory: what
    NIXL takes the region for. Where there is no agent `ready` stays False and nothing is read."""

    def __init__(self, opened: Callable[[], Any], memory: str, name: str = "nixl") -> None:
        super().__init__(name=name, daemon=True)
        self._opened = opened
        self._memory = memory
        self._agent: Any = None
        self.ready = False
        self._arrivals: queue.SimpleQueue[NixlRead | Remote | None] = queue.SimpleQueue()
        self._reads: list[NixlRead] = []
        self._known: dict[Owner, OrderedDict[int, str]] = {}
        self._holds = 0
        self._answers_until = 0.0
        self._closed = False

    # from any thread

    def submit(self, read: NixlRead) -> None:
        self._arrivals.put(read)

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

    def run(self) -> None:
        try:
            self._agent = self._opened()
        except TransportMissing as exc:
            logger.warning("%s: %s", self.name, exc.message)
            return
        self.ready = True
        logger.info("%s: ready", self.name)
        try:
            self._serve()
        except BaseException:
            # Reads would wait for ever. The peer starts another worker.
            logger.exception("nixl: its thread failed, the bulk worker ends")
            os._exit(1)

    def _serve(self) -> None:
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
        if isinstance(arrived, NixlRead):
            self._reads.append(arrived)
        elif isinstance(arrived, Remote):
            for generation in list(self._known.get(arrived.owner, ())):
                self._unload(arrived.owner, generation)
        return True

    def _at_once(self) -> NixlRead | Remote | None:
        return self._arrivals.get_nowait()

    def _advance(self, read: NixlRead) -> bool:
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

    def _post(self, read: NixlRead) -> bool:
        local, remote = read.pieces.popleft()
        name = self._loaded(read)
        sides = (local, self._memory), (remote, read.memory)
        descriptors = (self._agent.get_xfer_descs(*side) for side in sides)
        read.handle = self._agent.initialize_xfer("READ", *descriptors, name, b"", [BACKEND])
        return self._poll(read, self._agent.transfer(read.handle))

    def _poll(self, read: NixlRead, state: str) -> bool:
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

    def _failed(self, read: NixlRead, why: str) -> DataplaneError:
        owner = read.request.remote.owner
        self._unload(owner, read.generation)
        logger.warning("nixl: a read from peer %r failed: %s", owner.peer, why)
        return TransferFailed(
            f"the transfer from peer {owner.peer!r} over nixl broke off: {why}; it may be retried",
            peer=owner.peer,
        )

    def _loaded(self, read: NixlRead) -> str:
        """The remote agent of this generation; the oldest of too many is let go."""
        remote, generation = read.request.remote, read.generation
        known = self._known.setdefault(remote.owner, OrderedDict())
        if generation not in known:
            while len(known) >= len(remote.addresses) + SPARE_LIVES:
                self._unload(remote.owner, next(iter(known)))
            known[generation] = self._load(remote, read.metadata)
        known.move_to_end(generation)
        return known[generation]

    def _load(self, remote: Remote, metadata: bytes) -> str:
        try:
            name = self._agent.add_remote_agent(metadata)
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
