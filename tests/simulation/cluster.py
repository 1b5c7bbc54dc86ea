"""A whole plane in one process: real peers on simulated machines, started, crashed and frozen."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from dataplane.launch.settings import PeerConfig
from dataplane.memory.arena import Arena
from dataplane.metadata.shard import journal
from dataplane.peer import main
from dataplane.peer import peer as peer_module
from dataplane.peer.door.client_door import Door
from dataplane.peer.membership import watching
from dataplane.peer.net import greetings, peer_door
from dataplane.peer.peer import Peer
from dataplane.peer.pull import paths
from dataplane.peer.shards import log_receiver, log_sender, value_replicas
from dataplane.peer.watch import janitor
from dataplane.transport.registry import TCP
from dataplane.wire.tables import Owner
from tests.simulation.bulk import SimulatedEngine
from tests.simulation.loop import Machine, VirtualLoop
from tests.simulation.network import WITNESS_S, Greetings, Network, Streams

if TYPE_CHECKING:
    from dataplane.wire.messages import Claim, Request, Wait
    from tests.simulation.line import Client, Line

ARENA_BYTES = 2 << 20


class Listener:
    """What a door has while it is open."""

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        pass


@dataclass(eq=False)
class Place:
    """One host: its address, the machine that runs there now, and the peer on it."""

    name: str
    address: str
    machine: Machine
    peer: Peer | None = None
    serves: bool = False
    lives: int = 0
    joins: bool = False
    """it is no seed, and came later"""
    leave: asyncio.Event | None = None
    """set: the peer that runs here leaves the plane"""

    @property
    def lets_in(self) -> bool:
        """Whether a client may connect here. A peer that leaves serves on, behind a closed door."""
        return self.serves and self.peer is not None and self.peer.door.is_open


class Cluster:
    """`peers` hosts, of which the first keeps the roster."""

    def __init__(self, loop: VirtualLoop, rng: random.Random, peers: int) -> None:
        self.loop = loop
        self.rng = rng
        self.network = Network(loop, rng)
        self.arena_bytes = ARENA_BYTES
        self.wall_ahead_ns = 0
        seeds = tuple(f"tcp://127.0.0.1:{7001 + i}" for i in range(peers))
        self.places = [
            Place(name, seed, loop.machine(name))
            for name, seed in zip("abcdefgh", seeds, strict=False)
        ]
        self.seeds = seeds
        self.dead: list[Peer] = []
        self.known: dict[Owner, Peer] = {}
        """every peer that ever ran"""
        self.died: dict[Owner, float] = {}
        """when processes ended, however long nobody may have noticed"""
        self.lines: list[Line] = []
        self.answer_loss = 0.0
        """how likely it is that a local connection breaks instead of bringing an answer"""
        self.on_extinct: list[Callable[[], None]] = []
        """called when the last seed of a plane ended that was a member: what that had is gone"""
        self.gone: Container[Owner] = ()
        """who is no member any more, whether it knows or, as a frozen one, not"""
        self.waiting: dict[Client, Claim | Wait] = {}
        """claims and `wait`s under way, the oldest first"""
        self.stalled: list[str] = []
        """calls of clients that were not answered although their peer could"""

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Time, chance, zmq and the bulk workers are the simulation's meanwhile."""
        network = self.network
        with contextlib.ExitStack() as stack:
            for target, name, stand_in in (
                (time, "monotonic", self.loop.time),
                (time, "time_ns", self._wall_ns),
                (secrets, "randbits", self.rng.getrandbits),
                (greetings, "Greetings", partial(Greetings, network)),
                (peer_door, "Streams", partial(Streams, network)),
                (peer_module, "BulkEngine", partial(SimulatedEngine, network)),
                # what this machine has installed, or in memory of another run, is no part of it
                (paths, "candidates", lambda choice: [TCP]),
                (peer_module, "candidates", lambda choice: [TCP]),
                (peer_module, "create_arena", lambda size, name, least: Arena.create(size, name)),
                (janitor, "prefaulted", _prefaulted),
                (watching, "watch", network.watch),
                (Door, "open", lambda door, path: setattr(door, "_listener", Listener())),
                # a few hundred rows go to a new backup in several messages, as many do elsewhere
                (log_sender, "MESSAGE_BYTES", 4 << 10),
                (log_sender, "CARRIED_BYTES", 1 << 10),
                (log_sender, "LEAST_BYTES_S", 8 << 10),
                # and others have their turn after each piece
                (log_sender, "SNAPSHOT_BYTES", 8 << 10),
                (log_sender, "PIECE_S", -1.0),
                (log_receiver, "PIECE_S", -1.0),
                (journal, "PIECE_ROWS", 16),
                (journal, "MAX_RECORD_BYTES", 2 << 10),
                (value_replicas, "BATCH_BYTES", 32 << 10),
                (log_receiver, "BATCH_BYTES", 32 << 10),
            ):
                stack.enter_context(mock.patch.object(target, name, stand_in))
            asyncio._set_running_loop(self.loop)
            stack.callback(asyncio._set_running_loop, None)
            yield

    def _wall_ns(self) -> int:
        return 1_700_000_000_000_000_000 + int(self.loop.now * 1e9) + self.wall_ahead_ns

    # life and death

    def start(self, place: Place) -> None:
        place.machine.crashed = False
        place.lives += 1
        self.loop.start_on(place.machine, self._serve(place))

    async def _serve(self, place: Place) -> None:
        """As `dataplane.peer.main` does."""
        again = True
        while again:
            config = PeerConfig(
                "plane",
                place.name,
                place.address,
                self.seeds,
                self.arena_bytes,
                self._nowhere(),
                join=place.joins,
            )
            peer = Peer(config)
            place.peer, place.leave = peer, asyncio.Event()
            self.known[peer.host.owner] = peer
            self.network.peers[peer.host.address, peer.host.incarnation] = place.machine, peer
            try:
                if not await main._started(peer, "/nowhere", (place.leave,)):
                    return
                place.serves = True
                again = await peer.run(place.leave, asyncio.Event())
            except Exception as exc:
                self.loop.failures.append(f"{place.name} could not start: {exc!r}")
                again = False
            finally:
                self._ended(place, peer)
                if place.peer is peer:
                    await peer.close()
                    self._retire(place, peer)
                    place.peer = None

    def _nowhere(self) -> Path:
        """Another run directory for each life: the arena of one that crashed, which stays mapped
        here, is nobody's leftover."""
        return Path(f"/nowhere/{len(self.known)}")

    def _retire(self, place: Place, peer: Peer) -> None:
        self.network.peers.pop((peer.host.address, peer.host.incarnation), None)
        self.dead.append(peer)
        self.died.setdefault(peer.host.owner, self.loop.now)

    def join(self) -> Place:
        """A host more, whose peer joins the plane."""
        number = len(self.places)
        name, address = "abcdefgh"[number], f"tcp://127.0.0.1:{7001 + number}"
        place = Place(name, address, self.loop.machine(name), joins=True)
        self.places.append(place)
        self.start(place)
        return place

    def crash(self, place: Place, at_once: bool, witnessed: bool = True) -> None:
        """The process is gone, with all that it had; a new one would run on a new machine. at_once:
        its host lives. witnessed: and so does the witness of the process."""
        old, peer = place.machine, place.peer
        if peer is not None:
            if at_once and witnessed:
                self.network.witnessed[peer.host.owner] = self.loop.now + WITNESS_S
            self._retire(place, peer)
            self._ended(place, peer)
        old.crashed = True
        place.peer = None
        self.network.crashed(old, at_once)
        for line in self.lines:
            if line.machine is old:
                line.break_off()
        self.lines = [line for line in self.lines if not line.lost]
        place.machine = self.loop.machine(place.name)

    def _ended(self, place: Place, ended: Peer) -> None:
        if place.serves:
            place.serves = False
            # A keeper that starts again asks the seeds: who only joined is not known to any.
            peers = [other.peer for other in self.places if other.serves and not other.joins]
            if not any(peer and self._goes_on(peer, ended) for peer in peers):
                for tell in self.on_extinct:
                    tell()

    def _goes_on(self, peer: Peer, ended: Peer) -> bool:
        """Whether a peer is of the plane of one that ended. A keeper that was started while it was
        cut off from all who live began another one, in which none of these is."""
        mine, last = peer.host.roster, ended.host.roster
        anew = not last.has(peer.host.owner) and mine.epoch[1] < last.epoch[1]
        return peer.host.owner not in self.gone and not anew

    def is_alive(self, owner: Owner) -> bool:
        """Whether this process is there, stopped or not."""
        return any(
            place.peer is not None and place.peer.host.owner == owner for place in self.places
        )

    def freeze(self, place: Place) -> None:
        place.machine.frozen = True

    def thaw(self, place: Place) -> None:
        place.machine.frozen = False
        place.machine.disturbed_at = self.loop.now

    # clients

    def is_leased(self, client: Client, lease: int) -> bool:
        """Whether the store that granted a client's lease, or took it over, still has it."""
        assert client.peer is not None
        return lease in client.peer.leases._leases and any(
            entry.store.is_leased(lease)
            for peer in self.peers
            if peer.host.owner not in self.gone  # and serves on, as it has not heard so
            for entry in peer.host.entries.values()
        )

    def loses_answer(self) -> bool:
        return self.answer_loss > 0 and self.rng.random() < self.answer_loss

    def late(self, client: Client, request: Request, machine: Machine, began: float) -> None:
        """A client was told too late, or nothing: no fault of a peer that did not run meanwhile."""
        if machine.runs and machine.disturbed_at < began:
            took_s = self.loop.now - began
            what = type(request.body).__name__
            self.stalled.append(f"{client!r} waited {took_s:.1f} s for an answer to {what}")

    @property
    def peers(self) -> list[Peer]:
        """Those that are there and know it."""
        return [p.peer for p in self.places if p.peer is not None and p.machine.runs]

    def close(self) -> None:
        """Give everything back, after the loop ended."""
        for peer in {*self.dead, *(p.peer for p in self.places if p.peer is not None)}:
            peer.host.arena.close()

    def __repr__(self) -> str:
        return ", ".join(repr(place.machine) for place in self.places)


def described(peer: Peer) -> dict[str, Any]:
    """What helps to see why a run failed."""
    host = peer.host
    return {
        "peer": host.name,
        "roster": (host.roster.epoch[1], [m[-4:] for m in host.roster.members]),
        "backup": host.roster.backup_of(host.address)
        if host.address in host.roster.members
        else "",
        "progress": repr(host.progress),
        "waiting": peer.claims.waiting,
        "stores": [repr(entry.store) for entry in host.entries.values()],
        "space": repr(host.space),
    }


async def _prefaulted(arena: Arena, start: int, length: int) -> None:
    """Pages that are allocated ahead change nothing that is simulated."""
