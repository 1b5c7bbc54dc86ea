"""The index of rows by key: which block a row is in, for the rows of a partition that are there.

A block whose keys are a run has one entry, among the blocks of the same prefix. Any other block has
one entry a row. Runs of one prefix never overlap: where freed keys come again, their rows are
indexed one by one. So a prefix has at most 256 runs, whatever keys a peer sends.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from operator import attrgetter

from dataplane.metadata.shard.blocks import Block
from dataplane.metadata.tables.bits import rows_of
from dataplane.metadata.tables.keys import PREFIX_BYTES, KeyRun, Keys, run_in

_start = attrgetter("keys.start")


class KeyIndex:
    """Blocks by the keys of their live rows."""

    __slots__ = ("_rows", "_runs", "_singles")

    def __init__(self) -> None:
        self._rows = 0
        self._runs: dict[bytes, list[Block]] = {}
        """by prefix, the lowest run first"""
        self._singles: dict[bytes, Block] = {}

    def __len__(self) -> int:
        """The number of rows."""
        return self._rows

    def __contains__(self, key: bytes) -> bool:
        return self.get(key) is not None

    def get(self, key: bytes) -> Block | None:
        """The block that has a live row with this key."""
        if (block := self._singles.get(key)) is not None:
            return block
        blocks = self._runs.get(key[:PREFIX_BYTES])
        if blocks is not None and (at := _upto(blocks, key[PREFIX_BYTES])):
            block = blocks[at - 1]
            if block.live >> block.keys.index(key) & 1:
                return block
        return None

    def blocks_of(self, keys: Keys) -> list[Block | None] | None:
        """The block of each key, None for a key without a row; None where all are without."""
        if isinstance(keys, KeyRun):
            apart = _fits(self._runs.get(keys.prefix, ()), keys)
        else:
            apart = self._runs.keys().isdisjoint([key[:PREFIX_BYTES] for key in keys])
        if apart and (not self._singles or self._singles.keys().isdisjoint(keys)):
            return None
        found = [self.get(key) for key in keys]
        return found if any([block is not None for block in found]) else None

    def kept(self, keys: Keys, minted: bool) -> KeyRun | tuple[bytes, ...]:
        """The keys of new rows as their block keeps them: as a run, where they are minted, and are
        a run that overlaps no other."""
        run = None
        if minted:
            run = keys if isinstance(keys, KeyRun) else run_in(b"".join(keys))
        if run is None:
            return tuple(keys)
        blocks = self._runs.get(run.prefix)
        if blocks is None:
            return run
        if not _fits(blocks, run):
            return tuple(keys)
        prefix: bytes = blocks[0].keys.prefix  # type: ignore[union-attr]
        return KeyRun(prefix, run.start, run.count)  # one prefix for all of them

    def add(self, block: Block) -> None:
        """Enter the live rows of a block that has its keys from `kept`. No row has one of them."""
        self._rows += block.live.bit_count()
        keys = block.keys
        if isinstance(keys, KeyRun):
            blocks = self._runs.setdefault(keys.prefix, [])
            blocks.insert(_upto(blocks, keys.start), block)
        else:
            self._singles.update(dict.fromkeys([keys[row] for row in rows_of(block.live)], block))

    def remove(self, block: Block, bits: int) -> None:
        """Rows of a block are about to go."""
        self._rows -= bits.bit_count()
        keys = block.keys
        if not isinstance(keys, KeyRun):
            for row in rows_of(bits):
                del self._singles[keys[row]]
            self._singles = self._singles or {}  # an emptied dict keeps its size
        elif bits == block.live:
            blocks = self._runs[keys.prefix]
            del blocks[_upto(blocks, keys.start) - 1]
            if not blocks:
                del self._runs[keys.prefix]
                self._runs = self._runs or {}


def _fits(blocks: Sequence[Block], run: KeyRun) -> bool:
    """Whether a run overlaps none of these."""
    if not blocks or _start(blocks[-1]) + blocks[-1].count <= run.start:
        return True  # most often, as keys come in order
    at = _upto(blocks, run.start)
    if at and _start(blocks[at - 1]) + blocks[at - 1].count > run.start:
        return False
    return at == len(blocks) or run.start + run.count <= _start(blocks[at])


def _upto(blocks: Sequence[Block], last: int) -> int:
    """How many of these runs start at this last byte or below."""
    if blocks and _start(blocks[-1]) <= last:  # most often, as keys come in order
        return len(blocks)
    return bisect_right(blocks, last, key=_start)
