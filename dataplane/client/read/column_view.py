"""One field of some rows as a sequence, over the chunks that hold it.

A view is a list of runs: neighbouring rows of one chunk, or rows that lack the field. Slices and
selections of a view are other runs over the same chunks. Arrays are read-only views of the arena,
made on first use. Their base keeps the chunks pinned. Texts and bytes are copied out as they are
decoded.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, chain, pairwise, starmap
from typing import Any, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from dataplane.client.read.chunk_columns import ChunkColumn, Memory
from dataplane.client.read.ragged import Ragged, ragged_of
from dataplane.client.write.copying import carry_out
from dataplane.errors import DataplaneError, FieldUnknown, ValueCorrupt, joined
from dataplane.wire.arrays import (
    Array,
    ArrayForm,
    preview,
    shortened,
    shown,
)
from dataplane.wire.layouts import OPEN, ColumnSpec
from dataplane.wire.tables import INLINE, Owner

_SHOWN = 4
"""How many numbers of a value a representation shows."""
_LOOKED_AT = 64
"""Objects whose types a representation names."""


NameOf: TypeAlias = Callable[[int], object]
"""Returns the key of a row."""
OwnerOf: TypeAlias = Callable[[ChunkColumn], Owner]
"""Returns the owner of the chunk of a column. INLINE: not known."""
RowSpan: TypeAlias = tuple[ChunkColumn | None, int, int]
"""Rows of a chunk column, from the first up to, but not including, the last. None: rows that lack
the field."""


class ColumnView(Sequence[Any]):
    """One field of some rows, as a sequence: entry i is the value of row i.

    Arrays are read-only NumPy views of shared memory. If the field has one number per row, each
    entry is a 0-d array. Objects have the Python types they were put with.
    Reading a row that lacks the field raises FieldUnknown, and a value whose bytes do not fit its
    layout raises ValueCorrupt.
    """

    def __init__(
        self,
        field: str,
        runs: Sequence[RowSpan],
        name_of: NameOf | None = None,
        owner_of: OwnerOf = lambda column: INLINE,
    ) -> None:
        """runs: none of them is empty. name_of, owner_of: for error messages."""
        self.field = field
        self.runs = runs
        self.name_of = name_of
        self.owner_of = owner_of

    @cached_property
    def _ends(self) -> list[int]:
        """Where each run ends, in rows of this view."""
        return list(accumulate([last - first for _, first, last in self.runs]))

    def __len__(self) -> int:
        return self._ends[-1] if self.runs else 0

    def __reduce__(self) -> Any:
        """Pickle the view as a list of private copies."""
        return list, (list(self),)

    def __repr__(self) -> str:
        return f"<{self.field}: {len(self)} rows, {self.described()}>"

    def described(self) -> str:
        """Describe the values: dtype and shape, the lengths of the rows, and the first value."""
        rows = np.flatnonzero(~self.absent)
        if not len(rows):
            return "no values"
        try:
            first = self[int(rows[0])]
            shown = _shown(first)
            form = arrays_of(self)._described_form(first, rows)
        except DataplaneError as exc:  # `repr` must not raise
            return f"unreadable: {exc.message:.80}"
        lacking = f", {len(self) - len(rows)} rows without a value" if len(rows) < len(self) else ""
        return f"{form}{lacking}, first {shown}"

    def _described_form(self, first: Any, rows: npt.NDArray[np.intp]) -> str:
        """rows: the rows with a value. first: the first of these."""
        if not self.holds_arrays:
            if isinstance(first, np.ndarray):
                return "mixed values"
            kinds = {type(self[int(row)]).__name__ for row in rows[:_LOOKED_AT]}
            return joined(sorted(kinds)) if len(kinds) <= 3 else "mixed values"
        ragged, uniform = self.ragged, self.uniform
        if uniform is not None:
            return f"{uniform[0].name}{list(uniform[1]) or ''}"
        if ragged is None:
            return f"arrays of {joined(sorted({one.name for one in self.dtypes}))}"
        shape = ",".join(map(str, (*ragged.head, "*", *ragged.tail)))
        least, most = min(ragged.lengths), max(ragged.lengths)
        return f"{ragged.dtype.name}[{shape}] of length {least} to {most}"

    # values

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> ColumnView: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        try:
            row = range(len(self))[index]
        except IndexError:
            raise IndexError(
                f"field {self.field!r}: row {index} is out of range, because there are "
                f"{len(self)} rows"
            ) from None
        except TypeError:
            raise TypeError(
                f"field {self.field!r}: the index is {shown(index):.40}: expected an int or a "
                "slice; to select several rows, use batch.rows([…])"
            ) from None
        column, at = self.place(row)
        if column is None:
            raise self.lacking(row)
        try:
            (value,) = column.values(at, at + 1)
        except ValueCorrupt as exc:
            raise self._corrupt(column, at, at + 1, exc.message) from exc
        return value

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(starmap(self._values, self.runs))

    def _values(self, column: ChunkColumn | None, first: int, last: int) -> Iterable[Any]:
        """The values of a run. All earlier runs have values."""
        if column is None:
            raise self.lacking(int(self.absent.argmax()))
        try:
            return column.values(first, last, self._corrupt)
        except ValueCorrupt as exc:
            raise self._corrupt(column, first, last, exc.message) from exc

    def present(self, row: int) -> bool:
        """Return whether this row has the field."""
        return self.place(row)[0] is not None

    def place(self, row: int) -> tuple[ChunkColumn | None, int]:
        """Return the chunk column that has this row, and the row's position in it."""
        number = bisect_right(self._ends, row)
        column, _, last = self.runs[number]
        return column, last - self._ends[number] + row

    def take(self, rows: npt.ArrayLike) -> ColumnView:
        """Return a view of only the rows at these positions, without copying."""
        chosen: npt.NDArray[np.intp] = np.arange(len(self))[np.asarray(rows, np.intp)]
        name_of = self.name_of
        return type(self)(
            self.field,
            cut(self.runs, row_runs(chosen)),
            None if name_of is None else lambda row: name_of(int(chosen[row])),
            self.owner_of,
        )

    def lacking(self, row: int) -> FieldUnknown:
        """Return the error for a row that lacks the field."""
        named = f"row {row}" if self.name_of is None else f"row {self.name_of(row)!r}"
        return FieldUnknown(
            f"{named} has no field {self.field!r}: skip the row, or call get({self.field!r}), "
            "which returns None for rows without the field",
            field=self.field,
            row=row,
        )

    def _corrupt(self, column: ChunkColumn, first: int, last: int, reason: str) -> ValueCorrupt:
        """Return the error for the first of these rows of a chunk that cannot be read."""
        at = next((at for at in range(first, last) if _is_corrupt(column, at)), first)
        runs = zip(self.runs, self._ends, strict=True)
        row = next(end - b + at for (one, a, b), end in runs if one is column and a <= at < b)
        return corrupt(self.field, row, self.name_of, self.owner_of(column), reason)

    # common properties of all rows

    @cached_property
    def specs(self) -> list[ColumnSpec | None]:
        """The distinct specs of the rows. None stands for rows that lack the field."""
        found = [None if column is None else column.spec for column, _, _ in self.runs]
        return list(dict.fromkeys(found))

    @cached_property
    def absent(self) -> npt.NDArray[np.bool_]:
        """For each row, whether it lacks the field."""
        lacks = [column is None for column, _, _ in self.runs]
        return np.repeat(np.array(lacks, bool), [last - first for _, first, last in self.runs])

    @cached_property
    def holds_arrays(self) -> bool:
        """Whether every row is an array (not an object, not absent)."""
        return bool(self.runs) and all(
            [spec is not None and spec.kind == "array" for spec in self.specs]
        )

    @property
    def loose(self) -> bool:
        """Whether some rows were put separately (in a nested tensor or a list of arrays), or are
        objects other than tensors."""
        return any([spec is not None and spec.loose for spec in self.specs])

    @cached_property
    def dtypes(self) -> list[np.dtype[Any]]:
        """The distinct dtypes of the rows that are arrays."""
        arrays = [spec for spec in self.specs if spec is not None and spec.kind == "array"]
        return list(dict.fromkeys([spec.items for spec in arrays]))

    @cached_property
    def uniform(self) -> ArrayForm | None:
        """The dtype and shape that all rows share. None if they differ or a row is not an array."""
        if not self.holds_arrays:
            return None
        dtype, *others = self.dtypes
        shapes = {column.shared_shape(first, last) for column, first, last in self.runs if column}
        shape = shapes.pop()
        return None if others or shapes or shape is None else (dtype, shape)

    def forms(self) -> list[ArrayForm]:
        """Return the dtype and shape of each row. All rows must be arrays."""
        return [
            (column.spec.items, column.shape_of(row))
            for column, first, last in self.runs
            if column is not None
            for row in range(first, last)
        ]

    @cached_property
    def ragged(self) -> Ragged | None:
        """What is needed to join the rows along one axis: the dtype, the sizes of the dimensions
        before and after that axis, and each row's length along it. None if the rows are single
        numbers, differ in dtype or number of dimensions, differ in length along several axes, or
        are not all arrays. If all shapes are equal, rows are joined along the axis that a spec
        declares as variable, or along axis 0 if no spec does."""
        if not self.holds_arrays:
            return None
        dtype, *others = self.dtypes
        if others:
            return None
        shapes = {spec.shape for spec in self.specs if spec is not None}
        if len(shapes) == 1 and (shape := shapes.pop()).count(OPEN) == 1:
            axis = shape.index(OPEN)
            own = [column.lengths[first:last] for column, first, last in self.runs if column]
            return Ragged(dtype, shape[:axis], shape[axis + 1 :], list(chain.from_iterable(own)))
        axes = [shape.index(OPEN) for shape in shapes if OPEN in shape]
        return ragged_of(dtype, [form[1] for form in self.forms()], max(axes, default=0))

    # where the rows are

    def on_host(self) -> ColumnView:
        """Return the same rows in host memory: this view, unless a plug-in keeps them elsewhere."""
        return self

    def on_gpu(self, device: str) -> Any | None:
        """Return the rows for `tensors.to_torch`, if all of them are on GPUs and `device` is a GPU;
        else None."""
        return None

    # bytes

    @property
    def nbytes(self) -> int:
        """The size in bytes of all rows that have the field."""
        return sum(
            [
                (column.bounds[last] - column.bounds[first]) * column.spec.unit_bytes
                for column, first, last in self.runs
                if column is not None
            ]
        )

    def spans(self) -> list[Memory]:
        """Return the bytes of the rows as read-only uint8 arrays, without a copy. Consecutive rows
        of a chunk share one array. All rows must be arrays."""
        return [column.span(first, last) for column, first, last in self.runs if column is not None]

    def dense(self) -> Array | None:
        """Return all rows as one read-only array [n, ...]. None unless they are contiguous arrays
        with the same dtype and shape."""
        if self.uniform is None:
            return None
        memory = _side_by_side(self.spans())
        return None if memory is None else self.stacked(memory)

    def stacked(self, memory: Memory | None = None) -> Array:
        """Return an array [n, ...] over this memory, or over new memory, for rows that share one
        dtype and shape."""
        assert self.uniform is not None
        dtype, shape = self.uniform
        try:
            return np.ndarray((len(self), *shape), dtype, memory)
        except ValueError as exc:  # an axis is longer than NumPy allows, and another one is 0
            column, first, last = self.runs[0]
            assert column is not None
            raise self._corrupt(column, first, last, f"a value of shape {shape}: {exc}") from exc

    def pack(self, target: Memory) -> None:
        """Copy the bytes of all rows into `target`, row after row. All rows must be arrays."""
        at, copies = 0, []
        for span in self.spans():
            copies.append((target[at : at + len(span)], span))
            at += len(span)
        carry_out(copies, at)


