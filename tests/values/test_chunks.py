"""Chunks: how a write is cut, what a chunk holds, what is stored once, what a message says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.client.write import chunks
from dataplane.client.write.chunks import (
    CHUNK_BYTES,
    DEDUP_BYTES,
    INLINE_BLOCK_BYTES,
    SHARED_COLUMN_BYTES,
    NewPiece,
    Unit,
    chunks_of,
    pieces_of,
    plan,
    room_of,
    select,
    unnamed,
    values_of,
    without,
)
from dataplane.client.write.columns import ValueColumn, prepare
from dataplane.client.write.copying import is_stored
from dataplane.errors import LimitExceeded
from dataplane.wire.layouts import decode
from dataplane.wire.limits import (
    ALIGNMENT_BYTES,
    INLINE_ROW_BYTES,
    MAX_CHUNKS_PER_MESSAGE,
    MAX_ROWS_PER_MESSAGE,
    NO_GROUP,
)
from dataplane.wire.packed import U4
from dataplane.wire.tables import INLINE
from tests.same import equals, same
from tests.values.conftest import PEER, planned, said_of

LENGTHS = [0, 1, 7, 60, 700, 1024, 5000]


def mixed_columns(n: int, seed: int) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    lengths = random.choice(LENGTHS, n)
    return {
        "dense": random.random((n, 3)),
        "wide": random.integers(0, 9, (n, 1100)).astype(np.int32),
        "strided": random.integers(0, 9, (n, 2, 5000)).astype(np.uint8)[:, 0],
        "big_endian": random.integers(0, 9, (n, 4)).astype(">i4"),
        "number": random.random(n),
        "flag": random.random(n) > 0.5,
        "ragged": [random.random(k).astype(np.float32) for k in lengths],
        "mrope": [np.full((3, k), k, np.int64) for k in lengths // 8],
        "grids": [np.full((k % 5, k % 3), k, np.int16) for k in lengths],
        "mixed": [np.full(k % 9, k, ("<i2", "<f8")[k % 2]) for k in lengths],
        "text": ["x\0é" * int(k) for k in lengths[::-1]],
        "bytes": [b"\0" * int(k) for k in lengths],
        "images": [{"of": [np.full((k, 2), k, np.int16)] * (k % 3)} for k in lengths.tolist()],
    }


def given_(column: Any) -> list[Any]:
    """The values of a column as they come back: in the byte order of the machine."""
    if not isinstance(column, np.ndarray):
        return list(column)
    column = column.astype(column.dtype.newbyteorder("="))
    return [column[row, ...] for row in range(len(column))]


def check(units: list[Unit], columns: list[ValueColumn]) -> None:
    """Units follow each other, a chunk belongs to one unit, and each value is in one of them."""
    n = columns[0].count
    assert [unit.first for unit in units] == [0, *(unit.last for unit in units[:-1])]
    assert units[-1].last == n
    everything = [chunk for unit in units for chunk in chunks_of(unit.pieces)]
    assert len({*everything}) == len(everything)
    assert sum(unit.nbytes for unit in units) == room_of(everything)
    for unit in units:
        rows: dict[str, list[int]] = {column.field: [] for column in columns}
        for piece in unit.pieces:
            for field in piece.fields:
                rows[field] += piece.rows
        inline = {column.field for column in unit.inline}
        every = [*range(unit.first, unit.last)]
        assert all(sorted(some) == ([] if f in inline else every) for f, some in rows.items())
        for chunk in chunks_of(unit.pieces):
            assert len(b"".join(chunk.image())) == chunk.nbytes
            assert len(decode(chunk.layout)) == len(chunk.columns)
            starts = [start for _, start in chunk.places()]
            assert not any(start % ALIGNMENT_BYTES for start in starts)
            values = sum(one.nbytes for one in chunk.columns)
            assert values <= CHUNK_BYTES or chunk.rows == 1


def comes_back(arena: Any, columns: dict[str, Any], group: Any, inline: bool, n: int) -> None:
    prepared = prepare(columns)
    units, order = planned(prepared, group, inline)
    check(units, prepared)
    if group is not None:
        together = group if order is None else group[order]
        for unit in units:
            assert len({*together[unit.first : unit.last].tolist()}) == 1
    for name, values in arena.put(columns, group).items():
        assert all(map(same, values, given_(columns[name]))), name


@given(
    n=st.integers(1, 60),
    seed=st.integers(0, 99),
    groups=st.none() | st.lists(st.sampled_from([0, 1, 2, 3, NO_GROUP]), min_size=60, max_size=60),
    inline=st.booleans(),
)
@settings(max_examples=50)
def test_everything_comes_back_however_it_is_cut(
    new_arena: Any, n: int, seed: int, groups: list[int] | None, inline: bool
) -> None:
    group = None if groups is None else np.array(groups[:n], U4)
    comes_back(new_arena(16 << 20), mixed_columns(n, seed), group, inline, n)


def test_many_rows_come_back(new_arena: Any) -> None:
    columns = mixed_columns(600, 1) | {
        "large": [np.zeros((2 << 20) * (r == 7), "u1") for r in range(600)]
    }
    comes_back(new_arena(64 << 20), columns, None, True, 600)


def test_as_many_fields_as_there_may_be_come_back(arena: Any) -> None:
    columns = {f"f{k}": [np.full(k * row, k, np.uint8) for row in range(20)] for k in range(64)}
    comes_back(arena, columns, np.zeros(20, U4), True, 20)


def test_the_bytes_of_a_chunk_say_where_its_rows_are() -> None:
    columns: dict[str, Any] = {
        "tokens": [np.arange(n) for n in (3, 0, 5)],
        "text": ["a", "\0", ""],
        "score": np.array([0.5, 1.5, 2.5], np.float32),
        "mrope": [np.full((3, n), n, np.int64) for n in (1, 0, 2)],
        "both": [np.zeros((n, 2 * n), np.int8) for n in (1, 2, 3)],
    }
    (unit,) = plan(prepare(columns))[0]
    (chunk,) = chunks_of(unit.pieces)
    memory = b"".join(chunk.image())
    lengths = np.frombuffer(memory, U4, 3 + 3 + 3 + 6).tolist()
    assert lengths == [3, 0, 5, 1, 1, 0, 1, 0, 2, 1, 2, 2, 4, 3, 6]
    places = {one.field: at for one, at in chunk.places()}
    assert list(places.values()) == [64, 128, 192, 256, 384]
    tokens = np.concatenate(columns["tokens"]).tobytes()
    assert memory[64 : 64 + len(tokens)] == tokens
    assert memory[128:130] == b"a\0"
    assert memory[192:204] == np.array([0.5, 1.5, 2.5], np.float32).tobytes()


def test_a_chunk_for_a_device_has_its_lengths_beside_it() -> None:
    columns = prepare({"tokens": [np.arange(n) for n in (3, 0, 5)]})
    _, (unit,) = plan([], others=[columns])
    (chunk,) = chunks_of(unit.pieces)
    assert np.frombuffer(chunk.beside, U4).tolist() == [3, 0, 5]
    assert chunk.nbytes == 64 and b"".join(chunk.image()) == np.arange(3).tobytes() + (
        np.arange(5).tobytes()
    )
    assert said_of(unit.pieces).chunks[0].inline == chunk.beside


def test_object_rows_are_padded_to_16_bytes() -> None:
    leaf = np.arange(9, dtype=np.int16)
    (unit,) = plan(prepare({"x": [{"a": leaf, "b": "t"}, ["no arrays"], None]}))[0]
    (chunk,) = chunks_of(unit.pieces)
    memory = b"".join(chunk.image())
    assert not chunk.nbytes % 16
    lengths = np.frombuffer(memory, U4, 3).tolist()
    assert chunk.nbytes == 64 + sum(-(-length // 16) * 16 for length in lengths)
    assert (memory.index(leaf.tobytes()) - 64) % 16 == 0


def sizes_of(unit: Unit) -> list[int]:
    return [chunk.nbytes for chunk in chunks_of(unit.pieces)]


def sizes(columns: dict[str, Any], **options: Any) -> list[list[int]]:
    return [sizes_of(unit) for unit in plan(prepare(columns), **options)[0]]


def test_large_columns_have_chunks_of_their_own_and_small_ones_share_one() -> None:
    n = 16
    columns = {
        "large": np.zeros((n, SHARED_COLUMN_BYTES // n + 1), np.uint8),
        "a": np.zeros((n, 100), np.uint8),
        "b": np.zeros((n, 64), np.uint8),
    }
    own, shared = SHARED_COLUMN_BYTES + n, n * 164
    group = [0] * n
    assert sizes(columns, groups=group) == [[own, shared]]
    assert sizes(columns, groups=group, inline=True) == [[own]]


def test_rows_without_a_group_are_cut_every_32() -> None:
    units = plan(prepare({"x": np.zeros((300, 4096), np.uint8)}))[0]
    assert [unit.last - unit.first for unit in units] == [32] * 8 + [32, 12]
    units = plan(prepare({"x": np.zeros((8, 4096), np.uint8)}), unit_bytes=10_000)[0]
    assert [unit.last - unit.first for unit in units] == [2] * 4
    units = plan(prepare({"x": np.zeros((3, 4096), np.uint8)}), unit_bytes=100)[0]
    assert [unit.last - unit.first for unit in units] == [1] * 3


def test_a_chunk_has_a_mebibyte_and_a_larger_value_is_alone() -> None:
    group = [0] * 7
    assert sizes({"x": np.zeros((7, 300_000), np.uint8)}, groups=group) == [
        [900_000, 900_000, 300_000]
    ]
    ragged = [np.zeros(k, np.uint8) for k in (10, CHUNK_BYTES + 1, 20, 30)]
    lengths = [U4.itemsize * rows for rows in (1, 1, 2)]
    aligned = [-(-n // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for n in lengths]
    expected = [a + n for a, n in zip(aligned, (10, CHUNK_BYTES + 1, 50), strict=True)]
    assert sizes({"x": ragged}, groups=group[:4]) == [expected]


def test_a_group_is_one_unit_whatever_it_takes() -> None:
    group = [0, 1, 1, 1, 1, 2, 2]
    units = plan(prepare({"x": np.zeros((7, 1 << 19), np.uint8)}), group)[0]
    assert [(unit.first, unit.last) for unit in units] == [(0, 1), (1, 5), (5, 7)]
    assert [unit.nbytes for unit in units] == [1 << 19, 4 << 19, 2 << 19]


def test_rows_of_scattered_groups_are_brought_together() -> None:
    group = np.array([5, 5, NO_GROUP, 7, 5, NO_GROUP, 7, 2], U4)
    units, order = planned(prepare({"x": np.zeros((8, 5000), np.uint8)}), group)
    assert order is not None
    assert [order[unit.first : unit.last] for unit in units] == [[0, 1, 4], [2], [3, 6], [5], [7]]


def test_a_group_with_more_rows_than_a_message_takes_is_refused() -> None:
    n = MAX_ROWS_PER_MESSAGE + 1
    group = [0] + [1] * n
    large = prepare({"x": np.zeros(n + 1, np.int8)})
    with pytest.raises(LimitExceeded, match=rf"group 'b' has {n} rows.*split the group across"):
        plan(large, group, group_names=["a", "b"])


def test_a_group_with_more_chunks_than_a_message_takes_is_refused() -> None:
    n = MAX_CHUNKS_PER_MESSAGE + 1
    values = np.zeros((n, DEDUP_BYTES), np.uint8)
    values[:, :4] = np.arange(n, dtype=U4)[:, None].view(np.uint8)
    images, group = prepare({"x": values}, dedup=("x",)), [0] * n
    with pytest.raises(
        LimitExceeded, match=rf"need {n} chunks.*split the group across several calls"
    ):
        plan(images, group)
    assert len(plan(images)[0]) == -(-n // 32)
    half = values[: n // 2 + 1]
    images, others = prepare({"x": half}, dedup=("x",)), prepare({"y": half}, dedup=("y",))
    with pytest.raises(LimitExceeded, match="fewer fields per call"):
        plan(images, group[: len(half)], others=[others])


def test_columns_of_other_memories_are_cut_at_the_same_rows() -> None:
    large = prepare({"x": np.zeros((3, 20 << 20), np.uint8)})
    nothing, units = plan([], others=[large])
    assert [sizes_of(unit) for unit in nothing] == [[], [], []]
    assert [(u.first, u.last) for u in units] == [(0, 1), (1, 2), (2, 3)]


# inline


@given(n=st.integers(1, 300), seed=st.integers(0, 99), grouped=st.booleans())
@settings(max_examples=40)
def test_inline_bytes_keep_to_the_budget_of_a_block_and_a_row(
    n: int, seed: int, grouped: bool
) -> None:
    group = [row // 20 for row in range(n)] if grouped else None
    units = plan(prepare(mixed_columns(n, seed)), group, True)[0]
    inline = [chunk for chunk in chunks_of(pieces_of(units)) if chunk.is_inline]
    assert len(inline) <= (-(-n // 20) if grouped else -(-n // chunks.BLOCK_ROWS))
    for chunk in inline:
        assert chunk.data is not None and chunk.nbytes == len(chunk.data)
        assert chunk.nbytes <= min(INLINE_BLOCK_BYTES, INLINE_ROW_BYTES * chunk.rows)


def test_a_run_that_ends_inside_of_a_block_has_its_small_values(arena: Any) -> None:
    columns = {"small": np.arange(300), "large": np.zeros((300, 1000))}
    units = plan(prepare(columns), None, True)[0]
    for run in (units[:3], units[3:5], units[5:]):
        pieces = pieces_of(run)
        arena.write(chunks_of(pieces))
        first = run[0].first
        values = values_of(PEER, pieces, first)
        (small,) = [piece for piece in values.pieces if values.chunks[piece.chunk].owner][:1]
        assert small.base == 0
    assert [piece.rows for piece in pieces_of(units) if piece.chunk.is_inline] == [
        range(256),
        range(256, 300),
    ]


def test_the_smallest_columns_go_inline() -> None:
    n = 16
    columns = {f"f{k}": np.zeros((n, k), np.uint8) for k in (400, 8, 100, 64, 200)}
    (unit,) = plan(prepare(columns), [0] * n, True)[0]
    assert {one.field for one in unit.inline} == {"f8", "f64", "f100", "f200"}


def test_what_was_inline_lands_in_chunks(arena: Any) -> None:
    columns = {"a": np.zeros(300), "b": np.arange(300), "t": ["x" * (n % 7) for n in range(300)]}
    pieces = pieces_of(plan(prepare(columns), None, True)[0])
    assert all(chunk.is_inline for chunk in chunks_of(pieces))
    for chunk in chunks_of(pieces):
        chunk.land()
    arena.write(chunks_of(pieces))
    said = said_of(pieces)
    assert not said.inline_bytes and len(said.chunks) == 2
    for name, view in arena.views(pieces).items():
        assert equals(view, given_(columns[name]))


# what a message says


def test_a_message_names_each_chunk_once(arena: Any) -> None:
    columns = mixed_columns(100, 3)
    pieces = pieces_of(plan(prepare(columns), None, True)[0])
    arena.write(chunks_of(pieces), arena.extents(*[1 << 20] * 4)[::-1])
    said = said_of(pieces)
    own = [chunk for chunk in said.chunks if not chunk.inline]
    wrote = [(chunk.offset, chunk.nbytes) for chunk in unnamed(pieces)]
    assert [(chunk.offset, chunk.nbytes) for chunk in own] == wrote
    assert {piece.chunk for piece in said.pieces} == {*range(len(said.chunks))}
    assert said.owners == [PEER, INLINE]
    assert set(said.fields) == set(columns)


@given(
    n=st.integers(1, 120), seed=st.integers(0, 99), taken=st.sets(st.integers(0, 119), min_size=1)
)
@settings(max_examples=60)
def test_some_rows_name_just_the_chunks_that_they_need(
    new_arena: Any, n: int, seed: int, taken: set[int]
) -> None:
    rows = np.array(sorted(row for row in taken if row < n) or [0])
    columns = mixed_columns(n, seed)
    for inline in (False, True):
        pieces = pieces_of(plan(prepare(columns), None, inline)[0])
        arena = new_arena(8 << 20)
        arena.write(chunks_of(pieces))
        some = select(pieces, rows.tolist())
        for name, view in arena.views(some).items():
            assert all(map(same, view, [given_(columns[name])[row] for row in rows.tolist()])), name
        used = {row // 32 for row in rows.tolist()}
        chosen = {*chunks_of(some)}
        mine = [p for p in pieces if p.chunk in chosen and not p.chunk.is_inline]
        assert {p.rows[0] // 32 for p in mine} <= used


def test_a_field_may_be_left_out_of_what_was_written(arena: Any) -> None:
    columns = {"a": np.arange(5), "b": np.arange(5.0), "large": np.zeros((5, 9000), np.uint8)}
    pieces = pieces_of(plan(prepare(columns))[0])
    arena.write(chunks_of(pieces))
    kept = without(pieces, {"a", "large"})
    assert len(chunks_of(kept)) == 1
    (view,) = arena.views(kept).values()
    assert view.field == "b" and equals(view, given_(columns["b"]))


def test_a_chunk_that_the_peer_has_is_named_by_its_number(arena: Any) -> None:
    columns = {"x": np.zeros((64, 4096), np.uint8), "i": list(range(64))}
    pieces = pieces_of(plan(prepare(columns))[0])
    arena.write(chunks_of(pieces))
    first, *others = chunks_of(pieces)
    first.number = 3 << 32 | 7
    assert unnamed(pieces) == others
    said = said_of(pieces)
    assert said.pieces[0].chunk == 0
    assert [chunk.number for chunk in said.chunks] == [first.number] + [0] * len(others)


# dedup


def picture(seed: int, nbytes: int = 5000) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes).astype(np.uint8)


def written(arena: Any, prepared: list[ValueColumn], group: Any = None) -> list[NewPiece]:
    units, _ = planned(prepared, group)
    pieces = pieces_of(units)
    arena.write(chunks_of(pieces))
    return pieces


def test_equal_values_of_a_put_are_stored_once(arena: Any) -> None:
    one, other, large = picture(1), picture(2), picture(3, 100_000)
    columns: dict[str, list[Any]] = {
        "pixels": [one, one, one.copy(), other],
        "chat": [{"image": large}, {"image": one}, ["x", large, large.copy()], "x" * 9000],
        "tokens": [one, one, one, one],
    }
    pieces = written(arena, prepare(columns, dedup=["pixels", "chat"]))
    deduplicated = [chunk for chunk in chunks_of(pieces) if chunk.digest]
    assert len(deduplicated) == 2 + 4
    for name, view in arena.views(pieces).items():
        assert equals(view, columns[name])


def test_values_are_found_equal_across_units(arena: Any) -> None:
    columns = {"x": [picture(n % 3) for n in range(100)]}
    units, _ = planned(prepare(columns, dedup=["x"]))
    found = [chunks_of(unit.pieces) for unit in units]
    assert len(found) == 4 and all({*one} == {*found[0]} and len(one) == 3 for one in found)
    assert [unit.nbytes for unit in units] == [room_of(found[0]), 0, 0, 0]
    pieces = written(arena, prepare(columns, dedup=["x"]))
    assert equals(arena.views(pieces)["x"], columns["x"])


def test_small_values_are_never_looked_at(arena: Any) -> None:
    pieces = written(arena, prepare({"x": [picture(1, 4095)] * 3}, dedup=["x"]))
    assert [chunk.digest for chunk in chunks_of(pieces)] == [b""]


def test_rows_of_a_dense_column_are_found_equal_too(arena: Any) -> None:
    dense = np.stack([picture(1), picture(2), picture(1)])
    group = np.array([0, 1, 0], U4)
    pieces = written(arena, prepare({"x": dense}, dedup=["x"]), group)
    assert len(chunks_of(pieces)) == 2
    everywhere = np.broadcast_to(picture(1), (8, 5000))
    assert len(chunks_of(written(arena, prepare({"x": everywhere}, dedup=["x"])))) == 1


def test_bytes_are_compared_before_they_are_shared(arena: Any) -> None:
    (chunk,) = chunks_of(written(arena, prepare({"x": [picture(1)]}, dedup=["x"])))
    stored = arena.memory[chunk.offset : chunk.offset + chunk.nbytes]
    assert is_stored(chunk, stored)
    stored[-1] ^= 1
    assert not is_stored(chunk, stored)


def test_hash_collisions_share_nothing(arena: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xxhash, "xxh3_128_digest", lambda _: bytes(range(16)))
    columns = {"x": [picture(1), picture(2), picture(1)]}
    pieces = written(arena, prepare(columns, dedup=["x"]))
    assert sorted(bool(chunk.digest) for chunk in chunks_of(pieces)) == [False, True]
    assert equals(arena.views(pieces)["x"], columns["x"])
