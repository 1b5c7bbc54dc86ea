"""A peer's own figures, for `plane.stats()`, `part.stats()` and `dataplane status`.

Plain nested dicts. A peer reports its own figures; those of a partition come from its shard.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from typing import TYPE_CHECKING, Any

from dataplane.errors import DataplaneError
from dataplane.metadata.shard import inspection
from dataplane.metadata.shard.reasons import seen_by_others
from dataplane.peer.host import Caller, Entry, Host
from dataplane.peer.sessions import Session
from dataplane.transport.seam import Remote
from dataplane.version import __version__
from dataplane.wire.messages import Body, Request, Stats, StatsDone
from dataplane.wire.tables import Owner

if TYPE_CHECKING:
    from dataplane.peer.peer import Peer

MAX_HOLDERS = 1_000
"""Holders of leases that a peer names at once."""
MAX_CLIENTS = 1_000
MAX_NAMED = 8
"""The most partitions that are listed per client."""
ASK_S = 2.0
"""Timeout for another peer's figures."""
MAX_ASKED = 256
"""The most peers asked at once."""


class Reporting:
    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.host = peer.host
        self.mesh = peer.mesh

    async def stats(self, session: Session, request: Request, body: Stats) -> Body:
        if body.probe:
            return StatsDone(await self._probed())
        if body.partition is None:
            return StatsDone(await self._plane(session))
        found: StatsDone = await self.peer.router.ask(body)
        return found

    async def stats_here(self, caller: Caller, body: Stats) -> Body:
        if body.probe:
            return StatsDone(await self._ways())
        if body.partition is None:
            return StatsDone(self._peer())
        entry = self.host.entries.get(body.partition)
        if entry is None:
            return StatsDone({})
        groups = inspection.open_groups(entry.store)
        return StatsDone(self._partition(entry) | {"open_groups": groups})

    def _peer(self) -> dict[str, Any]:
        """Return this peer's own figures."""
        host = self.host
        space = host.space.stats()
        return {
            "peer": host.name,
            "plane": host.plane,
            "pid": os.getpid(),
            "address": host.address,
            "incarnation": host.incarnation,
            "arena": space,
            "metadata": self.peer.metadata_quota.figures(),
            "devices": self.peer.pools.figures(),
            "shards": len(host.roster.shards_of(host.address)),
            "roster": _roster(host),
            "partitions": {name: self._partition(one) for name, one in host.entries.items()},
            "clients": len(self.peer.door.sessions),
            "connections": len(self.peer.door.connections),
            "encrypted": self.mesh.gate.encrypted,
            "messages": {"between": dict(host.sent_between), "local": dict(host.sent_local)},
            "refused": self.peer.door.refusals.total + self.mesh.refused,
            "leases": len(self.peer.claims.leases),
            "waiting_claims": self.peer.claims.waiting,
            "waits": self._waits(),
            "holders": self._holders(),
            "client_list": self._clients(),
            "rates": self._rates(),
            "put_rows": host.put_by_clients,
            "dropped_rows": self.peer.changes.dropped_rows,
            "rss_bytes": _resident_bytes(),
            "starved_claims": self.peer.room.starved,
            "waiting_puts": len(self.peer.room) + self.peer.metadata_quota.writers,
            "pulled_bytes": self.peer.pulls.pulled_bytes,
            "carried_bytes": self.peer.pulls.carried_bytes,
            "pull_hits": self.peer.pulls.hits,
            "spill_written_bytes": self.peer.spilling.written_bytes if self.peer.spilling else 0,
            "spill_read_bytes": self.peer.spilling.read_bytes if self.peer.spilling else 0,
            "bulk": self._bulk(),
        }

    def _bulk(self) -> dict[str, Any] | None:
        if self.peer.pulls.engine is None:
            return None
        return self.peer.pulls.engine.stats() | {"paths": self.peer.pulls.stats()}

    async def _probed(self) -> dict[str, Any]:
        """Return the paths between all peers, measured one after another, so that none is measured
        under another's load."""
        peers = []
        for address in self.host.roster.members:
            try:
                reply: StatsDone = await self.mesh.call(address, Stats(probe=True))
                peers.append(reply.stats)
            except DataplaneError as exc:
                peers.append({"peer": self.mesh.others.name(address), "error": exc.message})
        return {"plane": self.host.plane, "peers": peers}

    async def _ways(self) -> dict[str, Any]:
        """Return the paths to this peer from each other peer."""
        host, ways = self.host, []
        for address in host.roster.members:
            if address != host.address:
                ways.append(await self._way(address))
        return {
            "peer": host.name,
            "address": host.address,
            "version": __version__,
            "arena_bytes": host.space.size_bytes,
            **{k: v for k, v in self.peer.pulls.stats().items() if k != "peers"},
            "devices": {k: v for k, v in self.peer.pools.transports().items() if k != "peers"},
            "from": ways,
        }

    async def _way(self, address: str) -> dict[str, Any]:
        named = {"peer": self.mesh.others.name(address), "address": address}
        try:
            hello = await self.mesh.hello(address)
            owner = Owner(address, hello.incarnation)
            source = Remote(owner, hello.bulk, hello.bulk_fingerprint)
            path = await self.peer.pulls.paths.tried(source, measures=True)
            in_pools = await self.peer.pools.ways(owner)
        except DataplaneError as exc:
            return named | {"error": exc.message}
        devices = in_pools.shown() if in_pools is not None else None
        return {
            "peer": hello.name,
            "address": address,
            "tls": bool(source.fingerprint),
            **path.shown(),
            "devices": devices,
        }

    async def _plane(self, asks: Session) -> dict[str, Any]:
        """Return this peer's figures, a line for each other peer, and totals. asks: the session
        that asks, which is not listed as a client."""
        stats = self._peer()
        stats["client_list"] = [o for o in stats["client_list"] if o["session"] != asks.id]
        _name(stats, self.host.name)
        stats["peers"], everybody = {}, [stats]
        # All at once, so that the timeouts of silent peers do not add up.
        asking = asyncio.Semaphore(MAX_ASKED)
        members = list(self.host.roster.members)
        replies = await asyncio.gather(*(self._figures(at, asking) for at in members))
        for address, reply in zip(members, replies, strict=True):
            if address == self.host.address:
                stats["peers"][self.host.name] = _line(stats)
            elif isinstance(reply, DataplaneError):
                stats["peers"][address] = {"address": address, "error": reply.message}
            else:
                name = reply["peer"]  # embedded peers share one name
                name = f"{name} at {address}" if name in stats["peers"] else name
                stats["peers"][name] = _line(reply)
                _name(reply, name)
                everybody.append(reply)
        stats["everywhere"] = {
            "partitions": {k: v for one in everybody for k, v in one["partitions"].items()},
            "waits": [wait for one in everybody for wait in one["waits"]],
            "holders": [held for one in everybody for held in one["holders"]],
            "clients": [client for one in everybody for client in one["client_list"]],
        }
        _introduce(stats["everywhere"])
        return stats

    async def _figures(
        self, address: str, asking: asyncio.Semaphore
    ) -> dict[str, Any] | DataplaneError:
        """Return another peer's figures, or the error that it gave; nothing for this peer."""
        if address == self.host.address:
            return {}
        owner = self.host.roster.owner_at(address)
        # If the peer is declared lost, the call ends at once.
        to = owner.incarnation if owner is not None else None
        async with asking:
            try:
                reply: StatsDone = await self.mesh.call(address, Stats(), timeout_s=ASK_S, to=to)
            except DataplaneError as exc:
                return exc
        return reply.stats

    def _waits(self) -> list[dict[str, Any]]:
        """Return what calls of this host's clients wait for."""
        return [
            {
                "kind": subject.kind,
                "partition": subject.partition,
                "stage": subject.stage,
                "calls": calls,
                "for_s": round(for_s, 1),
                "why": seen_by_others(why),
                "reason": reason,
                "peer": self.host.name,
            }
            for subject, calls, for_s, why, reason in self.host.notices.waits(self.host.now())
        ]

    def _holders(self) -> list[dict[str, Any]]:
        """Return the holders of leased rows at this peer, the longest first."""
        now = self.host.now()
        found: list[dict[str, Any]] = [
            {
                "partition": entry.name,
                "stage": stage,
                "session": holder,
                "holder": self.host.who(holder),
                "rows": rows,
                "for_s": round(age, 1),
            }
            for entry in self.host.entries.values()
            for holder, stage, rows, age in inspection.holders(entry.store, now)
        ]
        return sorted(found, key=lambda one: -one["for_s"])[:MAX_HOLDERS]

    def _clients(self) -> list[dict[str, Any]]:
        """Return the clients of this host, the oldest first: their names, and what they hold."""
        now, held = self.host.now(), {who: room for who, *room in self.host.space.holders()}
        found: list[dict[str, Any]] = []
        for one in itertools.islice(self.peer.sessions, MAX_CLIENTS):
            granted, pinned = held.get(one.id, (0, 0))
            found.append(
                {
                    "session": one.id,
                    "client": one.label,
                    "pid": one.own_pid or one.pid,
                    "command": one.command,
                    "rank": one.rank,
                    "host": self.peer.sessions.where,
                    "age_s": round(now - one.began, 1),
                    "partitions": sorted(one.partitions)[:MAX_NAMED],
                    "leases": len(one.leases),
                    "leased_rows": self.peer.claims.leases.rows_of(one),
                    "waiting_calls": one.waiting,
                    "granted_bytes": granted,
                    "pinned_bytes": pinned,
                }
            )
        return found

    def _rates(self) -> dict[str, Any]:
        """Return rows per second put by this host's clients, and acked per stage. The averages over
        30 s show which host is slow."""
        now, host = self.host.now(), self.host
        host.meter()
        acked = {name: round(one.per_s(now), 2) for name, one in host.acked_rates.items()}
        put = round(host.put_rate.per_s(now), 2)
        return {"put_rows_per_s": put, "acked_rows_per_s": acked}

    def _partition(self, entry: Entry) -> dict[str, Any]:
        now, stats = self.host.now(), inspection.stats(entry.store)
        self.host.meter_stages(entry, now)
        for name, figures in stats["stages"].items():
            acked = entry.acked_rates.get(name)
            figures["acked_rows_per_s"] = round(acked.per_s(now), 2) if acked else 0.0
        return {**stats, "phase": entry.store.phase, "generation": entry.generation}


