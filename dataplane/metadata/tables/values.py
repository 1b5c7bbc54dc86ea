"""Values of rows as they came: records, specs, owners and small bytes of a message, kept together.

Whole messages pass through untouched: a block keeps what a put brought, and a table that is asked
for is the same bytes again. Only where rows part from each other, or values meet others, are
records looked at. A `Values` never changes; its lists may be shared. Every record that is not
ABSENT stands for one reference to its range, so what is overwritten, refused or removed is returned
for its owner to be told.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from dataplane.errors import InvalidRows, LimitExceeded, ProtocolError, counted
from dataplane.memory.extents import every
from dataplane.metadata.tables.bits import all_of, of_mask, picked
from dataplane.metadata.tables.references import Array
from dataplane.wire.limits import (
    ABSENT,
    INLINE_ALIGNMENT_BYTES,
    INLINE_LIMIT_BYTES,
    MAX_FIELDS,
    MAX_LEAVES_PER_ROW,
    MAX_NAME_BYTES,
)
from dataplane.wire.records import ONE_VALUE, U4, U8, VALUE, column
from dataplane.wire.tables import INLINE, Column, Owner, Spec

Leaves = dict[str, tuple[bytes, ...]]
"""Field → for each row VALUE records of the arrays inside of its value."""
Loose = tuple[Sequence[Owner], bytes]
"""VALUE records that are in no row any more, and their owners."""

_SIZE = VALUE.itemsize
_RAW = np.dtype(f"V{_SIZE}")
_STEP = INLINE_ALIGNMENT_BYTES
_LAST = np.uint64(_STEP - 1)
_UP = ~_LAST
_NO_VALUE = np.zeros(1, VALUE)
_NO_VALUE["owner"] = ABSENT
_NONE = _NO_VALUE.tobytes()
_FEW_BYTES = 48 * _SIZE
"""Records of up to so many bytes are checked one by one, at less than what numpy takes to begin."""


class Values(msgspec.Struct, frozen=True, gc=False, eq=False):
    """Values of `count` rows. records: VALUE, one field behind the other. inline: the bytes of
    those whose owner is `INLINE`. holes: field → rows that lack it; None: none does.

    gc: there are as many as there are blocks, and nothing here refers back to one."""

    count: int
    fields: tuple[str, ...] = ()
    records: bytes = b""
    specs: list[Spec] = []
    owners: list[Owner] = []
    inline: bytes = b""
    holes: dict[str, int] | None = None
    leaves: Leaves | None = None

    # what is there

    @property
    def blob(self) -> bytes:
        """All records, those of arrays inside of objects too."""
        if self.leaves is None:
            return self.records
        return b"".join([self.records, *chain.from_iterable(self.leaves.values())])

    @property
    def loose(self) -> Loose:
        return self.owners, self.blob

    @property
    def is_inline(self) -> bool:
        """Whether every record is of a small value."""
        return self.holes is None and len(self.owners) == 1 and self.owners[0] == INLINE

    @property
    def nbytes(self) -> int:
        """What it takes, without the small values."""
        if self.leaves is None:
            return len(self.records)
        return len(self.records) + sum(
            [8 + len(raw) for one in self.leaves.values() for raw in one]
        )

    def having(self, fields: Iterable[str]) -> int:
        """The rows that have all of these fields."""
        bits = all_of(self.count)
        for field in fields:
            if field not in self.fields:
                return 0
            if self.holes is not None:
                bits &= ~self.holes.get(field, 0)
        return bits

    def grid(self) -> Array:
        """VALUE records, by field and row; not to be written to."""
        return np.frombuffer(self.records, VALUE).reshape(len(self.fields), self.count)

    def per_row(self) -> Iterator[tuple[str, Array, Array]]:
        """(field, the row of each record, VALUE records) of all that there is, leaves as well."""
        for field, records in zip(self.fields, self.grid(), strict=True):
            there = (records["owner"] != ABSENT).nonzero()[0]
            yield field, there, records[there]
        for field, arrays in (self.leaves or {}).items():
            rows = np.repeat(np.arange(self.count), [len(raw) // _SIZE for raw in arrays])
            yield field, rows, np.frombuffer(b"".join(arrays), VALUE)

    def columns(self) -> list[Column]:
        width, found = self.count * _SIZE, []
        for at, field in enumerate(self.fields):
            one = Column(field, self.records[at * width : (at + 1) * width])
            if self.leaves is not None and field in self.leaves:
                arrays = self.leaves[field]
                one.leaf_counts = np.array([len(raw) // _SIZE for raw in arrays], U4).tobytes()
                one.leaves = b"".join(arrays)
            found.append(one)
        return found

    def arrays(self, field: str) -> Sequence[bytes]:
        """The leaf records of each row."""
        return (self.leaves or {}).get(field) or (b"",) * self.count

    # parts of it

    def only(self, fields: Sequence[str]) -> Values:
        """These fields alone; ABSENT where there is none."""
        if len(fields) == len(self.fields) and tuple(fields) == self.fields:
            return self
        width, parts, holes = self.count * _SIZE, [], {}
        for field in fields:
            if field in self.fields:
                at = self.fields.index(field) * width
                parts.append(self.records[at : at + width])
                if self.holes is not None and field in self.holes:
                    holes[field] = self.holes[field]
            else:
                parts.append(_NONE * self.count)
                holes[field] = all_of(self.count)
        leaves = {f: one for f, one in (self.leaves or {}).items() if f in fields}
        found = replace(
            self,
            fields=tuple(fields),
            records=b"".join(parts),
            holes=holes or None,
            leaves=leaves or None,
        )
        return _cut([found])[0] if self.inline else found

    def without_empty(self) -> Values:
        """Without fields that no row has."""
        everything = all_of(self.count)
        empty = [f for f, rows in (self.holes or {}).items() if rows == everything]
        return self.only([f for f in self.fields if f not in empty]) if empty else self

    def split(self, parts: Sequence[Sequence[int]]) -> list[Values]:
        """One for each of these lists of rows; each takes along what it has of the small values."""
        if not self.fields or not parts:
            return [Values(len(part)) for part in parts]
        grid = np.frombuffer(self.records, _RAW).reshape(len(self.fields), self.count)
        found = []
        for rows in parts:
            at = slice(rows.start, rows.stop) if isinstance(rows, range) else list(rows)
            holes, leaves = self.holes, self.leaves
            if holes is not None:
                holes = {f: some for f, h in holes.items() if (some := picked(h, rows))} or None
            if leaves is not None:
                leaves = _there({f: tuple([one[r] for r in rows]) for f, one in leaves.items()})
            records = grid[:, at].tobytes()
            found.append(
                replace(self, count=len(rows), records=records, holes=holes, leaves=leaves)
            )
        return _cut(found) if self.inline else found

    # what changes

    def merged(
        self, other: Values, rows: Sequence[int], keep: bool
    ) -> tuple[Values, dict[str, int], Loose | None]:
        """With the values of `other`, one a row of `rows`. Returns also how many stayed that were
        there, by field (`keep`), and the records that lost, old or new."""
        if not other.fields:
            return self, {}, None
        whole = len(rows) == self.count and rows == range(self.count)
        if whole and set(self.fields).isdisjoint(other.fields):
            return self._beside(other), {}, None
        mine, new = _alike([self, other])
        old, came = mine.grid().copy(), new.grid()
        at = list(rows)
        target = old[:, at]
        written, there = came["owner"] != ABSENT, target["owner"] != ABSENT
        clash = written & there
        lost = [(came if keep else target)[clash].tobytes()]
        if keep:
            written &= ~there
        target[written] = came[written]
        old[:, at] = target
        leaves: Leaves = {}
        for place, field in enumerate(mine.fields):
            held, coming = list(mine.arrays(field)), new.arrays(field)
            for i, row in enumerate(at):
                if clash[place, i]:
                    lost.append(coming[i] if keep else held[row])
                if written[place, i]:
                    held[row] = coming[i]
            leaves[field] = tuple(held)
        inline = _padded(mine.inline) + new.inline
        found = _of_grid(mine.fields, old, mine.specs, mine.owners, inline, leaves)
        gone = b"".join(lost)
        if not gone:
            return found, {}, None
        stayed = zip(mine.fields, clash.sum(axis=1).tolist(), strict=True)
        kept = {field: rows for field, rows in stayed if rows} if keep else {}
        return found.trimmed(), kept, (mine.owners, gone)

    def _beside(self, other: Values) -> Values:
        """With fields that all these rows lack."""
        if not self.fields:
            return other
        specs, owners = _union(self.specs, other.specs), _union(self.owners, other.owners)
        inline = _padded(self.inline) if other.inline else self.inline
        other = other._numbered(specs, owners, len(inline))
        holes, leaves = other.holes, other.leaves
        return replace(
            other,
            fields=self.fields + other.fields,
            records=self.records + other.records,
            inline=inline + other.inline,
            holes=self.holes if holes is None else (self.holes or {}) | holes,
            leaves=self.leaves if leaves is None else (self.leaves or {}) | leaves,
        )

    def without(
        self, rows: Sequence[int], fields: Sequence[str] | None = None
    ) -> tuple[Values, Loose]:
        """Without what these rows have (of these fields), and the records that go."""
        grid, lost = self.grid().copy(), list[bytes]()
        leaves: Leaves = {}
        at = list(rows)
        for place, field in enumerate(self.fields):
            held = list(self.arrays(field))
            if fields is None or field in fields:
                lost.append(grid[place, at].tobytes())
                lost += [held[row] for row in at]
                grid[place, at] = _NO_VALUE[0]
                for row in at:
                    held[row] = b""
            leaves[field] = tuple(held)
        found = _of_grid(self.fields, grid, self.specs, self.owners, self.inline, leaves)
        return found.trimmed(), (self.owners, b"".join(lost))

    def trimmed(self) -> Values:
        """Without fields, specs, owners and small bytes that no record uses."""
        found = self.without_empty()
        found = _cut([found])[0] if found.inline else found
        records = np.frombuffer(found.blob, VALUE)
        records = records[records["owner"] != ABSENT]
        specs = [found.specs[i] for i in np.unique(records["spec"]).tolist()]
        owners = [found.owners[i] for i in np.unique(records["owner"]).tolist()]
        if len(specs) == len(found.specs) and len(owners) == len(found.owners):
            return found
        return found._numbered(specs, owners, 0)

    def moved(self, blob: bytes, owners: list[Owner]) -> Values:
        """With these records, as many as there were, in place of its own."""
        return self._of_blob(blob, owners=owners).trimmed()

    def _numbered(self, specs: list[Spec], owners: list[Owner], base: int) -> Values:
        """By these tables, which have all that is used; small values lie `base` further back."""
        base = base if self.inline else 0
        by, same_owners = _begins(specs, self.specs), _begins(owners, self.owners) == 0
        if by == 0 and same_owners and not base:
            return replace(self, specs=specs, owners=owners)
        records = np.frombuffer(bytearray(self.blob), VALUE)
        if base and self.is_inline:
            records["range"] += np.uint32(base)
        elif base:
            here = records["owner"] == self.owners.index(INLINE)
            records["range"] += here * np.uint32(base)
        # an ABSENT record may have any number: what is looked up is bounded first
        if by is None:
            records["spec"] = _numbers(self.specs, specs).take(records["spec"], mode="clip")
        elif by:
            records["spec"] += np.uint32(by)
        if not same_owners:
            of_owner = _numbers(self.owners, owners).take(records["owner"], mode="clip")
            records["owner"] = np.where(records["owner"] == ABSENT, ABSENT, of_owner)
        return self._of_blob(records.tobytes(), specs=specs, owners=owners)

    def _of_blob(self, blob: bytes, **changed: Any) -> Values:
        """With these records, leaves included, as many as there were."""
        if self.leaves is None:
            return replace(self, records=blob, **changed)
        leaves: Leaves = {}
        at = len(self.records)
        for field, arrays in self.leaves.items():
            ends = list(accumulate(map(len, arrays), initial=at))
            leaves[field] = tuple([blob[a:b] for a, b in pairwise(ends)])
            at = ends[-1]
        return replace(self, records=blob[: len(self.records)], leaves=leaves, **changed)


# several together


def joined(parts: Sequence[Values]) -> Values:
    """The rows of all of these, one behind the other."""
    first = parts[0]
    if len(parts) == 1 or not any([one.fields for one in parts]):
        return first if len(parts) == 1 else Values(sum([one.count for one in parts]))
    if not all(
        one.fields == first.fields and one.specs == first.specs and one.owners == first.owners
        for one in parts
    ):
        parts = _alike(parts, inline=False)
        first = parts[0]
    counts, width = [one.count for one in parts], len(first.fields)
    if len(set(counts)) == 1:
        raw = np.frombuffer(b"".join([one.records for one in parts]), _RAW)
        records = raw.reshape(len(parts), width, counts[0]).transpose(1, 0, 2).tobytes()
    else:
        sizes = [one.count * _SIZE for one in parts]
        records = b"".join(
            [
                one.records[at * size : (at + 1) * size]
                for at in range(width)
                for one, size in zip(parts, sizes, strict=True)
            ]
        )
    if not any([one.inline or one.holes or one.leaves for one in parts]):
        return replace(first, count=sum(counts), records=records)
    inline = b""
    if any(one.inline for one in parts):
        pieces = [_padded(one.inline) for one in parts]
        bases = np.cumsum([0, *map(len, pieces[:-1])])
        parts = [
            one if not one.leaves else one._numbered(one.specs, one.owners, int(base))
            for one, base in zip(parts, bases, strict=True)
        ]
        table = np.frombuffer(bytearray(records), VALUE).reshape(width, -1)
        here = table["owner"] == first.owners.index(INLINE)
        table["range"] += np.where(here, np.repeat(bases, counts), 0).astype(np.uint32)
        records, inline = table.tobytes(), b"".join(pieces)
    holes: dict[str, int] = {}
    at = 0
    for one in parts:
        for field, rows in (one.holes or {}).items():
            holes[field] = holes.get(field, 0) | rows << at
        at += one.count
    with_leaves = {field for one in parts for field in one.leaves or ()}
    leaves = {f: tuple(chain.from_iterable([p.arrays(f) for p in parts])) for f in with_leaves}
    return replace(
        first,
        count=at,
        records=records,
        inline=inline,
        holes=holes or None,
        leaves=leaves or None,
    )


def by_tables(
    parts: Iterable[Loose], inline: bool = False
) -> Iterator[tuple[Sequence[Owner], Array]]:
    """All records that are not ABSENT, in as few columns as there are lists of owners. Not inline:
    without what wholly lives here."""
    found: dict[int, tuple[Sequence[Owner], list[bytes]]] = {}
    for owners, blob in parts:
        if blob and owners and (inline or len(owners) > 1 or owners[0] != INLINE):
            found.setdefault(id(owners), (owners, []))[1].append(blob)
    for owners, blobs in found.values():
        records = np.frombuffer(b"".join(blobs), VALUE)
        yield owners, records[records["owner"] != ABSENT]


def _alike(parts: Sequence[Values], inline: bool = True) -> list[Values]:
    """The same with the fields, specs and owners of all. inline: small values of the later ones lie
    as if all of them were one behind the other."""
    fields = tuple(dict.fromkeys(field for one in parts for field in one.fields))
    specs = list(dict.fromkeys(spec for one in parts for spec in one.specs))
    owners = list(dict.fromkeys(owner for one in parts for owner in one.owners))
    found, base = [], 0
    for one in parts:
        wide = one._numbered(specs, owners, base)
        base += len(_padded(one.inline)) if inline else 0
        missing = [field for field in fields if field not in one.fields]
        if missing:
            wide = replace(
                wide,
                fields=one.fields + tuple(missing),
                records=wide.records + _NONE * (one.count * len(missing)),
                holes=(wide.holes or {}) | dict.fromkeys(missing, all_of(one.count)),
            )
        if wide.fields != fields:
            width = one.count * _SIZE
            at = [wide.fields.index(field) * width for field in fields]
            records = b"".join([wide.records[start : start + width] for start in at])
            wide = replace(wide, fields=fields, records=records)
        found.append(wide)
    return found


def _cut(parts: Sequence[Values]) -> list[Values]:
    """Parts of one message, each with what it needs of the small values; neighbours stay so."""
    first = parts[0]
    if len(parts) == 1 and (whole := _stretch(first)) is not None:
        return [whole]
    blobs = [one.blob for one in parts]
    records = np.frombuffer(bytearray(b"".join(blobs)), VALUE)
    here = records["owner"] == first.owners.index(INLINE)
    mine = records if every(here) else records[here]
    if not len(mine):
        return [one._of_blob(blob, inline=b"") for one, blob in zip(parts, blobs, strict=True)]
    starts = mine["range"].astype(np.int64)
    ends = _ends(starts, mine["nbytes"]).astype(np.int64)
    of = np.repeat(np.arange(len(parts)), [len(blob) // _SIZE for blob in blobs])[here]
    breaks = np.append(0, ((starts[1:] != ends[:-1]) | (of[1:] != of[:-1])).nonzero()[0] + 1)
    lasts = np.append(breaks[1:], len(mine)) - 1
    sizes = ends[lasts] - starts[breaks]
    runs = of[breaks]
    before = np.cumsum(sizes) - sizes  # where each run begins behind those of all parts
    base = before[np.searchsorted(runs, runs)]  # and where its part's first one does
    mine["range"] = starts + np.repeat(before - base - starts[breaks], lasts + 1 - breaks)
    if mine is not records:
        records[here] = mine
    inline: list[list[bytes]] = [[] for _ in parts]
    for part, start, size in zip(
        runs.tolist(), starts[breaks].tolist(), sizes.tolist(), strict=True
    ):
        inline[part].append(first.inline[start : start + size])
    raw, at, found = records.tobytes(), 0, []
    for one, blob, pieces in zip(parts, blobs, inline, strict=True):
        found.append(one._of_blob(raw[at : at + len(blob)], inline=b"".join(pieces)))
        at += len(blob)
    return found


def _stretch(values: Values) -> Values | None:
    """With what it needs of the small values, where they lie one behind the other; None where they
    do not, or others are among them."""
    blob = values.blob
    if not blob or not values.is_inline:
        return None
    records = np.frombuffer(blob, VALUE)
    starts = records["range"]
    ends = _ends(starts, records["nbytes"])
    if not _follow(starts, ends):
        return None
    low, high = int(starts[0]), int(ends[-1])
    if low:
        records = np.frombuffer(bytearray(blob), VALUE)
        records["range"] -= np.uint32(low)
        blob = records.tobytes()
    return values._of_blob(blob, inline=values.inline[low:high])


def _of_grid(
    fields: tuple[str, ...],
    grid: Array,
    specs: list[Spec],
    owners: list[Owner],
    inline: bytes,
    leaves: Leaves,
) -> Values:
    absent = grid["owner"] == ABSENT
    holes = {f: of_mask(a) for f, a in zip(fields, absent, strict=True) if a.any()}
    there = _there(leaves)
    return Values(
        grid.shape[1], fields, grid.tobytes(), specs, owners, inline, holes or None, there
    )


def _there(leaves: Leaves) -> Leaves | None:
    """Without fields that have no arrays inside."""
    return {field: arrays for field, arrays in leaves.items() if any(arrays)} or None


def _union(one: list[Spec] | list[Owner], other: list[Spec] | list[Owner]) -> list:  # type: ignore[type-arg]
    new = [entry for entry in dict.fromkeys(other) if entry not in one] if one != other else []
    return [*one, *new] if new else one


def _begins(table: Sequence[Spec | Owner], other: Sequence[Spec | Owner]) -> int | None:
    """Where in `table` the entries of `other` begin, in a row; None: they are not in a row."""
    if table is other or table[: len(other)] == other:
        return 0
    at = table.index(other[0]) if other[0] in table else 0
    return at if table[at : at + len(other)] == other else None


def _numbers(old: Sequence[Spec | Owner], new: Sequence[Spec | Owner]) -> Array:
    places = {one: number for number, one in enumerate(new)}
    return np.array([places.get(one, 0) for one in old] or [0], U4)


def _ends(starts: Array, sizes: Array) -> Array:
    """Where small values end that begin there, with what is left free behind them."""
    ends: Array = (sizes + _LAST & _UP) + starts
    return ends


def _follow(starts: Array, ends: Array) -> bool:
    """Whether each value begins where the one before it ends: so they are written."""
    return every(starts[1:] == ends[:-1])


def _padded(inline: bytes) -> bytes:
    return inline + bytes(-len(inline) % _STEP)


# what arrives


def values_in(
    columns: Sequence[Column],
    count: int,
    specs: list[Spec] | None,
    owners: list[Owner] | None,
    inline: bytes = b"",
) -> Values:
    """Check the columns of a message. specs, owners None: they are not known yet, nor the small
    values; only which rows have what matters.

    Everything here came from another process: a length, an index or a count that does not fit gets
    a typed error, and nothing is believed because the sender should have known better."""
    if len(columns) > MAX_FIELDS:
        raise LimitExceeded(
            f"the message has {len(columns)} fields, over the limit of {MAX_FIELDS}: use fewer "
            "fields per call",
            limit=MAX_FIELDS,
        )
    fields = tuple([one.field for one in columns])
    if len(set(fields)) != len(fields):
        twice = next(name for name in fields if fields.count(name) > 1)
        raise InvalidRows(f"field {twice!r:.80} appears twice in this call: pass each field once")
    if owners is not None and len(owners) > 1 and len(set(owners)) < len(owners):
        raise ProtocolError("the message lists an owner of values twice")
    has_leaves = False
    for one in columns:
        if not 0 < len(one.field) <= MAX_NAME_BYTES:
            raise InvalidRows(
                f"invalid field name {one.field[:40]!r}: it has {len(one.field)} characters, "
                f"expected 1 to {MAX_NAME_BYTES}"
            )
        if len(one.values) != count * _SIZE:
            raise _not_one_a_row(one, count)
        if one.leaf_counts or one.leaves:
            has_leaves = True
    records = b"".join([one.values for one in columns])
    if specs and owners and not has_leaves and len(records) <= _FEW_BYTES:
        found = Values(count, fields, records, specs, owners, inline)
        if _is_plain(found):
            return found
    known = ABSENT if owners is None else min(len(owners), ABSENT)
    holes: dict[str, int] | None = None
    if not _is_sound(records, None if specs is None else len(specs), known):
        records, holes = _checked(fields, records, count, specs, owners)
    leaves = _leaves_in(columns, count, holes or {}, specs, owners) if has_leaves else None
    found = Values(count, fields, records, specs or [], owners or [], inline, holes, leaves)
    if owners is not None and (inline or INLINE in owners):
        _check_inline(found)
    return found


def _not_one_a_row(one: Column, rows: int) -> InvalidRows:
    values = len(column(one.values, VALUE))
    return InvalidRows(
        f"field {one.field!r} has {counted(values, 'value')} for {counted(rows, 'row')}: pass one "
        "value per row",
        field=one.field,
        values=values,
        rows=rows,
    )


def _is_plain(values: Values) -> bool:
    """Whether every record is a value, of a spec and an owner that there are, and the small ones
    follow each other to the end of what is there of them. What is not plain may be sound."""
    specs, owners, end = len(values.specs), len(values.owners), 0
    here = values.owners.index(INLINE) if INLINE in values.owners else ABSENT
    for start, _, nbytes, spec, _, owner in ONE_VALUE.iter_unpack(values.records):
        if spec >= specs or owner >= owners or owner == ABSENT:
            return False
        if owner == here:
            if start != end or nbytes > INLINE_LIMIT_BYTES:
                return False
            end = start + nbytes + _STEP - 1 & -_STEP
    return end == len(values.inline)


def _is_sound(records: bytes, specs: int | None, owners: int) -> bool:
    """Whether every record is a value, of a spec and an owner that there are."""
    if not records:
        return True
    # spec, delta and owner of each, the owner uppermost: most often they are of the first
    if int(np.maximum.reduce(np.frombuffer(records, U8)[2::3])) < (specs or 0) and owners:
        return True
    raw = np.frombuffer(records, VALUE)
    if int(np.maximum.reduce(raw["owner"])) >= owners:
        return False
    return specs is None or int(np.maximum.reduce(raw["spec"])) < specs


def _checked(
    fields: Sequence[str],
    raw: bytes,
    count: int,
    specs: list[Spec] | None,
    owners: list[Owner] | None,
) -> tuple[bytes, dict[str, int] | None]:
    """The records, those without a value made equal, and which rows lack what."""
    grid = np.frombuffer(bytearray(raw), VALUE).reshape(len(fields), count)
    absent = grid["owner"] == ABSENT
    for field, records, gone in zip(fields, grid, absent, strict=True):
        _check_records(field, records[~gone], specs, owners)
    if not absent.any():
        return raw, None
    grid[absent] = _NO_VALUE[0]
    return grid.tobytes(), {
        f: of_mask(gone) for f, gone in zip(fields, absent, strict=True) if gone.any()
    }


def _check_records(
    field: str, records: Array, specs: list[Spec] | None, owners: list[Owner] | None
) -> None:
    if not len(records):
        return
    spec, owner = int(records["spec"].max()), int(records["owner"].max())
    if specs is not None and spec >= len(specs):
        raise ProtocolError(
            f"field {field!r} refers to spec {spec}, but there are only {len(specs)} specs"
        )
    if owners is not None and owner >= len(owners):
        raise ProtocolError(
            f"field {field!r} refers to owner {owner}, but there are only {len(owners)} owners"
        )


def _leaves_in(
    columns: Sequence[Column],
    rows: int,
    holes: Mapping[str, int],
    specs: list[Spec] | None,
    owners: list[Owner] | None,
) -> Leaves | None:
    found: Leaves = {}
    for one in columns:
        if not one.leaf_counts and not one.leaves:
            continue
        leaves = column(one.leaves, VALUE)
        if not one.leaf_counts:
            raise ProtocolError(
                f"field {one.field!r} has inner arrays, but no array counts per row"
            )
        counts = column(one.leaf_counts, U4, rows).astype(np.int64)
        if int(counts.max()) > MAX_LEAVES_PER_ROW:
            raise LimitExceeded(
                f"field {one.field!r} has a row with {int(counts.max())} arrays, over the limit "
                f"of {MAX_LEAVES_PER_ROW}: stack them, or spread them over several fields",
                limit=MAX_LEAVES_PER_ROW,
            )
        without = holes.get(one.field, 0) & of_mask(counts > 0)
        if (total := int(counts.sum())) != len(leaves):
            raise ProtocolError(
                f"field {one.field!r} has {len(leaves)} inner arrays, but its array counts per row "
                f"add up to {total}"
            )
        if without:
            raise ProtocolError(
                f"field {one.field!r} has inner arrays for {counted(without.bit_count(), 'row')} "
                f"that {'has' if without.bit_count() == 1 else 'have'} no value"
            )
        _check_records(one.field, leaves, specs, owners)
        if (leaves["owner"] == ABSENT).any():
            raise ProtocolError(f"an array inside field {one.field!r} has no location")
        ends = (np.cumsum(counts) * _SIZE).tolist()
        found[one.field] = tuple([one.leaves[a:b] for a, b in pairwise([0, *ends])])
    return _there(found)


def _check_inline(values: Values) -> None:
    """ProtocolError unless what is named of the small values is there, and all of it small."""
    inline = values.inline
    if INLINE not in values.owners:
        raise ProtocolError(
            f"the message has {len(inline)} bytes of small values, but does not list the shard as "
            "an owner"
        )
    mine = np.frombuffer(values.blob, VALUE)
    if len(values.owners) > 1 or values.holes:
        mine = mine[mine["owner"] == values.owners.index(INLINE)]
    if not len(mine):
        if inline:
            raise ProtocolError(
                f"the message has {len(inline)} bytes of small values that no field refers to"
            )
        return
    starts, sizes = mine["range"], mine["nbytes"]
    most = int(np.maximum.reduce(sizes))
    if most > INLINE_LIMIT_BYTES:
        raise ProtocolError(
            f"a value of {most} bytes is too large to store in the shard: the limit is "
            f"{INLINE_LIMIT_BYTES} bytes",
            limit=INLINE_LIMIT_BYTES,
        )
    ends = _ends(starts, sizes)
    end, named, astray = int(ends[-1]), int(ends[-1]), 0
    if starts[0] or not _follow(starts, ends):
        end, named = int(np.maximum.reduce(ends)), int(np.add.reduce(ends - starts))
        astray = int(np.bitwise_or.reduce(starts)) % _STEP
    if end > len(inline):
        raise ProtocolError(
            f"a small value ends at byte {end}, but the message has only {len(inline)} bytes of "
            "small values"
        )
    if astray:
        raise ProtocolError(f"a small value in the message is not aligned to {_STEP} bytes")
    if named > len(inline):  # rows that part would take a copy each
        raise ProtocolError(
            f"small values in the message overlap: they have {named} bytes in total, but the "
            f"buffer has only {len(inline)}"
        )
