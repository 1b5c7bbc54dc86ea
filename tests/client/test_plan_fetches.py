"""How a micro-batch of a plan is fetched: in as many messages as its rows take, and in step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dataplane import Plane
from dataplane.client._sync import calls
from dataplane.client._sync.plan_part import SOUGHT, Fetching, Part, fetch
from dataplane.client.balancing import Layout
from dataplane.client.session.telemetry import Tally
from dataplane.errors import FrameTooLarge, RowsGone, Unavailable
from dataplane.memory.arena import Pin
from dataplane.metadata.tables.keys import hash_names
from dataplane.wire.messages import (
    Claim,
    Claimed,
    Define,
    Defined,
    Failed,
    Fetch,
    Fetched,
    Finish,
)
from dataplane.wire.packed import U4, column
from dataplane.wire.tables import Definition, Name, PlanRows, Rows, Shape, Table
from tests.client.scripted_peer import ScriptedPeer


class Shard:
    """Answers what a part of a plan asks for; no answer has more than `most` rows with fields."""

    def __init__(self, n: int, most: int = 1 << 20) -> None:
        self.most = most
        self.there = np.ones(n, np.bool_)
        self.asked: list[int] = []
        self.pins: list[int] = []
        session: Any = SimpleNamespace(
            max_rows=65_536,
            pinned=self.pinned,
            pools=None,
            abandon=lambda *_: None,
            tally=Tally(),
            spans=None,
        )
        handle: Any = SimpleNamespace(session=session, name="p")
        self.part = Part(handle, "s", 31, n, 0, ["x"])

    def pinned(self, *pins: int) -> Pin:
        self.pins.extend(pins)
        return Pin(None, 0, None)

    def answer(self, body: Fetch) -> Fetched:
        at = column(body.index or b"", U4).astype(np.intp)
        self.asked.append(len(at))
        if body.fields and len(at) > self.most:
            raise FrameTooLarge("the answer would be too large")
        at = at[self.there[at]]
        keys: list[Name] = [int(one) for one in at]
        return Fetched(
            len(self.asked), Table(Rows(hash_names(keys), keys)), at.astype(U4).tobytes()
        )

    def fetched(self, rows: list[int]) -> Fetching:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(calls, "send", lambda _, call: self.answer(call.body))
            return fetch(self.part, rows)


def test_what_no_message_carries_comes_in_several() -> None:
    shard = Shard(100, most=30)
    reader, at, positions, mask = shard.fetched(list(range(99, -1, -1)))
    assert reader.table.rows.names == list(range(100)) == at[::-1].tolist()
    assert positions.tolist() == list(range(99, -1, -1)) and mask.all()
    assert shard.asked == [100, 50, 25, 25, 25, 25] and shard.pins == [3, 4, 5, 6]
    shard.fetched(list(range(50)))
    assert shard.asked[6:] == [25, 25], "what was too large once is not tried again"
    shard.most = 0
    with pytest.raises(FrameTooLarge):
        shard.fetched([1, 2])


def test_for_rows_that_are_gone_another_stands_that_is_looked_for_a_few_at_a_time() -> None:
    shard = Shard(5 * SOUGHT)
    shard.there[: 3 * SOUGHT + 1] = False
    reader, at, positions, mask = shard.fetched([4, 5])
    assert shard.asked == [2, *[SOUGHT] * 4, 1]
    assert reader.table.rows.names == [3 * SOUGHT + 1] and not mask.any() and not at.any()
    assert positions.tolist() == [3 * SOUGHT + 1] * 2


def test_one_that_goes_as_it_is_fetched_is_looked_for_again_and_where_none_is_that_is_said() -> (
    None
):
    shard = Shard(8)
    shard.there[:4] = False
    answer = shard.answer

    def gone_by_then(body: Fetch) -> Fetched:
        at = column(body.index or b"", U4)
        if body.fields and len(at) == 1 and at[0] < 6:
            shard.there[at[0]] = False
        return answer(body)

    shard.answer = gone_by_then  # type: ignore[method-assign]
    reader, _, _, mask = shard.fetched([0, 1])
    assert reader.table.rows.names == [6] and not mask.any()
    shard.there[:] = False
    with pytest.raises(RowsGone, match="every row of this plan"):
        shard.fetched([6, 7])


def test_a_layout_that_is_kept_is_given_whole_to_whoever_asks_meanwhile() -> None:
    shard = Shard(8)
    part = shard.part
    part.layout = layout = Layout(Shape(ranks=1, minibatches=2, epochs=4), PlanRows(8))
    taken = layout.mini

    def other_first(rank: int, epoch: int, number: int) -> Any:
        """Another thread has gone on to the last epochs before this one has its mini-batch."""
        layout.mini = taken  # type: ignore[method-assign]
        part.mini(7)
        return taken(rank, epoch, number)

    layout.mini = other_first  # type: ignore[method-assign]
    assert part.mini(0) == taken(0, 0, 0)
    assert part.mini(7) == taken(0, 3, 1)


def test_a_plan_whose_fields_cannot_be_found_out_is_released(
    peer: ScriptedPeer, plane: Plane
) -> None:
    """The stage was declared after this client had attached to the partition."""
    peer.definition = Definition({})
    part = plane.partition("x")
    peer.scripts[Claim] = lambda r, b: Claimed(11, 0, Table(Rows(b"")), PlanRows(4))
    peer.scripts[Define] = lambda r, b: (
        Failed("Unavailable", "hm") if peer.bodies(Claim) else Defined(4, peer.definition, "open")
    )
    with pytest.raises(Unavailable):
        part.plan("s", rank=0, ranks=1)
    released = peer.await_body(Finish)
    assert (released.lease, released.outcome) == (11, "release")
