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
from dataplane.wire.peering import Found
from dataplane.wire.tables import Rows, Table

FIRST = Roster.from_seeds(["tcp://10.0.0.1:7101", "tcp://10.0.0.2:7101"])
SECOND = dataclasses.replace(FIRST, epoch=(FIRST.epoch[0], FIRST.epoch[1] + 1))


async def ask(body: Read) -> Found:
    """A shard of six rows."""
    keys = [bytes([n]) * 16 for n in range(1, 7) if bytes([n]) * 16 > body.after]
    return Found(Table(Rows(b"".join(keys[: body.limit]))), len(keys) > body.limit)


def reading() -> Reading:
    host: Any = SimpleNamespace(roster=FIRST, owner=None, space=None)
    shard = SimpleNamespace(ask=ask, mesh=SimpleNamespace(handlers={}))
    return Reading(host, shard, None, SimpleNamespace(pulls=None))  # type: ignore[arg-type]


async def page(part: Reading, body: Read) -> tuple[list[int], bytes]:
    session: Any = SimpleNamespace(id=1)
    done = await part.read(session, None, body)  # type: ignore[arg-type]
    assert isinstance(done, ReadDone)
    return numbers(done.table), done.cursor


def numbers(table: Table) -> list[int]:
    return np.frombuffer(table.rows.keys, np.uint8)[::16].tolist()


async def test_a_page_begins_behind_the_one_before() -> None:
    part = reading()
    keys, cursor = await page(part, Read("p", 1, limit=4))
    assert keys == [1, 2, 3, 4]
    assert await page(part, Read("p", 1, limit=4, after=cursor)) == ([5, 6], b"")


async def test_a_later_page_is_refused_under_another_roster() -> None:
    part = reading()
    _, cursor = await page(part, Read("p", 1, limit=3))
    part.host.roster = SECOND
    with pytest.raises(StaleEpoch, match="in the middle of this read"):
        await page(part, Read("p", 1, limit=3, after=cursor))
