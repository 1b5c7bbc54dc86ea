"""Deadlock detection: whether all clients wait for each other, so that a put that waits for space
must fail.

Every peer reports which of its clients could still free space. A peer with waiting producers
asks them all. A deadlock must be found several times in a row with no change in between, because
a claim that is just being granted looks the same. A peer that does not answer may be busy, so
its silence ends no wait. The shards of waiting producers are always asked, because shards keep rows
for waiting claims only while they know of no waiting producer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import TYPE_CHECKING

import msgspec

from dataplane.errors import DataplaneError
from dataplane.peer.host import Caller
from dataplane.wire.messages import Body
from dataplane.wire.peering import Activity, CanFree

if TYPE_CHECKING:
    from dataplane.peer.peer import Peer

LOOKS = 3
LOOK_EVERY_S = 0.2
LOOK_AGAIN_S = 2.0
"""The pause after a look that found a client that may free space."""
ASK_S = 2.0
TELL_EVERY_S = 2.0
"""How often remote shards learn that puts wait for space here: well within
`waiting_calls.YIELD_S`."""


def is_alive(answers: Iterable[Activity]) -> bool:
    """Whether some of these hosts, as far as they answered, can free rows by themselves."""
    filled: set[str] = set()
    busy: set[str] = set()
    for answer in answers:
        filled |= set(answer.filled)
        busy |= set(answer.busy)
        if answer.held:
            return True
    return bool(filled & busy)


def is_standstill(answers: list[Activity]) -> bool:
    """Whether no client of these hosts is left that could free space.

    That is so if nothing is leased, no claim can be granted, and every client of partitions with
    rows waits in a call. A claim cannot be granted if it waits, and ready rows have no other
    claim.
    """
    if is_alive(answers) or not any(answer.filled for answer in answers):
        return False
    return any(answer.claims for answer in answers) or not any(a.claimable for a in answers)


class Standstill:
    def __init__(self, peer: Peer) -> None:
        self.peer, self.host, self.mesh = peer, peer.host, peer.mesh
        self._looks = 0
        self._done: list[int] = []
        """operations of the hosts at the last look"""
        self._looking: asyncio.Task[None] | None = None
        self._next_look = 0.0
        self._telling: asyncio.Task[None] | None = None
        self._next_tell = 0.0
        self._alive = ""
        """the peer with such a client at the last look, which is asked first next time"""

    @property
    def can_spill(self) -> bool:
        """Whether values, though not rows, can still be spilled when no client frees any."""
        return self.peer.spilling is not None and not self.peer.spilling.exhausted

    def lasts(self, for_bytes: bool, for_rows: bool) -> bool:
        """Called periodically: whether the deadlock was found often enough by now. for_bytes,
        for_rows: whether producers of this host wait for bytes, for rows."""
        if for_bytes and not self.host.solo:
            self._tell()
        waits = for_rows or for_bytes and not self.can_spill
        if not waits or is_alive([self._here()]):
            self._looks = 0
        elif self.host.solo:
            self._note([self._here()])
        elif (self._looking is None or self._looking.done()) and self.host.now() > self._next_look:
            self._looking = self.mesh.spawn(self._look())
        found = self._looks >= LOOKS
        if found:
            self._looks = 0  # a call that begins to wait now depends on later looks
        return found

    def _tell(self) -> None:
        """Tell the shards of the clients that wait here that producers wait: claims there then
        get rows that are kept for others."""
        under_way = self._telling is not None and not self._telling.done()
        if under_way or self.host.now() < self._next_tell:
            return
        self._next_tell = self.host.now() + TELL_EVERY_S
        names = set[str]().union(*(s.partitions for s in self.peer.sessions if s.waiting))
        homes = {self.host.roster.home(name) for name in names} - {self.host.address}
        self._telling = self.mesh.spawn(self._send_can_free(sorted(homes)))

    async def _send_can_free(self, homes: list[str]) -> None:
        calls = [self.mesh.call(home, CanFree(), timeout_s=ASK_S) for home in homes]
        await asyncio.gather(*calls, return_exceptions=True)  # repeated soon

    async def _look(self) -> None:
        answers: list[Activity] = []
        for address in sorted(self.host.roster.members, key=lambda m: m != self._alive):
            try:
                answers.append(await self.mesh.call(address, CanFree(), timeout_s=ASK_S))
                alive = is_alive(answers)
            except DataplaneError:
                alive = True
            if alive:
                self._alive, self._looks = address, 0
                self._next_look = self.host.now() + LOOK_AGAIN_S
                return
        self._next_look = self.host.now() + LOOK_EVERY_S
        self._note(answers)

    def _note(self, answers: list[Activity]) -> None:
        done = [answer.done for answer in answers]
        same = done == self._done or not self._looks
        self._looks = self._looks + 1 if same and is_standstill(answers) else 0
        self._done = done

    def can_free(self, caller: Caller, body: CanFree) -> Body | Awaitable[Body]:
        """Note that calls wait for space, unless the caller asks for a reason: waiting claims give
        up their priority over claims that take rows."""
        if body.why:
            return self._here_with_reasons(caller)
        self.peer.calls.producers_wait()
        return self._here()

    async def _here_with_reasons(self, caller: Caller) -> Activity:
        kept, more = await self.peer.room.kept(caller.owner)
        return msgspec.structs.replace(self._here(), kept=kept, more=more)

    def _here(self) -> Activity:
        entries = [entry for entry in self.host.entries.values() if len(entry.store)]
        drop = any(entry.store.definition.free == "drop" for entry in entries)
        leased = any(len(entry.store.leases) for entry in entries)
        busy = set[str]().union(*(s.partitions for s in self.peer.sessions if not s.waiting))
        return Activity(
            filled=[entry.name for entry in entries],
            busy=sorted(busy),
            held=leased or drop or self.peer.room.starved > 0,
            claims=self.peer.claims.waiting,
            claimable=any(one.rows.ready(None) for e in entries for one in e.store.stages.values()),
            done=self.host.progress.done,
        )
