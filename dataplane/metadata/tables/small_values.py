"""Small values that live in the shard: blocks of bytes, each what one message brought.

A store's VALUE record of such a value has the owner number `HERE`, the block's number as `range`,
and where it starts in the block as `generation`; a record is one reference. A block is kept as it
came, and goes with the last value that is in it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dataplane.errors import ProtocolError
from dataplane.memory.extents import every
from dataplane.metadata.tables.columns import Array
from dataplane.metadata.tables.incoming import ColumnIn
from dataplane.wire.limits import INLINE_ALIGNMENT_BYTES, INLINE_LIMIT_BYTES, PACK_BLOCK_BYTES
from dataplane.wire.records import VALUE, joined
from dataplane.wire.tables import INLINE, Owner

HERE = 0
"""The number of the owner `INLINE` in every store."""

_STEP = INLINE_ALIGNMENT_BYTES
_FEW = 8
"""Records up to which Python is faster than numpy's fixed cost."""


def check_inline(columns: Sequence[ColumnIn], owners: Sequence[Owner], inline: bytes) -> None:
    """ProtocolError unless what the columns name of `inline` is there, and all of it small."""
    number = owners.index(INLINE) if INLINE in owners else -1
    if number < 0:
        if inline:
            raise ProtocolError(f"{len(inline)} bytes of values that no owner is named for")
        return
    records = joined([part for one in columns for part in (one.values, one.leaves)], VALUE)
    here = records["owner"] == number
    mine = records if every(here) else records[here]
    if not len(mine):
        raise ProtocolError("values are said to be in the message, and none is")
    starts, sizes = mine["range"].astype(np.int64), mine["nbytes"]
    if int(np.maximum.reduce(sizes)) > INLINE_LIMIT_BYTES:
        raise ProtocolError(
            f"a value of {int(sizes.max())} bytes is to live in the shard; the limit is "
            f"{INLINE_LIMIT_BYTES}",
            limit=INLINE_LIMIT_BYTES,
        )
    ends = starts + _room(sizes.astype(np.int64))
    if int(np.maximum.reduce(ends)) > len(inline) or np.count_nonzero(starts % _STEP):
        raise ProtocolError("a value lies outside the message, or at no multiple of 8 in it")


class Blocks:
    """The blocks of one store."""

    def __init__(self) -> None:
        self._data: list[bytes] = []
        self._refs: list[int] = []
        self._free: list[int] = []
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._data) - len(self._free)

    def add(self, data: bytes, refs: int) -> int:
        """A new block that so many values are in; its number."""
        self.nbytes += len(data)
        if self._free:
            number = self._free.pop()
            self._data[number], self._refs[number] = data, refs
            return number
        self._data.append(data)
        self._refs.append(refs)
        return len(self._data) - 1

    def hold(self, number: int, refs: int) -> None:
        self._refs[number] += refs

    def release(self, records: Array) -> None:
        """These records, all of values here, are no more."""
        numbers = records["range"]
        if len(numbers) < _FEW:
            for number in numbers.tolist():
                self._let_go(number, 1)
            return
        different, counts = np.unique(numbers, return_counts=True)
        for number, count in zip(different.tolist(), counts.tolist(), strict=True):
            self._let_go(number, count)

    def _let_go(self, number: int, count: int) -> None:
        self._refs[number] -= count
        if not self._refs[number]:
            self.nbytes -= len(self._data[number])
            self._data[number] = b""
            self._free.append(number)

    def collect(self, records: Array) -> bytes:
        """What a message has to carry of these VALUE records, some of values here: each then says
        where it starts in that. Neighbours of one block stay together, and a whole one as it is."""
        here = records["owner"] == HERE
        count = int(np.count_nonzero(here))
        if not count:
            return b""
        mine = records if count == len(records) else records[here]
        numbers, starts = mine["range"], mine["generation"].astype(np.int64)
        ends = starts + _room(mine["nbytes"].astype(np.int64))
        breaks = ((numbers[1:] != numbers[:-1]) | (starts[1:] != ends[:-1])).nonzero()[0] + 1
        firsts, lasts = np.append(0, breaks), np.append(breaks, count) - 1
        parts = [
            self._data[number][start:end]
            for number, start, end in zip(
                numbers[firsts].tolist(), starts[firsts].tolist(), ends[lasts].tolist(), strict=True
            )
        ]
        before = np.cumsum([0, *map(len, parts[:-1])]) - starts[firsts]
        mine["range"] = starts + np.repeat(before, lasts + 1 - firsts)
        mine["generation"] = 0
        if mine is not records:
            records[here] = mine
        return parts[0] if len(parts) == 1 else b"".join(parts)


class Arriving:
    """What one message brought, on its way into blocks: large ones are cut, so that a row does not
    keep what came with many others."""

    __slots__ = ("_blocks", "_data", "_numbers")

    def __init__(self, blocks: Blocks, data: bytes) -> None:
        self._blocks, self._data = blocks, data
        self._numbers: dict[int, int] = {}

    def enter(self, records: Array) -> None:
        """Rewrite these VALUE records, already with the owner number `HERE`, to the store's."""
        if not self._is_cut:
            records["generation"] = records["range"]
            records["range"] = self._number(0, len(records))
            return
        piece, start = np.divmod(records["range"], PACK_BLOCK_BYTES)
        different, inverse, counts = np.unique(piece, return_inverse=True, return_counts=True)
        numbers = [
            self._number(one, count)
            for one, count in zip(different.tolist(), counts.tolist(), strict=True)
        ]
        records["generation"] = start
        records["range"] = np.array(numbers)[inverse]

    def enter_one(self, start: int) -> tuple[int, int]:
        """`range` and `generation` of the value that starts there."""
        piece, start = divmod(start, PACK_BLOCK_BYTES) if self._is_cut else (0, start)
        return self._number(piece, 1), start

    @property
    def _is_cut(self) -> bool:
        return len(self._data) > PACK_BLOCK_BYTES

    def _number(self, piece: int, refs: int) -> int:
        number = self._numbers.get(piece)
        if number is None:
            data, start = self._data, piece * PACK_BLOCK_BYTES
            if self._is_cut:  # with the end of the value that begins last in it
                data = data[start : start + PACK_BLOCK_BYTES + INLINE_LIMIT_BYTES]
            number = self._numbers[piece] = self._blocks.add(data, refs)
        else:
            self._blocks.hold(number, refs)
        return number


def told(records: Array) -> Array:
    """What each of these VALUE records has a message carry beside itself (i8)."""
    here = records["owner"] == HERE
    result: Array = np.where(here, _room(records["nbytes"].astype(np.int64)), 0)
    return result


def _room(sizes: Array) -> Array:
    room: Array = (sizes + (_STEP - 1)) & -_STEP
    return room
