"""The books of chunks: references, freed chunks, and outdated numbers."""

from __future__ import annotations

import numpy as np
import pytest

from dataplane.errors import RowsGone
from dataplane.memory.chunks import Chunks
from tests.chunk_numbers import chunk_numbers, indexes


def add(table: Chunks, count: int) -> np.ndarray:
    return table.add([(4096 * number, 4096) for number in range(count)], 1)


def test_a_chunk_dies_with_its_last_reference() -> None:
    table = Chunks()
    chunks = add(table, 3)
    table.hold(chunks)
    table.hold(chunks[[0, 0, 1]])
    assert table.release(chunks, 2) == [(8192, 4096, 1)]
    assert table.alive(chunks).tolist() == [True, True, False]
    freed = table.release(chunks[[0, 0, 1]])
    assert sorted(freed) == [(0, 4096, 1), (4096, 4096, 1)]
    assert table.live == 0


def test_a_column_that_names_a_chunk_several_times_counts_each() -> None:
    table = Chunks()
    chunks = add(table, 1)
    table.hold(chunks[[0] * 1000], np.arange(1000))
    assert table.refs(chunks).tolist() == [1 + 999 * 500]
    freed = table.release(chunks[[0] * 500501])
    assert freed == [(0, 4096, 1)]


def test_an_id_is_used_again_under_the_next_generation() -> None:
    table = Chunks()
    old = add(table, 2)
    table.release(old)
    new = add(table, 2)
    assert sorted(indexes(new)) == sorted(indexes(old))
    assert not table.alive(old).any()
    assert table.alive(new).all()
    with pytest.raises(RowsGone, match="2 of 2"):
        table.extents(old)


def test_releasing_what_is_dead_already_does_nothing() -> None:
    table = Chunks()
    old = add(table, 2)
    table.release(old)
    new = add(table, 2)
    assert table.release(old) == []
    assert table.release(old[[0, 1]], np.array([3, 4])) == []
    assert table.alive(new).all()


def test_holding_a_dead_chunk_changes_nothing() -> None:
    table = Chunks()
    chunks = add(table, 2)
    table.release(chunks[1:])
    with pytest.raises(RowsGone) as caught:
        table.hold(chunks)
    assert caught.value.details == {"gone": 1, "asked": 2}
    assert table.refs(chunks[:1]).tolist() == [1]


def test_names_that_never_were_are_not_alive() -> None:
    table = Chunks()
    add(table, 1)
    names = chunk_numbers([(0, 0), (1, 1), (2**32 - 1, 1), (0, 2)])
    assert not table.alive(names).any()
    assert table.release(names) == []
    assert not Chunks().alive(names).any()


def test_the_table_grows_and_ids_come_back_in_any_portion() -> None:
    table = Chunks()
    first = add(table, 5000)
    table.release(first[::2])
    table.release(first[1::4])
    more = add(table, 4000)
    assert table.live == 1250 + 4000
    assert len(np.unique(indexes(more) + indexes(first[3::4]))) == 5250
    assert table.alive(first).sum() == 1250


def test_generation_zero_is_never_given_out() -> None:
    table = Chunks()
    add(table, 1)
    table._number[0] = (2**32 - 1) << 32
    chunks = chunk_numbers([(0, 2**32 - 1)])
    table.release(chunks)
    assert add(table, 1).tolist() == chunk_numbers([(0, 1)]).tolist()
