"""Parcels: what lies together, what is packed, what is stored once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.client.read.views import same
from dataplane.client.write import dedup, layout
from dataplane.client.write.few import lay_few
from dataplane.client.write.filling import inline_of
from dataplane.client.write.layout import Parcel, join, plan, plan_beside
from dataplane.client.write.values import Prepared, prepare
from dataplane.errors import LimitExceeded
from dataplane.wire.limits import (
    ALIGNMENT_BYTES,
    MAX_ROWS_PER_MESSAGE,
    NO_GROUP,
    PACK_BLOCK_BYTES,
    PACK_LIMIT_BYTES,
)

U4 = np.dtype("<u4")


def check_records(parcel: Parcel) -> None:
    """Every value lies inside its range, aligned, and no two overlap unless they are shared."""
    sizes = parcel.sizes.tolist()
    ends: dict[int, list[tuple[int, int]]] = {}
    for cells in parcel.cells:
        for record in (*cells.values, *cells.leaves):
            start, length = int(record["delta"]), int(record["nbytes"])
            assert start % ALIGNMENT_BYTES == 0 and record["generation"] == record["owner"] == 0
            assert start + length <= sizes[record["range"]]
            ends.setdefault(int(record["range"]), []).append((start, start + length))
            if length >= PACK_LIMIT_BYTES:
                assert start == 0 and sizes[record["range"]] == length
    assert sorted(ends) == list(range(len(sizes)))
    for number, stretches in ends.items():
        if len(stretches) > 1:
            assert sizes[number] <= PACK_BLOCK_BYTES
            stretches.sort()
            for (_, end), (start, _) in zip(stretches, stretches[1:], strict=False):
                assert end <= start


def mixed_columns(n: int, seed: int) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    lengths = random.choice([0, 1, 7, 60, 700, 1024, 5000], n)
    return {
        "dense": random.random((n, 3)),
        "wide": random.integers(0, 9, (n, 1100)).astype(np.int32),
        "ragged": [random.random(k).astype(np.float32) for k in lengths],
        "text": ["x" * int(k) for k in lengths[::-1]],
        "images": [{"of": [np.full((k, 2), k, np.int16)] * (k % 3)} for k in lengths.tolist()],
    }


@given(
    n=st.integers(1, 60),
    seed=st.integers(0, 99),
    groups=st.none() | st.lists(st.sampled_from([0, 1, 2, 3, NO_GROUP]), min_size=60, max_size=60),
)
@settings(max_examples=60, deadline=None)
def test_everything_comes_back_however_it_is_cut(
    new_arena: Any, n: int, seed: int, groups: list[int] | None
) -> None:
    columns = mixed_columns(n, seed)
    group = None if groups is None else np.array(groups[:n], U4)
    prepared = prepare(columns)
    for parcel in plan(prepared, group):
        check_records(parcel)
    for name, values in new_arena(32 << 20).put(columns, group).items():
        assert all(map(same, values, columns[name]))


@pytest.mark.parametrize("seed", range(8))
def test_rows_of_scattered_groups_are_brought_together_with_their_leaves(
    arena: Any, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(layout, "PARCEL_BYTES", 16_384)
    n = 90
    columns = mixed_columns(n, seed)
    group = np.random.default_rng(seed).choice([0, 1, 2, 3, 4, NO_GROUP], n).astype(U4)
    parcels = plan(prepare(columns), group)
    assert len(parcels) > 5
    assert sorted(row for p in parcels for row in p.rows.tolist()) == list(range(n))
    seen: set[int] = set()
    for parcel in parcels:
        check_records(parcel)
        here = set(group[parcel.rows].tolist()) - {NO_GROUP}
        assert not here & seen
        seen |= here
        views = arena.views(parcel, arena.write(parcel))
        for name, view in views.items():
            assert view.equals([columns[name][row] for row in parcel.rows.tolist()])


def test_dense_rows_at_irregular_places_are_copied_in_pieces(arena: Any) -> None:
    dense = np.arange(6 << 19, dtype=np.int64).astype(np.uint8).reshape(6, -1)
    texts = ["x" * (5000 + 64 * row * row) for row in range(6)]
    whole = join(plan(prepare({"x": dense, "t": texts})))
    views = arena.views(whole, arena.write(whole))
    assert views["x"].equals(list(dense)) and views["t"].equals(texts)


def test_small_parcels_take_whole_groups_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "PARCEL_BYTES", 20_000)
    group = np.array([5, 5, NO_GROUP, 7, 5, NO_GROUP, 7, 2], U4)
    parcels = plan(prepare({"x": np.zeros((8, 5000), np.uint8)}), group)
    assert [parcel.rows.tolist() for parcel in parcels] == [[0, 1, 4], [2, 3, 6], [5, 7]]
    for parcel in parcels:
        check_records(parcel)
        assert parcel.nbytes <= 20_000


def test_a_large_group_is_one_parcel_alone() -> None:
    group = np.repeat(np.arange(3, dtype=U4), [1, 4, 2])
    parcels = plan(prepare({"x": np.zeros((7, 1 << 19), np.uint8)}), group)
    assert [parcel.rows.tolist() for parcel in parcels] == [[0], [1, 2, 3, 4], [5, 6]]
    assert [parcel.nbytes for parcel in parcels] == [1 << 19, 4 << 19, 2 << 19]


def test_a_group_with_more_rows_than_a_message_takes_is_refused() -> None:
    n = MAX_ROWS_PER_MESSAGE + 1
    group = np.append(np.zeros(1, U4), np.ones(n, U4))
    large = [prepare({"x": np.zeros(n + 1, np.int8)})]
    with pytest.raises(
        LimitExceeded, match=rf"group 'b' has {n} rows.*split the group across several"
    ):
        plan_beside(large, group, group_names=["a", "b"])


def test_fields_that_all_go_elsewhere_leave_parcels_without_ranges() -> None:
    large = prepare({"x": np.zeros((3, 1 << 20), np.uint8)})
    nothing, parcels = plan_beside([Prepared(3, [], []), large])
    assert [len(p.sizes) for p in nothing] == [0, 0, 0]
    assert [p.sizes.tolist() for p in parcels] == [[1 << 20]] * 3


def test_few_and_many_values_are_laid_out_by_one_rule() -> None:
    for seed in range(30):
        columns = mixed_columns(4, seed)
        if seed >= 20:  # several blocks
            columns["blocks"] = [np.zeros(2_000 + seed, np.uint8)] * 4
            columns |= {f"b{n}": np.zeros((4, 3_000 + 17 * n), np.uint8) for n in range(12)}
        prepared = prepare(columns)
        for inline in (False, True):
            (parcel,) = plan(prepared, inline=inline)
            few = lay_few(prepared, inline)
            assert few is not None
            if not inline:
                check_records(parcel)
            assert few.sizes == parcel.sizes.tolist() and few.nbytes == parcel.nbytes
            assert few.inline == inline_of(parcel) and bool(few.inline) == inline
            assert few.columns == [cells.wire() for cells in parcel.cells]


def test_a_hundred_thousand_rows_pack_densely() -> None:
    n = 100_000
    parcels = plan(prepare({"x": np.zeros((n, 2)), "i": list(range(n))}))
    sizes = np.concatenate([parcel.sizes for parcel in parcels])
    assert sizes.max() <= PACK_BLOCK_BYTES and sizes.sum() == 2 * 64 * n
    assert np.concatenate([parcel.rows for parcel in parcels]).tolist() == list(range(n))
    check_records(parcels[-1])


def test_ranges_may_lie_in_many_extents_in_any_order(arena: Any) -> None:
    columns = mixed_columns(50, 3)
    parcels = plan(prepare(columns))
    extents = arena.extents(*[1 << 16] * 60)[::-1]
    whole = join(parcels)
    views = arena.views(whole, arena.write(whole, extents))
    for name, view in views.items():
        assert view.equals(columns[name])


def test_joined_parcels_are_one(arena: Any) -> None:
    columns = {
        "x": np.arange(6 << 19, dtype=np.int64).astype(np.uint8).reshape(6, -1),
        "t": [*"abcdef"],
    }
    parcels = plan(prepare(columns))
    assert len(parcels) > 2
    part = join(parcels[1:3])
    check_records(part)
    assert part.sizes.tolist() == [size for p in parcels[1:3] for size in p.sizes.tolist()]
    views = arena.views(part, arena.write(part))
    assert list(views["t"]) == [columns["t"][row] for row in part.rows.tolist()]
    assert (np.stack(list(views["x"])) == columns["x"][part.rows]).all()
    assert "ranges" in repr(part)


# dedup


def image(seed: int, nbytes: int = 5000) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes).astype(np.uint8)


def test_equal_values_of_a_put_are_stored_once(arena: Any) -> None:
    one, other = image(1), image(2)
    columns = {
        "pixels": [one, one, one.copy(), other],
        "chat": [{"image": one}, {"image": other}, ["x", one], "x" * 9000],
        "tokens": [one, one, one, one],
    }
    (parcel,) = plan(prepare(columns, dedup=["pixels", "chat"]))
    cells = {c.field: c for c in parcel.cells}
    pixels, leaves = cells["pixels"].values["range"], cells["chat"].leaves["range"]
    assert pixels[0] == pixels[1] == pixels[2] == leaves[0] == leaves[2]
    assert pixels[3] == leaves[1] != pixels[0]
    assert len(set(cells["tokens"].values["range"].tolist())) == 4
    assert parcel.digests["nbytes"].tolist() == [5000, 5000, 9003]
    assert parcel.sizes[parcel.digest_ranges].tolist() == [5000, 5000, 9003]
    assert (parcel.bytes_of(0) == one).all()
    for name, view in arena.views(parcel, arena.write(parcel)).items():
        assert view.equals(columns[name])


def test_small_values_are_never_looked_at() -> None:
    (parcel,) = plan(prepare({"x": [image(1, 4095)] * 3}, dedup=["x"]))
    assert len(parcel.digests) == 0 and len(parcel.sizes) == 1


def test_known_values_are_shared_instead_of_written(arena: Any) -> None:
    columns = {"pixels": [image(1), image(2), image(1), image(3)], "i": [1, 2, 3, 4]}
    (first,) = plan(prepare(columns, dedup=["pixels"]))
    stored = arena.write(first)[first.digest_ranges]
    (again,) = plan(prepare(columns, dedup=["pixels"]))
    assert (again.digests == first.digests).all()
    known = np.array([True, False, True])
    again.share(known)
    assert len(again.sizes) == 2 and len(again.digests) == 1
    assert (again.bytes_of(0) == image(2)).all()
    own = arena.write(again)
    for name, view in arena.views(again, np.concatenate([own, stored[known]])).items():
        assert view.equals(columns[name])


def test_a_parcel_of_which_all_is_known_writes_nothing(arena: Any) -> None:
    columns = {"pixels": [image(1), image(2)]}
    (first,) = plan(prepare(columns, dedup=["pixels"]))
    stored = arena.write(first)
    (again,) = plan(prepare(columns, dedup=["pixels"]))
    again.share([True, True])
    assert len(again.sizes) == again.nbytes == 0
    arena.write(again)
    assert arena.views(again, stored)["pixels"].equals(columns["pixels"])


def test_copies_in_later_parcels_say_so_and_join_with_what_is_shared(arena: Any) -> None:
    large = image(1, 1 << 20)
    columns = {"x": [large, image(2, 1 << 20), large.copy(), image(3, 1 << 20)]}
    parcels = plan(prepare(columns, dedup=["x"]))
    limits = (100, 1 << 30, 1, 1 << 30)
    assert [parcel.run(*limits) for parcel in parcels] == [2, 2, 4, 4]
    stored = arena.write(parcels[0])
    parcels[2].share([True])
    rest = join(parcels[1:])
    assert len(rest.sizes) == 2
    offsets = np.concatenate([arena.write(rest), stored])
    assert arena.views(rest, offsets)["x"].equals(columns["x"][1:])


def test_rows_of_a_dense_column_are_found_equal_too() -> None:
    dense = np.stack([image(1), image(2), image(1)])
    group = np.array([0, 1, 0], U4)
    (parcel,) = plan(prepare({"x": dense}, dedup=["x"]), group)
    assert len(parcel.sizes) == 2
    (parcel,) = plan(prepare({"x": np.broadcast_to(image(1), (8, 5000))}, dedup=["x"]))
    assert len(parcel.sizes) == 1


def test_hash_collisions_share_nothing(arena: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dedup.xxhash, "xxh3_128_digest", lambda _: bytes(16))
    columns = {"x": [image(1), image(2), image(1)]}
    (parcel,) = plan(prepare(columns, dedup=["x"]))
    assert len(parcel.sizes) == 2 and len(parcel.digests) == 1
    assert arena.views(parcel, arena.write(parcel))["x"].equals(columns["x"])
