"""Clients that drop rows by key, groups, and what a filter matches, also before they were put."""

from __future__ import annotations

import asyncio

from dataplane.metadata.tables.keys import hash_name
from dataplane.wire import messages as m
from dataplane.wire.tables import Name, Rows
from tests.simulation.roles import MAX_LENGTH, Producer, Role, length_of


class Dropper(Role):
    drops = 6
    pause_s = 0.4
    producers: list[Producer]

    async def _run(self) -> None:
        for _ in range(self.drops):
            await asyncio.sleep(self.rng.expovariate(1 / self.pause_s))
            kind = self.rng.choice((self._rows, self._group, self._filter))
            body, keys = kind()
            self.ledger.condemn(keys)
            await self._patiently(lambda body=body, keys=keys: self._drop(body, keys))
        self.doing = "has dropped enough"

    def _name(self) -> str:
        """A group, put or not yet."""
        producer = self.rng.choice(self.producers)
        return f"{producer.client.name}-{self.rng.randrange(producer.groups)}"

    def _rows(self) -> tuple[m.Drop, list[bytes]]:
        """Some rows of a group. Minted keys are known once their client has made them, also to who
        should not know them yet."""
        name = self._name()
        group = self.ledger.named.get(hash_name(name))
        count = self.rng.randint(1, self.ledger.group_rows)
        names: list[Name] | None = [f"{name}-{i}" for i in range(count)]
        if group is not None and group.names is None:
            keys, names = [row.key for row in group.rows[:count]], None
        else:
            keys = [hash_name(f"{name}-{i}") for i in range(count)]
        return m.Drop(self.partition, 0, Rows(b"".join(keys), names)), keys

    def _group(self) -> tuple[m.Drop, list[bytes]]:
        name = self._name()
        return m.Drop(self.partition, 0, groups=[name]), [hash_name(name)]

    def _filter(self) -> tuple[m.Drop, list[bytes]]:
        """Short rows of a group that is in."""
        known = [group for group in self.ledger.groups if group.acked]
        if not known:
            return self._group()
        group, below = self.rng.choice(known), self.rng.randrange(MAX_LENGTH)
        where = ["and", ["eq", "group", group.name], ["lt", "length", below]]
        keys = [row.key for row in group.rows if length_of(row.key) < below]
        return m.Drop(self.partition, 0, where=where), keys

    async def _drop(self, body: m.Drop, keys: list[bytes]) -> None:
        self.doing = f"drops {len(keys)} rows or groups"
        body.generation = self.generation
        began = self.ledger.beginnings
        dropped = await self.client.call(body, m.Dropped, 10.0)
        if self.ledger.beginnings == began:
            self.ledger.ended(keys, self.client.cluster.loop.now, body.generation)
        if dropped.rows > max(len(keys), 1) * self.ledger.group_rows:
            self.ledger.wrong(f"{self!r} dropped {dropped.rows} rows")
