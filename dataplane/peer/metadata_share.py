"""What metadata may take at a peer, beside the arena: tables, remembered names, small values.

Where it is more than a twentieth of the arena's size, writers keep small values as ranges in their
arenas; where it is more than a fifth, new rows wait at the writer. A finish, an ack and a drop are
always taken. The backup of these shards has as much again.
"""

from __future__ import annotations

import asyncio
from typing import Any

from dataplane.errors import ShardFull
from dataplane.peer.host import Host, call_deadline

WITH_VALUES, IN_ALL = 20, 5
"""One part in so many of the arena's size: up to where small values are taken, and new rows. A
million rows of seven fields, without values, are some 300 MB."""
LEAST_BYTES = 4 << 20
"""Of a small arena, the smaller of the two; the other is four times as much."""
MEASURED_S = 0.1
"""How old the figures of the tables may be; what small values took since is added."""
RETRY_S = 0.1
"""New rows that found no room are tried again after so long."""


class MetadataShare:
    def __init__(self, host: Host) -> None:
        self._host = host
        self.size_bytes = max(LEAST_BYTES * WITH_VALUES // IN_ALL, host.space.size_bytes // IN_ALL)
        self.inline_bytes = self.size_bytes * IN_ALL // WITH_VALUES
        """more than this, tables included, is no room for small values"""
        self.refused_values = 0
        """messages whose small values their writers had to keep"""
        self._measured_at = float("-inf")
        self._measured = 0
        self._since = 0

    @property
    def used_bytes(self) -> int:
        """Tables, names and small values of all partitions whose shard is here."""
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
            raise ShardFull(
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

    async def wait(self) -> None:
        """Until new rows find room. ShardFull at the deadline of the call."""
        while self.is_full:
            if not await another_try(self._host):
                self.check_rows()
                return

    def figures(self) -> dict[str, Any]:
        stores = [entry.store for entry in self._host.entries.values()]
        return {
            "size_bytes": self.size_bytes,
            "used_bytes": self.used_bytes,
            "values_bytes": sum(store.state.fields.inline_bytes for store in stores),
            "refused_values": self.refused_values,
        }


async def another_try(host: Host) -> bool:
    """Pause before new rows are tried again; False where the call ends before."""
    if host.now() + RETRY_S > call_deadline.get():
        return False
    await asyncio.sleep(RETRY_S)
    return True
