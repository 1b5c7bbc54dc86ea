"""The columns of a put, brought into the two forms that travel: arrays and objects.

Runs in the client, before any room is asked for. Everything stays a view of the caller's memory
until the one copy into the arena; only encoded objects and arrays that numpy cannot read in place
(non-contiguous, byte-swapped, on a device) are made anew. Bytes are never looked at here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.errors import FieldUnknown, InvalidRows, InvalidValue, LimitExceeded, counted
from dataplane.wire import objects
from dataplane.wire.arrays import Array, as_array, is_torch, raw, spec_of
from dataplane.wire.limits import MAX_FIELDS, MAX_NAME_BYTES, PACK_LIMIT_BYTES
from dataplane.wire.tables import Spec

Buffer = Any
"""bytes, or a contiguous array whose dtype the buffer protocol knows."""
_OBJECT = Spec("object")
_nbytes, _dtype, _shape = attrgetter("nbytes"), attrgetter("dtype"), attrgetter("shape")


@dataclass(slots=True)
class Strip:
    """Values of one field in order: one a row, or the array leaves of its objects.

    source: uint8 [count, row bytes] where all have one shape, else one contiguous buffer a value.
    sizes, specs: a value each, or one number for all.
    """

    count: int
    source: npt.NDArray[np.uint8] | list[Buffer]
    sizes: int | npt.NDArray[np.int64]
    specs: int | npt.NDArray[np.uint32]


@dataclass(slots=True)
class PreparedColumn:
    """One field: its values, and the leaves of its objects where there are any."""

    field: str
    values: Strip
    leaf_counts: npt.NDArray[np.int64] | None = None
    leaves: Strip | None = None
    dedup: bool = False


@dataclass(slots=True)
class Prepared:
    """The columns of one put. `specs` is what the spec numbers of the strips index."""

    n: int
    columns: list[PreparedColumn]
    specs: list[Spec]


class Specs:
    """Numbers each spec of a put once."""

    def __init__(self) -> None:
        self.specs: list[Spec] = []
        self._numbers: dict[Spec, int] = {}

    def number(self, spec: Spec) -> int:
        number = self._numbers.setdefault(spec, len(self.specs))
        if number == len(self.specs):
            self.specs.append(spec)
        return number


def prepare(
    columns: Mapping[str, Any], n: int | None = None, dedup: Collection[str] = ()
) -> Prepared:
    """Bring the columns of a put of `n` rows (None: as many as they have) into travelling form.

    A column is an array or tensor [n, ...], a nested tensor, or a sequence of n values. Arrays of
    one dimension are one 0-d value a row. InvalidRows where the columns do not fit together,
    InvalidValue with field and row for a value that cannot travel.
    """
    if not isinstance(columns, Mapping):
        raise InvalidRows(f"columns are a mapping of field names to columns, not {columns!r:.60}")
    sized = {checked_name(name): _column(name, column) for name, column in columns.items()}
    rows = _common_length({name: len(column) for name, column in sized.items()}, n)
    if len(sized) > MAX_FIELDS:
        raise LimitExceeded(f"{len(sized)} fields, the limit is {MAX_FIELDS}", limit=MAX_FIELDS)
    for name in dedup:
        if name not in sized:
            raise FieldUnknown(f"dedup names {name!r}, which is no field of this put")
    specs = Specs()
    prepared = [_prepare(name, column, specs) for name, column in sized.items()]
    for column in prepared:
        column.dedup = column.field in dedup
    return Prepared(rows, prepared, specs.specs)


def checked_name(name: object) -> str:
    """InvalidRows for what cannot name a field."""
    if not isinstance(name, str) or not name or len(name.encode()) > MAX_NAME_BYTES:
        raise InvalidRows(
            f"a field is named by a text of 1 to {MAX_NAME_BYTES} bytes, not {name!r:.80}"
        )
    return name


def _common_length(lengths: dict[str, int], n: int | None) -> int:
    if not lengths:
        raise InvalidRows("an empty put: there is no column; give at least one field")
    expected = n if n is not None else next(iter(lengths.values()))
    if any(length != expected for length in lengths.values()):
        told = ", ".join(f"{name}: {length}" for name, length in lengths.items())
        wanted = f"; the put has {counted(n, 'row')}" if n is not None else ""
        raise InvalidRows(
            f"columns of different lengths: {told}{wanted}; give each one entry a row",
            lengths=lengths,
        )
    if expected == 0:
        raise InvalidRows("an empty put: the columns have no rows; give at least one")
    return expected


def _column(name: str, column: Any) -> Sequence[Any] | Array:
    """A column as a list, a tuple or a plain array whose first axis is the rows."""
    if isinstance(column, (list, tuple)):
        return column
    if isinstance(column, (str, bytes, bytearray, memoryview, Mapping, Set)):
        kind = type(column).__name__
        raise InvalidRows(f"{name}: a column has one entry a row, in order; a {kind} is none")
    if is_torch(column) and column.is_nested:
        unbound: tuple[Any, ...] = column.unbind()
        return unbound
    try:
        array: Any = _rows_array(column)
    except InvalidValue as exc:
        raise InvalidValue(f"{name}: {exc.message}", field=name) from exc
    if array is None:
        try:
            return list(column)
        except TypeError:
            pass
    elif array.ndim:
        rows: Sequence[Any] | Array = array
        return rows
    raise InvalidRows(f"{name}: a column is a sequence or an array [n, ...], not {column!r:.60}")


def _rows_array(column: Any) -> Any:
    """As `as_array`, but large rows that are contiguous one by one are left where they are."""
    if (
        type(column) is np.ndarray
        and column.ndim > 1
        and not column.flags.c_contiguous
        and len(column)
        and column[0].flags.c_contiguous
        and column[0].nbytes >= PACK_LIMIT_BYTES
    ):
        return _Rows(column)
    return as_array(column)


class _Rows(list[Array]):
    """The rows of an array of which each is contiguous, but not the whole."""

    ndim = 2


def _prepare(name: str, column: Sequence[Any] | Array, specs: Specs) -> PreparedColumn:
    if isinstance(column, np.ndarray):
        return PreparedColumn(name, _dense(column, specs))
    heads = objects.encode_many(column)
    if heads is not None:
        return PreparedColumn(name, _heads(heads, specs))
    arrays = _arrays(name, column)
    if arrays is not None:
        return PreparedColumn(name, _ragged(arrays, specs))
    return _objects(name, column, specs)


def _dense(array: Array, specs: Specs) -> Strip:
    n, shape = len(array), array.shape[1:]
    spec = specs.number(spec_of(array.dtype, shape))
    size = array.nbytes // n
    if size == 0:
        return Strip(n, np.empty((n, 0), np.uint8), 0, spec)
    return Strip(n, array.reshape(n, -1).view(np.uint8), size, spec)


def _arrays(name: str, column: Sequence[Any]) -> list[Array] | None:
    """The column as plain arrays; None where not every value is one."""
    first = _array_at(name, 0, column[0])
    if first is None:
        return None
    arrays = [first]
    for index, value in enumerate(column[1:], 1):
        array = _array_at(name, index, value)
        if array is None:
            return None
        arrays.append(array)
    return arrays


def _array_at(name: str, index: int, value: object) -> Array | None:
    try:
        return as_array(value)
    except InvalidValue as exc:
        path = f"{name}[{index}]"
        raise InvalidValue(f"{path}: {exc.message}", field=name, row=index, path=path) from exc


def _ragged(arrays: list[Array], specs: Specs) -> Strip:
    count = len(arrays)
    sizes = np.fromiter(map(_nbytes, arrays), np.int64, count)
    forms = list(zip(map(_dtype, arrays), map(_shape, arrays), strict=True))
    numbers = {form: specs.number(spec_of(*form)) for form in dict.fromkeys(forms)}
    if len(set(numbers.values())) == 1:
        return Strip(count, [raw(array) for array in arrays], sizes, next(iter(numbers.values())))
    each = np.fromiter(map(numbers.__getitem__, forms), np.uint32, count)
    return Strip(count, [raw(array) for array in arrays], sizes, each)


def _heads(heads: list[bytes], specs: Specs) -> Strip:
    sizes = np.fromiter(map(len, heads), np.int64, len(heads))
    return Strip(len(heads), heads, sizes, specs.number(_OBJECT))


def _objects(name: str, column: Sequence[Any], specs: Specs) -> PreparedColumn:
    heads: list[bytes] = []
    leaves: list[Array] = []
    counts = np.zeros(len(column), np.int64)
    for index, value in enumerate(column):
        try:
            head, own = objects.encode(value, f"{name}[{index}]")
        except (InvalidValue, LimitExceeded) as exc:
            exc.details.update(field=name, row=index)
            raise
        heads.append(head)
        leaves += own
        counts[index] = len(own)
    values = _heads(heads, specs)
    if not leaves:
        return PreparedColumn(name, values)
    return PreparedColumn(name, values, counts, _ragged(leaves, specs))
