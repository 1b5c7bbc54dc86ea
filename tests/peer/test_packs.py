"""Small values that ride in a grant: which do, what is refused, and where they come to lie."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from dataplane.errors import ProtocolError
from dataplane.memory.admission import Admission
from dataplane.memory.arena import Arena
from dataplane.memory.space import Space
from dataplane.peer import packs
from dataplane.peer.rows import flat_values
from dataplane.wire.limits import ABSENT, INLINE, MAX_GRANT_PACKS, PACK_BLOCK_BYTES
from dataplane.wire.records import RANGE, VALUE
from dataplane.wire.tables import Column, Owner, Rows, Spec, Table

HERE, ELSEWHERE = Owner("a", 7), Owner("b", 8)
SPECS = [Spec("array", "uint8", (-1,))]


class Supplier:
    """An arena whose every byte is its offset modulo 251, with one range over its first MiB."""

    def __init__(self) -> None:
        self.arena = Arena.create(4 << 20, "test")
        self.arena.view[:] = (np.arange(4 << 20) % 251).astype(np.uint8).tobytes()
        self.space = Space(self.arena.size_bytes)
        _, extents = self.space.reserve(1, Admission.OPEN, [np.array([1 << 20], np.uint64)])
        (self.range,) = self.space.commit(1, extents, 1, Admission.OPEN).tolist()

    def table(self, values: list[tuple[int, int]], owner: int = 0) -> Table:
        """Rows whose values have this delta and these bytes."""
        records = np.zeros(len(values), VALUE)
        records["range"], records["generation"] = self.range
        records["delta"], records["nbytes"] = np.array(values).T
        records["owner"] = owner
        column = Column("x", records.tobytes())
        return Table(Rows(bytes(16 * len(values))), [column], SPECS, [HERE, ELSEWHERE])

    def inlined(self, table: Table) -> tuple[Table, list[bytes]]:
        return packs.inlined(table, HERE, self.space, self.arena)


@pytest.fixture
def supplier() -> Iterator[Supplier]:
    made = Supplier()
    yield made
    made.arena.close()


def read(table: Table, blocks: list[bytes]) -> list[bytes]:
    return [
        blocks[int(v["range"])][int(v["delta"]) : int(v["delta"]) + int(v["nbytes"])]
        for v in flat_values(table.columns)
        if v["owner"] == INLINE
    ]


def test_small_values_ride_along_and_come_out_as_they_were(supplier: Supplier) -> None:
    values = [(0, 5), (64, 4095), (6400, 0), (64, 4095)] + [(64 * n, 3000) for n in range(60)]
    table, blocks = supplier.inlined(supplier.table(values))
    expected = [bytes(supplier.arena.view[at : at + n]) for at, n in values]
    assert read(table, blocks) == expected
    assert all(len(block) <= PACK_BLOCK_BYTES for block in blocks)
    packs.check(table, blocks)
    ranges = np.array([(9, 1), (10, 1), (11, 1), (12, 1)], RANGE)
    flat = flat_values(packs.landed(table, ranges, ELSEWHERE).columns)
    assert set(flat["owner"].tolist()) == {1} and set(flat["range"].tolist()) <= {9, 10, 11, 12}


def test_large_values_those_of_other_peers_and_absent_ones_stay_where_they_are(
    supplier: Supplier,
) -> None:
    for table in (
        supplier.table([(0, (32 << 10) + 1)]),
        supplier.table([(0, 8)], owner=1),
        supplier.table([(0, 8)], owner=ABSENT),
    ):
        assert supplier.inlined(table) == (table, [])


def test_a_few_values_ride_whole_unless_a_larger_one_is_read_in_bulk_anyway(
    supplier: Supplier,
) -> None:
    few = [(0, 32 << 10), (32 << 10, 5), (40 << 10, 20 << 10)]
    table, blocks = supplier.inlined(supplier.table(few))
    assert read(table, blocks) == [bytes(supplier.arena.view[at : at + n]) for at, n in few]
    for more in ([*few, (0, (32 << 10) + 1)], [(64 * n, 32 << 10) for n in range(9)] + few[1:2]):
        table, blocks = supplier.inlined(supplier.table(more))
        assert read(table, blocks) == [bytes(supplier.arena.view[32 << 10 : (32 << 10) + 5])]


def test_more_than_a_grant_carries_is_left_to_the_bulk_path(supplier: Supplier) -> None:
    most = MAX_GRANT_PACKS * PACK_BLOCK_BYTES // 64
    distinct = [(64 * (n % 1000) + n // 1000, 1) for n in range(most)]
    _, blocks = supplier.inlined(supplier.table(distinct))
    assert sum(map(len, blocks)) == MAX_GRANT_PACKS * PACK_BLOCK_BYTES
    table = supplier.table([*distinct, (63, 1)])
    assert supplier.inlined(table) == (table, [])


def test_values_beyond_their_pack_and_too_many_packs_are_refused(supplier: Supplier) -> None:
    table, (block,) = supplier.inlined(supplier.table([(0, 100), (128, 100)]))
    for bad in ([], [block[:100]], [block] * 5, [b""], [bytes(PACK_BLOCK_BYTES + 1)]):
        with pytest.raises(ProtocolError):
            packs.check(table, bad)
