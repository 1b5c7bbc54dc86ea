"""Partitions at this peer: attaching to them, their phases, and the home records kept here.

The home of a partition decides (generation, definition, phase); every peer that touches it keeps an
`Entry` with its own store. Phases come from the home to all peers and are acknowledged, so that
sealing is two-phase: no peer accepts new rows any more before anybody calls it sealed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Literal

import msgspec

from dataplane.errors import DataplaneError, PartitionGone, PartitionUndefined, Unavailable
from dataplane.metadata.partition_home import Broadcast, PartitionHome
from dataplane.metadata.store import Store
from dataplane.peer.host import Entry, Host, call_deadline
from dataplane.peer.mesh import Caller, Mesh
from dataplane.wire.messages import Body, Define, Defined, Done, Seal
from dataplane.wire.peering import AddStage, Phase, Tally
from dataplane.wire.tables import Definition

log = logging.getLogger(__name__)

ANSWER_S = 3.0
"""How long after its deadline a home's answer is awaited: less than the client waits for this
peer's, so that it is told who did not answer."""
IN_FORCE_S = 25.0
"""How long a seal or a drop waits for all peers: less than its asker waits for the home."""
RETRY_S = 0.5
"""A peer that was away is told again after so long."""
MAX_ENDED = 10_000
"""Dropped partitions whose last generation is remembered."""


class Partitions:
    def __init__(self, host: Host, mesh: Mesh, settle: Callable[[Entry], None]) -> None:
        self.host = host
        self.mesh = mesh
        self.settle = settle
        self.on_phase: list[Callable[[Entry, str], None]] = []
        self._homes: dict[str, PartitionHome] = {}
        self._defined: dict[str, asyncio.Event] = {}
        self._early: dict[tuple[str, int], str] = {}
        self._attaching: dict[str, asyncio.Lock] = {}
        self._dropped: dict[str, int] = {}
        self._told: dict[str, asyncio.Event] = {}
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
        home = self.host.roster.home(partition)
        body = Define(partition, definition, int(wait_s * 1000))
        reply: Defined = await self.mesh.call(home, body, timeout_s=wait_s + ANSWER_S)
        self._enter(partition, reply)
        return reply

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
            Store(partition, defined.definition, defined.generation, self.host.lease_numbers),
        )
        self.host.entries[partition] = entry
        phase = self._early.pop(entry.key, defined.phase)
        if phase != "open":
            self._apply(entry, phase)
        return entry

    async def entry(self, partition: str, generation: int) -> Entry:
        """This peer's entry; fetched from the home where this peer has none yet.

        PartitionGone for an old generation.
        """
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

    async def _define_at_home(self, caller: Caller, body: Define) -> Body:
        home = self._homes.get(body.partition)
        if home is None:
            home = PartitionHome(body.partition, self.host.roster.members)
            self._homes[body.partition] = home
        if body.definition is None and body.wait_ms:
            await self._await_definition(home, body.wait_ms / 1000)
        record = home.define(body.definition, time.time_ns())
        event = self._defined.pop(body.partition, None)
        if event is not None:
            event.set()
        return Defined(record.generation, record.definition, record.phase)

    async def _await_definition(self, home: PartitionHome, wait_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while not home.defined:
                    await self._defined.setdefault(home.partition, asyncio.Event()).wait()

    async def _seal_at_home(self, caller: Caller, body: Seal) -> Body:
        home = self._home_record(body.partition)
        home.seal(body.generation)
        self._carry_out(home)
        await self._in_force(home, body.generation, "sealed")
        return Done()

    def _tally(self, caller: Caller, body: Tally) -> Body:
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
                for address in self.host.roster.members:
                    self.mesh.spawn(self._tell(home, address, body))

    async def _tell(self, home: PartitionHome, address: str, body: Phase) -> None:
        """Until the peer has answered: one that is away is told when it is back."""
        while body.phase == "dropped" or home.is_in(body.generation, body.phase):
            try:
                await self.mesh.call(address, body)
                home.phase_ack(address, body.generation, body.phase)
                break
            except DataplaneError as exc:
                log.warning(
                    "%s is not told that %r is %s: %s", address, body.partition, body.phase, exc
                )
                if self.mesh.others.is_lost(address):
                    # Nobody waits for it; it is told all the same, should it have been stopped.
                    home.phase_ack(address, body.generation, body.phase)
                    self._follow(home)
                await asyncio.sleep(RETRY_S)
        self._follow(home)

    def _follow(self, home: PartitionHome) -> None:
        """An answer came: the next phase, and those who wait for this one."""
        self._carry_out(home)
        told = self._told.pop(home.partition, None)
        if told is not None:
            told.set()

    async def _in_force(
        self, home: PartitionHome, generation: int, phase: Literal["sealed", "dropped"]
    ) -> None:
        """Until every peer has answered. Unavailable with those that did not; they still will."""
        limit = min(IN_FORCE_S, call_deadline.get() - self.host.now())
        try:
            async with asyncio.timeout(limit):
                while home.missing(generation, phase):
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
        await self.mesh.call(self.host.roster.home(entry.name), body)

    async def _add_stage(self, caller: Caller, body: AddStage) -> Body:
        if body.ask:
            home = self._home_record(body.partition)
            fields = home.add_stage(body.generation, body.stage, body.fields).definition.stages
            # Told also for a stage that is known: another claim's call may still be telling it.
            told = AddStage(body.partition, body.generation, body.stage, fields[body.stage])
            await self.mesh.call_all(told)
            return Done()
        entry = await self.entry(body.partition, body.generation)
        if body.stage not in entry.definition.stages:
            stages = {**entry.definition.stages, body.stage: body.fields}
            entry.definition = msgspec.structs.replace(entry.definition, stages=stages)
            entry.store.declare_stage(body.stage, body.fields)
            self.settle(entry)
        return Done()

    async def drop(self, entry: Entry) -> None:
        """Drop the whole partition everywhere."""
        await self.mesh.call(
            self.host.roster.home(entry.name),
            Phase(entry.name, entry.generation, "dropped", ask=True),
        )

    # phases, at every peer

    async def _phase(self, caller: Caller, body: Phase) -> Body:
        if body.ask:  # only a drop is asked for: the home tells everybody, this peer too
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
        self._note_dropped(entry.name, entry.generation)
