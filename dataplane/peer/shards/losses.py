"""Rows lost with a peer, by name, for clients that subscribe or whose claim can get no more.

Their names are kept at the partition's shard (`metadata.shard.lost_names`), and asked for there: a
subscription waits there, in turns, until there are some, or until no row can be lost any more.
"""

from __future__ import annotations

import asyncio
import math

import msgspec

from dataplane.errors import DeadlineExceeded, PartitionGone
from dataplane.peer.host import Caller, Entry, Host
from dataplane.peer.net.mesh import Mesh
from dataplane.peer.sessions import Session
from dataplane.peer.shards.partitions import Partitions
from dataplane.wire.messages import Body, Losses, LossesDone, Request

TURN_S = 10.0
"""A shard is asked again after so long: what it holds for a subscriber ends with that."""


class LossReports:
    def __init__(self, host: Host, mesh: Mesh, partitions: Partitions) -> None:
        self.host = host
        self.partitions = partitions
        self._news: dict[tuple[str, int], asyncio.Event] = {}
        partitions.on_phase.append(lambda entry, phase: self.look(entry))
        mesh.handlers[Losses] = self._losses_here

    # asked for by clients of this host

    async def losses(self, session: Session, request: Request, body: Losses) -> LossesDone:
        """The lost rows after the number that it has, once there are any. DeadlineExceeded when its
        time is up."""
        end = self.host.now() + body.timeout_ms / 1000 if body.timeout_ms >= 0 else math.inf
        while True:
            left = max(0.0, end - self.host.now())
            turn = msgspec.structs.replace(body, timeout_ms=int(min(left, TURN_S) * 1000))
            try:
                done: LossesDone = await self.partitions.ask_home(body.partition, turn)
                return done
            except DeadlineExceeded:
                if left > TURN_S:
                    continue
                raise DeadlineExceeded(
                    f"no row of partition {body.partition!r} was lost within "
                    f"{body.timeout_ms / 1000:g} s, and rows can still be",
                    limit_s=body.timeout_ms / 1000,
                ) from None

    async def latest(self, partition: str, generation: int) -> LossesDone:
        """How many rows were lost so far (`after`), and the names of the last ones."""
        done: LossesDone = await self.partitions.ask_home(
            partition, Losses(partition, generation, -1)
        )
        return done

    # at the shard

    def look(self, entry: Entry) -> None:
        """Something changed there: whoever waits looks again."""
        news = self._news.pop(entry.key, None)
        if news is not None:
            news.set()

    def turned(self) -> None:
        """A new roster: who waits for what another peer has now asks there."""
        news, self._news = self._news, {}
        for one in news.values():
            one.set()

    async def _losses_here(self, caller: Caller, body: Losses) -> Body:
        entry = self.host.shard(body.partition, body.generation)
        known = entry.store.losses
        if body.after < 0:
            return LossesDone(known.total, known.latest())
        try:
            async with asyncio.timeout(body.timeout_ms / 1000):
                while True:
                    names, number, missed = known.after(body.after)
                    if names or missed:
                        return LossesDone(number, names, missed)
                    if _over(self._still_here(entry)):
                        return LossesDone(number, ended=True)
                    await self._news.setdefault(entry.key, asyncio.Event()).wait()
        except TimeoutError:
            raise DeadlineExceeded("no row was lost meanwhile") from None
        except PartitionGone:
            return LossesDone(body.after, ended=True)

    def _still_here(self, entry: Entry) -> Entry:
        return self.host.shard(entry.name, entry.generation)


def _over(entry: Entry) -> bool:
    """Whether every stage has had every row that is left."""
    stages = entry.definition.stages
    return (
        entry.sealed
        and bool(stages)
        and not any(entry.store.counts(stage).outstanding_rows for stage in stages)
    )
