"""Chunks that a client wrote: what the peer records, and which are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from dataplane.errors import LimitExceeded, ProtocolError, RowsGone
from dataplane.memory.admission import Admission
from dataplane.memory.space import Space
from dataplane.peer.requests.puts import Committed, Grants
from dataplane.wire.limits import MAX_CHUNKS_PER_MESSAGE, MAX_PIECES_PER_MESSAGE
from dataplane.wire.messages import GiveBack
from dataplane.wire.packed import EXTENT
from dataplane.wire.tables import INLINE, Chunk, Owner, Piece, Values

ME, THERE = Owner("tcp://a", 7), Owner("tcp://b", 8)
SESSION: Any = SimpleNamespace(id=9)


@pytest.fixture
def host() -> Any:
    return SimpleNamespace(space=Space(1 << 20), owner=ME)


def values(*chunks: Chunk, owners: tuple[Owner, ...] = (ME, INLINE)) -> Values:
    return Values(["x"], list(owners), [b"layout"], list(chunks), [Piece(0, (0,), 0, b"\1")])


def grant(host: Any) -> int:
    """Where the client may write 64 KiB."""
    start: int = host.space.grant(SESSION.id, Admission.OPEN, 1 << 16)["offset"].item()
    return start


def commit(host: Any, *chunks: Chunk, owners: tuple[Owner, ...] = (ME, INLINE)) -> Committed:
    nothing: Any = None
    grants = Grants(host, nothing, nothing)
    return grants.commit(SESSION, values(*chunks, owners=owners), Admission.OPEN)


def shared(host: Any) -> Any:
    """Return the number of a chunk that the peer has already."""
    return commit(host, Chunk(0, 0, 3, 64, 0, b"", grant(host))).chunks


def test_chunks_are_named_by_their_numbers(host: Any) -> None:
    known, at = shared(host), grant(host)
    name = known.item()
    inline = Chunk(1, 0, 2, 5, 0, b"bytes")
    made = commit(
        host,
        Chunk(0, name, 1, 40, 0),
        inline,
        Chunk(0, 0, 2, 4000, 0, b"", at + 4096, b"d" * 16),
        Chunk(0, 0, 4, 0, 0, b"lengths", at),
    )
    first, second, third = made.chunks.tolist()
    assert made.written.tolist() == [first, second] and third == name
    assert made.values.chunks == [
        Chunk(0, name, 1, 40, 0),
        inline,
        Chunk(0, first, 2, 4000, 0),
        Chunk(0, second, 4, 0, 0, b"lengths"),
    ]
    assert msgspec.structs.replace(made.values, chunks=[]) == values()
    assert host.space.chunks.refs(made.chunks).tolist() == [1, 1, 2]
    assert host.space.chunks.places(made.written) == [(at + 4096, 4032), (at, 64)]


def test_inline_chunks_need_no_extents(host: Any) -> None:
    sent = Chunk(1, 0, 2, 5, 0, b"bytes")
    made = commit(host, sent)
    assert made.values == values(sent) and not len(made.chunks)
    assert not commit(host).values.chunks


@pytest.mark.parametrize(
    "chunk",
    [
        Chunk(2, 0, 1, 64, 0, b"", 64),
        Chunk(-1, 0, 1, 64, 0, b"", 64),
        Chunk(0, -1, 1, 64, 0),
        Chunk(0, 1 << 64, 1, 64, 0),
        Chunk(0, 0, 1, 64, 0),
        Chunk(0, 0, 1, 64, 0, b"", -1 << 20),
        Chunk(0, 0, 1, 64, 0, b"", 65),
        Chunk(0, 0, 1, 64, 0, b"", 1 << 64),
        Chunk(0, 0, 1, 1 << 16, 0, b"", 64),
        Chunk(0, 0, 1, 1 << 64, 0, b"", 64),
        Chunk(0, 0, 1, -1, 0, b"", 64),
        Chunk(0, 0, 1, 64, 0, b"", 64, b"short"),
    ],
    ids=str,
)
def test_a_chunk_that_its_client_may_not_write_is_refused(host: Any, chunk: Chunk) -> None:
    at = grant(host)
    wrong = msgspec.structs.replace(chunk, offset=at + chunk.offset)
    with pytest.raises(ProtocolError):
        commit(host, Chunk(0, 0, 1, 64, 0, b"", at), wrong)
    assert host.space.chunks.live == 0


def test_too_many_chunks_are_refused_before_anything_is_booked(host: Any) -> None:
    chunks = [Chunk(0, 0, 1, 64, 0, b"", 64 * n) for n in range(MAX_CHUNKS_PER_MESSAGE + 1)]
    before = host.space.stats()
    with pytest.raises(LimitExceeded, match="chunks"):
        commit(host, *chunks)
    assert host.space.stats() == before


def test_a_message_returns_a_bounded_number_of_extents(host: Any) -> None:
    nothing: Any = None
    grants = Grants(host, nothing, nothing)
    before = host.space.stats()
    body = GiveBack(bytes(EXTENT.itemsize * (MAX_PIECES_PER_MESSAGE + 1)))
    with pytest.raises(LimitExceeded, match="65537 extents in one message"):
        grants.give_back(SESSION, nothing, body)
    assert host.space.stats() == before


@pytest.mark.parametrize("owners", [(THERE,), (ME, THERE), (Owner(ME.peer, 6),)])
def test_chunks_of_others_are_refused(host: Any, owners: tuple[Owner, ...]) -> None:
    """Also those of the same peer in an earlier life of its process."""
    with pytest.raises(ProtocolError, match="client's own peer"):
        commit(host, Chunk(0, 0, 1, 64, 0, b"", grant(host)), owners=owners)


@pytest.mark.parametrize("wrong", ["extent", "chunk", "freed"])
def test_what_a_refused_message_shares_is_held_no_more(host: Any, wrong: str) -> None:
    known = shared(host)
    if wrong == "freed":
        host.space.release(known)
    sent = Chunk(0, known.item(), 1, 65 if wrong == "chunk" else 64, 0)
    outside = Chunk(0, 0, 1, 64, 0, b"", 1 << 40)
    with pytest.raises(RowsGone if wrong == "freed" else ProtocolError):
        commit(host, outside, sent)
    assert host.space.alive(known).tolist() == [wrong != "freed"]
    if wrong != "freed":
        assert host.space.chunks.refs(known).tolist() == [1]