def arrays_of(view: ColumnView) -> ColumnView:
    """Turn arrays that were stored as objects (because they differ in dtype or rank) into array
    rows. Return the view unchanged if it holds no such arrays, or if some row is not an array."""
    if view.holds_arrays:
        return view
    runs: list[RowSpan] = []
    for run in view.runs:
        column, first, last = run
        if (
            column is None
            or not column.is_array
            and (column.spec.kind != "object" or column.spec.loose)
        ):
            return view
        if column.is_array:
            runs.append(run)
            continue
        for value in view._values(column, first, last):
            if type(value) is not np.ndarray:
                return view
            runs.append((ChunkColumn.of(value), 0, 1))
    return type(view)(view.field, runs, view.name_of, view.owner_of)


def corrupt(
    field: str, row: int, name_of: NameOf | None, owner: Owner, reason: str
) -> ValueCorrupt:
    """Return the error for a row whose value does not fit its layout. owner: of its chunk."""
    key = None if name_of is None else name_of(row)
    named = f"row {row}" if key is None else f"row {key!r}"
    stored = f", which the peer at {owner.peer} stores," if owner.peer else ""
    return ValueCorrupt(
        f"field {field!r}: the value of {named}{stored} is corrupt: {reason}. Put the row again "
        "with replace=True, or drop it, and check that its writer has this dataplane release",
        field=field,
        key=key,
        writer=owner.peer,
    )


