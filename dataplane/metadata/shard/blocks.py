"""Blocks and groups: the rows of one put in one group, stored together, and their index by key.

A row is one bit of its block, as long as the block exists. Rows are removed from a block and
never added. Nothing here references its users (a block names its group by key), so the garbage
collector need not track these objects.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, ClassVar

import msgspec

from dataplane.metadata.tables.bits import first_of, rows_of
from dataplane.metadata.tables.keys import (
    KEY_BYTES,
    PREFIX_BYTES,
    PROGRESS,
    KeyRun,
    Keys,
    format_minted,
    format_minted_many,
    is_minted,
    records_of,
    run_in,
)
from dataplane.metadata.tables.pieces import Pieces
from dataplane.metadata.tables.tags import Tags
from dataplane.wire.tables import Name

PENDING, READY, LEASED, ACKED, SPLIT = range(5)
"""PENDING: not ready yet. SPLIT: a group of which the stage took or acked rows singly; it is never
offered whole again."""

UNKNOWN_SIZE = -1
UNLIMITED = 1 << 40
MAX_GROUP_ROWS = (1 << 31) - 1
"""The largest size of a group."""
_start = attrgetter("keys.start")
_unpack_names = msgspec.msgpack.Decoder(list[Name]).decode


class Standing(msgspec.Struct, gc=False, eq=False):
    """The states of a block's rows for one stage. Rows that are neither ready, leased nor acked
    are pending. returned: rows that a lease returned and that were not acked since."""

    ready: int = 0
    leased: int = 0
    acked: int = 0
    returned: int = 0


class Reader(msgspec.Struct, gc=False, eq=False):
    """The peer at `address`, which was granted rows, and fetched these fields of them (None: all).
    Its copies may be evicted, so this only says where to look first. Backups do not know it."""

    address: str
    fields: frozenset[str] | None

    def has(self, owner: str, fields: Collection[str], block: Block) -> bool:
        """Whether the peer has values that are at `owner`, of these fields of the block."""
        if owner == self.address:
            return True
        read = block.reader is not None and block.reader.address == self.address
        return read and (self.fields is None or not self.fields.isdisjoint(fields))


class Block(msgspec.Struct, gc=False, eq=False):
    """A block. keys: of all its rows, removed ones too. live: the rows that exist. group: its key;
    b"" without one. standings: by the stage's number. packed_names: MessagePack of the user's
    names, unless all are generated. values: also a stage's progress, under the names of
    `progress_field`.

    A change replaces values and tags, so a copy of a block shares them.
    """

    number: int
    keys: KeyRun | tuple[bytes, ...]
    count: int
    live: int
    group: bytes
    values: Pieces
    standings: tuple[Standing, ...] = ()
    packed_names: bytes | None = None
    tags: Tags | None = None
    reader: Reader | None = None
    """the last peer that was granted rows of it"""

    nbytes_each: ClassVar[int] = 470
    nbytes_each_key: ClassVar[int] = 100

    @property
    def nbytes(self) -> int:
        """The approximate size with its rows in the index, without inline bytes."""
        nbytes = self.nbytes_each + self.values.nbytes
        if not isinstance(self.keys, KeyRun):
            nbytes += self.nbytes_each_key * self.count
        if self.packed_names is not None:
            nbytes += len(self.packed_names)
        if self.tags is not None:
            nbytes += self.tags.nbytes
        return nbytes

    @property
    def names(self) -> list[Name] | None:
        """The name of each row as given; None where all are minted."""
        return None if self.packed_names is None else _unpack_names(self.packed_names)

    def keys_of(self, bits: int) -> bytes:
        """The KEY records of these rows."""
        if bits.bit_count() == self.count:
            return records_of(self.keys, 0, self.count)
        rows = rows_of(bits)
        if isinstance(rows, range):
            return records_of(self.keys, rows.start, rows.stop)
        return b"".join([self.keys[row] for row in rows])

    def row(self, key: bytes) -> int:
        """The row with this key, which must be in the block."""
        return self.keys.index(key)

    def name(self, row: int) -> Name:
        """A row's key as users see it."""
        names = self.names
        return format_minted(self.keys[row]) if names is None else names[row]


def progress_field(stage: str, field: str) -> str:
    """The name under which a block stores a stage's progress of `field`."""
    return stage + PROGRESS + field


def progress_in(fields: Iterable[str], stage: str) -> dict[str, str]:
    """The progress of a stage in these fields: each with its field name for the stage."""
    found = {}
    for field in fields:
        of, mark, name = field.rpartition(PROGRESS)
        if mark and of == stage:
            found[field] = name
    return found


class Group(msgspec.Struct, gc=False, eq=False):
    """A group. expected, seen, dropped: numbers of rows.

    It is open until it has seen as many rows as it expects (dropped and freed ones count), and
    then closed for good. Its record is deleted with its last row after that. states: by the
    stage's number; each change replaces them, so a copy of a group shares them. begun: the
    trainer's version at its start, see `Permits`.
    """

    number: int
    key: bytes
    given: Name | None
    expected: int
    states: bytes
    blocks: tuple[Block, ...] = ()
    live: int = 0
    seen: int = 0
    dropped: int = 0
    closed: bool = False
    begun: int = 0

    nbytes_each: ClassVar[int] = 400

    @property
    def name(self) -> Name:
        """The group's name as users see it."""
        return format_minted(self.key) if self.given is None else self.given

    @property
    def is_full(self) -> bool:
        """Whether the group is open and has seen all expected rows."""
        return not self.closed and self.seen == self.expected

    @property
    def is_spent(self) -> bool:
        """Whether its record can be deleted."""
        return self.closed and not self.live

    @property
    def all_dropped(self) -> bool:
        """Whether all its rows were dropped. Such groups do not count as made."""
        return self.dropped == self.seen

    @property
    def room(self) -> int:
        """How many more rows it accepts."""
        if self.closed:
            return 0
        return UNLIMITED if self.expected == UNKNOWN_SIZE else self.expected - self.seen


