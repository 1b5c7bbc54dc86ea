"""The partitions whose home is at this peer: who declared them, their generation and their phase.

A home decides (`metadata.partition_home`); what it decides is carried out here: every peer is told,
again until it answers, so that sealing is two-phase: no peer accepts new rows any more before
anybody calls it sealed. What a peer does when it is told is in `partitions`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from typing import Literal

from dataplane.errors import DataplaneError, PartitionGone, StaleEpoch, Unavailable
from dataplane.metadata.partition_home import PartitionHome, Record
from dataplane.metadata.roster import Roster
from dataplane.peer.host import Caller, Host, call_deadline
from dataplane.peer.mesh import Mesh
from dataplane.wire.messages import Body, Define, Defined, Done, Seal
from dataplane.wire.peering import AddStage, Phase, Tally
from dataplane.wire.rosters import KnownPartition

log = logging.getLogger(__name__)

IN_FORCE_S = 25.0
"""How long a seal or a drop waits for all peers: less than its asker waits for the home."""
RETRY_S = 0.5
"""A peer that was away is told again after so long."""
MAX_RETRY_S = 15.0
"""And one without rows ever more seldom: nobody waits for it, and it may be away for long."""


def gone(partition: str) -> PartitionGone:
    return PartitionGone(
        f"partition {partition!r} was dropped since this handle was opened; get a new one with "
        f"plane.partition({partition!r}, …)",
        partition=partition,
    )


class PartitionHomes:
    def __init__(self, host: Host, mesh: Mesh) -> None:
        self.host = host
        self.mesh = mesh
        self._homes: dict[str, PartitionHome] = {}
        self._defined: dict[str, asyncio.Event] = {}
        self._awaited: Counter[str] = Counter()
        """how many wait for a definition"""
        self._told: dict[str, asyncio.Event] = {}
        self._taken_over: set[str] = set()
        mesh.handlers |= {Define: self._define, Seal: self._seal, Tally: self._tally}

    def __contains__(self, partition: str) -> bool:
        """Whether anything is kept of it here, be it that it is over."""
        return partition in self._homes

    def names(self) -> list[str]:
        """The partitions whose home is here."""
        return [name for name, home in self._homes.items() if home.defined]

    def _made(self, partition: str) -> PartitionHome:
        return PartitionHome(partition, self.host.roster.hosts, self.host.roster.others)

    # what is asked of a home

    async def _define(self, caller: Caller, body: Define) -> Body:
        await self.host.informed()
        home = self._homes.get(body.partition)
        if home is None:
            home = self._homes[body.partition] = self._made(body.partition)
        try:
            self._check_given(home, body)
            if body.definition is None and body.wait_ms:
                await self._await_definition(home, body.wait_ms / 1000)
            record = home.define(body.definition, time.time_ns())
        finally:
            self._let_go(home)
        event = self._defined.pop(body.partition, None)
        if event is not None:
            event.set()
        return Defined(record.generation, record.definition, record.phase)

    def _check_given(self, home: PartitionHome, body: Define) -> None:
        """StaleEpoch where nothing may begin to live in this shard: it goes to another peer."""
        spare = self.host.spare
        new = body.definition is not None and not home.defined
        if new and spare is not None and spare[self.host.roster.bucket(home.partition)]:
            raise StaleEpoch(f"the shard of partition {home.partition!r} moves: call again")

    async def _await_definition(self, home: PartitionHome, wait_s: float) -> None:
        self._awaited[home.partition] += 1
        try:
            async with asyncio.timeout(wait_s):
                while not home.defined:
                    await self._defined.setdefault(home.partition, asyncio.Event()).wait()
                    self._check_here(home)
        except TimeoutError:
            pass
        finally:
            self._awaited[home.partition] -= 1
            if not self._awaited[home.partition]:
                del self._awaited[home.partition]
                self._defined.pop(home.partition, None)

    def _let_go(self, home: PartitionHome) -> None:
        """Of a partition that is over only its last generation is kept: steps come and go."""
        here = self._homes.get(home.partition) is home
        if here and home.is_over and home.partition not in self._awaited:
            del self._homes[home.partition]

    async def _seal(self, caller: Caller, body: Seal) -> Body:
        await self.host.informed()
        home = self._home_record(body.partition)
        home.seal(body.generation)
        self._carry_out(home)
        await self._in_force(home, body.generation, "sealed")
        return Done()

    async def _tally(self, caller: Caller, body: Tally) -> Body:
        await self.host.informed()
        home = self._home_record(body.partition)
        home.tally(caller.address, body.generation, body.closed_groups)
        self._carry_out(home)
        return Done()

    async def add_stage(self, body: AddStage) -> None:
        """Declare a stage at every peer; refused under free="acked"."""
        await self.host.informed()
        home = self._home_record(body.partition)
        fields = home.add_stage(body.generation, body.stage, body.fields).definition.stages
        # Told also for a stage that is known: another claim's call may still be telling it.
        told = AddStage(body.partition, body.generation, body.stage, fields[body.stage])
        await self.mesh.call_all(told)

    async def drop(self, partition: str, generation: int) -> None:
        """Until every peer has dropped it. Unavailable while some did not answer.

        What other peers know must have been told here before: `Host.informed`."""
        home = self._home_record(partition)
        home.drop(generation)
        self._carry_out(home)
        await self._in_force(home, generation, "dropped")

    def _home_record(self, partition: str) -> PartitionHome:
        home = self._homes.get(partition)
        if home is None:
            raise gone(partition)
        return home

    # what it decided

    def _carry_out(self, home: PartitionHome) -> None:
        """Tell every peer what the home decided."""
        for told in home.instructions():
            body = Phase(home.partition, told.generation, told.phase)
            for address in sorted(home.silent):
                self.mesh.spawn(self._tell(home, address, body))

    async def _tell(self, home: PartitionHome, address: str, body: Phase) -> None:
        """Until the peer has answered, or is no member any more. An end is told also once the home
        is let go: who has no rows is not waited for, and keeps an entry until it hears."""
        pause_s = RETRY_S
        while address in self.host.roster.members:
            here = self._homes.get(home.partition) is home
            if body.phase != "dropped" and not (here and home.is_in(body.generation, body.phase)):
                break
            try:
                await self.mesh.call(address, body)
                home.phase_ack(address, body.generation, body.phase)
                break
            except DataplaneError as exc:
                say = log.warning if pause_s == RETRY_S else log.debug
                say("%s is not told that %r is %s: %s", address, body.partition, body.phase, exc)
                await asyncio.sleep(pause_s)
                if address not in self.host.roster.hosts:
                    pause_s = min(2 * pause_s, MAX_RETRY_S)
        self._follow(home)

    def _follow(self, home: PartitionHome) -> None:
        """An answer came: the next phase, and those who wait for this one."""
        self._carry_out(home)
        told = self._told.pop(home.partition, None)
        if told is not None:
            told.set()
        self._let_go(home)

    async def _in_force(
        self, home: PartitionHome, generation: int, phase: Literal["sealed", "dropped"]
    ) -> None:
        """Until every peer has answered. Unavailable with those that did not; they still will."""
        limit = min(IN_FORCE_S, call_deadline.get() - self.host.now())
        try:
            async with asyncio.timeout(limit):
                while home.missing(generation, phase):
                    self._check_here(home)
                    await self._told.setdefault(home.partition, asyncio.Event()).wait()
        except TimeoutError:
            silent = ", ".join(sorted(home.missing(generation, phase)))
            raise Unavailable(
                f"partition {home.partition!r} is not {phase} everywhere: {silent} did not answer "
                "and will be told when they do; call again to wait for that",
                partition=home.partition,
            ) from None

    # a new roster

    def turned(self, roster: Roster) -> None:
        """Homes that are elsewhere now are forgotten here, the others go by the new members."""
        for partition, home in list(self._homes.items()):
            if roster.home(partition) != self.host.address:
                del self._homes[partition]
            else:
                home.members(roster.hosts, roster.others)
                self._carry_out(home)
                self._let_go(home)
            for waiting in (self._defined, self._told):
                event = waiting.pop(partition, None)
                if event is not None:
                    event.set()

    def restate(self, peer: str, known: KnownPartition) -> None:
        """A peer tells the new home what it knows."""
        home = self._homes.get(known.partition)
        if home is None:
            home = self._homes[known.partition] = self._made(known.partition)
        self._taken_over.add(known.partition)
        record = Record(known.generation, known.definition, known.phase)
        home.restate(peer, record, known.closed_groups)

    def resume(self) -> None:
        """All peers have told: what the homes before began is carried on."""
        for partition in self._taken_over & self._homes.keys():
            self._homes[partition].resume()
            self._carry_out(self._homes[partition])
        self._taken_over.clear()

    def _check_here(self, home: PartitionHome) -> None:
        if self._homes.get(home.partition) is not home:
            raise StaleEpoch(f"the home of partition {home.partition!r} moved: ask there")