def _is_corrupt(column: ChunkColumn, row: int) -> bool:
    try:
        list(column.values(row, row + 1))
    except ValueCorrupt:
        return True
    return False


def row_runs(rows: npt.NDArray[np.intp]) -> list[tuple[int, int]]:
    """Split these rows into runs of consecutive rows, each as (first, last + 1)."""
    if not len(rows):
        return []
    bounds = [0, *(np.flatnonzero(rows[1:] - rows[:-1] != 1) + 1).tolist(), len(rows)]
    firsts = rows[bounds[:-1]].tolist()
    return [
        (first, first + end - start)
        for first, (start, end) in zip(firsts, pairwise(bounds), strict=True)
    ]


def cut(runs: Sequence[RowSpan], chosen: Iterable[tuple[int, int]]) -> list[RowSpan]:
    """Return the runs that cover the chosen ranges of rows, in the given order. Rows that no run
    covers lack the field."""
    ends = list(accumulate([last - first for _, first, last in runs]))
    found: list[RowSpan] = []
    for first, last in chosen:
        number = bisect_right(ends, first)
        while first < last:
            if first < 0 or number == len(runs):
                found.append((None, 0, last - first))
                break
            column, _, end = runs[number]
            shift = end - ends[number]
            stop = min(last, ends[number])
            start = first + shift
            if found and found[-1][0] is column and found[-1][2] == start:
                start = found.pop()[1]
            found.append((column, start, stop + shift))
            first, number = stop, number + 1  # noqa: PLW2901
    return found


def _side_by_side(spans: Sequence[Memory]) -> Memory | None:
    """Return the parts as one array if they are adjacent in memory, else None."""
    if len(spans) == 1:
        return spans[0]
    base = spans[0].base
    if not isinstance(base, np.ndarray) or any([span.base is not base for span in spans]):
        return None
    first, *others = [span.__array_interface__["data"][0] for span in spans]
    sizes = list(map(len, spans))
    if others != list(accumulate(sizes[:-1], initial=first))[1:]:
        return None
    start = first - base.__array_interface__["data"][0]
    whole: Memory = base[start : start + sum(sizes)]
    return whole


def _shown(value: Any) -> str:
    """Return the beginning of a value on one line."""
    if not isinstance(value, np.ndarray):
        return shortened(value, 60)
    few = preview(value, _SHOWN)
    return f"[{few}]" if value.ndim else few
