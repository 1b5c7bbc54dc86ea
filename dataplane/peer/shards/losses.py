"""Rows lost with a peer, by name, for clients that subscribe or whose claim can get no more.

Their names are kept at the partition's shard (`metadata.shard.lost_names`), and asked for there: a
subscription waits there, in turns, until there are some, or until no row can be lost any more.
"""

from __future__ import annotations

import asyncio
import math

import msgspec

from dataplane.errors import DeadlineExceeded, PartitionGone, ProtocolError, StaleEpoch, Unavailable
from dataplane.peer.host import Caller, Entry, Host
from dataplane.peer.net.mesh import Mesh
from dataplane.peer.sessions import Session
from dataplane.peer.shards.partitions import Partitions
from dataplane.wire.messages import Body, Losses, LossesDone, Request

LOOK_S = 0.2
"""How often a shard looks whether it has news for who waits."""


class LossReports:
    def __init__(self, host: Host, mesh: Mesh, partitions: Partitions) -> None:
        self.host = host
        self.partitions = partitions
        mesh.handlers[Losses] = self._losses_here

    async def losses(self, session: Session, request: Request, body: Losses) -> LossesDone:
        """For a client of this host: the lost rows after the number that it has, once there are
        any. DeadlineExceeded when its time is up."""
        end = self.host.now() + body.timeout_ms / 1000 if body.timeout_ms >= 0 else math.inf

        def turn(timeout_ms: int) -> Losses:
            return msgspec.structs.replace(body, timeout_ms=timeout_ms)

        try:
            done: LossesDone = await self.partitions.ask_in_turns(body.partition, turn, end)
            return done
        except (DeadlineExceeded, StaleEpoch, Unavailable) as exc:
            raise DeadlineExceeded(
                f"no row of partition {body.partition!r} was lost within "
                f"{body.timeout_ms / 1000:g} s, and rows can still be",
                limit_s=body.timeout_ms / 1000,
            ) from exc

    async def _losses_here(self, caller: Caller, body: Losses) -> Body:
        if body.after < 0:
            raise ProtocolError("a number of lost rows is not negative")
        until = self.host.now() + body.timeout_ms / 1000
        entry = self.host.shard(body.partition, body.generation)
        while True:
            names, number, missed = entry.store.losses.after(body.after)
            if names or missed:
                return LossesDone(number, names, missed)
            if _over(entry):
                return LossesDone(number, ended=True)
            if self.host.now() >= until:
                raise DeadlineExceeded("no row was lost meanwhile")
            await asyncio.sleep(min(LOOK_S, until - self.host.now()))
            try:
                entry = self.host.shard(body.partition, body.generation)
            except PartitionGone:
                return LossesDone(body.after, ended=True)


def _over(entry: Entry) -> bool:
    """Whether every stage has had every row that is left."""
    stages = entry.definition.stages
    return (
        entry.sealed
        and bool(stages)
        and not any(entry.store.counts(stage).outstanding for stage in stages)
    )
