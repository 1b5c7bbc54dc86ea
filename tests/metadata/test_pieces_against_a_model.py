"""Pieces beside a table of cells: for each row and field of a block, which chunk row it has."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from dataplane.errors import DataplaneError
from dataplane.metadata.tables.bits import all_of, bits_of, rows_of
from dataplane.metadata.tables.incoming import values_in
from dataplane.metadata.tables.outgoing import OutgoingValues
from dataplane.metadata.tables.pieces import (
    MAX_BLOCK_ROWS,
    SHARED_SHAPE_BYTES,
    UNUSED,
    BlockShape,
    Chunk,
    Part,
    Piece,
    Pieces,
    nbytes_of,
    pieces_of,
    shape_of,
    split,
)
from dataplane.wire import tables as wire
from dataplane.wire.tables import INLINE, Owner

FIELDS = "abcd"
Cell = tuple[int, int, int]
"""The chunk's number, and the row and column of it."""
Cells = dict[tuple[int, str], Cell]


def cells_of(pieces: Pieces, numbers: dict[int, int]) -> Cells:
    """What is live, each cell once."""
    found: Cells = {}
    for part in pieces.parts:
        for row, at in zip(rows_of(part.live), part.chunk_rows(part.live), strict=True):
            for column, field in enumerate(part.fields):
                if field != UNUSED:
                    assert (row, field) not in found
                    found[row, field] = numbers[id(part.chunk)], at, column
    return found


OWNERS = [Owner("a", 7), Owner("b", 8)]


def chunk_of(rows: int, number: int) -> Chunk:
    """One of three is inline."""
    if not number % 3:
        return Chunk(INLINE, 0, rows, 5, b"inline", b"bytes")
    return Chunk(OWNERS[number % 2], number, rows, 100, b"layout")


def piece(
    chunk: Chunk,
    fields: tuple[str, ...],
    base: int,
    given: int,
    first: int = 0,
    at: tuple[int, ...] | None = None,
) -> Piece[Chunk]:
    """A piece of a message."""
    return Piece(chunk, fields, given, given, first, at, "", base)


def new_blocks(parts: Sequence[Sequence[int]]) -> list[Part]:
    """Each of these lists of rows as a block of its own."""
    return [(rows, range(len(rows)), len(rows)) for rows in parts]


class Message:
    """Columns of some rows of a message, in chunks."""

    def __init__(self, draw: st.DrawFn, count: int, first_number: int) -> None:
        self.chunks: list[Chunk] = []
        self.pieces: list[Piece[Chunk]] = []
        self.cells: Cells = {}
        self.numbers: dict[int, int] = {}
        fields = list(draw(st.permutations(FIELDS)))[: draw(st.integers(0, len(FIELDS)))]
        while fields:
            many = draw(st.integers(1, len(fields)))
            self._chunks_of(draw, tuple(fields[:many]), count, first_number)
            fields = fields[many:]

    def _chunks_of(
        self, draw: st.DrawFn, fields: tuple[str, ...], count: int, first_number: int
    ) -> None:
        """One or more chunks with these columns, for neighbouring rows of the message."""
        start = 0
        while start < count:
            end = draw(st.integers(start + 1, count))
            rows = [row for row in range(start, end) if draw(st.integers(0, 9))]
            shuffled = draw(st.booleans())
            skipped = draw(st.integers(0, 2))
            places = draw(st.permutations(range(len(rows)))) if shuffled else range(len(rows))
            at = [skipped + place for place in places]
            chunk = chunk_of(skipped + len(rows), first_number + len(self.chunks))
            number = first_number + len(self.chunks)
            self.chunks.append(chunk)
            self.numbers[id(chunk)] = number
            if rows:
                given = bits_of(row - start for row in rows)
                follow = at == list(range(skipped, skipped + len(rows)))
                self.pieces.append(
                    piece(chunk, fields, start, given, skipped, None)
                    if follow
                    else piece(chunk, fields, start, given, 0, tuple(at))
                )
            for row, place in zip(rows, at, strict=True):
                for column, field in enumerate(fields):
                    self.cells[row, field] = number, place, column
            start = end


