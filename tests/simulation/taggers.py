"""Clients that set one tag of a row, each only over the value that it has read.

Every value is set at most once, so a row's tag must have gone through a chain of values: one that
two sets replaced, or that was replaced and is there, is a set that got lost.
"""

from __future__ import annotations

import asyncio

from dataplane.errors import InvalidRows, RowsDropped, RowsGone, TagConflict
from dataplane.wire import messages as m
from tests.simulation.ledger import Row
from tests.simulation.roles import Role, rows_of

TAG = "turn"


class Tagger(Role):
    sets = 8
    pause_s = 0.8

    async def _run(self) -> None:
        for number in range(self.sets):
            await asyncio.sleep(self.rng.expovariate(1 / self.pause_s))
            await self._patiently(lambda n=number: self._set(n))
        self.doing = "has set its tags"

    async def _set(self, number: int) -> None:
        groups = [group for group in self.ledger.groups if group.acked and not group.excused]
        if not groups:
            return
        row = self.rng.choice(self.rng.choice(groups).rows[:2])
        self.doing = f"reads a tag of {row.group.name}"
        there, old = await self.read(row)
        if not there:
            return
        new = f"{self.client.name}-{number}-{self.client.cluster.loop.now:.6f}"
        row.turns[new] = old, False
        self.doing = f"sets a tag of {row.group.name}"
        body = m.Tag(
            self.partition, self.generation, rows_of([row.group], [row]), {TAG: [new]}, {TAG: old}
        )
        try:
            await self.client.call(body, m.Done, 10.0)
        except (TagConflict, RowsGone, RowsDropped, InvalidRows) as exc:
            self.told = str(exc)  # an attempt before may have been carried out
            return
        row.turns[new] = old, True

    async def read(self, row: Row) -> tuple[bool, str | None]:
        """Whether the row is there, and its tag."""
        body = m.Read(self.partition, self.generation, rows_of([row.group], [row]), None, [])
        try:
            done = await self.client.call(body, m.ReadDone, 10.0)
        except (RowsGone, RowsDropped, InvalidRows):
            return False, None
        self.client.tell(m.Unpin([done.pin]))
        if not done.table.rows.keys:
            return False, None
        values = done.table.tags.get(TAG, [None])
        return True, values[0]  # type: ignore[return-value]

    async def look(self) -> None:
        """After everything: what is there must follow from what was set."""
        for group in self.ledger.groups:
            for row in group.rows:
                if row.turns and not group.excused:
                    await self._patiently(lambda r=row: self._compare(r))

    async def _compare(self, row: Row) -> None:
        there, last = await self.read(row)
        if not there or row.group.excused:
            return
        came: set[str] = set()
        value = last
        while value is not None:
            if value not in row.turns or value in came:
                self.ledger.wrong(f"a row of {row.group.name} has the tag {value!r} of nowhere")
                return
            came.add(value)
            value = row.turns[value][0]
        for new, (old, certain) in row.turns.items():
            if certain and new not in came:
                self.ledger.wrong(
                    f"a tag of {row.group.name} was set from {old!r} to {new!r}, and is {last!r}"
                )
