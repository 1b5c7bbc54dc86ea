"""What a peer says of itself: `plane.stats()`, `part.stats()`, `dataplane status`.

Plain nested dicts. A peer's figures are its own; a partition's are summed over all peers.
"""

from __future__ import annotations

import os
from typing import Any

from dataplane.errors import DataplaneError
from dataplane.peer.claims import Claims
from dataplane.peer.door import Door
from dataplane.peer.host import Entry, Host
from dataplane.peer.mesh import Caller, Mesh
from dataplane.peer.pulls import Pulls
from dataplane.peer.room import Room
from dataplane.peer.sessions import Session
from dataplane.wire.messages import Body, Request, Stats, StatsDone


class Reporting:
    def __init__(
        self,
        host: Host,
        mesh: Mesh,
        door: Door,
        room: Room,
        claims: Claims,
        pulls: Pulls,
    ) -> None:
        self.host = host
        self.mesh = mesh
        self.door = door
        self.room = room
        self.claims = claims
        self.pulls = pulls
        mesh.handlers[Stats] = self._stats_here

    async def stats(self, session: Session, request: Request, body: Stats) -> Body:
        if body.partition is None:
            return StatsDone(await self._plane())
        parts = await self.mesh.call_all(body)
        total = _sum([p.stats for p in parts])
        if total.get("rows"):
            total["bytes_per_row"] = total["metadata_bytes"] / total["rows"]
        return StatsDone(total)

    async def _stats_here(self, caller: Caller, body: Stats) -> Body:
        if body.partition is None:
            return StatsDone(self._peer())
        entry = self.host.entries.get(body.partition)
        return StatsDone(_partition(entry) if entry is not None else {})

    def _peer(self) -> dict[str, Any]:
        """This peer alone."""
        host = self.host
        space = host.space.stats()
        return {
            "peer": host.name,
            "plane": host.plane,
            "pid": os.getpid(),
            "address": host.address,
            "incarnation": host.incarnation,
            "arena": space,
            "shards": len(host.roster.shards_of(host.address)),
            "partitions": {name: _partition(entry) for name, entry in host.entries.items()},
            "clients": len(self.door.sessions),
            "connections": len(self.door.connections),
            "directory_names": len(host.directory),
            "leases": len(self.claims.leases),
            "waiting_claims": self.claims.waiting,
            "waiting_puts": len(self.room),
            "pulled_bytes": self.pulls.pulled_bytes,
            "pull_hits": self.pulls.hits,
            "bulk": self.pulls.engine.stats() if self.pulls.engine else None,
        }

    async def _plane(self) -> dict[str, Any]:
        """This peer's figures, and a line for each other peer."""
        stats = self._peer()
        stats["peers"] = {}
        for address in self.host.roster.members:
            if address == self.host.address:
                stats["peers"][self.host.name] = _line(stats)
                continue
            try:
                reply: StatsDone = await self.mesh.call(address, Stats(), timeout_s=2.0)
                stats["peers"][reply.stats["peer"]] = _line(reply.stats)
            except DataplaneError as exc:
                stats["peers"][address] = {"address": address, "error": exc.message}
        return stats


def _line(stats: dict[str, Any]) -> dict[str, Any]:
    return {
        "address": stats["address"],
        "shards": stats["shards"],
        "partitions": len(stats["partitions"]),
        "rows": sum(p["rows"] for p in stats["partitions"].values()),
        "used_bytes": stats["arena"]["used_bytes"],
        "size_bytes": stats["arena"]["size_bytes"],
        "clients": stats["clients"],
    }


def _partition(entry: Entry) -> dict[str, Any]:
    return {
        **entry.store.stats(),
        "phase": "sealed" if entry.sealed else "sealing" if entry.store.sealing else "open",
        "generation": entry.generation,
    }


def _sum(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures added up, nested dicts alike; the first peer's word for what is no figure."""
    total: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            if isinstance(value, dict):
                total[name] = _sum([total.get(name, {}), value])
            elif isinstance(value, int | float) and not isinstance(value, bool):
                total[name] = (
                    value if name == "generation" or name not in total else total[name] + value
                )
            else:
                total.setdefault(name, value)
    return total