@st.composite
def messages(draw: st.DrawFn, count: int, first_number: int = 0) -> Message:
    return Message(draw, count, first_number)


@st.composite
def parts_of(draw: st.DrawFn, count: int) -> list[Sequence[int]]:
    """The rows of a message as they become blocks: runs, and groups that lie between each other."""
    owner = [draw(st.integers(0, 3)) for _ in range(count)]
    if draw(st.booleans()):
        owner.sort()
    found: list[Sequence[int]] = []
    for number in dict.fromkeys(owner):
        rows = [row for row in range(count) if owner[row] == number]
        run = range(rows[0], rows[-1] + 1)
        found.append(run if list(run) == rows else rows)
    return found


@given(st.data())
def test_a_message_is_divided_into_blocks(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 24))
    message = data.draw(messages(count))
    parts = data.draw(parts_of(count))
    divisions = split(message.pieces, new_blocks(parts))
    assert [one.count for one in divisions] == [len(rows) for rows in parts]
    for rows, mine in zip(parts, divisions, strict=True):
        assert cells_of(mine, message.numbers) == {
            (n, field): message.cells[row, field]
            for n, row in enumerate(rows)
            for field in FIELDS
            if (row, field) in message.cells
        }


def test_values_that_lie_all_over_a_message_are_looked_at_once() -> None:
    """Every value is of 16 rows, each in another block: block by block that is minutes of work."""
    rows, values = 65_536, 4_096
    every = sum(1 << row for row in range(0, rows, values))
    pieces = [
        piece(Chunk(OWNERS[0], n + 1, 1, 9), ("a",), n, every, 0, (0,) * 16) for n in range(values)
    ]
    found = split(pieces, new_blocks([range(at, at + 2) for at in range(0, rows, 2)]))
    assert [[part.chunk.number for part in one.parts] for one in found[2047:2050]] == [
        [4095, 4096],
        [1, 2],
        [3, 4],
    ]


@given(st.data())
def test_rows_of_many_blocks_that_exist_get_their_values_in_any_order(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 24))
    message = data.draw(messages(count))
    parts = [
        (data.draw(st.permutations(rows)), data.draw(st.permutations(range(24)))[: len(rows)], 24)
        for rows in data.draw(parts_of(count))
    ]
    for (at, rows, _), mine in zip(parts, split(message.pieces, parts), strict=True):
        assert cells_of(mine, message.numbers) == {
            (there, field): message.cells[row, field]
            for row, there in zip(at, rows, strict=True)
            for field in FIELDS
            if (row, field) in message.cells
        }


@given(st.data())
def test_a_block_through_its_life(data: st.DataObject) -> None:
    draw = data.draw
    count = draw(st.integers(1, 12))
    block, cells = pieces_of(count), Cells()
    numbers: dict[int, int] = {}
    kept_alive: list[Message] = []  # an id is a chunk's only as long as the chunk lives
    again: list[tuple[Message, Pieces]] = []
    for _ in range(draw(st.integers(1, 5))):
        move = draw(st.sampled_from(["add", "add", "row by row", "remove"]))
        if move == "remove":
            bits = draw(st.integers(0, all_of(count)))
            fields = draw(st.none() | st.sets(st.sampled_from(FIELDS)))
            block = block.without(bits, fields)
            for row in rows_of(bits):
                for field in FIELDS if fields is None else fields:
                    cells.pop((row, field), None)
        else:
            message = draw(messages(count, 1_000 * len(kept_alive)))
            kept_alive.append(message)
            numbers |= message.numbers
            whole = split(message.pieces, new_blocks([range(count)]))[0]
            keep = draw(st.booleans())
            steps = [whole]
            if move == "row by row":  # as parts of an add that are acked one by one
                steps = [whole.without(all_of(count) & ~(1 << row)) for row in range(count)]
                again.append((message, whole))
            for step in steps:
                new = cells_of(step, numbers)
                meet = {cell for cell in new if cell in cells}
                block, stayed = block.overlaid(step, keep)
                assert sum(stayed.values()) == (len(meet) if keep else 0)
                cells = new | cells if keep else cells | new
            replaced = all(block.live(field) == whole.live(field) for field in block.fields)
            if move == "row by row" and not keep and replaced:
                assert len(block.parts) <= len(message.pieces) * len(FIELDS)
        assert cells_of(block, numbers) == cells
        for field in FIELDS:
            assert block.live(field) == bits_of(
                row for row in range(count) if (row, field) in cells
            )
        assert set(block.fields) == {field for _, field in cells}
        some = draw(st.sets(st.sampled_from(FIELDS)))
        assert cells_of(block.only(some), numbers) == {
            cell: at for cell, at in cells.items() if cell[1] in some
        }


