"""The assembled peer: its parts, its life, and the effects of a change.

`run_effects` is called after everything that changed a store (`shards.effects`).
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import secrets

from dataplane.errors import DataplaneError
from dataplane.gpu.registry import peer_pools
from dataplane.launch.settings import PeerConfig
from dataplane.launch.values import MIN_BYTES, Spill
from dataplane.memory.arena import create_arena
from dataplane.memory.spill import SpillFile
from dataplane.metadata.roster.roster import Roster, canonical
from dataplane.peer.door.client_door import Door
from dataplane.peer.door.undelivered import Undelivered
from dataplane.peer.host import Host
from dataplane.peer.membership.authority import EtcdKeeper, SeedKeeper
from dataplane.peer.membership.leaving import Leaving
from dataplane.peer.membership.membership import Membership
from dataplane.peer.net.greetings import Gate
from dataplane.peer.net.mesh import Mesh
from dataplane.peer.net.router import Router
from dataplane.peer.operations import OPERATIONS
from dataplane.peer.pull.paths import candidates, start_engine
from dataplane.peer.pull.pulls import Pulls
from dataplane.peer.requests.changes import Changes
from dataplane.peer.requests.checkpoints import Checkpoints
from dataplane.peer.requests.claims import Claims
from dataplane.peer.requests.directory import Directory
from dataplane.peer.requests.leases import Finishing, Leases
from dataplane.peer.requests.outgoing_changes import OutgoingChanges
from dataplane.peer.requests.puts import Grants, Writing
from dataplane.peer.requests.reads import Reading
from dataplane.peer.requests.waits import Waits
from dataplane.peer.room.admission import Room
from dataplane.peer.room.pools import Pools
from dataplane.peer.room.spilling import Spilling
from dataplane.peer.room.standstill import Standstill
from dataplane.peer.sessions import Session, Sessions
from dataplane.peer.shards.confirming import Confirming
from dataplane.peer.shards.effects import Effects
from dataplane.peer.shards.log_receiver import LogReceiver
from dataplane.peer.shards.log_sender import LogSender
from dataplane.peer.shards.metadata_quota import MetadataQuota
from dataplane.peer.shards.partitions import Partitions
from dataplane.peer.shards.references import References
from dataplane.peer.shards.retries import Retries
from dataplane.peer.shards.value_replicas import ValueReplicas
from dataplane.peer.shards.waiting_calls import WaitingCalls
from dataplane.peer.tasks import first_of
from dataplane.peer.watch.janitor import Janitor
from dataplane.peer.watch.stats import Reporting
from dataplane.peer.watch.timeline import Timeline
from dataplane.transport.engine import BulkEngine
from dataplane.transport.tickets import plane_key
from dataplane.wire.peering import Beat
from dataplane.wire.tables import Owner

ADMITTED_S = 300.0
"""How long a starting peer waits for the keeper: hosts of a job start at different times."""


class Peer:
    mesh: Mesh
    pulls: Pulls
    partitions: Partitions
    calls: WaitingCalls
    references: References
    grants: Grants
    reading: Reading
    writing: Writing
    finishing: Finishing
    changes: Changes
    checkpoints: Checkpoints
    directory: Directory
    waits: Waits
    claims: Claims
    membership: Membership
    log_receiver: LogReceiver
    reporting: Reporting
    timeline: Timeline
    standstill: Standstill

    def __init__(self, config: PeerConfig) -> None:
        self.config = config
        roster = Roster.from_seeds(config.seeds, keeps=not config.roster, launch=config.launch)
        address = canonical(config.listen) if config.listen and config.seeds else roster.members[0]
        self.pools: Pools = peer_pools(config.device_arena) or Pools()
        arena = create_arena(config.arena_bytes, config.arena_name, MIN_BYTES)
        self.host = Host(
            plane=config.run,
            name=config.name,
            incarnation=secrets.randbits(53),
            address=address,
            roster=roster,
            arena=arena,
            space=self.pools.memory(arena.size_bytes),
            # Two of a thousand incarnations with a million numbers each overlap with a probability
            # of 2e-7, and only numbers in use at the same time would be confused.
            numbers=itertools.count(secrets.randbits(62) + 1),
            founding=roster.epoch,
        )
        self.host.space.waste_bytes = self._waste
        self.mesh = Mesh(self.host, self._bulk, Gate(config.token, config.run))
        self.host.serving.name_of = self.mesh.others.name
        self.router = Router(self.host, self.mesh)
        self.sessions = Sessions(self.host, self._session_ended)
        self._keep_memory()
        self._keep_shards()
        self._serve_clients()
        self._take_part()
        for one in OPERATIONS.values():
            if one.client is not None:
                self.door.handlers[one.message] = one.client(self)
            if one.peer is not None:
                self.mesh.handlers[one.message] = one.peer(self)

    def _keep_memory(self) -> None:
        """Build what manages this host's memories and copies remote values."""
        config, host, mesh = self.config, self.host, self.mesh
        self.room = room = Room(host, mesh)
        room.on_wait.append(self._producers_wait)
        self.spilling = self._spilling(config.spill) if config.spill is not None else None
        from_disk = self.spilling.read if self.spilling is not None else None
        self.pools.open(host, room, from_disk)
        self.pulls = pulls = Pulls(host, mesh, room, self.pools, config.transport)
        self.pools.use(pulls)
        self.value_replicas = ValueReplicas(host, mesh, pulls, room)

    def _keep_shards(self) -> None:
        """Build the partitions, the calls that wait at them, and the references to values."""
        host, mesh, router, room = self.host, self.mesh, self.router, self.room
        self.log_sender = LogSender(host, mesh, self.value_replicas)
        self.references = refs = References(host, mesh, room)
        self.effects = effects = Effects(refs, self.value_replicas, room, retries := Retries())
        self.partitions = parts = Partitions(host, mesh, router, self.log_sender, effects.run)
        self.metadata_quota = quota = MetadataQuota(host)
        self.calls = calls = WaitingCalls(
            host,
            mesh,
            parts,
            self.value_replicas,
            effects.run,
            producers=lambda: room.producers + quota.writers,
            retries=retries,
        )
        effects.on_changed = calls.changed
        quota.on_refused.append(calls.producers_wait)

    def _serve_clients(self) -> None:
        """Build the handlers of clients' requests, and the client door."""
        host, mesh, router, room = self.host, self.mesh, self.router, self.room
        refs, parts, quota = self.references, self.partitions, self.metadata_quota
        run_effects = self.effects.run
        self.outgoing = outgoing = OutgoingChanges(host, mesh, router)
        self.leases = leases = Leases(room.unpin)
        self.grants = grants = Grants(host, room, self.pools)
        self.reading = reading = Reading(host, router, leases, self.pools)
        self.writing = Writing(
            host, grants, outgoing, refs, self.value_replicas, quota, run_effects
        )
        self.finishing = finishing = Finishing(router, leases, self.writing)
        self.changes = Changes(host, outgoing, refs, parts, run_effects)
        self.checkpoints = Checkpoints(self.writing, reading, router, self.sessions)
        self.directory = Directory(host, mesh, self.sessions, parts, self.config.run_dir)
        self.waits = Waits(host, router, self.sessions, self.directory)
        self.claims = Claims(host, router, finishing, reading, self.waits, room)
        undelivered = Undelivered(host, grants, finishing, self.waits)
        self.door = Door(
            host,
            self.sessions,
            undelivered.take_back,
            lambda session, pins: room.unpin(session.id, pins),
            lambda: self.janitor.is_over(),
        )
        self.door.on_claimed = self.claims.answered

    def _take_part(self) -> None:
        """Build the membership of this peer, and what ends it."""
        config, host, mesh, router = self.config, self.host, self.mesh, self.router
        parts, refs = self.partitions, self.references
        self.keeper = (
            EtcdKeeper(host, config.roster, lambda address: self.membership.has_ended(address))
            if config.roster
            else SeedKeeper(host, host.roster.members[0])
        )
        mesh.begins_anew = bool(config.launch)
        self.membership = Membership(host, mesh, self.keeper, self, config.lost_after_s)
        self.log_sender.on_whole = self.membership.beat_now
        self.confirming = Confirming(host, mesh, self.log_sender, self.membership.keeps_the_roster)
        self.log_receiver = LogReceiver(host, mesh, parts, self.log_sender, refs)
        # Requests and replies carry records and positions, which saves messages of their own.
        mesh.has = self.log_receiver.has
        mesh.door.carry, mesh.door.heard = self.log_sender.carry, self.log_sender.heard
        self.leaving = Leaving(
            host, mesh, self.membership, self.value_replicas, self.door, router, self.effects.run
        )
        self.reporting = Reporting(self)
        self.timeline = Timeline(self)
        self.standstill = Standstill(self)
        self.janitor = Janitor(self)

    # life

    async def start(self, socket_path: str) -> None:
        candidates(self.config.transport)  # checks the settings, even without another peer
        self.pools.check()
        if not self.host.solo:
            bind_host = self.host.address.removeprefix("tcp://").rsplit(":", 1)[0]
            token = self.config.token
            secret = token.key(self.host.plane, "bulk") if token else None
            key = plane_key(self.host.plane, self.host.founding, secret)
            self.membership.watching.key = key
            made = functools.partial(
                BulkEngine,
                self.host.arena.rw_fd,
                arena_bytes=self.host.arena.size_bytes,
                host=bind_host.strip("[]"),
                owner=self.host.owner,
                key=key,
                pin=self.pulls.pin,
                unpin=self.pulls.unpin,
            )
            engine = await start_engine(self.config.transport, made, self.config.bulk_tls)
            self.pulls.use(engine)
            if not self.config.bulk_tls:
                await self.pools.start(made, engine.transport)
            await self.mesh.listen()  # the reply to a greeting names the bulk workers
            self.mesh.spawn(self.membership.run())
            self.mesh.spawn(self.confirming.run())
            await self.membership.admitted(ADMITTED_S)
        self.door.open(socket_path)

    async def run(self, leave: asyncio.Event, stop: asyncio.Event) -> bool:
        """Run until `stop` is set or no client is left. After `leave` is set, run until
        everything has moved to other peers. Return True if the run continues without this
        process, which may then rejoin as a new peer."""
        deposed = self.membership.deposed
        works = deposed.wait(), self.janitor.run(stop), self.leaving.leave(leave)
        for ended in await first_of(*works):
            ended.result()
        return deposed.is_set() and not (stop.is_set() or leave.is_set())

    async def close(self, why: DataplaneError | None = None) -> None:
        """Close the peer. why: the error for clients that are still connected."""
        await self.door.close(why)
        await self.mesh.close()
        await self.keeper.close()  # no call needs the keeper now, and this peer must not become it
        await self.pools.stop()
        await self.pulls.close(witnessed=self._is_missed())
        await self.host.threads.ended()
        if self.spilling is not None:
            self.spilling.file.close()
        self.pools.free()
        # Otherwise the memory would stay mapped after a restart in this process.
        self.host.arena.close()

    def _is_missed(self) -> bool:
        """Whether other members continue that still count this process as a member."""
        roster = self.host.roster
        deposed = self.membership.deposed.is_set()
        return not deposed and self.host.owner in roster.owners and len(roster.owners) > 1

    def _spilling(self, spill: Spill) -> Spilling:
        host = self.host
        name = f"{host.plane}\0{host.name}\0{host.incarnation}"
        file = SpillFile(spill.folder(), name, host.arena.view)
        size_bytes = spill.file_bytes(self.config.arena_bytes)
        return Spilling(host, self.mesh, self.room, file, size_bytes)

    def _bulk(self) -> tuple[str, str, str]:
        engine = self.pulls.engine
        if engine is None:
            return "", "", ""
        return engine.address, engine.fingerprint, self.pools.address

    # roster changes

    def heartbeat(self, leaving: bool, spare: bytes) -> Beat:
        """Return this peer's heartbeat for the roster keeper."""
        synced, wanted = self.log_sender.has_all, self.janitor.is_wanted()
        return Beat(synced, leaving, self.leaving.clear(), wanted, spare)

    def turned(self, old: Roster, new: Roster) -> None:
        """Apply a newer roster."""
        # First, because shards that were taken over are this peer's own from here on.
        self.log_receiver.turned(old, new)
        self.leaving.turned(old, new)
        self.partitions.turned()
        self.log_sender.turned(new)
        if not new.places_like(old):
            self.calls.turned()

    def gone(self, owner: Owner) -> None:
        """Handle a process that is no longer a member. Called after `turned`."""
        self.calls.gone(owner)
        self.references.gone(owner)
        self.pulls.gone(owner)
        self.pools.gone(owner)

    # effects

    def _session_ended(self, session: Session) -> None:
        self.finishing.release_all(session)
        self.waits.give_back(session, list(session.permits))
        self.room.pump()

    def _producers_wait(self) -> None:
        """Note that a call begins to wait for space."""
        if self.room.producers:
            self.calls.producers_wait()

    def _waste(self) -> int:
        """Return the bytes of dead values in chunks that other rows keep alive: a chunk is freed
        whole."""
        stores = [entry.store for entry in self.host.entries.values()]
        return sum([store.dead_bytes(self.host.owner) for store in stores])