def _name(stats: dict[str, Any], peer: str) -> None:
    """Add to each client and partition the name of its peer."""
    for one in (*stats["client_list"], *stats["partitions"].values()):
        one["peer"] = peer


def _resident_bytes() -> int:
    """Memory of this process, with the pages of the arena that it has touched."""
    with open("/proc/self/statm", "rb") as figures:
        return int(figures.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _introduce(everywhere: dict[str, Any]) -> None:
    """Add to each holder of rows what its own peer knows of it."""
    known = {client["session"]: client for client in everywhere["clients"]}
    for held in everywhere["holders"]:
        client = known.get(held["session"], {})
        held |= {name: client.get(name) for name in ("command", "rank", "host")}


def _roster(host: Host) -> dict[str, Any]:
    """The roster in force here. unprotected: members whose shards no backup in sync has."""
    roster = host.roster
    backup, in_sync = roster.backup_of(host.address)
    return {
        "founding": list(host.founding),
        "epoch": list(roster.epoch),
        "members": list(roster.members),
        "backup": backup,
        "in_sync": in_sync,
        "unprotected": sum(not roster.backup_of(member)[1] for member in roster.hosts),
        "operations": host.progress.done,
        "confirmed": host.progress.confirmed,
    }


def _line(stats: dict[str, Any]) -> dict[str, Any]:
    return {
        "address": stats["address"],
        "incarnation": stats["incarnation"],
        "shards": stats["shards"],
        "partitions": len(stats["partitions"]),
        "rows": sum(p["rows"] for p in stats["partitions"].values()),
        "used_bytes": stats["arena"]["used_bytes"],
        "size_bytes": stats["arena"]["size_bytes"],
        "clients": stats["clients"],
        "rates": stats["rates"],
        "rss_bytes": stats["rss_bytes"],
        "spill_bytes": stats["arena"]["spill_bytes"],
        "spilled_bytes": stats["arena"]["spilled_bytes"],
        "put_rows": stats["put_rows"],
        "dropped_rows": stats["dropped_rows"],
        "answers": stats["messages"]["local"],
    }