def test_a_message_of_many_groups_is_divided_in_one_pass() -> None:
    groups, size = 2_000, 16
    pieces = [
        piece(chunk_of(size, 1), ("a", "b"), group * size, all_of(size)) for group in range(groups)
    ]
    inline = [
        piece(chunk_of(256, 1), ("c",), start, all_of(256))
        for start in range(0, groups * size, 256)
    ]
    parts = [range(group * size, (group + 1) * size) for group in range(groups)]
    found = split([*pieces, *inline], new_blocks(parts))
    assert all(one.having("abc") == all_of(size) for one in found)
    assert sorted(part.first for part in found[17].parts) == [0, 16]


def test_rows_of_a_message_reach_thousands_of_blocks_in_one_pass() -> None:
    count = 4_096
    order = [(row * 1_031) % count for row in range(count)]
    pieces = [piece(chunk_of(32, 1), ("a",), at, all_of(32)) for at in range(0, count, 32)]
    found = split(pieces, [([row], [0], 1) for row in order])
    assert [one.parts[0].first for one in found] == [row % 32 for row in order]


def test_values_that_rows_share_count_once() -> None:
    chunk, other = chunk_of(1, 1), chunk_of(4, 2)
    shared = Piece(chunk, ("a",), all_of(16), all_of(16), 0, (0,) * 16)
    own = Piece(other, ("b",), all_of(4), all_of(4))
    blocks = [pieces_of(16, [shared, own]), pieces_of(16, [shared])]
    assert nbytes_of((one, all_of(16)) for one in blocks) == chunk.nbytes + other.nbytes
    assert nbytes_of([(blocks[0], 1)]) == chunk.nbytes + other.nbytes // 4


# as they travel


def on_wire(data: st.DataObject, count: int) -> tuple[wire.Values, list[Message], Cells]:
    """Rows of two blocks as a message, the messages that brought them, and what each row has."""
    brought = [data.draw(messages(count, 1 + 1_000 * n)) for n in range(2)]
    blocks = [split(one.pieces, new_blocks([range(count)]))[0] for one in brought]
    taken = [data.draw(st.integers(1, all_of(count))) for _ in blocks]
    fields = data.draw(st.none() | st.sets(st.sampled_from(FIELDS)).map(sorted))
    expected, base = Cells(), 0
    for one, bits in zip(brought, taken, strict=True):
        for place, row in enumerate(rows_of(bits)):
            for field in FIELDS if fields is None else fields:
                if (row, field) in one.cells:
                    expected[base + place, field] = one.cells[row, field]
        base += bits.bit_count()
    return (
        OutgoingValues(list(zip(blocks, taken, strict=True)), fields).on_wire(),
        brought,
        expected,
    )


@given(st.data())
def test_rows_arrive_as_they_left(data: st.DataObject) -> None:
    values, _, expected = on_wire(data, data.draw(st.integers(1, 9)))
    raw = msgspec.msgpack.encode(values)
    arrived = msgspec.msgpack.decode(raw, type=wire.Values)
    rows = 1 + max([row for row, _ in expected], default=0)
    block = values_in(arrived, rows, {}).pieces
    long = values_in(arrived, MAX_BLOCK_ROWS + rows, {}).pieces
    for message in (block, long):
        assert len(split(message.parts, new_blocks([range(rows)]))[0].parts) == len(block.parts)
        assert message.shape.live == block.shape.live
    assert {cell: at[1:] for cell, at in expected.items()} == {
        cell: at[1:]
        for cell, at in cells_of(block, dict.fromkeys(map(id, block.chunks), 0)).items()
    }
    named = {(one.owner, one.number) for one in block.chunks if one.number}
    assert len(named) == len([one for one in block.chunks if one.number])
    here: dict[wire.Owner, dict[int, Chunk]] = {}
    for one in block.chunks:
        here.setdefault(one.owner, {})[one.number] = one
    again = values_in(arrived, rows, here)
    assert {id(one) for one in again.pieces.chunks if one.number} <= set(map(id, block.chunks))
    assert len(again.known) == len(named) and not again.unused


