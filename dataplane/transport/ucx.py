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
from dataplane.transport.ucx_reads import Fetch, UcxReads
from dataplane.transport.ucx_settings import settle
from dataplane.wire.tables import Owner

CHECK_S = 0.1
START_S = 20.0


class Card(msgspec.Struct, array_like=True, frozen=True):
    """What a reader needs of an owner's region. base: its address in the owner's worker."""

    worker: bytes
    key: bytes
    base: int
    nbytes: int


class UcxTransport(Transport):
    """Both sides; the owner's has nothing to do but to progress."""

    capabilities = Capabilities(
        "ucx", frozenset({"host"}), one_sided=True, needs_target_progress=True
    )

    def __init__(self, owner: Owner) -> None:
        super().__init__(owner)
        settle()
        self._binding = _binding()

    def register(self, region: Region) -> RegionKey:
        if region.kind not in self.capabilities.memory:
            raise TransportMissing(f"ucx registers host memory only, not {region.kind}")
        self._base = region.address
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
        fetch = self._fetch(request, held)
        self._reads.submit(fetch)
        try:
            while not fetch.done.wait(CHECK_S):
                held.check()
        except BaseException:
            self._reads.stop(fetch)
            fetch.done.wait()  # nothing is written any more
            raise
        if fetch.error is not None:
            raise fetch.error

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
        key = ucp.register(region.address, region.nbytes)
        card = Card(ucp.address(), key, region.address, region.nbytes)
        self._card = msgspec.msgpack.encode(card)
        return ucp

    def _features(self) -> tuple[Any, ...]:
        feature = self._binding.Feature
        return feature.RMA, feature.WAKEUP

    def _fetch(self, request: ReadRequest, held: Held) -> Fetch:
        card = _card(held.key.card)
        sizes, base = request.copies["nbytes"], np.uint64(card.base)
        beyond = held.sources + sizes > np.uint64(card.nbytes)
        if beyond.any():
            raise ProtocolError("an owner holds ranges beyond the end of its region")
        return Fetch(
            request.remote.owner,
            (held.key.generation, card.worker, card.key),
            np.uint64(self._base) + request.copies["dest"],
            base + held.sources,
            sizes,
        )


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
