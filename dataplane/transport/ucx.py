"""UCX as a transport: one-sided reads of registered arenas, through ucxx (or ucx-py's `ucp`).

Runs in a bulk worker. One thread makes all of UCX's calls, in its blocking progress mode; the
threads that read wait for it. A read has an end point of its own while it lasts: closed by force,
it stops at once and surely, whether the owner is stopped, dead or well. Worker addresses and keys
travel in the region's card, over our own authenticated connections.
"""

from __future__ import annotations

import secrets
from typing import Any

import msgspec
import numpy as np

from dataplane.errors import ProtocolError, TransportMissing
from dataplane.transport.libucp import UcpWorker
from dataplane.transport.seam import (
    Capabilities,
    Held,
    ReadRequest,
    Region,
    RegionKey,
    Remote,
    Transport,
)
from dataplane.transport.stretches import OpenRegion, Stretch, Stretches
from dataplane.transport.ucx_reads import Fetch, Target, UcxReads
from dataplane.transport.ucx_settings import settle
from dataplane.wire.tables import Owner

CHECK_S = 0.1
START_S = 20.0


class Card(msgspec.Struct, array_like=True, frozen=True):
    """What a reader needs of an owner's region. base: the arena's address in the owner's worker;
    of device memory `stretches` and their `keys` have all."""

    worker: bytes
    key: bytes
    base: int
    nbytes: int
    stretches: list[Stretch] = []
    keys: list[bytes] = []

    def region(self) -> tuple[Stretches, list[bytes]]:
        """Its stretches, and the remote key of each."""
        if not self.stretches:
            return Stretches([Stretch(0, self.base, self.nbytes)]), [self.key]
        if len(self.keys) != len(self.stretches):
            raise ProtocolError("an owner's card has not one key for each device arena")
        return Stretches(self.stretches), self.keys


class UcxTransport(Transport):
    """Both sides; the owner's has nothing to do but to progress."""

    capabilities = Capabilities("ucx", frozenset({"host", "cuda"}), one_sided=True)

    def __init__(self, owner: Owner) -> None:
        super().__init__(owner)
        settle()
        self._binding = _binding()

    def register(self, region: Region) -> RegionKey:
        self._own = OpenRegion(region)
        self._reads = UcxReads(lambda: self._opened(region))
        self._reads.start()
        if not self._reads.opened.wait(START_S):
            raise TransportMissing(f"UCX did not start within {START_S:g} s")
        if self._reads.failure is not None:
            raise TransportMissing(f"UCX does not start: {self._reads.failure}")
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

    def cancel(self, job: int) -> None:
        """`read` sees it within CHECK_S."""

    def forget(self, remote: Remote) -> None:
        self._reads.forget(remote.owner)

    def close(self) -> None:
        self._reads.close()

    def _opened(self, region: Region) -> UcpWorker:
        """In the thread that will use it."""
        context = self._binding.UCXContext({}, feature_flags=self._features())
        worker = self._binding.UCXWorker(context)
        ucp = UcpWorker(int(context.handle), int(worker.handle))
        self._alive = context, worker  # for as long as there is anything of them
        self._own.bind()
        own = self._own.stretches.all
        keys = [ucp.register(one.address, one.nbytes, self._own.on_gpu) for one in own]
        card = Card(ucp.address(), keys[0], region.address, region.nbytes)
        if region.pools:
            card = Card(ucp.address(), b"", 0, 0, list(own), keys)
        self._card = msgspec.msgpack.encode(card)
        return ucp

    def _features(self) -> tuple[Any, ...]:
        feature = self._binding.Feature
        return feature.RMA, feature.WAKEUP

    def _fetches(self, request: ReadRequest, held: Held) -> list[Fetch]:
        """One for the copies between each two stretches, of which an arena has one."""
        card = _card(held.key.card)
        theirs, keys = card.region()
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
        return msgspec.msgpack.decode(raw, type=Card)
    except msgspec.MsgspecError as exc:
        raise ProtocolError(f"not the card of a region of ucx: {exc}") from exc


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
            f"neither ucxx nor ucp can be imported ({reasons}; ucp: {exc})"
        ) from exc
