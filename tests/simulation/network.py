"""The network between simulated machines, where greetings, streams and the bulk workers would be.

It does what TCP lets happen: frames of one connection come late but in order, a cut that heals soon
loses nothing, and one that lasts longer breaks the connection, with some prefix of what was on its
way delivered. What was sent again on the next connection may then come twice, or before the first.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from dataplane.peer.failures import LinkBroken
from dataplane.peer.net.streams import JOIN_S
from dataplane.peer.operations import Channel
from dataplane.transport.witness import DIAL_S, Look, Process, Tell
from dataplane.wire.refusals import Refusals
from dataplane.wire.tables import Owner
from tests.simulation.loop import Machine, VirtualLoop

if TYPE_CHECKING:
    from dataplane.peer.peer import Peer

log = logging.getLogger(__name__)

SILENT_S = (7.0, 8.0)
"""How soon a connection breaks whose other host answers nothing, by the kernel's keepalive. A
process that only stopped does not break any: its kernel answers."""
WITNESS_S = 15.0
"""How long the witness of a process that died says so."""
LOOK_S = 0.1
"""How soon the end of a watched connection is noticed."""
RETRY_S = 0.05
DELAY_S = 0.0005
"""What a frame takes on its way, on average."""


@dataclass(eq=False)
class Wire:
    """One established connection, from a dialler's machine to a listener's."""

    dealer: Dealer | Stream
    router: Router | Stream
    broken: bool = False
    last: dict[str, float] = field(default_factory=lambda: {"to": 0.0, "back": 0.0})
    """when the last frame of each direction arrives: none overtakes another"""
    held: list[tuple[str, Any]] = field(default_factory=list)
    """frames that a cut holds up"""

    def machines(self) -> tuple[Machine, Machine]:
        return self.dealer.machine, self.router.machine


class Network:
    def __init__(self, loop: VirtualLoop, rng: random.Random) -> None:
        self.loop = loop
        self.rng = rng
        self.delay_s = DELAY_S
        self.byte_s = 0.0
        """how long one byte takes on a connection"""
        self.bulk_until = 0.0
        """when all has come that a bulk worker has begun to send"""
        self.cuts: set[frozenset[str]] = set()
        self.forbidden: set[tuple[str, str]] = set()
        """which machine a firewall lets make no connection to which"""
        self.listeners: dict[str, Router] = {}
        self.doors: dict[str, Streams] = {}
        self.peers: dict[tuple[str, int], tuple[Machine, Peer]] = {}
        """by address and incarnation, for bulk reads"""
        self.vacant: dict[str, str] = {}
        """addresses at which a host is there and nobody listens, with the host's name"""
        self.witnessed: dict[Owner, float] = {}
        """processes that died and left a witness, and until when that answers"""
        self.wires: list[Wire] = []
        self._identities = itertools.count(1)

    # state of the links

    def delay(self) -> float:
        """Mostly short, sometimes long."""
        slow = 40.0 if self.rng.random() < 0.02 else 1.0
        return self.rng.expovariate(1.0) * self.delay_s * slow + 20e-6

    def is_cut(self, one: Machine, other: Machine) -> bool:
        return frozenset((one.name, other.name)) in self.cuts

    def cut(self, one: Machine, other: Machine) -> None:
        self.cuts.add(frozenset((one.name, other.name)))
        for wire in self.wires:
            if {one, other} == set(wire.machines()):
                self._watch(wire)

    def forbid(self, one: Machine, other: Machine) -> None:
        """The first reaches no port of the second, which reaches the ports of the first."""
        self.forbidden.add((one.name, other.name))
        for wire in list(self.wires):
            if wire.machines() == (one, other):
                self.snap(wire)

    def may_connect(self, one: Machine, other: Machine) -> bool:
        return not self.is_cut(one, other) and (one.name, other.name) not in self.forbidden

    def heal(self) -> None:
        self.cuts.clear()
        self.forbidden.clear()
        for wire in list(self.wires):
            held, wire.held = wire.held, []
            for way, frame in held:
                self.carry(wire, way, frame)

    def _watch(self, wire: Wire) -> None:
        """Break it unless it comes back to life in time."""

        def look() -> None:
            one, other = wire.machines()
            if self.is_cut(one, other) or one.crashed or other.crashed:
                self.snap(wire)

        self.loop.call_on(self.loop.world, self.rng.uniform(*SILENT_S), look)

    def crashed(self, machine: Machine, at_once: bool) -> None:
        """A process that died resets its connections; a host that did is only silent."""
        for address, router in list(self.listeners.items()):
            if router.machine is machine:
                del self.listeners[address]
                if at_once:
                    self.vacant[address] = machine.name
        for wire in self.wires:
            if machine in wire.machines():
                if at_once:
                    self.loop.call_on(self.loop.world, self.delay(), self.snap, wire)
                else:
                    self._watch(wire)

    def snap(self, wire: Wire) -> None:
        """The connection breaks; both sides learn of it when they run."""
        if wire.broken:
            return
        wire.broken = True
        wire.held.clear()
        self.wires.remove(wire)
        self.loop.call_on(wire.dealer.machine, self.delay(), wire.dealer.disconnected, wire)

    async def watch(
        self, process: Process, key: bytes, tell: Tell, silent_since: float | None
    ) -> float | None:
        """As `transport.witness.watch`: to the port at which the process was greeted, where it runs
        or its successor does, or its witness answers, or nobody does."""
        asks, owner, began = self.loop.current, process.owner, self.loop.now
        address = owner.peer
        await asyncio.sleep(self.delay())
        machine = self._machine(owner)
        if machine is not None and self.may_connect(asks, machine):
            tell(Look.ANSWERED, began)
            while self._machine(owner) is machine and self.may_connect(asks, machine):
                await asyncio.sleep(LOOK_S)
            if self._machine(owner) is None and address in self.vacant:
                return None  # its process died, and reset the connection
            cut_at = self.loop.now
            while self.loop.now - cut_at < SILENT_S[1] and self._is_silent(asks, owner):
                await asyncio.sleep(LOOK_S)
            return cut_at if self._is_silent(asks, owner) else None
        if self._is_silent(asks, owner):
            await asyncio.sleep(DIAL_S)
            since = began if silent_since is None else silent_since
            tell(Look.UNANSWERED, since)
            return since
        if self.loop.now < self.witnessed.get(owner, 0.0):
            tell(Look.ENDED, self.loop.now)
        elif address in self.vacant:
            tell(Look.REFUSED, self.loop.now)
        else:
            tell(Look.ANSWERED, self.loop.now)
        return None

    def _machine(self, owner: Owner) -> Machine | None:
        """Where a process runs, or is frozen."""
        found = self.peers.get((owner.peer, owner.incarnation))
        return found[0] if found is not None and not found[0].crashed else None

    def _is_silent(self, asks: Machine, owner: Owner) -> bool:
        """Whether the host at whose address a process ran answers nothing to who asks."""
        machine = self._machine(owner)
        router = self.listeners.get(owner.peer)
        name = machine.name if machine else router.machine.name if router else None
        name = name or self.vacant.get(owner.peer)
        if name is None or frozenset((asks.name, name)) in self.cuts:
            return True
        return (asks.name, name) in self.forbidden

    # frames

    def carry(self, wire: Wire, way: str, frame: Any) -> None:
        if wire.broken:
            return
        one, other = wire.machines()
        if self.is_cut(one, other):
            wire.held.append((way, frame))
            return
        arrival = max(self.loop.now + self.delay(), wire.last[way] + 1e-9)
        arrival += len(frame) * self.byte_s
        wire.last[way] = arrival
        self.loop.call_on(self.loop.world, arrival - self.loop.now, self._arrive, wire, way, frame)

    def _arrive(self, wire: Wire, way: str, frame: Any) -> None:
        one, other = wire.machines()
        if wire.broken and (way == "back" or self.rng.random() < 0.5):
            wire.last["lost"] = 1.0
        if "lost" in wire.last:
            return
        if self.is_cut(one, other):
            wire.held.append((way, frame))
        elif way == "to":
            self.loop.call_on(other, 0.0, wire.router.arrived, wire, frame)
        else:
            self.loop.call_on(one, 0.0, wire.dealer.arrived, wire, frame)

    # connections

    def dial(self, dealer: Dealer) -> None:
        if dealer.closed:
            return
        router = self.listeners.get(dealer.address)
        there = router is not None and router.machine.runs and dealer.machine.runs
        if not there or not self.may_connect(dealer.machine, router.machine):  # type: ignore[union-attr]
            self.loop.call_on(self.loop.world, RETRY_S * self.rng.uniform(1, 3), self.dial, dealer)
            return
        assert router is not None
        wire = dealer.wire = Wire(dealer, router)
        self.wires.append(wire)
        queued, dealer.queued = dealer.queued, []
        for frame in queued:
            self.carry(wire, "to", frame)


