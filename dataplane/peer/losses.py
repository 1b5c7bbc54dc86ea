"""Rows lost with a peer, told by name: to every member, and from there to clients that subscribe.

Whoever serves a lost row's shard tells all members, until each has answered. A subscription ends
when no row can be lost any more, and nobody has anything left to tell.
"""

from __future__ import annotations

import asyncio
import math
from asyncio import FIRST_COMPLETED

from dataplane.errors import (
    ClaimTimeout,
    DeadlineExceeded,
    PartitionGone,
    StaleEpoch,
    Unavailable,
)
from dataplane.peer.host import Caller, Entry, Host
from dataplane.peer.mesh import Mesh
from dataplane.peer.partitions import Partitions
from dataplane.peer.sessions import Session
from dataplane.wire.limits import MAX_LOST_PER_MESSAGE
from dataplane.wire.messages import Body, Done, Losses, LossesDone, Request, Wait
from dataplane.wire.rosters import CanLose, LostRows, Remaining
from dataplane.wire.tables import Name, Owner

RETRY_S = 0.5
TURN_S = 5.0
"""How long one waits for the roster that says who does not answer."""
DRAIN_TURN_S = 10.0
"""A stage's home is asked again after so long whether the stage has had every row."""

Key = tuple[str, int]


class LossReports:
    def __init__(self, host: Host, mesh: Mesh, partitions: Partitions) -> None:
        self.host = host
        self.mesh = mesh
        self.partitions = partitions
        self._telling: dict[Key, set[asyncio.Task[object]]] = {}
        self._news: dict[Key, asyncio.Event] = {}
        partitions.on_phase.append(self._on_phase)
        mesh.handlers |= {LostRows: self._lost_rows, CanLose: self._can_lose}

    # telling

    def tell(self, entry: Entry, names: list[Name]) -> None:
        """Rows of this peer's shards were lost: every member hears of it."""
        for at in range(0, len(names), MAX_LOST_PER_MESSAGE):
            some = names[at : at + MAX_LOST_PER_MESSAGE]
            self._note(entry, some)
            body = LostRows(entry.name, entry.generation, some)
            for owner in self.host.roster.owners:
                if owner != self.host.owner:
                    self._begin(entry.key, owner, body)

    def _begin(self, key: Key, owner: Owner, body: LostRows) -> None:
        task = self.mesh.spawn(self.mesh.tell(owner, body))
        telling = self._telling.setdefault(key, set())
        telling.add(task)
        task.add_done_callback(telling.discard)

    async def _lost_rows(self, caller: Caller, body: LostRows) -> Body:
        try:
            entry = await self.partitions.entry(body.partition, body.generation)
        except PartitionGone:
            return Done()  # and with it whoever would have asked
        self._note(entry, body.names)
        return Done()

    async def _can_lose(self, caller: Caller, body: CanLose) -> Body:
        """What may still be lost of this peer's rows, after all that was lost has been told."""
        telling = self._telling.get((body.partition, body.generation))
        while telling:
            await asyncio.wait(telling)
        entry = self.host.entry(body.partition, body.generation)
        return Remaining(0 if entry is None else _outstanding(entry))

    def _note(self, entry: Entry, names: list[Name]) -> None:
        entry.losses.note(names)
        self.host.lost_rows += len(names)
        self._wake(entry.key)

    def _wake(self, key: Key) -> None:
        news = self._news.pop(key, None)
        if news is not None:
            news.set()

    def _on_phase(self, entry: Entry, phase: str) -> None:
        if phase == "dropped":
            self._telling.pop(entry.key, None)
        self._wake(entry.key)

    # asking

    async def losses(self, session: Session, request: Request, body: Losses) -> Body:
        """From this host's client: the lost rows after the number that it has, once there are any.

        DeadlineExceeded when its time is up."""
        entry = await self.partitions.entry(body.partition, body.generation)
        end = self.host.now() + body.timeout_ms / 1000 if body.timeout_ms >= 0 else math.inf
        while True:
            names, number, missed = entry.losses.after(body.after)
            if names or missed:
                return LossesDone(number, names, missed)
            if self.host.entries.get(entry.name) is not entry:
                return LossesDone(number, ended=True)
            if self.host.now() >= end:
                raise DeadlineExceeded(
                    f"no row of partition {entry.name!r} was lost within "
                    f"{body.timeout_ms / 1000:g} s, and rows can still be",
                    limit_s=body.timeout_ms / 1000,
                )
            if await self._over(entry, end) and entry.losses.total == number:
                return LossesDone(number, ended=True)

    async def _over(self, entry: Entry, end: float) -> bool:
        """Wait for news, or until it is sure that there will be none (True)."""
        news = self._news.setdefault(entry.key, asyncio.Event())
        told: asyncio.Task[bool] = asyncio.create_task(news.wait())
        waits: list[asyncio.Task[bool]] = [told]
        if entry.sealed and entry.definition.stages:
            waits.append(asyncio.create_task(self._drained(entry)))
        left = None if end == math.inf else max(0.0, end - self.host.now())
        try:
            done, _ = await asyncio.wait(waits, timeout=left, return_when=FIRST_COMPLETED)
            return any(one.result() for one in done - {told})
        finally:
            for one in waits:
                one.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def _drained(self, entry: Entry) -> bool:
        """Until every stage has had every row that is left, and every loss was told here."""
        while True:
            try:
                for stage in entry.definition.stages:
                    await self._await_stage(entry, stage)
                if not await self._remaining_anywhere(entry):
                    return True
            except PartitionGone:
                return True
            except (StaleEpoch, Unavailable, ClaimTimeout):
                pass  # asked again, perhaps under another roster
            await self.host.another_roster(self.host.roster, self.host.now() + RETRY_S)

    async def _await_stage(self, entry: Entry, stage: str) -> None:
        turn_ms = int(DRAIN_TURN_S * 1000)
        body = Wait(entry.name, entry.generation, stage, "rows", below=1, timeout_ms=turn_ms)
        await self.partitions.ask_home(entry.name, body)

    async def _remaining_anywhere(self, entry: Entry) -> int:
        roster = self.host.roster
        body = CanLose(entry.name, entry.generation)
        # Who leaves has no rows any more, and may still be telling what it lost.
        asked = {*roster.hosts, *roster.leaving}
        calls = (self.mesh.call(m, body, epoch=roster.epoch) for m in sorted(asked))
        answers: list[Remaining] = await asyncio.gather(*calls)
        return sum(answer.rows for answer in answers)

    async def heard(self, entry: Entry) -> None:
        """Until all losses that the members of a roster know of have been told here."""
        while True:
            roster = self.host.roster
            try:
                await self._remaining_anywhere(entry)
                return
            except (StaleEpoch, Unavailable):
                if not await self.host.another_roster(roster, self.host.now() + TURN_S):
                    raise


def _outstanding(entry: Entry) -> int:
    """Rows that some stage has not had yet."""
    counts = (entry.store.counts(stage) for stage in entry.definition.stages)
    return max((one.outstanding_rows for one in counts), default=0)
