"""Who reads all of a partition in the end: what was acknowledged is there, or is named as lost."""

from __future__ import annotations

from dataplane.errors import DeadlineExceeded
from dataplane.metadata.tables.keys import format_minted
from dataplane.wire import messages as m
from dataplane.wire.tables import Name
from tests.simulation.ledger import Row
from tests.simulation.roles import Role, keys_of

PAGE_ROWS = 100
LOSSES_MS = 2000


class Auditor(Role):
    async def look(self) -> None:
        """Of a partition whose rows stay until they are dropped."""
        await self._patiently(self._compare)

    async def drop(self) -> None:
        """The partition, whatever is left of it."""
        await self._patiently(self._drop)
        self.client.close()

    async def _drop(self) -> None:
        await self.client.call(m.Drop(self.partition, self.generation), m.Dropped)

    async def _compare(self) -> None:
        there = await self._read()
        missing = {_name(row): row.group for row in self._owed() if row.key not in there}
        named = await self._lost() if missing else set()
        for name in missing.keys() - named:
            self.ledger.wrong(f"{name} of {missing[name].name} is not there, nor named as lost")
        for key in there:
            row = self.ledger.rows.get(key)
            if row is None:
                self.ledger.wrong(f"a row {key.hex()} is there that nobody put")
            elif row.dropped_in == self.generation and not row.group.excused:
                self.ledger.wrong(f"a row of {row.group.name} is there, which was dropped")

    def _owed(self) -> list[Row]:
        groups = [group for group in self.ledger.groups if group.generation == self.generation]
        return [row for group in groups for row in group.rows if not row.dropping]

    async def _read(self) -> set[bytes]:
        """The keys of all rows, page by page."""
        self.doing = "reads everything"
        there, after = set[bytes](), b""
        while True:
            body = m.Read(self.partition, self.generation, limit=PAGE_ROWS, after=after)
            done = await self.client.call(body, m.ReadDone, 10.0)
            keys = keys_of(done.table)
            self.compare(done.table, keys)
            self.client.tell(m.Unpin([done.pin]))
            if not there.isdisjoint(keys):
                self.ledger.wrong(f"{self!r} read rows twice")
            there.update(keys)
            after = done.cursor
            if not after:
                return there

    async def _lost(self) -> set[Name]:
        names = set[Name]()
        after, ended = 0, False
        while not ended:
            body = m.Losses(self.partition, self.generation, after, LOSSES_MS)
            try:
                told = await self.client.call(body, m.LossesDone, LOSSES_MS / 1000)
            except DeadlineExceeded:
                return names
            names.update(told.names)
            after, ended = told.after, told.ended
        return names


def _name(row: Row) -> Name:
    """As it is named where it was lost."""
    names = row.group.names
    return format_minted(row.key) if names is None else names[row.group.rows.index(row)]