class Stream:
    """One end of a stream, as `peer.net.streams.Stream`."""

    is_full, waiting_bytes, unanswered_bytes = False, 0, 0
    channel = Channel.CALLS

    def __init__(
        self,
        network: Network,
        machine: Machine,
        way: str,
        take: Callable[[Any, bytes], None],
        ended: Callable[[Any, str], None] = lambda stream, why: None,
    ) -> None:
        self.network, self.machine = network, machine
        self.id, self.wire, self.closed = b"", cast(Wire, None), False
        self._way, self._take, self._ended = way, take, ended

    def post(self, frame: bytes) -> None:
        if not self.closed:
            self.network.carry(self.wire, self._way, bytes(frame))

    async def drained(self) -> None: ...

    def pause(self) -> None:
        raise AssertionError("no simulated peer is asked for so much")

    def arrived(self, wire: Wire, frame: bytes) -> None:
        if not self.closed:
            self._take(self, frame)

    def disconnected(self, wire: Wire) -> None:
        if not self.closed:
            self.closed = True
            self._ended(self, "the network broke it")

    def close(self) -> None:
        self.closed = True
        if not self.wire.broken:
            self.network.snap(self.wire)


class Streams:
    """Stands where `peer.net.streams.Streams` does."""

    def __init__(self, network: Network, sealed: bool, take: Callable[[Any, bytes], None]) -> None:
        self.network, self.machine, self._take = network, network.loop.current, take
        self.refusals, self.address = Refusals(log, "stream door"), ""
        self._open: list[Stream] = []

    async def listen(self, where: str, told: str) -> None:
        self.address = told
        self.network.doors[told] = self

    def __len__(self) -> int:
        return len(self._open)

    def promise(self, channel: Channel = Channel.CALLS) -> bytes:
        return f"{channel.value} {next(self.network._identities)}".encode()

    def answer(self, stream: Stream, frame: bytes) -> None:
        stream.post(frame)

    def close(self) -> None:
        for stream in self._open:
            stream.close()

    async def dial(
        self,
        address: str,
        secret: bytes,
        take: Callable[[Any, bytes], None],
        ended: Callable[[Any, str], None],
    ) -> Stream:
        network, asks = self.network, self.network.loop.current
        await asyncio.sleep(network.delay())
        there = network.doors[address]
        runs = there.machine.runs and not there.machine.crashed
        if not runs or not network.may_connect(asks, there.machine):
            await asyncio.sleep(JOIN_S)
            raise LinkBroken(f"nobody accepts a stream at {address}", address=address)
        mine = Stream(network, asks, "to", take, ended)
        theirs = Stream(network, there.machine, "back", there._take)
        theirs.id = mine.id = secret
        theirs.channel = Channel(secret.decode().partition(" ")[0])
        mine.wire = theirs.wire = Wire(mine, theirs)
        there._open.append(theirs)
        network.wires.append(mine.wire)
        return mine


