"""Keys of rows as runs, and the index that finds a row's block by its key."""

from __future__ import annotations

import random

import numpy as np
import pytest

from dataplane.errors import RowsGone
from dataplane.metadata.shard import rows_out
from dataplane.metadata.shard.blocks import Block, KeyIndex
from dataplane.metadata.tables.bits import all_of
from dataplane.metadata.tables.keys import (
    KeyRun,
    format_minted_many,
    hash_names,
    keys_in,
    mint_many,
    records_of,
    run_in,
    some_of,
)
from dataplane.metadata.tables.pieces import Pieces, shape_of
from dataplane.wire.messages import Finish, Want
from dataplane.wire.tables import Rows
from tests.metadata.stores import Column, put, store, take, values, wrote
from tests.metadata.test_journal import copy_of


@pytest.mark.parametrize(("first", "count"), [(0, 1), (0, 256), (250, 6), (1 << 40, 16)])
def test_keys_that_count_up_in_their_last_byte_are_a_run(first: int, count: int) -> None:
    raw = mint_many(7, first, count)
    run, keys = run_in(raw), keys_in(raw)
    assert run == KeyRun(raw[:15], first % 256, count)
    assert list(run) == keys == [run[row] for row in range(len(run))]
    assert [run.index(key) for key in keys] == list(range(count))
    half = count // 2
    assert run.records(half, count) == records_of(keys, half, count) == raw[16 * half :]
    assert list(some_of(run, range(half, count))) == keys[half:]
    assert some_of(run, [0]) == keys[:1]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        mint_many(7, 250, 7),
        mint_many(7, 0, 512),
        mint_many(7, 1, 1) + mint_many(7, 0, 1),
        mint_many(7, 0, 1) + mint_many(7, 2, 1),
        mint_many(7, 0, 1) * 2,
        mint_many(7, 0, 1) + mint_many(8, 1, 1) + mint_many(7, 2, 1),
        hash_names(["a", "b"]),
        mint_many(7, 0, 2)[:-1],
    ],
)
def test_other_keys_are_no_run(raw: bytes) -> None:
    assert run_in(raw) is None


@pytest.mark.parametrize("seed", range(8))
def test_the_index_finds_what_a_dict_of_all_keys_finds(seed: int) -> None:
    """Runs, single minted keys, keys in disorder and given ones come, some where others have
    left, whose blocks still have other rows."""
    rng = random.Random(seed)
    index, model, blocks = KeyIndex(), dict[bytes, Block](), list[Block]()
    every = [key for session in (1, 2) for key in keys_in(mint_many(session, 0, 512))]
    given = keys_in(hash_names(range(64)))
    every += given
    for step in range(1_500):
        if rng.random() < 0.5 or not blocks:
            first, many = rng.randrange(len(every)), rng.choice([1, 1, 2, 5, 16, 300])
            keys = [key for key in every[first : first + many] if key not in model]
            if rng.random() < 0.2:
                rng.shuffle(keys)
            run = run_in(b"".join(keys))
            known = index.blocks_of(run or keys)
            assert known is None
            if not keys:
                continue
            kept = index.kept(run or keys, minted=keys[0] not in given)
            assert list(kept) == keys
            count = len(keys)
            block = Block(step, kept, count, all_of(count), b"", Pieces(shape_of(count, ())))
            index.add(block)
            blocks.append(block)
            model |= dict.fromkeys(keys, block)
        else:
            block = rng.choice(blocks)
            bits = block.live & rng.choice([block.live, rng.getrandbits(block.count)])
            if bits:
                index.remove(block, bits)
                block.live ^= bits
                for row in range(block.count):
                    if bits >> row & 1:
                        del model[block.keys[row]]
                if not block.live:
                    blocks.remove(block)
        assert len(index) == len(model)
        if step % 50 == 0:
            assert all((key in index) == (key in model) for key in every)
            assert [index.get(key) for key in every] == [model.get(key) for key in every]
            some = rng.sample(every, 40)
            known = index.blocks_of(some)
            assert (known or [None] * 40) == [model.get(key) for key in some]
    for block in blocks:
        index.remove(block, block.live)
        block.live = 0
    assert len(index) == 0 and not any(key in index for key in every)


def test_a_run_whose_rows_went_and_came_again_is_told_as_it_is() -> None:
    s = store(stages={"s": ["x"]}, free="acked")
    raw = mint_many(3, 16, 16)
    s.put(wrote(Rows(raw), [Column("x", values(16))]))
    taken = take(s, "s", Want("rows", 16, 1))
    assert taken.lease is not None
    s.finish(Finish(taken.lease, "ack", index=np.array([4, 5, 9], "<u4").tobytes()))
    again = raw[16 * 4 : 16 * 6]
    with pytest.raises(RowsGone):
        rows_out.find_rows(s, again)
    s.put(wrote(Rows(again), [Column("x", values(2, first=100))]))
    assert len(s) == 15
    there = [at for at in range(16) if at != 9]
    expected = b"".join([raw[16 * at : 16 * at + 16] for at in there])
    for one in (s, copy_of(s)):
        assert rows_out.find_rows(one, expected).keys == expected
        assert sorted(keys_in(one.rows.keys)) == keys_in(expected)
        assert len(one) == 15
    name = format_minted_many(again)[0]
    assert s.drop(rows=Rows(again, [name, "other"]))[0] == 2
    assert len(s) == 13


def test_rows_that_come_one_by_one_under_minted_keys_are_found_one_by_one() -> None:
    s = store(stages={"s": ["x"]})
    order = list(range(300))
    random.Random(1).shuffle(order)
    for at in order:
        s.put(wrote(Rows(mint_many(3, at, 1)), [Column("x", values(1, first=at))]))
    put(s, ["given"], fields=("x",))
    assert len(s) == 301
    raw = mint_many(3, 0, 300)
    assert rows_out.find_rows(s, raw).keys == raw
    assert s.drop(rows=Rows(raw[: 16 * 200]))[0] == 200
    assert sorted(keys_in(s.rows.keys)) == sorted([*keys_in(raw)[200:], hash_names(["given"])])
