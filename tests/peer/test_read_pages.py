"""Reads of all rows, page by page, while rows go and the roster changes."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from dataplane.errors import DataplaneError
from dataplane.metadata.shard.journal import snapshot
from dataplane.metadata.shard.store import Store
from dataplane.peer.host import Caller
from dataplane.peer.requests.reads import Reading
from dataplane.wire.messages import Read, ReadDone
from tests.metadata.observed import carried_over
from tests.metadata.stores import named, put, store

NOBODY = Caller("tcp://10.0.0.1:7101", 1)


class Reader:
    """A peer that reads of a shard, which is here."""

    def __init__(self, shard: Store) -> None:
        self.shard = shard
        serves: Any = SimpleNamespace(
            now=time.monotonic, shard=lambda *of: SimpleNamespace(store=self.shard)
        )
        nothing: Any = None
        router: Any = SimpleNamespace(ask=self.ask)
        pulls: Any = SimpleNamespace(pulls=nothing)
        self.reading = Reading(serves, router, nothing, pulls)
        self.reading.resolved = self.resolved  # type: ignore[method-assign]

    async def ask(self, body: Read) -> ReadDone:
        found = self.reading.read_here(NOBODY, body)
        assert isinstance(found, ReadDone)
        return found

    async def resolved(self, table: Any, holder: int, **how: Any) -> Any:
        return table, 0

    async def page(self, after: bytes = b"") -> tuple[list[Any], bytes]:
        session: Any = SimpleNamespace(id=5)
        request: Any = None
        body = Read("step-1", 1, fields=[], limit=4, after=after)
        done = await self.reading.read(session, request, body)
        assert isinstance(done, ReadDone)
        return list(done.table.rows.names or []), done.cursor


async def test_a_page_begins_behind_the_one_before_also_at_a_successor_where_rows_went() -> None:
    shard = store(free="drop")
    for block in (range(3), range(3, 6)):
        put(shard, list(block))
    reader = Reader(shard)
    names, cursor = await reader.page()
    assert names == [0, 1, 2, 3] and cursor
    reader.shard = Store("step-1", shard.definition, 1)
    carried_over(reader.shard, list(snapshot(shard)))
    reader.shard.drop(rows=named([3]))
    assert await reader.page(cursor) == ([4, 5], b"")


async def test_a_cursor_of_nobody_is_refused() -> None:
    with pytest.raises(DataplaneError):
        await Reader(store()).page(b"on")
