"""The peer, put together: its parts, its life, and what follows from a change.

`settle` is called after everything that changed a store: references that ended go to their owners,
waiting puts are looked at, and claims that wait are met.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import secrets

from dataplane.launch import runs
from dataplane.launch.settings import LINGER_S, PeerConfig
from dataplane.launch.values import MIN_ARENA_BYTES, Spill
from dataplane.memory.leftovers import arena_beside
from dataplane.memory.spill_file import SpillFile
from dataplane.metadata.operations import Operations
from dataplane.metadata.roster import Roster, canonical
from dataplane.peer.answers import Answers
from dataplane.peer.changes import Changes
from dataplane.peer.checkpoints import Checkpoints
from dataplane.peer.claim_queues import ClaimQueues
from dataplane.peer.claims import Claims
from dataplane.peer.copying import Copying
from dataplane.peer.credit import Credit
from dataplane.peer.device_pulls import DevicePulls
from dataplane.peer.devices import Devices, devices_of, memory_of
from dataplane.peer.door import Door
from dataplane.peer.finishing import Finishing
from dataplane.peer.gate import Gate
from dataplane.peer.grants import Grants
from dataplane.peer.host import Entry, Host
from dataplane.peer.janitor import Janitor
from dataplane.peer.keepers import keeper_of
from dataplane.peer.leases import Leases
from dataplane.peer.losses import LossReports
from dataplane.peer.mesh import Mesh
from dataplane.peer.metadata_share import MetadataShare
from dataplane.peer.partitions import Partitions
from dataplane.peer.paths import candidates, start_engine
from dataplane.peer.pulls import Pulls
from dataplane.peer.reading import Reading
from dataplane.peer.room import Room
from dataplane.peer.sessions import Session, Sessions
from dataplane.peer.shipping import Shipping
from dataplane.peer.spilling import Spilling
from dataplane.peer.standstill import Standstill
from dataplane.peer.stats import Reporting
from dataplane.peer.succession import Succession
from dataplane.peer.waits import Waits
from dataplane.peer.writing import Writing
from dataplane.transport.engine import BulkEngine
from dataplane.transport.tickets import plane_key
from dataplane.wire import messages as m

log = logging.getLogger(__name__)

ADMITTED_S = 300.0
"""How long a peer waits at its start for the authority: hosts of a job start at different times."""


class Peer:
    def __init__(self, config: PeerConfig) -> None:
        self.config = config
        roster = Roster.from_seeds(config.seeds, keeps=not config.roster, launch=config.launch)
        address = canonical(config.listen) if config.listen and config.seeds else roster.members[0]
        devices = devices_of(config.device_arena) if config.device_arena else []
        arena = arena_beside(config.arena_bytes, config.arena_name, MIN_ARENA_BYTES)
        self.host = Host(
            plane=config.run,
            name=config.name,
            incarnation=secrets.randbits(53),
            address=address,
            roster=roster,
            arena=arena,
            space=memory_of(arena.size_bytes, devices),
            operations=Operations(),
            # leases move to other peers with their rows, so no two peers may number alike
            lease_numbers=itertools.count(1 + secrets.randbits(62)),
            founding=roster.epoch,
        )
        self.host.space.waste_bytes = self._waste
        self.mesh = Mesh(self.host, self._bulk, Gate(config.token, config.run))
        self.room = Room(self.host)
        self.pulls = Pulls(self.host, self.mesh, self.room, config.transport)
        self.device_pulls = DevicePulls(self.host, self.mesh, self.pulls, config.transport)
        self.copying = Copying(self.host, self.mesh, self.pulls, self.room)
        self.shipping = Shipping(self.host, self.mesh, self.copying)
        self.partitions = Partitions(self.host, self.mesh, self.shipping, self.settle)
        self.leases = Leases()
        self.reading = Reading(
            self.host,
            self.mesh,
            self.partitions,
            self.leases,
            self.pulls,
            self.device_pulls,
        )
        self.grants = Grants(self.host, self.mesh, self.partitions, self.room)
        self.share = MetadataShare(self.host, self.mesh)
        self.writing = Writing(
            self.host,
            self.mesh,
            self.grants,
            self.copying,
            self.share,
            self.settle,
        )
        self.finishing = Finishing(
            self.host,
            self.mesh,
            self.leases,
            self.grants,
            self.copying,
            self.share,
            self.settle,
        )
        self.changes = Changes(self.host, self.mesh, self.partitions, self.settle)
        self.checkpoints = Checkpoints(self.writing, self.reading, self.partitions)
        self.sessions = Sessions(self.host, self._session_ended)
        self.waits = Waits(self.host, self.mesh, self.partitions, self.sessions)
        self.losses = LossReports(self.host, self.mesh, self.partitions)
        self.queues = ClaimQueues(
            self.host,
            self.mesh,
            self.partitions,
            self.shipping,
            self.losses,
            self.settle,
            producers=lambda: self.room.producers + len(self.share),
        )
        self.credit = Credit(self.host, self.room)
        self.claims = Claims(
            self.host,
            self.mesh,
            self.partitions,
            self.queues,
            self.leases,
            self.finishing,
            self.reading,
            self.waits,
            self.credit,
        )
        self.answers = Answers(
            self.host,
            self.room,
            self.partitions,
            self.grants,
            self.writing,
            self.changes,
            self.reading,
            self.claims,
            self.finishing,
            self.waits,
            self.losses,
            self.checkpoints,
        )
        self.door = Door(self.host, self.sessions, self.answers.handlers, self.answers.unsent)
        self.room.on_wait.append(self._producers_wait)
        self.share.on_wait.append(self.queues.producers_wait)
        self.keeper = keeper_of(
            self.host, roster.members[0], config.roster, self.mesh.others.is_away
        )
        self.succession = Succession(
            self.host,
            self.mesh,
            self.keeper,
            self.shipping,
            self.partitions,
            self.grants,
            self.queues,
            self.claims,
            self.door,
            self.settle,
        )
        self.membership = self.succession.membership
        self.membership.on_roster += [
            lambda old, new: self.share.all_try(),
            lambda old, new: self.losses.turned(),
        ]
        self.partitions.on_phase.append(lambda entry, phase: self.share.all_try())
        self.membership.begins_anew = bool(config.launch)
        self.spilling: Spilling | None = None
        self.devices = Devices(devices, config.device_arena, self.room, self.grants, self.pulls)
        self.reporting = Reporting(
            self.host,
            self.mesh,
            self.door,
            self.room,
            self.claims,
            self.pulls,
            self.device_pulls,
            self.share,
        )
        self.door.handlers[m.Stats] = self.reporting.stats
        self.door.may_serve = self.mesh.door.may_serve = self.membership.may_serve
        self.door.lease = self.mesh.door.lease = self.membership.lease
        self.standstill = Standstill(self.host, self.mesh, self.sessions, self.claims, self.queues)
        self.janitor = Janitor(
            self.host,
            self.sessions,
            self.room,
            self.share,
            self.standstill,
            self.finishing,
            self.membership,
        )
        self.membership.wanted = self.janitor.wanted
        if runs.is_unnamed(config.run):
            self.janitor.brief = config.linger_s == LINGER_S
            self.janitor.abandoned = functools.partial(runs.has_ended, config.run)

    # life

    async def start(self, socket_path: str) -> None:
        if self.config.spill is not None:
            self._spill_to(self.config.spill)
        candidates(self.config.transport)  # also where there is nobody yet to read from
        self.device_pulls.check()
        if not self.host.solo:
            bind_host = self.host.address.removeprefix("tcp://").rsplit(":", 1)[0]
            token = self.config.token
            secret = token.key(self.host.plane, "bulk") if token else None
            made = functools.partial(
                BulkEngine,
                self.host.arena.rw_fd,
                arena_bytes=self.host.arena.size_bytes,
                host=bind_host.strip("[]"),
                owner=self.host.owner,
                key=plane_key(self.host.plane, self.host.founding, secret),
                pin=self.pulls.pin,
                unpin=self.pulls.unpin,
            )
            engine = await start_engine(self.config.transport, made, self.config.bulk_tls)
            self.pulls.use(engine)
            if not self.config.bulk_tls:
                await self.device_pulls.start(made, engine.transport)
            self.mesh.listen()  # now that a greeting can say where bytes are read
            self.mesh.spawn(self.membership.run())
            await self.membership.admitted(ADMITTED_S)
        self.door.open(socket_path)

    async def run(self, leave: asyncio.Event, stop: asyncio.Event) -> bool:
        """Until `stop`, or nobody is left; after `leave`, until all it has is elsewhere. True where
        the plane goes on without this process: it may return as a new one."""
        deposed = asyncio.create_task(self.membership.deposed.wait())
        serving = asyncio.create_task(
            self.janitor.run(stop, self.config.linger_s, self.config.linger_unread_s)
        )
        leaving = asyncio.create_task(self.succession.leaving.leave(leave))
        tasks = deposed, serving, leaving
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for one in ended:
            one.result()
        return self.membership.deposed.is_set() and not (stop.is_set() or leave.is_set())

    async def close(self) -> None:
        await self.keeper.close()
        await self.door.close()
        await self.mesh.close()
        await self.device_pulls.close()
        await self.pulls.close()
        if self.spilling is not None:
            await self.spilling.close()
        await self.devices.close()
        # Another life of this process would find it still mapped, and have so much less.
        self.host.arena.close()

    def _spill_to(self, spill: Spill) -> None:
        host = self.host
        name = f"{host.plane}\0{host.name}\0{host.incarnation}"
        file = SpillFile(spill.folder(), name, host.arena.view)
        self.spilling = Spilling(host, self.mesh, self.room, self.credit, file, spill.size_bytes)
        self.devices.from_disk = self.spilling.read
        self.reporting.spilling = self.spilling
        self.standstill.spilling = self.spilling

    def _bulk(self) -> tuple[list[str], str, list[str]]:
        engine = self.pulls.engine
        if engine is None:
            return [], "", []
        return list(engine.address), engine.fingerprint, self.device_pulls.addresses

    # what follows from a change

    def settle(self, entry: Entry) -> None:
        freed = False
        for owner, ranges, counts in entry.store.freed():
            freed |= self.grants.let_go(owner, ranges, counts)
            self.copying.freed(entry, owner, ranges, counts)
        if freed:
            self.room.pump()
        changed = entry.store.dirty()
        if changed:
            self.queues.changed(entry, changed)
        self.partitions.follow_phase(entry)
        if entry.sealed:
            self.losses.look(entry)

    def _session_ended(self, session: Session) -> None:
        self.finishing.release_all(session)
        self.answers.ended(session)
        self.room.pump()

    def _producers_wait(self) -> None:
        """Somebody begins to wait for room."""
        if self.room.producers:
            self.queues.producers_wait()

    def _waste(self) -> int:
        """Bytes of dead values in blocks that others keep alive: a block of packs dies whole."""
        wasted = 0
        for entry in self.host.entries.values():
            blocks, alive = entry.store.packs(self.host.owner)
            wasted += int(self.host.space.ranges.extents(blocks)["length"].sum()) - alive
        return max(0, wasted)