def first_parts(parts: Iterable[tuple[Any, int]], count: int) -> list[tuple[Any, int]]:
    """The first `count` units of these parts, each a block or group with some of its bits."""
    found: list[tuple[Any, int]] = []
    for unit, bits in parts if count > 0 else ():
        found.append((unit, first_of(bits, count)))
        count -= found[-1][1].bit_count()
        if count <= 0:
            break
    return found


class Rows:
    """Rows of several blocks in order: for each block a set of rows."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[tuple[Block, int]] = ()) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return sum([bits.bit_count() for _, bits in self.parts])

    def __iter__(self) -> Iterator[tuple[Block, int]]:
        """Each row, as its block and its number there."""
        return ((block, row) for block, bits in self.parts for row in rows_of(bits))

    def first(self, count: int) -> Rows:
        """The first `count` rows."""
        return Rows(first_parts(self.parts, count))

    @property
    def keys(self) -> bytes:
        """The KEY records of the rows."""
        return b"".join([block.keys_of(bits) for block, bits in self.parts])

    @classmethod
    def of(cls, rows: Iterable[tuple[Block, int]]) -> Rows:
        """The rows at these indices, in this order."""
        parts: list[tuple[Block, int]] = []
        for block, row in rows:
            if parts and parts[-1][0] is block and not parts[-1][1] >> row:
                parts[-1] = block, parts[-1][1] | 1 << row
            else:
                parts.append((block, 1 << row))
        return cls(parts)


def names_of(rows: Rows, keys: bytes) -> list[Name] | None:
    """The names of rows, or None if all are generated. keys: their keys."""
    if all([block.packed_names is None for block, _ in rows.parts]):
        return None
    found: list[Name] = []
    for block, bits in rows.parts:
        names, at = block.names, len(found)
        if names is None:
            here = keys[at * KEY_BYTES : (at + bits.bit_count()) * KEY_BYTES]
            found += format_minted_many(here)
        else:
            found += [names[row] for row in rows_of(bits)]
    return found


def packed(names: Sequence[Name] | None) -> bytes | None:
    """The names to store. Generated names are derived from the keys."""
    if names is None or all(map(is_minted, names)):
        return None
    return msgspec.msgpack.encode(names)


class KeyIndex:
    """Blocks by the keys of their live rows.

    A block whose keys are a run has one entry, among the blocks of the same prefix. Any other
    block has one entry per row. Runs of one prefix never overlap: if freed keys are used again,
    their rows are indexed one by one. So a prefix has at most 256 runs, whatever keys a peer sends.
    """

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
        """Return the block that has a live row with this key."""
        if (block := self._singles.get(key)) is not None:
            return block
        blocks = self._runs.get(key[:PREFIX_BYTES])
        if blocks is not None and (at := _upto(blocks, key[PREFIX_BYTES])):
            block = blocks[at - 1]
            if block.live >> block.keys.index(key) & 1:
                return block
        return None

    def blocks_of(self, keys: Keys) -> list[Block | None] | None:
        """Return the block of each key, None for a key without a row. Return None if no key has a
        row."""
        if isinstance(keys, KeyRun):
            apart = _fits(self._runs.get(keys.prefix, ()), keys)
        else:
            apart = self._runs.keys().isdisjoint([key[:PREFIX_BYTES] for key in keys])
        if apart and (not self._singles or self._singles.keys().isdisjoint(keys)):
            return None
        found = [self.get(key) for key in keys]
        return found if any([block is not None for block in found]) else None

    def kept(self, keys: Keys, minted: bool) -> KeyRun | tuple[bytes, ...]:
        """Return the keys of new rows as their block stores them: a run if they are minted,
        consecutive, and overlap no other run."""
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
        return KeyRun(prefix, run.start, run.count)  # all runs share one prefix object

    def add(self, block: Block) -> None:
        """Add the live rows of a block. Its keys come from `kept`, and are not in the index."""
        self._rows += block.live.bit_count()
        keys = block.keys
        if isinstance(keys, KeyRun):
            blocks = self._runs.setdefault(keys.prefix, [])
            blocks.insert(_upto(blocks, keys.start), block)
        else:
            self._singles.update(dict.fromkeys([keys[row] for row in rows_of(block.live)], block))

    def remove(self, block: Block, bits: int) -> None:
        """Remove rows of a block. The caller then clears them in `block.live`."""
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
    """Return whether a run overlaps none of these."""
    if not blocks or _start(blocks[-1]) + blocks[-1].count <= run.start:
        return True  # the usual case: keys come in order
    at = _upto(blocks, run.start)
    if at and _start(blocks[at - 1]) + blocks[at - 1].count > run.start:
        return False
    return at == len(blocks) or run.start + run.count <= _start(blocks[at])


def _upto(blocks: Sequence[Block], last: int) -> int:
    """Return how many of these runs start at or below this last byte of a key."""
    if blocks and _start(blocks[-1]) <= last:  # the usual case: keys come in order
        return len(blocks)
    return bisect_right(blocks, last, key=_start)
