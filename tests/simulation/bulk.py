"""Bulk reads between simulated machines: what the bulk workers do, without processes.

The owner pins, bytes go over while it holds them, and it lets go; a connection that breaks on the
way is a failed transfer.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from dataplane.errors import DeadlineExceeded, TransferFailed
from dataplane.transport.bulk_frames import GONE
from dataplane.transport.registry import TCP
from dataplane.transport.seam import ReadOutcome, Records, Remote
from dataplane.wire.tables import Owner
from tests.simulation.network import SILENT_S, WITNESS_S, Network


class SimulatedEngine:
    """Stands where `BulkEngine` does."""

    transport = TCP
    missing = ""
    fingerprint = ""
    """nothing is encrypted here"""

    def __init__(self, network: Network, *_: Any, owner: Owner, **__: Any) -> None:
        self.network = network
        self.machine = network.loop.current
        self.owner = owner
        self.address = f"{owner.peer}/bulk"

    async def start(self) -> None:
        pass

    async def stop(self, witnessed: bool = False) -> None:
        if witnessed:
            self.network.witnessed[self.owner] = self.network.loop.now + WITNESS_S

    def forget(self, owner: Owner) -> None:
        """It keeps no connections."""

    async def read(
        self, remote: Remote, copies: Records, timeout_s: float = 30.0, transport: str = TCP
    ) -> ReadOutcome:
        """TransferFailed where the owner cannot be reached, or not to the end. DeadlineExceeded."""
        network, loop = self.network, self.network.loop
        found = network.peers.get((remote.owner.peer, remote.owner.incarnation))
        if found is None:
            raise TransferFailed("nobody is there")
        machine, owner = found
        nbytes = int(copies["nbytes"].sum())
        answer: asyncio.Future[ReadOutcome] = loop.create_future()

        def serve() -> None:
            pinned = owner.pulls.pin(copies["chunk"])
            assert isinstance(pinned, tuple), "a simulated arena reads nothing back from a disk"
            pin, places = pinned
            takes_s = network.delay() + nbytes * network.byte_s
            network.bulk_until = max(network.bulk_until, loop.now + takes_s)
            loop.call_on(machine, takes_s, send, pin, places)

        def send(pin: int, places: Records) -> None:
            if (remote.owner.peer, remote.owner.incarnation) not in network.peers:
                return  # it has ended in order meanwhile, and its arena with it
            if not answer.done() and not network.is_cut(self.machine, machine):
                gone = np.asarray(places["offset"] == GONE, np.bool_)
                self._copy(owner, copies[~gone], places[~gone])
                outcome = ReadOutcome(gone, nbytes)
                loop.call_on(self.machine, network.delay(), finish, outcome)
            owner.pulls.unpin(pin)

        def finish(outcome: ReadOutcome) -> None:
            if not answer.done():
                answer.set_result(outcome)

        if not network.is_cut(self.machine, machine):
            loop.call_on(machine, network.delay(), serve)
        silent_s = network.rng.uniform(*SILENT_S) + nbytes * network.byte_s
        try:
            async with asyncio.timeout(min(timeout_s, silent_s)):
                return await answer
        except TimeoutError:
            if timeout_s < silent_s:
                raise DeadlineExceeded(f"{nbytes} bytes did not come in {timeout_s:g} s") from None
            raise TransferFailed("the owner does not answer") from None

    def _copy(self, owner: Any, copies: Records, places: Records) -> None:
        here = self.network.peers.get((self.owner.peer, self.owner.incarnation))
        if here is None:
            return  # the reader died meanwhile
        mine = here[1]
        for copy, place in zip(copies, places, strict=True):
            nbytes, start, dest = int(copy["nbytes"]), int(place["offset"]), int(copy["dest"])
            source = owner.host.arena.view[start : start + nbytes]
            mine.host.arena.view[dest : dest + nbytes] = source
