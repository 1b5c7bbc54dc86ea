"""What this peer knows of partitions: attaching to them, their stages and their phases.

The home of a partition decides (generation, definition, phase); every peer that touches it keeps an
`Entry` with its own store. Phases come from the home to all peers, and an answer says that the
phase is in force here. The homes that sit at this peer are in `partition_homes`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import msgspec

from dataplane.errors import PartitionGone, PartitionUndefined
from dataplane.metadata.copies import Copies
from dataplane.metadata.journal import JournaledStore
from dataplane.metadata.roster import Flags
from dataplane.peer.host import Caller, Entry, Host
from dataplane.peer.mesh import CALL_S, Mesh
from dataplane.peer.partition_homes import PartitionHomes, gone
from dataplane.peer.shipping import Shipping
from dataplane.wire.messages import Body, Define, Defined, Done
from dataplane.wire.peering import AddStage, Phase
from dataplane.wire.rosters import KnownPartition
from dataplane.wire.tables import Definition

log = logging.getLogger(__name__)

ANSWER_S = 3.0
"""How long a home's answer is awaited, at most to the end of the call."""
MAX_ENDED = 10_000
"""Dropped partitions whose last generation is remembered."""


class Partitions:
    def __init__(
        self, host: Host, mesh: Mesh, shipping: Shipping, settle: Callable[[Entry], None]
    ) -> None:
        self.host = host
        self.shipping = shipping
        self.mesh = mesh
        self.settle = settle
        self.homes = PartitionHomes(host, mesh)
        self.on_phase: list[Callable[[Entry, str], None]] = []
        self._early: dict[tuple[str, int], str] = {}
        self._attaching: dict[str, asyncio.Lock] = {}
        self._dropped: dict[str, int] = {}
        mesh.handlers |= {AddStage: self._add_stage, Phase: self._phase}

    # attaching

    async def define(
        self, partition: str, definition: Definition | None, wait_s: float = 0
    ) -> Defined:
        """Declare or attach, at the home; then this peer has an entry.

        PartitionUndefined when nobody declared it within `wait_s`, PartitionConflict."""
        in_vain_s = wait_s - min(0.1, wait_s / 4)  # so that the home's answer is here in time
        body = Define(partition, definition, int(in_vain_s * 1000))
        reply: Defined = await self.ask_home(partition, body, timeout_s=wait_s + ANSWER_S)
        self._enter(partition, reply)
        return reply

    async def ask_home(
        self, partition: str, body: Body, caller: Caller | None = None, timeout_s: float = CALL_S
    ) -> Any:
        """Ask the peer that has the partition's shard, wherever that is then."""
        return await self.mesh.reach(
            lambda: self.host.roster.home(partition), body, caller=caller, timeout_s=timeout_s
        )

    def spare(self) -> Flags:
        """Per shard, whether it is this peer's and nothing lives in it."""
        roster = self.host.roster
        spare: Flags = roster.primaries == roster.members.index(self.host.address)
        for name in {*self.host.entries, *self.homes.names()}:
            spare[roster.bucket(name)] = False
        return spare

    def _enter(self, partition: str, defined: Defined) -> Entry:
        entry = self.host.entries.get(partition)
        if entry is not None and entry.generation >= defined.generation:
            return entry
        if self._dropped.get(partition, 0) >= defined.generation:
            raise gone(partition)  # its end was told before this answer came
        if entry is not None:
            self._drop(entry)
        entry = Entry(
            partition,
            defined.generation,
            defined.definition,
            self._store(partition, defined.definition, defined.generation),
        )
        self.host.entries[partition] = entry
        self.shipping.watch(entry)
        phase = self._early.pop(entry.key, defined.phase)
        if phase != "open":
            self._apply(entry, phase)
        return entry

    def _store(self, partition: str, definition: Definition, generation: int) -> JournaledStore:
        return JournaledStore(partition, definition, generation, self.host.lease_numbers)

    def hand_over(self) -> None:
        """All rows are another peer's now, with what they hold."""
        for entry in self.host.entries.values():
            sealing = entry.store.sealing
            entry.store = self._store(entry.name, entry.definition, entry.generation)
            entry.told_closed = 0
            entry.copies = Copies() if entry.copies is not None else None
            if sealing:
                entry.store.seal_begin()
            if entry.sealed:
                entry.store.seal_end()

    def take_over(self, partition: str, generation: int, definition: Definition) -> Entry | None:
        """This peer's entry, for rows of another peer's; None where the partition was dropped."""
        try:
            entry = self._enter(partition, Defined(generation, definition, "open"))
        except PartitionGone:
            return None
        if entry.generation != generation:
            return None
        for stage, fields in definition.stages.items():  # only hosts are told of those added later
            self._learn(entry, stage, fields)
        return entry

    def ended(self, partition: str, generation: int) -> None:
        """Whom this peer backs up has dropped it. Nobody waits until one without rows is told, and
        this one may be all that is left to remember."""
        entry = self.host.entries.get(partition)
        if entry is not None and entry.generation == generation:
            self._drop(entry)
        else:
            self._note_dropped(partition, generation)

    def known(self, address: str) -> list[KnownPartition]:
        """What this peer knows of partitions whose home is there now."""
        at = self.host.roster.home
        ended = [
            KnownPartition(name, generation, Definition(), "dropped", 0)
            for name, generation in self._dropped.items()
            if at(name) == address
        ]
        return ended + [
            KnownPartition(name, e.generation, e.definition, e.phase, e.store.closed_groups)
            for name, e in self.host.entries.items()
            if at(name) == address
        ]

    async def entry(self, partition: str, generation: int, stage: str = "") -> Entry:
        """This peer's entry, with this stage; fetched from the home where this peer has none yet.

        PartitionGone for an old generation.
        """
        entry = await self._attached(partition, generation)
        if stage and stage not in entry.definition.stages:
            # Whoever names it was told of it, and this peer is just being told.
            reply: Defined = await self.ask_home(partition, Define(partition, None, 0))
            if reply.generation == generation and stage in reply.definition.stages:
                self._learn(entry, stage, reply.definition.stages[stage])
        return entry

    async def _attached(self, partition: str, generation: int) -> Entry:
        found = self.host.entry(partition, generation)
        if found is not None:
            return found
        if self._dropped.get(partition, 0) >= generation:
            raise gone(partition)
        async with self._attaching.setdefault(partition, asyncio.Lock()):
            found = self.host.entry(partition, generation)
            if found is not None:
                return found
            try:
                await self.define(partition, None)
            except PartitionUndefined:
                raise gone(partition) from None
            finally:
                self._attaching.pop(partition, None)
        found = self.host.entry(partition, generation)
        if found is None:
            raise gone(partition)
        return found

    # stages

    async def add_stage(self, entry: Entry, stage: str, fields: list[str]) -> None:
        """Declare a stage by its first claim; the home refuses it under free="acked"."""
        body = AddStage(entry.name, entry.generation, stage, fields, ask=True)
        await self.ask_home(entry.name, body)

    async def _add_stage(self, caller: Caller, body: AddStage) -> Body:
        if body.ask:
            await self.homes.add_stage(body)
            return Done()
        self._learn(await self.entry(body.partition, body.generation), body.stage, body.fields)
        return Done()

    def _learn(self, entry: Entry, stage: str, fields: list[str]) -> None:
        if stage not in entry.definition.stages:
            stages = {**entry.definition.stages, stage: fields}
            entry.definition = msgspec.structs.replace(entry.definition, stages=stages)
            entry.store.declare_stage(stage, fields)
            self.settle(entry)

    # phases

    async def drop(self, entry: Entry) -> None:
        """Drop the whole partition everywhere."""
        await self.ask_home(entry.name, Phase(entry.name, entry.generation, "dropped", ask=True))

    async def _phase(self, caller: Caller, body: Phase) -> Body:
        if body.ask:  # only a drop is asked for: the home tells everybody, this peer too
            await self.host.informed()
            if not self._is_over(body.partition, body.generation):
                await self.homes.drop(body.partition, body.generation)
            return Done()
        entry = self.host.entries.get(body.partition)
        if entry is None or entry.generation != body.generation:
            if entry is None or entry.generation < body.generation:
                self._remember_early(body)
            return Done()
        self._apply(entry, body.phase)
        return Done()

    def _is_over(self, partition: str, generation: int) -> bool:
        """Whether this drop was carried out, everywhere: who asked may not have heard it."""
        return partition not in self.homes and self._dropped.get(partition) == generation

    def _remember_early(self, body: Phase) -> None:
        if body.phase == "dropped":
            self._early.pop((body.partition, body.generation), None)
            self._note_dropped(body.partition, body.generation)
        elif self._dropped.get(body.partition, 0) < body.generation:
            self._early[body.partition, body.generation] = body.phase

    def _note_dropped(self, partition: str, generation: int) -> None:
        self._dropped[partition] = max(generation, self._dropped.get(partition, 0))
        if len(self._dropped) > MAX_ENDED:
            del self._dropped[next(iter(self._dropped))]

    def _apply(self, entry: Entry, phase: str) -> None:
        if phase == "dropped":
            self._drop(entry)
            return
        entry.store.seal_begin()
        if phase == "sealed" and not entry.sealed:
            entry.store.seal_end()
            entry.sealed = True
        self.settle(entry)
        for tell in self.on_phase:
            tell(entry, phase)

    def _drop(self, entry: Entry) -> None:
        rows = entry.store.clear()
        log.info("partition %r dropped with %d rows", entry.name, rows)
        self.settle(entry)
        for tell in self.on_phase:
            tell(entry, "dropped")
        if self.host.entries.get(entry.name) is entry:
            del self.host.entries[entry.name]
        self.host.space.digests.drop(entry.name)
        self._note_dropped(entry.name, entry.generation)
