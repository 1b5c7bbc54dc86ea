"""What a client wrote becomes chunks of its peer, and what does not fit its ranges is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dataplane.errors import LimitExceeded, ProtocolError, RowsGone
from dataplane.memory.admission import Admission
from dataplane.memory.space import Space
from dataplane.metadata.tables.references import ids_of
from dataplane.peer.requests.puts import Committed, Grants
from dataplane.wire.limits import MAX_CHUNKS_PER_MESSAGE, MAX_PIECES_PER_MESSAGE
from dataplane.wire.messages import GiveBack
from dataplane.wire.records import EXTENT, RANGE
from dataplane.wire.tables import INLINE, Chunk, Owner, Piece, Values

ME, THERE = Owner("tcp://a", 7), Owner("tcp://b", 8)
SESSION: Any = SimpleNamespace(id=9)


@pytest.fixture
def host() -> Any:
    return SimpleNamespace(space=Space(1 << 20), owner=ME)


def values(*chunks: Chunk, owners: tuple[Owner, ...] = (ME, INLINE)) -> Values:
    return Values(["x"], list(owners), [b"layout"], list(chunks), [Piece(0, [0], 0, b"\1")])


def commit(host: Any, sent: Values, sizes: list[int], shared: Any = ()) -> Committed:
    """After ranges of these sizes were written."""
    extents = np.zeros(len(sizes), EXTENT)
    if sizes:
        (start,) = host.space.grant(SESSION.id, Admission.OPEN, 1 << 16)["offset"].tolist()
        extents["offset"] = start + 4096 * np.arange(len(sizes))
        extents["length"] = sizes
    nothing: Any = None
    grants = Grants(host, nothing, nothing)
    shared = np.array(list(shared), RANGE)
    return grants.commit(SESSION, sent, extents.tobytes(), shared.tobytes(), Admission.OPEN)


def test_chunks_are_named_by_the_ranges_that_they_became(host: Any) -> None:
    known = commit(host, values(Chunk(0, 1, 3, 64, 0)), [64]).ranges
    inline = Chunk(1, 0, 2, 5, 0, b"bytes")
    on_a_device = Chunk(0, 2, 4, 0, 0, b"lengths")
    sent = values(Chunk(0, 3, 1, 40, 0), inline, Chunk(0, 1, 2, 4000, 0), on_a_device)
    made = commit(host, sent, [4000, 0], known)
    first, second, third = ids_of(made.ranges).tolist()
    assert third == ids_of(known).item() and host.space.ranges.refs(known).tolist() == [2]
    assert made.values.chunks == [
        Chunk(0, third, 1, 40, 0),
        inline,
        Chunk(0, first, 2, 4000, 0),
        Chunk(0, second, 4, 0, 0, b"lengths"),
    ]
    unread = (sent.fields, sent.owners, sent.layouts, sent.pieces)
    told = made.values
    assert (told.fields, told.owners, told.layouts, told.pieces) == unread
    assert host.space.ranges.refs(made.ranges).tolist() == [1, 1, 2]


def test_inline_chunks_need_no_ranges(host: Any) -> None:
    sent = values(Chunk(1, 0, 2, 5, 0, b"bytes"))
    made = commit(host, sent, [])
    assert made.values == sent and not len(made.ranges)
    assert commit(host, Values(), []).values == Values()


@pytest.mark.parametrize(
    "chunk",
    [
        Chunk(2, 2, 1, 64, 0),
        Chunk(-1, 2, 1, 64, 0),
        Chunk(0, 0, 1, 64, 0),
        Chunk(0, -1, 1, 64, 0),
        Chunk(0, 3, 1, 64, 0),
        Chunk(0, 1 << 64, 1, 64, 0),
        Chunk(0, 1, 1, 64, 0),
        Chunk(0, 2, 1, 129, 0),
        Chunk(0, 2, 1, 64, 0),
        Chunk(0, 2, 1, 1 << 64, 0),
        Chunk(0, 2, 1, -1, 0),
    ],
    ids=str,
)
def test_a_chunk_that_is_no_range_of_its_message_is_refused(host: Any, chunk: Chunk) -> None:
    with pytest.raises(ProtocolError):
        commit(host, values(Chunk(0, 1, 1, 64, 0), chunk), [64, 128])
    assert host.space.ranges.live == 0


def test_too_many_chunks_are_refused_before_anything_is_booked(host: Any) -> None:
    chunks = [Chunk(0, n + 1, 1, 64, 0) for n in range(MAX_CHUNKS_PER_MESSAGE + 1)]
    before = host.space.stats()
    with pytest.raises(LimitExceeded, match="chunks"):
        nothing: Any = None
        Grants(host, nothing, nothing).commit(
            SESSION, values(*chunks), bytes(EXTENT.itemsize * len(chunks)), b"", Admission.OPEN
        )
    assert host.space.stats() == before


def test_a_message_returns_a_bounded_number_of_extents(host: Any) -> None:
    nothing: Any = None
    grants = Grants(host, nothing, nothing)
    before = host.space.stats()
    body = GiveBack(bytes(EXTENT.itemsize * (MAX_PIECES_PER_MESSAGE + 1)))
    with pytest.raises(LimitExceeded, match="in several messages"):
        grants.give_back(SESSION, nothing, body)
    assert host.space.stats() == before


def test_a_range_that_no_chunk_names_is_refused(host: Any) -> None:
    """Nobody would free it."""
    for other in ((), (Chunk(1, 0, 2, 5, 0, b"bytes"),)):
        with pytest.raises(ProtocolError, match="got 1 chunk for 2 ranges"):
            commit(host, values(Chunk(0, 1, 1, 64, 0), *other), [64, 64])
    with pytest.raises(ProtocolError):
        commit(host, values(Chunk(0, 1, 1, 64, 0)), [])


@pytest.mark.parametrize("owners", [(THERE,), (ME, THERE), (Owner(ME.peer, 6),)])
def test_chunks_of_others_are_refused(host: Any, owners: tuple[Owner, ...]) -> None:
    """Also those of the same peer in an earlier life of its process."""
    with pytest.raises(ProtocolError, match="client's own peer"):
        commit(host, values(Chunk(0, 1, 1, 64, 0), owners=owners), [64])


@pytest.mark.parametrize("wrong", ["extent", "chunk", "freed"])
def test_what_a_refused_message_shares_is_held_no_more(host: Any, wrong: str) -> None:
    known = commit(host, values(Chunk(0, 1, 3, 64, 0)), [64]).ranges
    if wrong == "freed":
        host.space.release(known)
    sent = values(Chunk(0, 1, 1, 64, 0), Chunk(0, 2, 1, 65 if wrong == "chunk" else 64, 0))
    outside = np.array([(1 << 40, 64)], EXTENT).tobytes()
    nothing: Any = None
    with pytest.raises(RowsGone if wrong == "freed" else ProtocolError):
        Grants(host, nothing, nothing).commit(
            SESSION, sent, outside, known.tobytes(), Admission.OPEN
        )
    assert host.space.alive(known).tolist() == [wrong != "freed"]
    if wrong != "freed":
        assert host.space.ranges.refs(known).tolist() == [1]
