"""What metadata may take at a peer, beside the arena: tables, and small values.

Where it is more than a twentieth of the arena's size, writers keep small values as ranges in their
arenas; where it is more than a fifth, new rows wait: their message at the writer, their turn in a
line at the shard. A finish, an ack and a drop are always taken, and names that are remembered of
rows that went are counted, but not waited for: they go when others come. The backup of these shards
has as much again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from dataplane.errors import ShardFull, StaleEpoch, Unavailable
from dataplane.peer.host import Caller, Host, call_deadline
from dataplane.peer.net.mesh import Mesh
from dataplane.peer.sessions import Session
from dataplane.wire.messages import Body, Done
from dataplane.wire.peering import Vacancy

WITH_VALUES, IN_ALL = 20, 5
"""One part in so many of the arena's size: up to where small values are taken, and new rows. A
million rows of seven fields, without values, are some 300 MB."""
LEAST_BYTES = 4 << 20
"""Of a small arena, the smaller of the two; the other is four times as much."""
MEASURED_S = 0.1
"""How old the figures of the tables may be; what small values took since is added."""
LOOK_S = 0.1
"""How often the line of new rows that wait is looked at, but for when some came in."""
TURN_S = 10.0
"""New rows wait in a shard's line for so long, and are tried then."""
MOVES_S = 0.5
"""A new roster is waited for so long where the shard is about to move."""


class MetadataShare:
    def __init__(self, host: Host, mesh: Mesh) -> None:
        self._host = host
        self._mesh = mesh
        self.size_bytes = max(LEAST_BYTES * WITH_VALUES // IN_ALL, host.space.size_bytes // IN_ALL)
        self.inline_bytes = self.size_bytes * IN_ALL // WITH_VALUES
        """more than this, tables included, is no room for small values"""
        self.refused_values = 0
        """messages whose small values their writers had to keep"""
        self.on_wait: list[Callable[[], None]] = []
        """called when new rows begin to wait here"""
        self.writers = 0
        """puts of this host's clients that wait for room at a shard, here or elsewhere"""
        self._measured_at = float("-inf")
        self._measured = 0
        self._since = 0
        self._line: dict[asyncio.Future[None], None] = {}
        """whose turn at this peer's shards is to come, the first first"""
        self._looking: asyncio.Task[None] | None = None
        self._vain: asyncio.Future[None] | None = None
        """done when nobody is left for whom the writers here could wait"""
        mesh.handlers[Vacancy] = self._vacancy

    def __len__(self) -> int:
        """New rows, of any host, that wait here: messages of them."""
        return len(self._line)

    @property
    def used_bytes(self) -> int:
        """Tables and small values of all partitions whose shard is here."""
        now = self._host.now()
        if now - self._measured_at > MEASURED_S:
            stores = [entry.store for entry in self._host.entries.values()]
            self._measured = sum(s.state.used_bytes + s.state.fields.inline_bytes for s in stores)
            self._measured_at, self._since = now, 0
        return self._measured + self._since

    @property
    def is_full(self) -> bool:
        """Whether new rows wait."""
        return self.used_bytes > self.size_bytes

    def check_rows(self) -> None:
        """ShardFull where new rows wait."""
        if self.is_full:
            raise self.full()

    def full(self) -> ShardFull:
        return ShardFull(
            f"the metadata of peer {self._host.name!r}, which keeps the rows of this "
            f"partition, has {self.used_bytes} bytes of {self.size_bytes}: consume or drop "
            "rows, or give that peer a larger --arena, of which metadata may take a fifth",
            peer=self._host.name,
            used_bytes=self.used_bytes,
            size_bytes=self.size_bytes,
        )

    def check_values(self, inline: bytes) -> None:
        """ShardFull, with `values`, where these are not to live in the shard; else they count."""
        if not inline:
            return
        if self.used_bytes + len(inline) > self.inline_bytes:
            self.refused_values += 1
            raise ShardFull(
                f"peer {self._host.name!r} has no room for {len(inline)} more bytes of small "
                "values beside its metadata: keep them in the arena",
                values=True,
            )
        self._since += len(inline)

    # new rows that wait: for a client of this host

    async def another_try(
        self, session: Session, partition: str, generation: int, full: ShardFull
    ) -> None:
        """Until the shard that was full may have room, or moves. ShardFull where the call ends
        before, or nobody is left who could make room; PartitionGone."""
        left_s = call_deadline.get() - self._host.now() - LOOK_S
        if left_s <= 0:
            raise full
        roster, wait_s = self._host.roster, min(TURN_S, left_s)
        body = Vacancy(partition, generation, int(1000 * wait_s))
        asked = self._mesh.call(roster.home(partition), body, epoch=roster.epoch)
        turn = asyncio.ensure_future(asked)
        if self._vain is None:
            self._vain = asyncio.get_running_loop().create_future()
        self.writers += 1
        session.waiting += 1
        try:
            await asyncio.wait([turn, self._vain], return_when=asyncio.FIRST_COMPLETED)
            if not turn.done():
                why = "nothing is leased or can be claimed, and every client waits"
                raise ShardFull(f"{full.message}; {why}", **full.details)
            turn.result()
        except (StaleEpoch, Unavailable):
            await self._host.another_roster(roster, self._host.now() + min(MOVES_S, left_s))
        finally:
            turn.cancel()
            self.writers -= 1
            session.waiting -= 1

    def end_in_vain(self) -> None:
        """Nobody is left who could free rows: ShardFull for all writers here that wait."""
        if self._vain is not None:
            self._vain.set_result(None)
            self._vain = None

    # new rows that wait: at the shard

    async def _vacancy(self, caller: Caller, body: Vacancy) -> Body:
        self._host.shard(body.partition, body.generation)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line[turn] = None
        for told in self.on_wait:
            told()
        if self._looking is None or self._looking.done():
            self._looking = self._mesh.spawn(self._look_now_and_then())
        try:
            async with asyncio.timeout(body.wait_ms / 1000):
                await turn
        except TimeoutError:
            pass
        finally:
            self._line.pop(turn, None)
        return Done()

    async def _look_now_and_then(self) -> None:
        while self._line:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """New rows came in, or some time has passed: whose turn it is may try, one at a time."""
        if self._line and not self.is_full:
            self._next()

    def all_try(self) -> None:
        """What they wait for may be elsewhere now, or no more."""
        while self._line:
            self._next()

    def _next(self) -> None:
        turn = next(iter(self._line))
        del self._line[turn]
        if not turn.done():
            turn.set_result(None)

    def figures(self) -> dict[str, Any]:
        stores = [entry.store for entry in self._host.entries.values()]
        return {
            "size_bytes": self.size_bytes,
            "used_bytes": self.used_bytes,
            "names_bytes": sum(store.state.tombstones.nbytes for store in stores),
            "values_bytes": sum(store.state.fields.inline_bytes for store in stores),
            "refused_values": self.refused_values,
        }
