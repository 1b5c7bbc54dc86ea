"""Checks of the rows and values of a message, before anything changes.

They come from another process, so nothing is trusted: an index, a count or a mask that does not fit
gets a typed error. Layouts and the bytes of chunks pass through unread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from typing import TypeVar

import msgspec
import numpy as np

from dataplane.errors import InvalidRows, LimitExceeded, ProtocolError, counted, mixed_releases
from dataplane.latest import Latest
from dataplane.metadata.tables.bits import in_bytes
from dataplane.metadata.tables.keys import PROGRESS, KeyRun, Keys, keys_in, run_in, some_of
from dataplane.metadata.tables.pieces import (
    MAX_BLOCK_ROWS,
    UNUSED,
    BlockShape,
    Chunk,
    Piece,
    Pieces,
    shape_of,
)
from dataplane.wire import tables as wire
from dataplane.wire.limits import (
    MAX_CHUNKS_PER_MESSAGE,
    MAX_FIELDS,
    MAX_LAYOUT_BYTES,
    MAX_NAME_BYTES,
    MAX_PIECES_PER_MESSAGE,
    MAX_ROWS_PER_MESSAGE,
    NO_GROUP,
)
from dataplane.wire.packed import U4, column
from dataplane.wire.tables import INLINE, Name, Owner, Rows

_Same = TypeVar("_Same", Owner, bytes)
_NO_VALUES = wire.Values()
Known = Mapping[Owner, Mapping[int, Chunk]]
"""The chunks that a shard has, by owner and number."""
_NOTHING: Mapping[int, Chunk] = {}
_listed = attrgetter("fields", "given", "at")
SHARED_BYTES, SHARED_CHUNKS, SHARED_ROWS = 1_024, 64, 1_024
"""A form is small if it has at most SHARED_ROWS rows, SHARED_CHUNKS chunks and as many pieces, and
if its field names and the lists in its pieces have at most SHARED_BYTES items. Larger forms rarely
repeat, and would fill the memory."""


@lru_cache(4_096)
def _shared(value: _Same) -> _Same:
    """Return an equal value that was kept before: chunks of many messages have the same owner and
    layout."""
    return value


_same_size = lru_cache(64)(int)
"""Columns of the same lengths have chunks of the same size, which share its number."""


# rows


class RowsIn(msgspec.Struct, eq=False):
    """The checked rows of a message. group: per row an index into `group_keys`, -1 without a
    group; None if no row has one. whole: all rows are in the only group."""

    keys: Keys
    names: Sequence[Name] | None
    group: Sequence[int] | None
    group_keys: list[bytes]
    group_names: Sequence[Name] | None
    whole: bool
    count: int

    def only(self, rows: Sequence[int]) -> RowsIn:
        """Return the rows at these indexes."""
        return RowsIn(
            some_of(self.keys, rows),
            None if self.names is None else [self.names[i] for i in rows],
            None if self.group is None else [self.group[i] for i in rows],
            self.group_keys,
            self.group_names,
            self.whole,
            len(rows),
        )


def different(raw: bytes, what: str) -> list[bytes]:
    """Return the keys of a KEY column. Raises ProtocolError if one appears twice."""
    keys = keys_in(raw)
    if len(set(keys)) != len(keys):
        twice = Counter(keys).most_common(1)[0][0]
        raise mixed_releases(f"expected each {what} once in the message, got {twice.hex()} twice")
    return keys


def rows_in(rows: Rows) -> RowsIn:
    """Check the rows of a message. Raises InvalidRows if there are none, or one appears twice."""
    keys: Keys = run_in(rows.keys) or keys_in(rows.keys)
    count = len(keys)
    if not count:
        raise InvalidRows("this call has no rows: pass at least one row")
    if count > MAX_ROWS_PER_MESSAGE:
        raise LimitExceeded(
            f"this message has {count} rows, over the limit of {MAX_ROWS_PER_MESSAGE}: split the "
            "rows across several calls",
            rows=count,
            limit=MAX_ROWS_PER_MESSAGE,
        )
    if rows.names is not None and len(rows.names) != count:
        raise InvalidRows(
            f"got {counted(len(rows.names), 'name')} for {counted(count, 'key')}: pass one "
            "name per key"
        )
    if not isinstance(keys, KeyRun) and len(set(keys)) != count:
        twice = next(i for i, key in enumerate(keys) if key in keys[:i])
        shown = rows.names[twice] if rows.names else keys[twice].hex()
        raise InvalidRows(f"key {shown!r} appears twice in this call: give each row its own key")
    group, group_keys = _groups_in(rows, count)
    whole = len(group_keys) == 1 and rows.group_index == bytes(U4.itemsize * count)
    return RowsIn(keys, rows.names, group, group_keys, rows.group_names, whole, count)


def _groups_in(rows: Rows, count: int) -> tuple[Sequence[int] | None, list[bytes]]:
    if not rows.group_keys and not rows.group_index and not rows.group_names:
        return None, []
    group_keys = keys_in(rows.group_keys)
    if rows.group_names is not None and len(rows.group_names) != len(group_keys):
        raise InvalidRows(
            f"got {counted(len(rows.group_names), 'name')} for {counted(len(group_keys), 'group')}"
            ": pass one name per group"
        )
    if not rows.group_index:
        return None, group_keys
    if rows.group_index == bytes(U4.itemsize * count) and group_keys:
        index = [0] * count
    else:
        numbers = column(rows.group_index, U4, count).astype(np.int64)
        numbers[numbers == NO_GROUP] = -1
        index = numbers.tolist()
    if max(index) >= len(group_keys):
        raise mixed_releases(
            f"invalid group index {max(index)} for a row: the message has "
            f"{counted(len(group_keys), 'group')}",
            groups=len(group_keys),
        )
    if len(set(group_keys)) != len(group_keys):
        raise InvalidRows(
            f"this call lists {len(group_keys)} groups, some of them more than once "
            f"({len(set(group_keys))} different): list each group once"
        )
    return index, group_keys


# values


class ValuesIn(msgspec.Struct, frozen=True, eq=False):
    """The checked values of a message. pieces: as a block of all rows of the message stores them.
    known: the chunks that the shard had before. unused: the chunks that no piece uses."""

    pieces: Pieces
    known: Sequence[Chunk]
    unused: tuple[Chunk, ...]


class MessageForm(msgspec.Struct, frozen=True):
    """The common part of messages that differ only in their chunks: the names of the fields, the
    pieces, how many rows each chunk has, and how many the message has."""

    fields: tuple[str, ...]
    pieces: tuple[wire.Piece, ...]
    chunk_rows: tuple[int, ...]
    rows: int

    @property
    def is_small(self) -> bool:
        """Whether results derived from this form may be cached."""
        if len(self.pieces) > SHARED_CHUNKS or len(self.chunk_rows) > SHARED_CHUNKS:
            return False
        lists = chain(self.fields, *map(_listed, self.pieces))
        return self.rows <= SHARED_ROWS and sum(map(len, lists)) <= SHARED_BYTES


def values_in(
    values: wire.Values, rows: int, known: Known, most: int = MAX_CHUNKS_PER_MESSAGE
) -> ValuesIn:
    """Check the values of a message about this many rows. Chunks that the shard already has are
    reused. most: the most chunks that the message may have. Raises ProtocolError, InvalidRows or
    LimitExceeded for inconsistent values.
    """
    if values == _NO_VALUES:
        return _nothing_in(rows)
    check_sizes(values, most)
    chunks, before = _chunks_in(values, known)
    form = message_form(values, rows)
    known_shape = _shapes.get(form)
    if known_shape is None:
        known_shape = shape_in(form)
        if form.is_small:
            _shapes[form] = known_shape
    shape, used = known_shape
    if len(used) == len(chunks):
        return ValuesIn(Pieces(shape, tuple(chunks)), before, ())
    unused = set(range(len(chunks))).difference(used)
    taken = tuple([chunks[n] for n in used])
    return ValuesIn(Pieces(shape, taken), before, tuple([chunks[n] for n in unused]))


@lru_cache(64)
def _nothing_in(rows: int) -> ValuesIn:
    return ValuesIn(Pieces(shape_of(rows, ())), (), ())


def message_form(values: wire.Values, rows: int) -> MessageForm:
    """Return the form of a message about this many rows."""
    chunk_rows = tuple([one.rows for one in values.chunks])
    return MessageForm(tuple(values.fields), tuple(values.pieces), chunk_rows, rows)


def shape_in(form: MessageForm) -> tuple[BlockShape, tuple[int, ...]]:
    """Check the pieces of a message. Return the shape of a block of its rows, and the numbers of
    the chunks that its pieces use, in the order in which the block has them.

    ProtocolError or InvalidRows for pieces that fit neither the chunks nor the rows.
    """
    _check_fields(form.fields)
    pieces = [_piece_in(form, one) for one in form.pieces]
    used = sorted({one.chunk for one in pieces})
    if len(used) < len(form.chunk_rows):
        numbers = {chunk: n for n, chunk in enumerate(used)}
        pieces = [msgspec.structs.replace(one, chunk=numbers[one.chunk]) for one in pieces]
    return shape_of(form.rows, tuple(pieces)), tuple(used)


_shapes = Latest[MessageForm, tuple[BlockShape, tuple[int, ...]]](1_024)
"""The result of `shape_in` for small forms, which most messages repeat."""


def check_sizes(values: wire.Values, most_chunks: int = MAX_CHUNKS_PER_MESSAGE) -> None:
    """Raise LimitExceeded if a message describes more than it may."""
    if (
        len(values.fields) > MAX_FIELDS
        or len(values.chunks) > most_chunks
        or len(values.pieces) > MAX_PIECES_PER_MESSAGE
        or max(len(values.layouts), len(values.owners)) > MAX_CHUNKS_PER_MESSAGE
    ):
        raise too_many(values, most_chunks)
    largest = max(map(len, values.layouts), default=0)
    if largest > MAX_LAYOUT_BYTES:
        raise LimitExceeded(
            f"a chunk's layout is {largest} bytes long, over the limit of {MAX_LAYOUT_BYTES}: "
            "write fewer fields per call",
            limit=MAX_LAYOUT_BYTES,
        )


def too_many(values: wire.Values, most_chunks: int) -> LimitExceeded:
    """Return the error that names which part of a message is too large."""
    sizes = [
        ("fields", len(values.fields), MAX_FIELDS),
        ("chunks", len(values.chunks), most_chunks),
        ("pieces", len(values.pieces), MAX_PIECES_PER_MESSAGE),
        ("layouts", len(values.layouts), MAX_CHUNKS_PER_MESSAGE),
        ("owners", len(values.owners), MAX_CHUNKS_PER_MESSAGE),
    ]
    what, given, most = next(one for one in sizes if one[1] > one[2])
    return LimitExceeded(
        f"the message has {given} {what}, over the limit of {most}: write fewer rows per call",
        limit=most,
    )


def check_owners(values: wire.Values) -> None:
    """Raise ProtocolError unless each chunk has an owner of the message, and a number and a size of
    0 or more."""
    owners = len(values.owners)
    for chunk in values.chunks:
        owner = chunk.owner
        if owner < 0 or owner >= owners:
            raise mixed_releases(
                f"invalid owner index {owner} for chunk {chunk.number}: the message lists "
                f"{counted(owners, 'owner')}"
            )
        if chunk.number < 0 or chunk.nbytes < 0:
            raise mixed_releases(
                f"invalid chunk {chunk.number} of {chunk.nbytes} bytes: expected a non-negative "
                "number and size"
            )


def _check_fields(fields: Sequence[str]) -> None:
    if len(set(fields)) != len(fields):
        twice = Counter(fields).most_common(1)[0][0]
        raise InvalidRows(f"field {twice[:40]!r} appears twice in this call: pass each field once")
    for field in fields:
        most = MAX_NAME_BYTES
        if PROGRESS in field:  # it has the name of a stage as well
            most += len(PROGRESS) + MAX_NAME_BYTES
        if not 0 < len(field) <= most:
            raise InvalidRows(
                f"field name {field[:40]!r} has {len(field)} characters: choose a name of "
                f"1 to {most} characters"
            )


def _chunks_in(values: wire.Values, known: Known) -> tuple[list[Chunk], list[Chunk]]:
    """Return the chunks of a message, and which of them the shard already has."""
    owners = [_shared(owner) for owner in values.owners]
    layouts = [_shared(layout) for layout in values.layouts]
    there = [None if owner == INLINE else known.get(owner, _NOTHING) for owner in owners]
    chunks: list[Chunk] = []
    before: list[Chunk] = []
    many_owners, many_layouts, most_rows = len(owners), len(layouts), MAX_ROWS_PER_MESSAGE
    for one in values.chunks:
        at, number, rows, nbytes, form = one.owner, one.number, one.rows, one.nbytes, one.layout
        if at < 0 or form < 0 or rows < 0 or nbytes < 0:
            raise _invalid(one, values)
        if at >= many_owners or form >= many_layouts or rows > most_rows:
            raise _invalid(one, values)
        mine = there[at]
        if mine is None:
            if number or len(one.inline) != nbytes:
                raise mixed_releases(
                    f"invalid inline chunk: expected {nbytes} bytes and no chunk number, got "
                    f"{len(one.inline)} bytes and number {number}"
                )
        elif number < 1:
            raise mixed_releases(f"invalid chunk number {number}: expected 1 or more")
        elif (found := mine.get(number)) is not None:
            _check_same(found, one, layouts[form])
            chunks.append(found)
            before.append(found)
            continue
        size = _same_size(nbytes)
        chunks.append(Chunk(owners[at], number, rows, size, layouts[form], one.inline))
    if len(chunks) > 1:
        numbers = [one.number for one in chunks if one.number]
        if len(set(numbers)) < len(numbers):
            _check_distinct(chunks)
    return chunks, before


def _check_same(found: Chunk, one: wire.Chunk, layout: bytes) -> None:
    """Raise ProtocolError unless a message describes a chunk as the shard has it."""
    has = found.rows, found.nbytes, found.layout, found.inline
    if has != (one.rows, one.nbytes, layout, one.inline):
        raise mixed_releases(
            f"chunk {one.number} of peer {found.owner.peer} differs from the stored chunk in "
            f"size, layout or data: expected {counted(found.rows, 'row')} and "
            f"{counted(found.nbytes, 'byte')}, got {counted(one.rows, 'row')} and "
            f"{counted(one.nbytes, 'byte')}"
        )


def _check_distinct(chunks: Iterable[Chunk]) -> None:
    """Raise ProtocolError if a message has a chunk twice. Chunks of different owners may have the
    same number."""
    names = Counter([(one.owner, one.number) for one in chunks if one.number])
    (owner, number), times = names.most_common(1)[0]
    if times > 1:
        raise mixed_releases(
            f"the message lists chunk {number} of peer {owner.peer} {times} times: expected each "
            "chunk at most once"
        )


def _invalid(one: wire.Chunk, values: wire.Values) -> ProtocolError:
    """Return the error for a wrong description of a chunk."""
    if not 0 <= one.owner < len(values.owners):
        return mixed_releases(
            f"invalid owner index {one.owner} for chunk {one.number}: the message lists "
            f"{counted(len(values.owners), 'owner')}"
        )
    if not 0 <= one.layout < len(values.layouts):
        return mixed_releases(
            f"invalid layout index {one.layout} for chunk {one.number}: the message has "
            f"{counted(len(values.layouts), 'layout')}"
        )
    return mixed_releases(
        f"invalid chunk {one.number}: expected 0 to {MAX_ROWS_PER_MESSAGE} rows and 0 or more "
        f"bytes, got {one.rows} rows and {one.nbytes} bytes"
    )


def _columns_in(fields: tuple[str, ...], columns: tuple[int, ...]) -> tuple[str, ...]:
    """Return the field of each column of a piece."""
    if wrong := [field for field in columns if not -1 <= field < len(fields)]:
        raise mixed_releases(
            f"invalid field index {wrong[0]} in a piece: the message has "
            f"{counted(len(fields), 'field')}, and an unused column must have index -1"
        )
    names = tuple([UNUSED if field < 0 else fields[field] for field in columns])
    used = [name for name in names if name != UNUSED]
    if not used:
        raise mixed_releases("invalid piece: expected at least one column, got none")
    if len(set(used)) != len(used):
        twice = Counter(used).most_common(1)[0][0]
        raise mixed_releases(f"invalid piece: expected one column for field {twice!r}, got two")
    return names


def _piece_in(form: MessageForm, one: wire.Piece) -> Piece[int]:
    """Check a piece. If the message has more rows than a block, the piece keeps its `base`: a mask
    of all rows can take 8 KiB, and a message can have 65,536 pieces."""
    if not 0 <= one.chunk < len(form.chunk_rows):
        raise mixed_releases(
            f"a piece refers to chunk index {one.chunk}, but the message has only "
            f"{counted(len(form.chunk_rows), 'chunk')}"
        )
    if len(one.fields) > MAX_FIELDS:
        raise mixed_releases(
            f"invalid piece: expected at most {MAX_FIELDS} columns, got {len(one.fields)}"
        )
    names = _columns_in(form.fields, one.fields)
    has, given, base = form.chunk_rows[one.chunk], in_bytes(one.given), one.base
    many = given.bit_count()
    if not given or base < 0 or base + given.bit_length() > form.rows:
        raise mixed_releases(
            f"invalid piece of {counted(many, 'row')} from row {base}: a piece needs at least one "
            f"row, and the message has only {counted(form.rows, 'row')}"
        )
    if form.rows <= MAX_BLOCK_ROWS:
        given, base = given << base, 0
    at = tuple(column(one.at, U4, many).tolist()) if one.at else None
    last = max(at) if at is not None else one.first + many - 1
    if one.first < 0 or last >= has:
        raise ProtocolError(
            (
                f"a piece refers to rows {one.first} to {last} of its chunk, which has only "
                f"{counted(has, 'row')}. Install the same dataplane release everywhere"
            )
            if at is None
            else (
                f"a piece refers to row {last} of its chunk, which has only "
                f"{counted(has, 'row')}. "
                "Install the same dataplane release everywhere"
            )
        )
    first = one.first if at is None else 0
    if at is not None and at[-1] - at[0] == many - 1 and at == (*range(at[0], at[0] + many),):
        first, at = at[0], None
    return Piece(one.chunk, names, given, given, first, at, "", base)
