"""Partitions at this peer: attaching to them, their phases, and the home records kept here.

The home of a partition decides (generation, definition, phase); every peer that touches it keeps an
`Entry` with its own store. Phases come from the home to all peers and are acknowledged, so that
sealing is two-phase: no peer accepts new rows any more before anybody calls it sealed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from dataplane.errors import (
    DataplaneError,
    PartitionGone,
    PartitionUndefined,
    StaleEpoch,
    Unavailable,
)
from dataplane.metadata.copies import Copies
from dataplane.metadata.journal import JournaledStore
from dataplane.metadata.partition_home import Broadcast, PartitionHome, Record
from dataplane.metadata.roster import Roster
from dataplane.peer.host import Caller, Entry, Host, call_deadline
from dataplane.peer.mesh import CALL_S, Mesh
from dataplane.peer.shipping import Shipping
from dataplane.wire.messages import Body, Define, Defined, Done, Seal
from dataplane.wire.peering import AddStage, Phase, Tally
from dataplane.wire.rosters import KnownPartition
from dataplane.wire.tables import Definition

log = logging.getLogger(__name__)

ANSWER_S = 3.0
"""How long a home's answer is awaited, at most to the end of the call."""
IN_FORCE_S = 25.0
"""How long a seal or a drop waits for all peers: less than its asker waits for the home."""
RETRY_S = 0.5
"""A peer that was away is told again after so long."""
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
        self.on_phase: list[Callable[[Entry, str], None]] = []
        self._homes: dict[str, PartitionHome] = {}
        self._defined: dict[str, asyncio.Event] = {}
        self._awaited: Counter[str] = Counter()
        """how many wait for a definition"""
        self._early: dict[tuple[str, int], str] = {}
        self._attaching: dict[str, asyncio.Lock] = {}
        self._dropped: dict[str, int] = {}
        self._told: dict[str, asyncio.Event] = {}
        self._taken_over: set[str] = set()
        mesh.handlers |= {
            Define: self._define_at_home,
            Seal: self._seal_at_home,
            AddStage: self._add_stage,
            Phase: self._phase,
            Tally: self._tally,
        }

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

    async def ask_home(self, partition: str, body: Body, timeout_s: float = CALL_S) -> Any:
        """Ask the partition's home, wherever it is then."""
        return await self.mesh.reach(
            lambda: self.host.roster.home(partition), body, timeout_s=timeout_s
        )

    def _enter(self, partition: str, defined: Defined) -> Entry:
        entry = self.host.entries.get(partition)
        if entry is not None and entry.generation >= defined.generation:
            return entry
        if self._dropped.get(partition, 0) >= defined.generation:
            raise self._gone(partition)  # its end was told before this answer came
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
        return entry if entry.generation == generation else None

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
            raise self._gone(partition)
        async with self._attaching.setdefault(partition, asyncio.Lock()):
            found = self.host.entry(partition, generation)
            if found is not None:
                return found
            try:
                await self.define(partition, None)
            except PartitionUndefined:
                raise self._gone(partition) from None
            finally:
                self._attaching.pop(partition, None)
        found = self.host.entry(partition, generation)
        if found is None:
            raise self._gone(partition)
        return found

    @staticmethod
    def _gone(partition: str) -> PartitionGone:
        return PartitionGone(
            f"partition {partition!r} was dropped since this handle was opened; get a new one with "
            f"plane.partition({partition!r}, …)",
            partition=partition,
        )

    # at the home

    def homes(self) -> list[str]:
        """The partitions whose home is here."""
        return [name for name, home in self._homes.items() if home.defined]

    async def _define_at_home(self, caller: Caller, body: Define) -> Body:
        await self.host.informed()
        home = self._homes.get(body.partition)
        if home is None:
            home = PartitionHome(body.partition, self.host.roster.members)
            self._homes[body.partition] = home
        try:
            if body.definition is None and body.wait_ms:
                await self._await_definition(home, body.wait_ms / 1000)
            record = home.define(body.definition, time.time_ns())
        finally:
            self._let_go(home)
        event = self._defined.pop(body.partition, None)
        if event is not None:
            event.set()
        return Defined(record.generation, record.definition, record.phase)

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

    async def _seal_at_home(self, caller: Caller, body: Seal) -> Body:
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

    def _home_record(self, partition: str) -> PartitionHome:
        home = self._homes.get(partition)
        if home is None:
            raise self._gone(partition)
        return home

    def _carry_out(self, home: PartitionHome) -> None:
        """Tell every peer what the home decided."""
        for told in home.instructions():
            if isinstance(told, Broadcast):
                body = Phase(home.partition, told.generation, told.phase)
                for address in sorted(home.silent):
                    self.mesh.spawn(self._tell(home, address, body))

    async def _tell(self, home: PartitionHome, address: str, body: Phase) -> None:
        """Until the peer has answered, or is no member any more."""
        while address in self.host.roster.members and self._homes.get(home.partition) is home:
            if body.phase != "dropped" and not home.is_in(body.generation, body.phase):
                break
            try:
                await self.mesh.call(address, body)
                home.phase_ack(address, body.generation, body.phase)
                break
            except DataplaneError as exc:
                log.warning(
                    "%s is not told that %r is %s: %s", address, body.partition, body.phase, exc
                )
                await asyncio.sleep(RETRY_S)
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

    async def add_stage(self, entry: Entry, stage: str, fields: list[str]) -> None:
        """Declare a stage by its first claim; the home refuses it under free="acked"."""
        body = AddStage(entry.name, entry.generation, stage, fields, ask=True)
        await self.ask_home(entry.name, body)

    async def _add_stage(self, caller: Caller, body: AddStage) -> Body:
        if body.ask:
            await self.host.informed()
            home = self._home_record(body.partition)
            fields = home.add_stage(body.generation, body.stage, body.fields).definition.stages
            # Told also for a stage that is known: another claim's call may still be telling it.
            told = AddStage(body.partition, body.generation, body.stage, fields[body.stage])
            await self.mesh.call_all(told)
            return Done()
        self._learn(await self.entry(body.partition, body.generation), body.stage, body.fields)
        return Done()

    def _learn(self, entry: Entry, stage: str, fields: list[str]) -> None:
        if stage not in entry.definition.stages:
            stages = {**entry.definition.stages, stage: fields}
            entry.definition = msgspec.structs.replace(entry.definition, stages=stages)
            entry.store.declare_stage(stage, fields)
            self.settle(entry)

    async def drop(self, entry: Entry) -> None:
        """Drop the whole partition everywhere."""
        await self.ask_home(entry.name, Phase(entry.name, entry.generation, "dropped", ask=True))

    # a new roster

    def turned(self, roster: Roster) -> None:
        """Homes that are elsewhere now are forgotten here, the others go by the new members."""
        for partition, home in list(self._homes.items()):
            if roster.home(partition) != self.host.address:
                del self._homes[partition]
            else:
                home.members(roster.members)
                self._carry_out(home)
                self._let_go(home)
            for waiting in (self._defined, self._told):
                event = waiting.pop(partition, None)
                if event is not None:
                    event.set()

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

    def restate(self, peer: str, known: KnownPartition) -> None:
        """A peer tells the new home what it knows."""
        home = self._homes.get(known.partition)
        if home is None:
            home = PartitionHome(known.partition, self.host.roster.members)
            self._homes[known.partition] = home
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

    # phases, at every peer

    async def _phase(self, caller: Caller, body: Phase) -> Body:
        if body.ask:  # only a drop is asked for: the home tells everybody, this peer too
            await self.host.informed()
            if self._is_over(body.partition, body.generation):
                return Done()
            home = self._home_record(body.partition)
            home.drop(body.generation)
            self._carry_out(home)
            await self._in_force(home, body.generation, "dropped")
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
        return partition not in self._homes and self._dropped.get(partition) == generation

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
        for scope in (2 * entry.generation, 2 * entry.generation + 1):
            self.host.directory.drop(scope)
        self.host.space.digests.drop(entry.name)
        self.host.space.budgets.close(entry.account)
        self._note_dropped(entry.name, entry.generation)
