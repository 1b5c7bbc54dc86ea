"""What goes wrong in a run, drawn from its seed: crashes, freezes, cuts, and clocks that jump."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from dataplane.wire.tables import Owner
from tests.simulation.cluster import Cluster, Place
from tests.simulation.ledger import LARGE
from tests.simulation.network import DELAY_S

MAX_PLACES = 6
STRIKE_S = 8.0
"""How long a backup is awaited that is to be made."""
STALLS_S = (0.3, 1.5, 4.0, 13.0, 24.0)
"""How long a process is stopped or links are cut, about: the last is longer than `--lost-after`."""
QUIET_S = 8.0
"""In gentle runs, from fault to fault: time to be noticed, and for copies to be made anew."""


class Faults:
    def __init__(self, cluster: Cluster, rng: random.Random, gentle: bool) -> None:
        self.cluster = cluster
        self.rng = rng
        self.gentle = gentle
        self.story: list[str] = []
        kinds: list[Callable[[], Awaitable[None]]] = [
            self._crash,
            self._crash,
            self._freeze,
            self._cut,
            self._cut_from_keeper,
            self._snap,
            self._slow,
            self._narrow,
            self._strike,
            self._strike,
            self._strike,
            self._jump,
            self._answers,
            self._leave,
            self._join,
        ]
        self._kinds = rng.sample(kinds, rng.randint(1, 4))
        self.successors = random.Random(f"successors of {rng.random()}")
        self._stalls: list[tuple[float, float]] = []
        """when processes were stopped or links cut, and for how long"""

    def note(self, what: str) -> None:
        self.story.append(f"{self.cluster.loop.now - 1000:.2f} {what}")

    async def run(self, duration_s: float) -> None:
        end = self.cluster.loop.now + duration_s
        at_once: list[asyncio.Task[None]] = []
        while self.cluster.loop.now < end:
            await asyncio.sleep(self.rng.expovariate(0.4))
            fault = self.rng.choice(self._kinds)()
            if self.gentle:
                await fault
                await asyncio.sleep(QUIET_S)
            else:
                at_once.append(asyncio.ensure_future(fault))
        await asyncio.gather(*at_once)
        self.cluster.network.heal()
        self.cluster.network.delay_s, self.cluster.network.byte_s = DELAY_S, 0.0
        self.cluster.answer_loss = 0.0
        self.note("faults are over")

    def _place(self) -> Place:
        return self.rng.choice(self.cluster.places)

    async def _crash(self, place: Place | None = None) -> None:
        place = place or self._place()
        if place.peer is None or not place.machine.runs:
            return
        at_once, witnessed = self.rng.random() < 0.7, self.successors.random() < 0.7
        what = ", with its host" if not at_once else "" if witnessed else ", with its witness"
        self.note(f"{place.name} crashes{what}")
        self.cluster.crash(place, at_once, witnessed)
        await asyncio.sleep(self.rng.choice((0.05, 0.5, 2.0, 5.0)) * self.rng.uniform(0.5, 1.5))
        self.note(f"{place.name} starts again")
        self.cluster.start(place)

    async def _leave(self, place: Place | None = None) -> None:
        """As on SIGTERM: what it has moves out, and it ends; later it comes again, as a new one."""
        dies = self.successors.random() < 0.5
        busy = [
            p for p in self.cluster.places if dies and p.serves and p.peer and p.peer.host.entries
        ]
        place = place or (self.successors.choice(busy) if busy else self._place())
        peer, machine = place.peer, place.machine
        if peer is None or place.leave is None or not place.serves or not machine.runs:
            return
        self.note(f"{place.name} is told to leave")
        place.leave.set()
        successor = asyncio.ensure_future(self._successor_dies(place)) if dies else None
        while place.peer is peer:
            await asyncio.sleep(0.2)
        if successor is not None:
            await successor
        if place.machine is not machine:
            return  # it crashed meanwhile, and is started by that fault
        self.note(f"{place.name} has ended")
        await asyncio.sleep(self.rng.uniform(0.1, 5.0))
        if place.machine is machine and place.peer is None:
            self.note(f"{place.name} starts again")
            self.cluster.start(place)

    async def _successor_dies(self, place: Place) -> None:
        """Just before it has the shards of one that leaves, or as it gets them, or soon after."""
        peer = place.peer
        assert peer is not None
        host = peer.host
        while not host.silent:
            if place.peer is not peer or not place.machine.runs:
                return
            await asyncio.sleep(0.001)
        address, _ = host.roster.backup_of(host.address)
        successor = next((p for p in self.cluster.places if p.address == address), None)
        if self.successors.random() < 0.3:
            self.cluster.network.byte_s = 1 / 100e3
            self.cluster.loop.call_later(2.0, setattr, self.cluster.network, "byte_s", 0.0)
        await asyncio.sleep(
            self.successors.choice((0.0, 0.005, 0.05, 0.3)) * self.successors.uniform(0.5, 1.5)
        )
        if successor is not None:
            self.note(f"{successor.name} inherits from {place.name}")
            await self._crash(successor)

    async def _join(self) -> None:
        if len(self.cluster.places) < MAX_PLACES:
            self.note(f"{self.cluster.join().name} joins")

    async def _freeze(self, place: Place | None = None) -> None:
        place = place or self._place()
        if not place.machine.runs:
            return
        machine = place.machine
        self.note(f"{place.name} is frozen")
        self.cluster.freeze(place)
        await asyncio.sleep(self._stall_s())
        if place.machine is machine:
            self.note(f"{place.name} goes on")
            self.cluster.thaw(place)

    def _stall_s(self) -> float:
        """How long the next one lasts."""
        seconds = self.rng.choice(STALLS_S) * self.rng.uniform(0.5, 1.5)
        self._stalls.append((self.cluster.loop.now, seconds))
        return seconds

    def stalled_s(self, within_s: float) -> float:
        """How long processes were stopped or links cut, of the last so many seconds."""
        now = self.cluster.loop.now
        began = now - within_s
        return sum(max(0.0, min(now, at + s) - max(began, at)) for at, s in self._stalls)

    async def _cut(self, one: Place | None = None) -> None:
        one = one or self._place()
        other = self.rng.choice([place for place in self.cluster.places if place is not one])
        await self._cut_off(one, [other] if self.rng.random() < 0.5 else self.cluster.places)

    async def _cut_from_keeper(self) -> None:
        """It is called lost, and everybody else can reach it still."""
        keeper, *others = self.cluster.places
        await self._cut_off(self.rng.choice(others), [keeper])

    async def _cut_off(self, one: Place, others: list[Place]) -> None:
        """Its links are cut, or a firewall lets nobody connect over them in one direction."""
        network, machines = self.cluster.network, [p.machine for p in others if p is not one]
        names = ", ".join(machine.name for machine in machines)
        way = self.rng.choice(("both", "both", "from", "to"))
        self.note(f"{one.name} is cut off from {names}, ways: {way}")
        for machine in machines:
            if way == "both":
                network.cut(one.machine, machine)
            elif way == "from":
                network.forbid(one.machine, machine)
            else:
                network.forbid(machine, one.machine)
        await asyncio.sleep(self._stall_s())
        self.note("cuts heal")
        self.cluster.network.heal()

    async def _strike(self) -> None:
        """A backup dies, and something happens to a peer that takes part while the next one gets
        its copy."""
        primary = next((p for p in self.cluster.places if p.serves and self._has(p)), None)
        if primary is None or primary.peer is None:
            return
        sender = primary.peer.log_sender
        if (before := sender.backup) is not None:
            crashes = asyncio.ensure_future(self._crash(self._at(before)))
        narrows = asyncio.ensure_future(self._narrow())
        end = self.cluster.loop.now + STRIKE_S
        while sender.synced or sender.backup in (None, before):
            if self.cluster.loop.now > end or not self._has(primary):
                break
            await asyncio.sleep(0.01)
        await asyncio.sleep(self.rng.choice((0.0, 0.05, 0.5)) * self.rng.uniform(0.5, 1.5))
        self.note("a backup gets a copy" if not sender.synced else "there is no backup to be made")
        strike = self.rng.choice((self._crash, self._crash, self._freeze, self._cut, self._leave))
        await strike(self.rng.choice((primary, self._at(sender.backup), None)))
        await narrows
        if before is not None:
            await crashes

    def _has(self, place: Place) -> bool:
        return place.peer is not None and LARGE in place.peer.host.entries

    def _at(self, owner: Owner | None) -> Place | None:
        places = self.cluster.places
        return next((p for p in places if owner is not None and p.address == owner.peer), None)

    async def _snap(self) -> None:
        wires = self.cluster.network.wires
        self.note("connections break")
        for wire in self.rng.sample(wires, min(len(wires), self.rng.randint(1, 4))):
            self.cluster.network.snap(wire)

    async def _slow(self) -> None:
        self.note("the network is slow")
        self.cluster.network.delay_s = self.rng.choice((0.005, 0.03, 0.1))
        await asyncio.sleep(self.rng.uniform(0.5, 5.0))
        self.cluster.network.delay_s = DELAY_S

    async def _narrow(self) -> None:
        """Values and copies of shards take a while."""
        self.note("the network is narrow")
        self.cluster.network.byte_s = 1 / self.rng.choice((20e3, 100e3, 1e6))
        await asyncio.sleep(self.rng.uniform(2.0, 12.0))
        self.cluster.network.byte_s = 0.0

    async def _jump(self) -> None:
        """A machine that slept has a later monotonic clock; any wall clock may be set."""
        place = self._place()
        ahead_s = self.rng.choice((0.5, 3.0, 20.0, 4000.0))
        self.note(f"the clock of {place.name} jumps {ahead_s} s")
        place.machine.ahead_s += ahead_s
        place.machine.disturbed_at = self.cluster.loop.now
        self.cluster.wall_ahead_ns += int(self.rng.choice((-3600, -1, 1, 3600)) * 1e9)

    async def _answers(self) -> None:
        self.note("answers to clients get lost")
        self.cluster.answer_loss = self.rng.choice((0.01, 0.05))
        await asyncio.sleep(self.rng.uniform(1.0, 6.0))
        self.cluster.answer_loss = 0.0
