"""Reads of all rows, page by page, while the roster changes."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dataplane.errors import StaleEpoch
from dataplane.metadata.roster.roster import Roster
from dataplane.peer.requests.reads import Reading
from dataplane.wire.messages import Read, ReadDone
from dataplane.wire.tables import Rows, Table

FIRST = Roster.from_seeds(["tcp://10.0.0.1:7101", "tcp://10.0.0.2:7101"])
SECOND = dataclasses.replace(FIRST, epoch=(FIRST.epoch[0], FIRST.epoch[1] + 1))


async def ask(body: Read) -> ReadDone:
    """A shard of six rows."""
    keys = [bytes([n]) * 16 for n in range(1, 7) if bytes([n]) * 16 > body.after]
    page = keys[: body.limit]
    return ReadDone(Table(Rows(b"".join(page))), 0, page[-1] if len(keys) > body.limit else b"")


async def resolved(table: Table, holder: int) -> tuple[Table, int]:
    return table, 0


def reading() -> Reading:
    host, mesh = SimpleNamespace(roster=FIRST), SimpleNamespace(handlers={})
    shard = SimpleNamespace(ask=ask)
    part: Any = Reading(host, mesh, shard, None, None, None)  # type: ignore[arg-type]
    part.resolved = resolved
    return part  # type: ignore[no-any-return]


async def page(part: Reading, body: Read) -> tuple[list[int], bytes]:
    session: Any = SimpleNamespace(id=1)
    done = await part.read(session, None, body)  # type: ignore[arg-type]
    assert isinstance(done, ReadDone)
    return np.frombuffer(done.table.rows.keys, np.uint8)[::16].tolist(), done.cursor


async def test_a_page_begins_behind_the_one_before() -> None:
    part = reading()
    numbers, cursor = await page(part, Read("p", 1, limit=4))
    assert numbers == [1, 2, 3, 4]
    assert await page(part, Read("p", 1, limit=4, after=cursor)) == ([5, 6], b"")


async def test_a_later_page_is_refused_under_another_roster() -> None:
    part = reading()
    _, cursor = await page(part, Read("p", 1, limit=3))
    part.host.roster = SECOND
    with pytest.raises(StaleEpoch, match="in the middle of this read"):
        await page(part, Read("p", 1, limit=3, after=cursor))
