"""The memory limit of a peer's metadata, which is stored outside the arena: tables and small
values.

When metadata uses more than a twentieth of the arena's size, writers store small values in their
arenas. When it uses more than a fifth, new rows wait at their writer, which retries. A shard
always accepts a finish, an ack or a drop. Remembered names of freed rows count towards the
usage, but do not block new rows, because new names replace them. The backup of these shards uses
as much memory again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from dataplane.errors import BackPressure, ShardFull, sized
from dataplane.peer.host import Host, call_context
from dataplane.peer.sessions import Session
from dataplane.wire.events import EventRecord, Kind, Reason
from dataplane.wire.tables import Values

WITH_VALUES, IN_ALL = 20, 5
"""Shares of the arena's size, as divisors: up to the first, shards store small values; up to the
second, they accept new rows. A million rows of seven fields take 300 MB without values."""
LEAST_BYTES = 4 << 20
"""The least size of the share for small values. The other share is four times as much."""
MEASURED_S = 0.1
"""How old the measured size of the tables may be. Small values since then are added to it."""
AGAIN_S = (0.1, 2.0)
"""The first and the longest pause before waiting new rows are retried."""
LEAST_S = 0.25
"""With less time left, new rows are not retried. The shard waits for space for half of that time,
and without a reply it would be unknown whether the shard has the rows."""


class MetadataQuota:
    def __init__(self, host: Host) -> None:
        self._host = host
        self.size_bytes = max(LEAST_BYTES * WITH_VALUES // IN_ALL, host.space.size_bytes // IN_ALL)
        self.inline_bytes = self.size_bytes * IN_ALL // WITH_VALUES
        """above this usage, tables included, shards store no small values"""
        self.refused_values = 0
        """messages whose small values were rejected, so that the writer stores them"""
        self.on_refused: list[Callable[[], None]] = []
        """called when there is no space here for new rows"""
        self.writers = 0
        """puts of this host's clients that wait for space at a shard, here or elsewhere"""
        self._measured_at = float("-inf")
        self._measured = 0
        self._since = 0
        self._vain: asyncio.Future[None] | None = None
        """done when no client is left that could free space for the writers here"""

    @property
    def used_bytes(self) -> int:
        """Bytes of tables and small values of all partitions that this peer serves."""
        now = self._host.now()
        if now - self._measured_at > MEASURED_S:
            stores = [entry.store for entry in self._host.entries.values()]
            self._measured = sum(s.used_bytes + s.inline_bytes for s in stores)
            self._measured_at, self._since = now, 0
        return self._measured + self._since

    def check(self, values: Values, has_new_rows: bool) -> None:
        """Raise ShardFull if new rows must wait, or with `values` if small values must not be
        stored in the shard. Otherwise count these values."""
        nbytes = values.inline_bytes
        if not nbytes and not has_new_rows:
            return
        used = self.used_bytes
        if has_new_rows and used > self.size_bytes:
            for told in self.on_refused:
                told()
            raise self._full(used)
        if nbytes and used + nbytes > self.inline_bytes:
            self.refused_values += 1
            raise ShardFull(
                f"peer {self._host.name!r} has no metadata space left for inline values that take "
                f"{nbytes} bytes in total. Consume or drop rows, or give that peer a larger arena "
                "(--arena, DATAPLANE_ARENA)",
                values=True,
            )
        self._since += nbytes

    def _full(self, used: int) -> ShardFull:
        return ShardFull(
            f"peer {self._host.name!r}, which stores the metadata of this partition, accepts "
            "no new rows: the keys, tags and inline values that it stores use "
            f"{sized(used)}, over the limit of {sized(self.size_bytes)} (a "
            "fifth of its arena). Consume or drop rows, or give that peer a larger arena "
            "(--arena, DATAPLANE_ARENA)",
            peer=self._host.name,
            used_bytes=used,
            size_bytes=self.size_bytes,
        )

    # for clients of this host

    def waited(self, session: Session, began: float) -> None:
        """Note that a call waited for space since `began` (monotonic)."""
        record = EventRecord(Kind.ROOM_WAIT, reason=Reason.METADATA, worker=session.id)
        self._host.events.waited(record, began)

    async def wait_to_retry(self, session: Session, full: BackPressure, tries: int) -> None:
        """Wait before the next attempt at a shard that had no space for new rows or for their
        replicas.

        tries: the attempts so far. Raise BackPressure if the call's deadline is too near, or if no
        client is left that could free space.
        """
        wait_s = min(AGAIN_S[0] * 2.0 ** min(tries - 1, 10), AGAIN_S[1])
        latest = call_context.get().until - LEAST_S
        left_s = latest - self._host.now()
        if left_s <= 0:
            raise full
        if self._vain is None:
            self._vain = asyncio.get_running_loop().create_future()
        vain = self._vain
        self.writers += 1
        session.waiting += 1
        try:
            await asyncio.wait([vain], timeout=min(wait_s, left_s))
        finally:
            self.writers -= 1
            session.waiting -= 1
        if vain.done():
            why = "no client can free space, because all of them are waiting"
            raise type(full)(f"{full.message}; {why}", **full.details)
        if self._host.now() > latest + LEAST_S / 2:  # this process was short of processor time
            raise full

    def fail_waiting(self) -> None:
        """Raise BackPressure in all waiting writers here, because no client is left that could
        free rows."""
        if self._vain is not None:
            self._vain.set_result(None)
            self._vain = None

    def figures(self) -> dict[str, Any]:
        stores = [entry.store for entry in self._host.entries.values()]
        return {
            "size_bytes": self.size_bytes,
            "used_bytes": self.used_bytes,
            "names_bytes": sum(store.tombstones.nbytes for store in stores),
            "values_bytes": sum(store.inline_bytes for store in stores),
            "refused_values": self.refused_values,
        }
