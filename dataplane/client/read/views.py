"""Columns of fetched rows as sequences: arrays are read-only views of the arena, made when asked.

Runs in the client. A view's memory is pinned through the base array, whose own base is the pin: the
pin goes when the last view dies. Small values that came with the message are views of that. Nothing
here copies an array; texts and bytes of objects are copied out as they are decoded.
"""

from __future__ import annotations

import math
import reprlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, pairwise
from typing import Any, TypeVar, cast, overload

import numpy as np
import numpy.typing as npt

from dataplane.client.read.ragged import Ragged, ragged_of
from dataplane.client.write.parallel import SHARED_BYTES, Copy, carry_out
from dataplane.errors import DataplaneError, FieldUnknown, ProtocolError
from dataplane.memory.extents import every, some
from dataplane.wire import objects
from dataplane.wire.arrays import (
    Array,
    as_array,
    dtype_of,
    is_jagged,
    is_torch,
    jagged_parts,
    ragged_axis,
    shape_of,
)
from dataplane.wire.limits import MAX_RANK
from dataplane.wire.records import PLACE, PLACE_ABSENT, PLACE_INLINE, U4, U8, column
from dataplane.wire.tables import Column, Spec

Records = npt.NDArray[np.void]
Ints = npt.NDArray[np.int64]
_ROWS_A_RUN, _FEW_ROWS = 4, 16
_SHOWN = 4
"""How many numbers of a value a representation shows."""
_IN_ARENA = 4
"""Beside PLACE_INLINE."""
_BUT_OFFSET = np.dtype(f"V{PLACE.itemsize - U8.itemsize}")
"""What follows the offset in a PLACE: bytes, spec and flags."""
_NO_LEAVES = np.zeros(0, PLACE)
_NOTHING = bytes(8)
"""Memory for values without bytes."""
NOWHERE = np.zeros(0, np.uint8)
"""The arena of rows of which nothing is pinned there."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class _Form:
    """A spec, made ready: `row` bytes decide the open length where it is not 0, which stands
    between `head` and `tail`."""

    spec: Spec
    dtype: np.dtype[Any]
    row: int
    head: tuple[int, ...]
    tail: tuple[int, ...]


class ColumnView(Sequence[Any]):
    """One field of some rows: entry i is the value of row i.

    Arrays come as zero-copy read-only ndarrays (0-d where a row has one number of an array column),
    objects with the Python types they were put with. FieldUnknown at a row that lacks the field.
    """

    __slots__ = (
        "_base",
        "_forms",
        "_inline",
        "_known",
        "_name_of",
        "_leaf_starts",
        "_leaves",
        "_places",
        "field",
    )

    def __init__(
        self,
        source: Column,
        specs: Sequence[Spec],
        base: Array,
        name_of: Callable[[int], object] | None = None,
        inline: bytes = b"",
    ) -> None:
        """base: the whole arena, uint8, read-only. name_of: what a row is called in messages.
        inline: what came with the message. ProtocolError where the records do not fit each other,
        the arena or the message."""
        self.field = source.field
        self._name_of = name_of
        self._forms: list[_Form | Spec] = list(specs)
        self._known: dict[str, Any] = {}
        self._places: Records = column(source.values, PLACE)
        self._leaves: Records = column(source.leaves, PLACE) if source.leaves else _NO_LEAVES
        self._inline: Array | None = None
        """what came with the message, where only some of the values lie in it"""
        sizes = len(self._forms), base.nbytes, len(inline)
        found = self._sound_alike(*sizes)
        if found is None:
            found = _checked(self._places, *sizes)
        if source.leaves:
            found |= _checked(self._leaves, *sizes)
        if found & PLACE_INLINE:
            memory = np.frombuffer(inline or _NOTHING, np.uint8)
            if found & _IN_ARENA:
                self._inline = memory
            else:
                base = memory
        self._base = base
        self._leaf_starts: Ints | None = None
        if source.leaf_counts:
            counts = column(source.leaf_counts, U4, len(self._places))
            self._leaf_starts = np.zeros(len(counts) + 1, np.int64)
            np.cumsum(counts, out=self._leaf_starts[1:])
            if self._leaf_starts[-1] != len(self._leaves):
                raise ProtocolError(
                    f"field {self.field!r}: the array counts per row do not add up to the number "
                    "of arrays received"
                )

    def __len__(self) -> int:
        return len(self._places)

    def __reduce__(self) -> Any:
        """Another process gets a list of private copies."""
        return list, (list(self),)

    def __repr__(self) -> str:
        return f"<{self.field}: {len(self)} rows, {self.described()}>"

    def described(self) -> str:
        """What is here, for people: dtype and shape, the lengths of rows, and the first value."""
        rows = np.flatnonzero(~self.absent)
        if not len(rows):
            return "no values"
        try:
            first = self[int(rows[0])]
            shown = _shown(first)
        except DataplaneError as exc:  # a representation is no place to fail
            return f"unreadable: {exc.message:.80}"
        lacking = f", {len(self) - len(rows)} lacking" if len(rows) < len(self) else ""
        return f"{self._described_form(first)}{lacking}, first {shown}"

    def _described_form(self, first: Any) -> str:
        if not self.holds_arrays:
            return type(first).__name__ if not isinstance(first, np.ndarray) else "mixed values"
        ragged, uniform = self.ragged(), self.uniform
        if uniform is not None:
            return f"{uniform[0].name}{list(uniform[1]) or ''}"
        if ragged is None:
            return f"arrays of {' and '.join(sorted({one.name for one in self.dtypes}))}"
        shape = ",".join(map(str, (*ragged.head, "*", *ragged.tail)))
        least, most = int(ragged.lengths.min()), int(ragged.lengths.max())
        return f"{ragged.dtype.name}[{shape}] of length {least} to {most}"

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> ColumnView: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        row = range(len(self))[index]
        offset, nbytes, spec, flags = self._places[row].item()
        if flags & PLACE_ABSENT:
            raise self.lacking(row)
        form = self._form(spec)
        if form.spec.kind == "array":
            return self._array(offset, nbytes, form, flags)
        return objects.decode(self._memory(offset, nbytes, flags), self._leaves_of(row))

    def __iter__(self) -> Iterator[Any]:
        if self._inline is not None or len(self._places) <= _FEW_ROWS:
            return self._values()
        uniform = self.uniform
        if uniform is not None:
            dtype, shape = uniform
            # items of a dense array would be numpy scalars where a row is one number
            runs = self._runs(dtype, shape) if shape else None
            if runs is not None:
                return chain.from_iterable(runs)
            offsets = self._places["offset"].tolist()
            return (np.ndarray(shape, dtype, self._base, offset) for offset in offsets)
        return (self._leafless() if self._begins_with_object else self._ragged()) or self._values()

    def present(self, row: int) -> bool:
        """Whether this row has the field."""
        return not int(self._places["flags"][row]) & PLACE_ABSENT

    def take(self, rows: npt.ArrayLike) -> ColumnView:
        """The same field of only these rows (indexes), still without a copy."""
        chosen = np.asarray(rows, np.int64)
        part = object.__new__(ColumnView)
        part.field, part._base = self.field, self._base
        part._inline = self._inline
        part._forms, part._places, part._known = self._forms, self._places[chosen], {}
        name_of = self._name_of
        part._name_of = None if name_of is None else lambda row: name_of(int(chosen[row]))
        part._leaves, part._leaf_starts = self._leaves, None
        if self._leaf_starts is not None:
            starts = self._leaf_starts[chosen]
            counts = self._leaf_starts[chosen + 1] - starts
            part._leaf_starts = np.zeros(len(chosen) + 1, np.int64)
            np.cumsum(counts, out=part._leaf_starts[1:])
            ends = part._leaf_starts
            part._leaves = self._leaves[np.arange(ends[-1]) + np.repeat(starts - ends[:-1], counts)]
        return part

    @property
    def came_along(self) -> bool:
        """Whether all values lie in the message that brought them."""
        return self._inline is None and every(self._places["flags"] != 0)

    @property
    def places(self) -> Records:
        """The PLACE record of each row."""
        return self._places

    @property
    def base(self) -> Array | None:
        """The memory in which all rows lie, for as long as anybody holds this; None where some lie
        elsewhere."""
        return self._base if self._inline is None else None

    def _once(self, what: str, find: Callable[[], T]) -> T:
        """What is found out about the column, once."""
        if what not in self._known:
            self._known[what] = find()
        found: T = self._known[what]
        return found

    @property
    def _used(self) -> list[_Form]:
        """The forms of the rows that are here."""
        return self._once(
            "forms",
            lambda: [self._form(spec) for spec in np.unique(self.places["spec"][~self.absent])],
        )

    @property
    def holds_arrays(self) -> bool:
        """Whether every row is an array (not an object, not absent)."""
        if len(self) == 0 or self.absent.any():
            return False
        return all(form.spec.kind == "array" for form in self._used)

    @property
    def uniform(self) -> tuple[np.dtype[Any], tuple[int, ...]] | None:
        """dtype and shape that all rows share; None where they differ or are no arrays."""
        return self._once("uniform", self._uniform)

    def _uniform(self) -> tuple[np.dtype[Any], tuple[int, ...]] | None:
        places = self._places
        if not len(places):
            return None
        _, nbytes, spec, flags = places[0].item()
        form = self._form(spec)
        if flags & PLACE_ABSENT or form.spec.kind != "array":
            return None
        if not (self._is_alike or self._inline is not None and self._alike_otherwise(nbytes, spec)):
            return None
        return form.dtype, _shape(form, nbytes)

    @property
    def _is_alike(self) -> bool:
        """Whether all rows differ in nothing but where they begin."""
        return self._once("alike", self._differ_in_offsets)

    def _differ_in_offsets(self) -> bool:
        places = self._places
        rest = np.ndarray(len(places), _BUT_OFFSET, places, U8.itemsize, PLACE.itemsize).tobytes()
        return rest == rest[: _BUT_OFFSET.itemsize] * len(places)

    def _sound_alike(self, specs: int, arena_bytes: int, inline_bytes: int) -> int | None:
        """As `_checked`, where there are many rows and they are alike: the furthest says it."""
        places = self._places
        if len(places) <= _FEW_ROWS or not self._is_alike:
            return None
        _, *alike = places.item(0)
        furthest = int(np.maximum.reduce(places["offset"]))
        return _sound([(furthest, *alike)], specs, arena_bytes, inline_bytes)

    def _alike_otherwise(self, nbytes: int, spec: int) -> bool:
        """Whether all have so many bytes and this spec, some in the message and some in the
        arena."""
        places = self._places
        same = (places["nbytes"] == nbytes) & (places["spec"] == spec)
        return every(same & (places["flags"] & PLACE_ABSENT == 0))

    @property
    def loose(self) -> bool:
        """Whether rows were given one by one: a nested tensor, a list of arrays; or are kept as
        objects that are no tensors."""
        return any(form.spec.loose for form in self._used)

    @property
    def absent(self) -> npt.NDArray[np.bool_]:
        """Per row whether it lacks the field."""
        lacking: npt.NDArray[np.bool_] = self.places["flags"] & PLACE_ABSENT != 0
        return lacking

    @property
    def dtypes(self) -> list[np.dtype[Any]]:
        """Those of the rows that are arrays."""
        if self.uniform is not None:
            return [self.uniform[0]]
        return [form.dtype for form in self._used if form.spec.kind == "array"]

    def forms(self) -> list[tuple[np.dtype[Any], tuple[int, ...]]]:
        """dtype and shape of each row, where all are arrays."""
        places = self.places
        used = map(self._form, places["spec"].tolist())
        return [
            (form.dtype, _shape(form, nbytes))
            for form, nbytes in zip(used, places["nbytes"].tolist(), strict=True)
        ]

    def ragged(self) -> Ragged | None:
        """How the rows lie side by side, where they are arrays of one dtype that differ along one
        axis at most; of numbers, None. Where all are alike it is the axis as it was put."""
        return self._once("ragged", self._ragged_form)

    def _ragged_form(self) -> Ragged | None:
        if not len(self) or self.absent.any():
            return None
        places, forms = self.places, self._used
        if len({form.dtype for form in forms}) > 1 or any(f.spec.kind != "array" for f in forms):
            return None
        form = forms[0]
        if len(forms) == 1 and form.row and not (places["nbytes"] % form.row).any():
            lengths = (places["nbytes"] // form.row).astype(np.int64)
            return Ragged(form.dtype, form.head, form.tail, lengths)
        shapes = [shape for _, shape in self.forms()]
        axis = max(ragged_axis(form.spec.shape) or 0 for form in forms)
        return ragged_of(form.dtype, shapes, axis)

    def dense(self) -> Array | None:
        """All rows as one read-only array [n, ...] where they lie at a regular distance."""
        uniform = self.uniform
        return None if uniform is None else self._strided(*uniform)

    def _strided(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array | None:
        runs = self._runs(dtype, shape)
        return runs[0] if runs is not None and len(runs) == 1 else None

    def _runs(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> list[Array] | None:
        """The rows as few arrays [n, ...], each where they lie at a regular distance; None where
        that would be many. Their items are made in a third of the time of arrays one by one."""
        if self._inline is not None:
            return None
        if len(self._places) == 1:
            return [np.ndarray((1, *shape), dtype, self._base, self._places.item(0)[0])]
        offsets = np.ndarray(len(self._places), np.int64, self._places, 0, PLACE.itemsize)
        steps = offsets[1:] - offsets[:-1]
        if (raw := steps.tobytes()) == raw[: U8.itemsize] * len(steps):
            bounds, step = [0, len(offsets)], steps.item(0)
        else:
            step = int(np.minimum.reduce(steps))
            bounds = [0, *((steps != step).nonzero()[0] + 1).tolist(), len(offsets)]
        if step < 0 or (len(bounds) > 2 and _ROWS_A_RUN * len(bounds) > len(offsets)):
            return None
        strides = np.ndarray(shape, dtype, self._base, offsets.item(0)).strides
        return [
            np.ndarray(
                (last - first, *shape), dtype, self._base, offsets.item(first), (step, *strides)
            )
            for first, last in pairwise(bounds)
        ]

    def pack(self, target: npt.NDArray[np.uint8]) -> None:
        """Copy the bytes of all rows, one behind the other, into `target`."""
        dense = self.dense()
        if dense is not None and dense.size:
            carry_out([(target.view(dense.dtype).reshape(dense.shape), dense)], dense.nbytes)
        elif self._inline is None and self._places["nbytes"].max(initial=0) < SHARED_BYTES:
            self._pack_small(memoryview(cast(Any, target)))
        else:
            carry_out(self._copies(target), target.nbytes)

    def _pack_small(self, target: memoryview) -> None:
        """Row by row without a line of Python for each: that would take as long as the copies."""
        offsets, nbytes = (self._places[name].astype(np.int64) for name in ("offset", "nbytes"))
        ends = np.cumsum(nbytes)
        sources = map(slice, offsets.tolist(), (offsets + nbytes).tolist())
        targets = map(slice, (ends - nbytes).tolist(), ends.tolist())
        memory = memoryview(cast(Any, self._base))
        copies = map(target.__setitem__, targets, map(memory.__getitem__, sources))
        deque(copies, maxlen=0)

    def _copies(self, target: npt.NDArray[np.uint8]) -> Iterator[Copy]:
        small, at = memoryview(cast(Any, target)), 0
        for offset, nbytes, _, flags in self._places.tolist():
            if nbytes < SHARED_BYTES:
                small[at : at + nbytes] = self._memory(offset, nbytes, flags)
            else:
                yield target[at : at + nbytes], self._base[offset : offset + nbytes]
            at += nbytes

    def equals(self, other: Sequence[Any]) -> bool:
        """Whether the other has the same values: types, dtypes, shapes and bytes; NaN is itself."""
        return len(self) == len(other) and all(map(same, self, other))

    def _ragged(self) -> Iterator[Any] | None:
        """The rows where all are arrays of one spec whose first length is open, else None."""
        places = self._places
        if not len(places) or self.absent.any() or (places["spec"] != places["spec"][0]).any():
            return None
        form = self._form(int(places["spec"][0]))
        if not form.row or (places["nbytes"] % form.row).any():
            return None
        base, dtype, head, tail = self._base, form.dtype, form.head, form.tail
        columns = (places["offset"].tolist(), (places["nbytes"] // form.row).tolist())
        return (
            np.ndarray((*head, n, *tail), dtype, base, offset)
            for offset, n in zip(*columns, strict=True)
        )

    @property
    def _begins_with_object(self) -> bool:
        """A column that does is one of objects, or mixed."""
        if not len(self._places):
            return False
        _, _, spec, flags = self._places[0].item()
        return not flags & PLACE_ABSENT and self._form(spec).spec.kind == "object"

    def _leafless(self) -> Iterator[Any] | None:
        """The rows where all are objects without arrays, such as texts, else None."""
        places = self._places
        if self._leaf_starts is not None or self.absent.any():
            return None
        if any(self._form(spec).spec.kind != "object" for spec in set(places["spec"].tolist())):
            return None
        columns = (places["offset"].tolist(), places["nbytes"].tolist())
        memory = memoryview(cast(Any, self._base))
        return objects.decode_many(
            memory[offset : offset + nbytes] for offset, nbytes in zip(*columns, strict=True)
        )

    def _values(self) -> Iterator[Any]:
        decode = objects.decode if self._leaf_starts is None else objects.Decoder().decode
        for row, (offset, nbytes, spec, flags) in enumerate(self._places.tolist()):
            if flags & PLACE_ABSENT:
                raise self.lacking(row)
            form = self._form(spec)
            if form.spec.kind == "array":
                yield self._array(offset, nbytes, form, flags)
            else:
                head = self._memory(offset, nbytes, flags)
                yield decode(head, self._leaves_of(row))

    def _memory(self, offset: int, nbytes: int, flags: int) -> memoryview:
        """Where one value lies."""
        inline = self._inline is not None and flags & PLACE_INLINE
        memory = self._inline if inline else self._base
        return memoryview(cast(Any, memory))[offset : offset + nbytes]

    def _array(self, offset: int, nbytes: int, form: _Form, flags: int) -> Array:
        base = self._base
        if self._inline is not None and flags & PLACE_INLINE:
            base = self._inline
        return np.ndarray(_shape(form, nbytes), form.dtype, base, offset)

    def _leaves_of(self, row: int) -> list[Array]:
        if self._leaf_starts is None:
            return []
        first, last = self._leaf_starts[row : row + 2].tolist()
        return [
            self._array(offset, nbytes, self._form(spec), flags)
            for offset, nbytes, spec, flags in self._leaves[first:last].tolist()
        ]

    def _form(self, number: int) -> _Form:
        form = self._forms[number]
        if isinstance(form, Spec):
            form = self._forms[number] = _form_of(form)
        return form

    def lacking(self, row: int) -> FieldUnknown:
        """The error of a row that lacks the field."""
        named = f"row {row}" if self._name_of is None else f"row {self._name_of(row)!r}"
        return FieldUnknown(f"{named} has no field {self.field!r}", field=self.field, row=row)


def _shown(value: Any) -> str:
    """The beginning of a value on one line."""
    if not isinstance(value, np.ndarray) or not value.ndim:
        return f"{reprlib.repr(value.item() if isinstance(value, np.ndarray) else value):.60}"
    few = value.reshape(-1)[:_SHOWN]
    more = ", …" if value.size > _SHOWN else ""
    return f"[{', '.join(map(str, few.tolist()))}{more}]"


def _shape(form: _Form, nbytes: int) -> tuple[int, ...]:
    """Of a value of so many bytes."""
    if form.row and nbytes % form.row == 0:
        return (*form.head, nbytes // form.row, *form.tail)
    return shape_of(form.spec, form.dtype.itemsize, nbytes)


def same(one: Any, other: Any) -> bool:
    """Whether two values are the same to the last bit: types, order of keys, dtypes, shapes."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (np.ndarray, np.generic)):
        return (one.dtype, one.shape) == (other.dtype, other.shape) and (
            one.tobytes() == other.tobytes()
        )
    if is_torch(one):
        parts = (
            map(np.asarray, jagged_parts(t)) if is_jagged(t) else [as_array(t)]
            for t in (one, other)
        )
        return (one.dtype, one.is_nested) == (other.dtype, other.is_nested) and all(
            map(same, *parts)
        )
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return same(list(one), list(other)) and same(list(one.values()), list(other.values()))
    if isinstance(one, float):
        return np.float64(one).tobytes() == np.float64(other).tobytes()
    return bool(one == other)


