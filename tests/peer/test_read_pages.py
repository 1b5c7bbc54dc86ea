"""Reads of all rows, while the roster changes."""

from __future__ import annotations

import asyncio
import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dataplane.errors import DataplaneError, StaleEpoch, Unavailable
from dataplane.metadata.roster import Roster
from dataplane.peer.reading import Reading
from dataplane.wire.messages import Body, Read
from dataplane.wire.peering import Found
from dataplane.wire.tables import Rows, Table

HERE, THERE = "tcp://10.0.0.1:7101", "tcp://10.0.0.2:7101"
FIRST = Roster.from_seeds([HERE, THERE])
SECOND = dataclasses.replace(FIRST, epoch=(FIRST.epoch[0], FIRST.epoch[1] + 1))


class Members:
    """Two peers with three rows each. `fails`: what the next requests end in."""

    def __init__(self, fails: list[DataplaneError]) -> None:
        self.handlers: dict[type[Body], Any] = {}
        self.fails = fails
        self.asked: list[tuple[str, tuple[int, int]]] = []

    async def call(self, address: str, body: Read, epoch: tuple[int, int]) -> Found:
        self.asked.append((address, epoch))
        if address == THERE and self.fails:
            raise self.fails.pop(0)
        keys = [bytes([n]) * 16 for n in ((1, 2, 3) if address == HERE else (4, 5, 6))]
        keys = [key for key in keys if key > body.after]
        return Found(Table(Rows(b"".join(keys[: body.limit]))), len(keys) > body.limit)


def reading(fails: list[DataplaneError], then: Roster | None = SECOND) -> tuple[Reading, Members]:
    """`then`: the roster that comes while somebody waits for one."""
    members = Members(fails)
    host: Any = SimpleNamespace(roster=FIRST, now=lambda: 0.0)

    async def another_roster(than: Roster, until: float) -> bool:
        host.roster = than if then is None else then
        await asyncio.sleep(0)
        return then is not None

    host.another_roster = another_roster
    return Reading(host, members, *[None] * 5), members  # type: ignore[arg-type]


def numbers(table: Table) -> list[int]:
    return np.frombuffer(table.rows.keys, np.uint8)[::16].tolist()


@pytest.mark.parametrize("failure", [StaleEpoch("behind"), Unavailable("gone")])
async def test_a_read_that_a_new_roster_interrupts_begins_anew(failure: DataplaneError) -> None:
    part, members = reading([failure])
    table, cursor = await part._read_page(Read("p", 1))
    assert (numbers(table), cursor) == ([1, 2, 3, 4, 5, 6], b"")
    epochs = [FIRST.epoch] * 2 + [SECOND.epoch] * 2
    assert members.asked == list(zip([HERE, THERE] * 2, epochs, strict=True))


async def test_a_later_page_is_refused_under_another_roster() -> None:
    part, _ = reading([StaleEpoch("behind")])
    table, cursor = await part._read_page(Read("p", 1, limit=3))
    assert numbers(table) == [1, 2, 3]
    with pytest.raises(StaleEpoch, match="in the middle of this read"):
        await part._read_page(Read("p", 1, limit=3, after=cursor))


async def test_who_cannot_be_read_is_said_where_no_other_roster_comes() -> None:
    part, _ = reading([Unavailable("host b did not answer")], then=None)
    with pytest.raises(Unavailable, match="host b"):
        await part._read_page(Read("p", 1))