JUNK = st.integers(-2, 5) | st.binary(max_size=3) | st.sampled_from([1 << 40, -1, b"\xff" * 9])


@given(st.data())
def test_what_does_not_fit_is_a_typed_error(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 6))
    values, _, _ = on_wire(data, count)
    told = msgspec.to_builtins(values, builtin_types=(bytes,))
    for _ in range(data.draw(st.integers(1, 3))):
        table = told[data.draw(st.integers(0, 4))]
        if not table:
            continue
        at = data.draw(st.integers(0, len(table) - 1))
        if isinstance(table[at], list) and table[at]:
            table[at][data.draw(st.integers(0, len(table[at]) - 1))] = data.draw(JUNK)
        else:
            table.append(data.draw(st.sampled_from(["a", "", "x" * 600])))
    try:
        arrived = msgspec.convert(told, wire.Values)
        placed = values_in(arrived, count, {})
    except (DataplaneError, msgspec.ValidationError):
        return
    assert len(placed.pieces.chunks) + len(placed.unused) == len(arrived.chunks)
    block = split(placed.pieces.parts, new_blocks([range(count)]))[0]
    for part in block.parts:
        assert all(0 <= row < part.chunk.rows for row in part.chunk_rows(part.live))
    cells_of(block, dict.fromkeys(map(id, block.chunks), 0))


def test_a_message_names_the_chunks_that_no_piece_uses() -> None:
    chunks = [wire.Chunk(0, number, 2, 8, 0) for number in (4, 5, 6)]
    pieces = [wire.Piece(2, (0,), 0, b"\3"), wire.Piece(0, (1,), 0, b"\3")]
    arrived = wire.Values(["a", "b"], OWNERS[:1], [b"layout"], chunks, pieces)
    here = Chunk(OWNERS[0], 5, 2, 8, b"layout")
    found = values_in(arrived, 2, {OWNERS[0]: {5: here}})
    assert [one.number for one in found.pieces.chunks] == [4, 6]
    placed = [(part.chunk.number, part.fields) for part in found.pieces.parts]
    assert placed == [(6, ("a",)), (4, ("b",))]
    assert list(found.unused) == list(found.known) == [here]


def test_the_masks_of_a_long_message_are_short() -> None:
    """Else each of 65,536 pieces could take a mask of 65,536 rows."""
    rows = 65_536
    pieces = [wire.Piece(0, (0,), row, b"\1") for row in range(0, rows, 64)]
    arrived = wire.Values(["a"], OWNERS[:1], [b"layout"], [wire.Chunk(0, 4, 1, 8, 0)], pieces)
    shape = values_in(arrived, rows, {}).pieces.shape
    assert {one.given for one in shape.pieces} == {1}
    assert shape.live["a"] == bits_of(range(0, rows, 64))


def test_blocks_share_small_shapes_and_a_bounded_number_of_them() -> None:
    def shape(given: int, rows: int = 12, at: tuple[int, ...] | None = None) -> BlockShape:
        return shape_of(rows, (Piece(0, ("a",), given, given, 0, at),))

    one = shape(1)
    assert shape(1) is one
    others = [shape(given) for given in range(2, 4_000)]
    assert shape(3_999) is others[-1]  # used lately
    assert shape(1) is not one and shape(1).live == one.live
    large = shape(all_of(256), 256, tuple(range(256)))
    assert large.nbytes > SHARED_SHAPE_BYTES
    assert shape(all_of(256), 256, tuple(range(256))) is not large
    assert shape(1, MAX_BLOCK_ROWS + 1) is not shape(1, MAX_BLOCK_ROWS + 1)  # of a message
