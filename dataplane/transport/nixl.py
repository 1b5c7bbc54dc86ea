"""NIXL as a transport: one-sided reads of the owner's memory by lists of addresses.

Runs in a bulk worker; the thread that calls NIXL is in `nixl_reads`. Between peers of one host the
reader's processor copies the bytes: there a second thread, with an agent of its own, takes half of
the pieces of a large read.

The region is the arena, or device arenas that this process opened by their handles. Which of them
a driver lets a network card register, only trying it tells.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np

from dataplane.errors import DataplaneError, ProtocolError, TransportMissing
from dataplane.transport.bulk_frames import MAX_PULL_ITEMS
from dataplane.transport.cuda_ipc import this_host
from dataplane.transport.nixl_reads import BACKEND, NixlRead, NixlReads, Piece
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
HOST_MEMORY, GPU_MEMORY = "DRAM", "VRAM"


class Card(msgspec.Struct, array_like=True, frozen=True):
    """metadata: of the owner's NIXL agent. address: of the arena there; of device memory
    `stretches` has all, and `on_gpu` says whether NIXL knows it as such. host: of processes that
    may read each other's memory, see `this_host`; "": not told."""

    address: int
    nbytes: int
    metadata: bytes
    stretches: list[Stretch] = []
    on_gpu: bool = False
    host: str = ""

    @property
    def memory(self) -> str:
        return GPU_MEMORY if self.on_gpu else HOST_MEMORY

    def region(self) -> Stretches:
        return Stretches(self.stretches or [Stretch(0, self.address, self.nbytes)])


_cards = msgspec.msgpack.Decoder(Card)


class NixlTransport(Transport):
    """See the module."""

    capabilities = Capabilities(
        name="nixl",
        memory=frozenset({"host", "cuda"}),
        one_sided=True,
    )

    def __init__(self, owner: Owner) -> None:
        super().__init__(owner)
        self._generation = secrets.randbits(48)
        self._name = f"{owner.peer}-{self._generation:x}"
        self._agent = _agent(self._name)
        self._host = _host()
        self._beside: NixlReads | None = None
        self._lock = threading.Lock()

    def register(self, region: Region) -> RegionKey:
        self._own = OpenRegion(region)
        self._memory = GPU_MEMORY if self._own.on_gpu else HOST_MEMORY
        self._own.bind()
        self._register(self._agent)
        try:
            metadata = self._agent.get_agent_metadata()
        except Exception as exc:
            raise TransportMissing(f"nixl cannot describe the memory here: {exc!r}") from exc
        self._reads = NixlReads(self._bound, self._memory)
        self._reads.start()
        card = Card(region.address, region.nbytes, metadata, host=self._host)
        if region.pools:
            card = Card(0, 0, metadata, list(self._own.stretches.all), self._own.on_gpu)
        return RegionKey(self._generation, msgspec.msgpack.encode(card))

    def read(self, request: ReadRequest) -> None:
        held = request.held
        assert held is not None
        card = _card(held.key)
        pieces = _pieces(request, held, self._own.stretches, card.region())
        threads = self._threads(card, len(pieces))
        check = _one_at_a_time(held.check)
        reads = []
        for number, thread in enumerate(threads):
            some = pieces[number :: len(threads)]
            generation = held.key.generation
            read = NixlRead(request, some, generation, card.metadata, card.memory, check)
            reads.append(read)
            thread.submit(read)
        for read in reads:
            read.done.wait()
        for read in reads:
            if read.error is not None:
                raise read.error

    def holding(self, count: int) -> None:
        self._reads.holding(count)

    def forget(self, remote: Remote) -> None:
        for reads in self._all():
            reads.forget(remote)

    def close(self) -> None:
        with self._lock:
            for reads in self._all():
                reads.close()

    def _all(self) -> list[NixlReads]:
        return [self._reads] if self._beside is None else [self._reads, self._beside]

    def _threads(self, card: Card, pieces: int) -> list[NixlReads]:
        """Those that share a read; the second is started when it is first of use, and takes part
        when it is ready."""
        if pieces < 2 or not self._host or card.host != self._host:
            return [self._reads]
        with self._lock:
            if self._beside is None:
                self._beside = NixlReads(self._another, self._memory, "nixl-beside")
                self._beside.start()
        return [reads for reads in self._all() if reads.ready or reads is self._reads]

    def _bound(self) -> Any:
        self._own.bind()
        return self._agent

    def _another(self) -> Any:
        self._own.bind()
        agent = _agent(f"{self._name}-beside")
        self._register(agent)
        return agent

    def _register(self, agent: Any) -> None:
        own = self._own.stretches.all
        memory = [(one.address, one.nbytes, one.device, "") for one in own]
        try:
            agent.register_memory(memory, self._memory, [BACKEND])
        except Exception as exc:
            raise TransportMissing(f"nixl cannot register the memory here: {exc!r}") from exc


def _host() -> str:
    """Empty where the kernel does not tell: then no read is shared."""
    try:
        return this_host()
    except OSError:
        return ""


def _one_at_a_time(check: Callable[[], None]) -> Callable[[], None]:
    """For two threads: what one was told the other is told too, and not asked for again."""
    lock, told = threading.Lock(), list[DataplaneError]()

    def checked() -> None:
        with lock:
            if not told:
                try:
                    check()
                except DataplaneError as exc:
                    told.append(exc)
            if told:
                raise told[0]

    return checked


def _card(key: RegionKey) -> Card:
    try:
        return _cards.decode(key.card)
    except msgspec.MsgspecError as exc:
        raise ProtocolError(f"not a card of nixl: {exc}") from exc


def _pieces(request: ReadRequest, held: Held, own: Stretches, theirs: Stretches) -> list[Piece]:
    """Neighbours are joined."""
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