class Dealer:
    """A connection that was dialled."""

    wire: Wire | None = None
    closed = False

    def __init__(
        self,
        network: Network,
        address: str,
        greeting: bytes,
        take: Callable[[bytes], None],
        broke: Callable[[], None],
    ) -> None:
        self.network, self.machine, self.address = network, network.loop.current, address
        self.queued = [greeting]
        self._take, self._broke = take, broke
        network.loop.call_on(network.loop.world, network.delay(), network.dial, self)

    def arrived(self, wire: Wire, frame: bytes) -> None:
        if not self.closed and wire is self.wire:
            self._take(frame)

    def disconnected(self, wire: Wire) -> None:
        if not self.closed and wire is self.wire:
            self._broke()

    def close(self) -> None:
        self.closed = True
        if self.wire is not None and not self.wire.broken:
            self.network.snap(self.wire)


class Router:
    """Where one peer is greeted."""

    def __init__(self, network: Network, where: str) -> None:
        self.network, self.machine, self.where = network, network.loop.current, where
        self._answer: Callable[[bytes], bytes] | None = None
        self._unread: list[tuple[Wire, bytes]] = []
        network.listeners[where] = self
        network.vacant.pop(where, None)

    def serve(self, answer: Callable[[bytes], bytes]) -> None:
        self._answer = answer
        for wire, frame in self._unread:
            self.arrived(wire, frame)

    def arrived(self, wire: Wire, frame: bytes) -> None:
        if self._answer is None:
            self._unread.append((wire, frame))
        else:
            self.network.carry(wire, "back", self._answer(frame))

    def close(self) -> None:
        self._answer = None
        if self.network.listeners.get(self.where) is self:
            del self.network.listeners[self.where]
            self.network.vacant[self.where] = self.machine.name
        for wire in list(self.network.wires):
            if wire.router is self:
                self.network.snap(wire)


class Greetings:
    """Stands where `peer.net.greetings.Greetings` does."""

    def __init__(self, network: Network, gate: object) -> None:
        self.dial = lambda *how: Dealer(network, *how).close
        self._network = network
        self._router: Router | None = None

    def bind(self, address: str) -> str:
        self._router = Router(self._network, address)
        return address

    async def serve(self, answer: Callable[[bytes], bytes]) -> None:
        assert self._router is not None
        self._router.serve(answer)

    def close(self) -> None:
        if self._router is not None:
            self._router.close()
