"""Where clients read the chunks of a table."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dataplane.errors import DataplaneError, ProtocolError, RowsGone, RowsLost, Unavailable
from dataplane.memory.admission import Admission
from dataplane.memory.space import Space
from dataplane.peer.host import CallContext, call_context
from dataplane.peer.requests.reads import PAUSES_S, Reading, Resolved
from dataplane.wire.messages import Read, ReadDone
from dataplane.wire.packed import EXTENT, U8, Array
from dataplane.wire.tables import INLINE, Chunk, Owner, Rows, Table, Values
from tests.chunk_numbers import chunk_numbers

ME, THERE, ELSEWHERE = Owner("tcp://a", 7), Owner("tcp://b", 8), Owner("tcp://c", 9)
READER = 9


def written(space: Space, *sizes: int) -> Array:
    """Return chunks of these sizes in bytes."""
    made = []
    for size in sizes:
        _, extents = space.reserve(1, Admission.OPEN, [np.array([size], U8)])
        extents["length"] = size
        made.append(space.commit(1, extents.tolist(), Admission.OPEN))
    return np.concatenate(made)


class Pulls:
    """Brings whatever it is asked for, one chunk of an owner after the other."""

    def __init__(self, space: Space, away: Array | None = None) -> None:
        self.space, self.away = space, away
        self.room = SimpleNamespace(unpin=space.unpin)
        self.asked: list[tuple[Owner, list[tuple[int, ...]], list[int]]] = []
        self.failing: Owner | None = None

    async def bring(
        self, owner: Owner, remote: Array, nbytes: Array, holder: int
    ) -> tuple[Array, list[int]]:
        self.asked.append((owner, remote.tolist(), nbytes.tolist()))
        await asyncio.sleep(0)
        if owner == self.failing:
            raise RowsLost("its peer is lost")
        local = written(self.space, *nbytes.tolist())
        pin = self.space.pin(holder, local)
        self.space.release(local)
        return local, [pin]

    async def ensure_mappable(
        self, chunks: Array, holder: int, reader: int
    ) -> tuple[Array, list[int]]:
        return chunks, [self.space.pin(holder, chunks)]


@pytest.fixture
def reading() -> Any:
    space = Space(1 << 20)
    pulls = Pulls(space)
    in_place: Any = SimpleNamespace(pulls=pulls, bring=pulls.bring)
    nothing: Any = None
    return Reading(SimpleNamespace(space=space, owner=ME), nothing, nothing, in_place)  # type: ignore[arg-type]


def table(*chunks: Chunk, owners: tuple[Owner, ...] = (INLINE, ME, THERE, ELSEWHERE)) -> Table:
    return Table(Rows(b""), Values(owners=list(owners), layouts=[b"layout"], chunks=list(chunks)))


def named(owner: int, chunks: Array, nbytes: int) -> Chunk:
    """The first of these numbers as a chunk."""
    return Chunk(owner, chunks.item(0), 3, nbytes, 0)


def places(found: Resolved) -> list[tuple[int, int]]:
    return np.frombuffer(found[0].places, EXTENT).tolist()  # type: ignore[no-any-return]


def test_chunks_of_this_host_are_where_they_are_and_pinned_together(reading: Any) -> None:
    space = reading.host.space
    first, second = written(space, 100), written(space, 64)
    inline = Chunk(0, 0, 3, 5, 0, b"bytes")
    asked = table(named(1, second, 64), inline, named(1, first, 100))
    found = reading.resolve(asked, READER)
    starts = [space.chunks.extents(one)["offset"].item() for one in (second, first)]
    assert places(found) == [(starts[0], 64), (0, 0), (starts[1], 100)]
    assert found[0].values is asked.values
    assert space.pinned(READER)[found[1]].tolist() == [*second.tolist(), *first.tolist()]


def test_nothing_is_pinned_for_chunks_in_the_message(reading: Any) -> None:
    found = reading.resolve(table(Chunk(0, 0, 3, 5, 0, b"bytes")), READER)
    assert places(found) == [(0, 0)] and found[1] == 0
    assert places(reading.resolve(table(), READER)) == []


async def test_chunks_of_all_other_hosts_are_asked_for_at_once_and_pinned_together(
    reading: Any,
) -> None:
    space, far = reading.host.space, [chunk_numbers([(n, 1)]) for n in range(3)]
    own = written(space, 64)
    asked = table(
        named(2, far[0], 70), named(3, far[1], 5), named(1, own, 64), named(2, far[2], 1 << 17)
    )
    found = await reading.resolve(asked, READER)
    assert reading.pulls.asked == [
        (THERE, [*far[0].tolist(), *far[2].tolist()], [70, 1 << 17]),
        (ELSEWHERE, far[1].tolist(), [5]),
    ]
    pinned = space.pinned(READER)
    assert list(pinned) == [found[1]] and len(pinned[found[1]]) == 4
    extents = space.chunks.extents(pinned[found[1]])
    assert places(found) == list(zip(extents["offset"].tolist(), [70, 5, 64, 1 << 17], strict=True))
    space.unpin(READER, [found[1]])
    assert space.chunks.live == 1  # a copy that is not cached ends with its pin


async def test_what_came_is_let_go_of_where_one_owner_is_lost(reading: Any) -> None:
    space, far = reading.host.space, chunk_numbers([(5, 1)])
    reading.pulls.failing = ELSEWHERE
    with pytest.raises(RowsLost):
        await reading.resolve(table(named(3, far, 64), named(2, far, 64)), READER)
    assert len(reading.pulls.asked) == 2
    assert not space.pinned(READER) and not space.chunks.live


def test_a_chunk_that_was_freed_meanwhile_is_gone(reading: Any) -> None:
    space = reading.host.space
    here, gone = written(space, 64), written(space, 64)
    space.release(gone)
    with pytest.raises(RowsGone):
        reading.resolve(table(named(1, here, 64), named(1, gone, 64)), READER)
    assert not space.pinned(READER)


@pytest.mark.parametrize(
    "chunk",
    [Chunk(4, 1, 1, 1, 0), Chunk(-1, 1, 1, 1, 0), Chunk(1, -1, 1, 1, 0), Chunk(1, 1, 1, -1, 0)],
    ids=["owner", "negative owner", "number", "size"],
)
def test_a_table_that_describes_no_chunk_is_refused(reading: Any, chunk: Chunk) -> None:
    with pytest.raises(ProtocolError):
        reading.resolve(table(chunk), READER)


def test_a_chunk_never_reaches_behind_its_range(reading: Any) -> None:
    here = written(reading.host.space, 100)
    with pytest.raises(ProtocolError, match="129 bytes, but the chunk has 128"):
        reading.resolve(table(named(1, here, 129)), READER)
    assert not reading.host.space.pinned(READER)


# a shard that names values which are gone


class Reader(Reading):
    """A reader with a clock of its own, whose shard names a chunk at another peer each time."""

    def __init__(self, *whys: DataplaneError, repeated: bool = False) -> None:
        self.space, self.asked, self.clock_s = Space(1 << 20), list[float](), 100.0
        self.whys, self.repeated = list(whys), repeated
        host: Any = SimpleNamespace(
            space=self.space,
            owner=ME,
            address=ME.peer,
            roster=None,
            now=lambda: self.clock_s,
            another_roster=self.another_roster,
        )
        pulls: Any = SimpleNamespace(bring=self.bring, room=SimpleNamespace(unpin=self.space.unpin))
        nothing: Any = None
        pools: Any = SimpleNamespace(pulls=pulls, bring=self.bring)
        super().__init__(host, SimpleNamespace(ask=self.ask), nothing, pools)  # type: ignore[arg-type]

    async def another_roster(self, than: object, until: float) -> bool:
        assert until > self.clock_s, "a busy loop"
        self.clock_s = until
        return False

    async def ask(self, body: Read) -> ReadDone:
        self.asked.append(self.clock_s)
        return ReadDone(table(named(2, chunk_numbers([(1, 1)]), 64)), 0)

    async def bring(self, owner: Owner, remote: Array, nbytes: Array, holder: int) -> Any:
        if self.whys:
            raise self.whys[0] if self.repeated else self.whys.pop(0)
        return (local := written(self.space, *nbytes.tolist())), [self.space.pin(holder, local)]

    async def read_it(self) -> ReadDone:
        done: ReadDone = await self.found(Read("p", 1), SimpleNamespace(id=READER), "read")  # type: ignore[arg-type]
        return done


def gone() -> RowsGone:
    return RowsGone("the peer at tcp://b freed 1 value", peer=THERE.peer)


async def test_a_read_returns_to_the_shard_until_its_values_are_there() -> None:
    lost = RowsLost("the peer at tcp://b was lost", peer=THERE.peer)
    reader = Reader(*(gone(), lost) * 5)
    done = await reader.read_it()
    assert done.pin and len(reader.asked) == 11
    pauses = np.diff(reader.asked)
    assert pauses[0] == pytest.approx(PAUSES_S[0]) and pauses[-1] == pytest.approx(PAUSES_S[1])
    assert (np.diff(pauses) > -1e-9).all()


@pytest.mark.parametrize(
    ("why", "kind", "what"),
    [
        (gone(), RowsGone, "the peer at tcp://b, which had values of them, freed them"),
        (RowsGone("here"), RowsGone, "the peer at tcp://a, which had values of them, freed them"),
        (RowsLost("x", peer=THERE.peer), Unavailable, "the peer at tcp://b, .* was lost"),
    ],
)
async def test_a_read_whose_values_stay_gone_says_at_its_deadline_which_peer_had_them(
    why: DataplaneError, kind: type[DataplaneError], what: str
) -> None:
    reader = Reader(why, repeated=True)
    call_context.set(CallContext(reader.clock_s + 10.0))
    with pytest.raises(kind, match=what) as refused:
        await reader.read_it()
    assert refused.value.details["partition"] == "p"
    assert refused.value.details["peer"] in refused.value.message
    assert reader.clock_s == 110.0 and 10 < len(reader.asked) < 20