@lru_cache(maxsize=1024)
def _form_of(spec: Spec) -> _Form:
    if spec.kind == "object":
        return _Form(spec, np.dtype(np.uint8), 0, (), ())
    dtype, at = dtype_of(spec.dtype), ragged_axis(spec.shape) or 0
    head, tail = tuple(spec.shape[:at]), tuple(spec.shape[at + 1 :])
    # other shapes, and those that no array can have, are left to `shape_of`
    is_open = spec.shape[at : at + 1] == (-1,) and len(spec.shape) <= MAX_RANK
    is_open = is_open and min(head + tail, default=1) > 0
    return _Form(spec, dtype, dtype.itemsize * math.prod(head + tail) if is_open else 0, head, tail)


def _checked(places: Records, specs: int, arena_bytes: int, inline_bytes: int) -> int:
    """Where these values lie: PLACE_INLINE where some are in the message, _IN_ARENA where some are
    in the arena. ProtocolError for one that lies outside, or names no spec."""
    if len(places) <= _FEW_ROWS:  # numpy costs more than the work
        return _sound(places.tolist(), specs, arena_bytes, inline_bytes)
    flags, nbytes, size = places["flags"], places["nbytes"], cast(Any, np.uint64(arena_bytes))
    inlined = flags & PLACE_INLINE != 0
    found = PLACE_INLINE if some(inlined) else 0
    if found:
        size = np.where(inlined, np.uint64(inline_bytes), size)
    sound = (nbytes <= size) & (places["offset"] <= size - nbytes) & (places["spec"] < specs)
    if not every(sound) and not every(sound | (flags & PLACE_ABSENT != 0)):
        raise _outside()
    return found if found and every(flags != 0) else found | _IN_ARENA


def _sound(
    places: list[tuple[int, int, int, int]], specs: int, arena_bytes: int, inline_bytes: int
) -> int:
    """The same, of few."""
    found = 0
    for offset, nbytes, spec, flags in places:
        if flags & PLACE_ABSENT:
            continue
        inline = flags & PLACE_INLINE
        if offset + nbytes > (inline_bytes if inline else arena_bytes) or spec >= specs:
            raise _outside()
        found |= inline or _IN_ARENA
    return found


def _outside() -> ProtocolError:
    return ProtocolError("a value is outside the arena, or has no spec")
