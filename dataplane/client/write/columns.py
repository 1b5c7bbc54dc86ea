"""The columns of a write: one field each, as it lies in the caller's memory.

Runs in the client, before any space is reserved. Only values that numpy cannot read in place are
copied here: encoded objects, lists of numbers, and arrays that are not contiguous, byte-swapped or
on a device. Nothing inspects the bytes of values.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from functools import lru_cache
from itertools import chain, repeat
from operator import attrgetter
from struct import error as StructError
from struct import pack
from typing import Any

import msgspec
import numpy as np

from dataplane.client.write import schema
from dataplane.errors import (
    DataplaneError,
    FieldUnknown,
    InvalidCall,
    InvalidRows,
    InvalidValue,
    LimitExceeded,
    counted,
    few,
)
from dataplane.wire import objects
from dataplane.wire.arrays import (
    Array,
    ArrayForm,
    as_array,
    dtype_name,
    is_jagged,
    is_ready,
    is_torch,
    items_of,
    jagged_parts,
    kind_of,
    pairs_of,
    raw,
    reader,
    shown,
    unreadable,
)
from dataplane.wire.layouts import OBJECT_ALIGNMENT_BYTES, OPEN, ColumnSpec
from dataplane.wire.limits import MAX_FIELDS, MAX_NAME_BYTES
from dataplane.wire.objects import Buffer
from dataplane.wire.packed import U4

LARGE_ROW_BYTES = 4 << 10
"""Rows of at least this size stay in place until the single copy, even if rows are reordered."""
MAX_LENGTH = (1 << 32) - 1
"""The limit for an open axis, a text, bytes or an object, because chunks store lengths as u4."""
_TEXT, _BYTES = ColumnSpec("text"), ColumnSpec("bytes")
_OBJECT, _LOOSE_OBJECT = ColumnSpec("object"), ColumnSpec("object", loose=True)
SHOWN_FIELDS = 8
"""An error about all columns names at most this many."""
_TIMED_ROWS = 1_024
"""Objects are encoded in Python: after this many rows the call checks its deadline."""
_NUMBERS: dict[type, type[np.generic]] = {bool: np.bool_, int: np.int64, float: np.float64}
_PADDING = [bytes(length) for length in range(OBJECT_ALIGNMENT_BYTES)]
_dtype, _shape, _nbytes = attrgetter("dtype"), attrgetter("shape"), attrgetter("nbytes")
_form = attrgetter("dtype", "strides")


class ValueColumn(msgspec.Struct, eq=False):
    """One field of a write.

    source: an array [count, ...], one buffer per row, or for objects a list of buffers per row.
    sizes: bytes of each row, or one number for all. lengths: as a chunk stores them, `spec.width`
    numbers (u4) per row. mixed: the forms of arrays stored as objects, because they differ in dtype
    or rank.
    """

    field: str
    count: int
    spec: ColumnSpec
    source: Array | list[Buffer]
    nbytes: int
    sizes: int | list[int]
    lengths: bytes = b""
    mixed: list[ArrayForm] = []
    dedup: bool = False

    def bytes_of(self, first: int, last: int) -> int:
        """Return the bytes of the rows from `first` to `last`."""
        if last - first == self.count:
            return self.nbytes
        sizes = self.sizes
        return sizes * (last - first) if isinstance(sizes, int) else sum(sizes[first:last])

    def size_of(self, row: int) -> int:
        return self.sizes if isinstance(self.sizes, int) else self.sizes[row]

    def lengths_of(self, row: int) -> bytes:
        """Return the lengths of this row as a chunk stores them."""
        width = U4.itemsize * self.spec.width
        return self.lengths[row * width : (row + 1) * width]

    def buffers(self) -> list[Buffer]:
        """The buffers that the rows are copied from, in order."""
        source = self.source
        if type(source) is not list:
            return [source]
        return list(chain.from_iterable(source)) if type(source[0]) is list else source

    def part(self, first: int, last: int) -> ValueColumn:
        """Return the rows from `first` to `last`."""
        count, sizes, lengths = last - first, self.sizes, self.lengths
        if count == self.count:
            return self
        if isinstance(sizes, int):
            nbytes = sizes * count
        else:
            sizes = sizes[first:last]
            nbytes = sum(sizes)
        if lengths:
            width = U4.itemsize * self.spec.width
            lengths = lengths[first * width : last * width]
        source = self.source[first:last]
        return ValueColumn(
            self.field, count, self.spec, source, nbytes, sizes, lengths, [], self.dedup
        )

    def take(self, order: Sequence[int]) -> ValueColumn:
        """Return these rows, in this order. Large rows stay where they are."""
        source: Array | list[Buffer]
        if isinstance(self.source, np.ndarray) and self.size_of(0) < LARGE_ROW_BYTES:
            source = self.source[order]
        else:
            source = [self.source[row] for row in order]
        lengths = b"".join(map(self.lengths_of, order))
        sizes: int | list[int] = self.sizes
        if isinstance(sizes, int):
            nbytes = sizes * len(order)
        else:
            sizes = [sizes[row] for row in order]
            nbytes = sum(sizes)
        return ValueColumn(
            self.field, len(order), self.spec, source, nbytes, sizes, lengths, [], self.dedup
        )


class ObjectValue:
    """Mark a value, or a column of values, to be stored as a Python object.

    For example, `dataplane.object([1, 2])` is read back as a list, not as an array. In a
    TensorDict, such a value becomes non-tensor data.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"dataplane.object({shown(self.value):.60})"


def prepare(
    columns: dict[str, Any],
    n: int | None = None,
    dedup: Collection[str] = (),
    fields: Mapping[str, str] | None = None,
    whose: str = "key= names",
    check_time: Callable[[], object] = lambda: None,
) -> list[ValueColumn]:
    """Return the columns of a write of `n` rows; None: the number of rows of the columns.

    A column is an array or tensor [n, ...], a nested tensor, or a sequence of n values. A flat list
    of numbers of one kind is an array. An array of one dimension is one 0-d value a row.

    columns: the result of `by_name`. fields: the partition's schema. whose: names the source of n
    in an error. check_time: called now and then; raises once the deadline of the call has passed.
    Raise InvalidRows if the columns do not fit together. Raise InvalidValue, with field and row,
    for a value that cannot be stored or does not match the schema.
    """
    names, given = checked_names(tuple(columns)), list(columns.values())
    if {*map(type, given)} != {list}:
        given = list(map(_rows_of, names, given))
    _check_length(names, given, n, whose)
    if len(names) > MAX_FIELDS:
        raise LimitExceeded(
            f"this call writes {len(names)} fields, but a partition can have at most {MAX_FIELDS}: "
            "use fewer fields, for example by storing several values in one dict",
            limit=MAX_FIELDS,
        )
    for name in dedup:
        if name not in names:
            raise FieldUnknown(
                f"dedup= names field {name!r}, which is not in this put: list only fields that "
                "this put writes"
            )
    forms = map((fields or {}).get, names)
    made = list(map(_values, names, given, forms, repeat(check_time)))
    for name in dedup:
        made[names.index(name)].dedup = True
    if fields:
        schema.check(made, fields)
    return made


def by_name(columns: Any) -> dict[str, Any]:
    """Return the columns of a mapping or a TensorDict, by field. Nested keys of a TensorDict are
    joined with ".", and its data that are no tensors keep their Python types. A field of a
    tensorclass that is None is left out.

    Raise InvalidRows for any other object, and for a TensorDict without a batch size, with a "." in
    a key, or whose rows have different keys.
    """
    return columns if type(columns) is dict else _by_name(columns)


@reader(InvalidRows, "the mapping of columns")
def _by_name(columns: Any) -> dict[str, Any]:
    if not objects.is_tensordict(columns):
        if not isinstance(columns, Mapping):
            raise InvalidRows(
                "columns: expected a mapping of field names to columns, for example "
                f"{{'tokens': [[1, 2], [3]]}} for two rows, got {shown(columns):.60}"
            )
        return pairs_of("the mapping of columns", columns, InvalidRows)
    if not columns.batch_size:
        raise InvalidRows(
            "a TensorDict with batch_size [] has no rows: set batch_size to [number of rows]"
        )
    found = {}
    for key, column in _leaves(objects.tensordict_of(columns), ()):
        if any("." in part for part in key):
            raise InvalidRows(
                f"the TensorDict's key {key[-1]!r} contains '.', which separates the keys "
                "of nested TensorDicts: rename the key"
            )
        found[".".join(key)] = column
    return found


def named_once(columns: Any, named: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a call that takes them in a mapping and by name. InvalidCall if a field
    is in both."""
    given = {} if columns is None else by_name(columns)
    if twice := given.keys() & named.keys():
        raise InvalidCall(
            f"field {min(twice)!r} was passed both in the mapping and as a keyword argument: pass "
            "each field once"
        )
    return {**given, **named}


def _leaves(tensordict: Any, above: tuple[str, ...]) -> Iterable[tuple[tuple[str, ...], Any]]:
    """Yield the columns of a TensorDict at the keys `above`, each with the keys that lead to it."""
    library = sys.modules["tensordict"]
    odd = objects.uneven_keys(tensordict)
    if odd is not None:
        field = ".".join((*above, odd[0]))
        one = "row" if tensordict.stack_dim == 0 else "stacked TensorDict"
        raise InvalidRows(
            f"the TensorDict's key {field!r} is in {one} {odd[2]} but not in {one} {odd[1]}, and "
            "every row of a put needs the same fields: give the key a value in every row, or "
            "write the rows in separate put() calls",
            field=field,
            row=odd[1],
        )
    for name in tensordict.keys():  # noqa: SIM118
        key = (*above, name)
        lazy = isinstance(tensordict, library.LazyStackedTensorDict) and tensordict.stack_dim == 0
        if lazy:
            rows = [_got(objects.tensordict_of(row), key) for row in tensordict.tensordicts]
            kinds = {_kind(row, library) for row in rows}
            if "TensorDict" not in kinds:  # stacking requires one shape and kind
                plain = [objects.as_plain(row) for row in rows]
                yield key, plain if kinds == {"tensor"} else ObjectValue(plain)
                continue
            if len(kinds) > 1:
                raise InvalidRows(
                    f"the TensorDict's key {'.'.join(key)!r} holds a TensorDict in some rows and "
                    "something else in others: use the same kind of value in every row, or write "
                    "the two kinds of rows in separate put() calls",
                    field=".".join(key),
                )
        column = _got(tensordict, key)
        if library.is_non_tensor(column):
            yield key, ObjectValue(_entries(column, tensordict.batch_size[0], library))
        elif library.is_tensor_collection(column):
            yield from _leaves(objects.tensordict_of(column), key)
        else:
            yield key, column


def _got(tensordict: Any, key: tuple[str, ...]) -> Any:
    try:
        return tensordict.get(key[-1])
    except RuntimeError as exc:  # a stack of several shapes inside a stack
        name = ".".join(key)
        raise InvalidValue(
            f"cannot read key {name!r} of the TensorDict: {exc}. Use values of the same "
            "shape in every row, or write the rows in separate put() calls",
            field=name,
        ) from exc


def _kind(value: Any, library: Any) -> str:
    if library.is_tensor_collection(value) and not library.is_non_tensor(value):
        return "TensorDict"
    return "tensor" if is_torch(value) else "object"


def _entries(column: Any, n: int, library: Any) -> list[Any]:
    """Return the entries of data that are no tensors, one per row. An array of n objects, which a
    TensorDict takes for one value of all rows, has one entry per row, as outside a TensorDict."""
    if not isinstance(column, library.NonTensorData):
        return objects.listed(column)
    whole = column.data
    of_rows = isinstance(whole, np.ndarray) and whole.dtype == object and whole.shape[:1] == (n,)
    return list(whole) if of_rows else [whole] * n


@reader(InvalidRows, "the name of a field")
def checked_name(name: object) -> str:
    """Return the name of a field. Raise InvalidRows if it cannot be one, such as half of a
    surrogate pair."""
    try:
        fits = isinstance(name, str) and 0 < len(str.encode(name)) <= MAX_NAME_BYTES
    except UnicodeEncodeError:
        fits = False
    if not isinstance(name, str) or not fits:
        raise InvalidRows(
            f"invalid field name {shown(name):.80}: expected a str of 1 to {MAX_NAME_BYTES} bytes"
        )
    if "~" in name:
        raise InvalidRows(
            f"field name {shown(name):.80} contains '~', which is reserved for values that "
            "release(values=…) stores: use another name"
        )
    return name if type(name) is str else str.__str__(name)


@lru_cache(256)
def checked_names(names: tuple[Any, ...]) -> tuple[str, ...]:
    """Return the names of the fields of a call; see `checked_name`."""
    return tuple(map(checked_name, names))


def _check_length(
    names: Sequence[str], columns: Sequence[Sequence[Any] | Array], n: int | None, whose: str
) -> None:
    if not columns:
        raise InvalidRows("the call has no fields to write: pass at least one field")
    expected = n if n is not None else len(columns[0])
    if {*map(len, columns)} != {expected}:
        lengths = dict(zip(names, map(len, columns), strict=True))
        told = ", ".join(f"{name}: {length}" for name, length in lengths.items())
        if n is None:
            what = f"the columns have different lengths ({told}): pass one entry per row for each "
            what += "field"
        else:
            what = f"{whose} {counted(n, 'row')}, but not every column has {n} "
            what += f"{'entry' if n == 1 else 'entries'} ({told}): pass one entry per row for each "
            what += "field"
        raise InvalidRows(what, lengths=lengths)
    if expected == 0:
        raise InvalidRows(
            f"the columns ({few([repr(name) for name in names], SHOWN_FIELDS)}) have no rows to "
            "write: pass at least one row"
        )


def _rows_of(name: str, column: Any) -> Sequence[Any] | Array:
    """Call `_column`. Raise InvalidValue if the column's own code raises."""
    try:
        return _column(name, column)
    except DataplaneError:
        raise
    except Exception as exc:
        raise unreadable(f"field {name!r}", column, exc, field=name) from exc


def _column(name: str, column: Any) -> Sequence[Any] | Array:
    """Return a column as a list, a tuple or a plain array whose first axis is the rows."""
    if type(column) is tuple:
        return column
    if isinstance(column, (list, tuple)):
        return items_of(f"field {name!r}", column, field=name)
    if isinstance(column, ObjectValue):
        return [ObjectValue(value) for value in _column(name, column.value)]
    if isinstance(column, (str, bytes, bytearray, memoryview, Mapping, Set, np.generic)):
        raise InvalidRows(
            f"field {name!r}: expected a list or an array with one entry per row, got "
            f"{kind_of(column)}",
            field=name,
        )
    if isinstance(column, np.ndarray) and column.dtype == object and column.ndim:
        return list(column)
    if is_torch(column) and column.is_nested and not is_jagged(column):
        unbound: tuple[Any, ...] = column.unbind()
        return unbound
    try:
        array: Any = _JaggedRows(column) if is_jagged(column) else _rows_array(column)
    except InvalidValue as exc:
        raise InvalidValue(f"field {name!r}: {exc.message}", field=name) from exc
    if array is None:
        if isinstance(column, Iterable) or hasattr(type(column), "__getitem__"):
            return items_of(f"field {name!r}", column, field=name)
    elif array.ndim:
        rows: Sequence[Any] | Array = array
        return rows
    raise InvalidRows(
        f"field {name!r}: expected a list or an array with one entry per row, got "
        f"{shown(column):.60}",
        field=name,
    )


def _rows_array(column: Any) -> Any:
    """Return `as_array` of a column, but leave large rows that are contiguous one by one in
    place."""
    if (
        type(column) is np.ndarray
        and column.ndim > 1
        and not column.flags.c_contiguous
        and len(column)
        and column[0].flags.c_contiguous
        and column[0].nbytes >= LARGE_ROW_BYTES
        and dtype_name(column.dtype) is not None
    ):
        return _Rows(column)
    return as_array(column)


class _Rows(list[Array]):
    """The rows of an array that is not contiguous although each of its rows is."""

    ndim = 2


class _JaggedRows(list[Array]):
    """The rows of a nested jagged tensor, and the axis of a row that is ragged."""

    ndim = 2

    def __init__(self, tensor: Any) -> None:
        values, ends, self.axis = jagged_parts(tensor)
        before = (slice(None),) * self.axis
        bounds = ends.tolist()
        spans = zip(bounds[:-1], bounds[1:], strict=True)
        rows = (values[(*before, slice(start, end))] for start, end in spans)
        super().__init__(rows if self.axis == 0 else map(np.ascontiguousarray, rows))


def _values(
    name: str,
    column: Sequence[Any] | Array,
    form: str | None,
    check_time: Callable[[], object],
) -> ValueColumn:
    if type(column) is not list and type(column) is not tuple:
        if isinstance(column, np.ndarray):
            return _of_array(name, column)
        if isinstance(column, _Rows):
            return _of_arrays(name, column, loose=False)
        if isinstance(column, _JaggedRows):
            return _of_arrays(name, column, column.axis)
    if form is not None and schema.parsed(form).shape == ():
        numbers = _of_flat(list(column))  # without a declared dtype, they stay Python numbers
        if isinstance(numbers, np.ndarray):
            return _of_array(name, numbers)
    kinds = set(map(type, column))
    only = type(column[0]) if len(kinds) == 1 else None
    if only is np.ndarray and (vectors := _of_vectors(name, column)) is not None:
        return vectors
    if only is bytes:
        return _of_bytes(name, list(column), _BYTES)
    elif only is str and (texts := _encoded(column)) is not None:
        return _of_bytes(name, texts, _TEXT)
    elif only in _NUMBERS or (only is not None and issubclass(only, np.generic)):
        found = _of_scalars(name, column, only)
        if found is not None:
            return found
    check_time()
    rows = None if np.ndarray in kinds else objects.encode_many(column)
    if rows is not None:
        return _of_heads(name, rows, _OBJECT)
    if ObjectValue in kinds:
        column = [v.value if type(v) is ObjectValue else v for v in column]
        return _of_objects(name, column, check_time, _LOOSE_OBJECT)
    if list in kinds:
        column = _without_flat_lists(column, schema.empty_dtype(form))
    arrays = _arrays(name, column)
    if arrays is not None:
        return _of_vectors(name, arrays) or _of_arrays(name, arrays)
    return _of_objects(name, column, check_time)


def _without_flat_lists(column: Sequence[Any], empty_dtype: np.dtype[Any]) -> list[Any]:
    """Return the column with arrays for flat lists of numbers of one kind. An empty list gets the
    dtype of the other entries if they are arrays, and `empty_dtype` if all are empty."""
    found = [_of_flat(value) if type(value) is list else value for value in column]
    if not any(type(value) is list and not value for value in found):
        return found
    dtypes = {getattr(v, "dtype", None) for v in found if not (type(v) is list and not v)}
    if all(isinstance(dtype, np.dtype) for dtype in dtypes) and len(dtypes) < 2:
        empty = np.zeros(0, dtypes.pop() if dtypes else empty_dtype)
        return [empty if type(value) is list and not value else value for value in found]
    return found


def _of_flat(values: list[Any]) -> Any:
    """Return numbers of one kind as an array of bool, int64, float64 or their NumPy dtype; other
    lists as they are."""
    kinds = set(map(type, values))
    if len(kinds) != 1:
        return values
    kind = kinds.pop()
    try:
        if kind in _NUMBERS:
            return np.array(values, _NUMBERS[kind])
        if issubclass(kind, np.generic) and dtype_name(values[0].dtype) is not None:
            # numpy would convert times of several units to the finest one, which may overflow
            return np.array(values) if len({value.dtype for value in values}) == 1 else values
    except OverflowError:
        pass
    return values


def _arrays(name: str, column: Sequence[Any]) -> list[Array] | None:
    """Return the column as plain arrays, or None if some value is none."""
    arrays: list[Array] = []
    for index, value in enumerate(column):
        array: Array | None = value if is_ready(value) else _array_at(name, index, value)
        if array is None:
            return None
        arrays.append(array)
    return arrays


def _array_at(name: str, index: int, value: object) -> Array | None:
    try:
        if objects.has_plain(value) or is_jagged(value):
            return None
        return as_array(value)
    except InvalidValue as exc:
        path = f"{name}[{index}]"
        raise InvalidValue(f"{path}: {exc.message}", field=name, row=index, path=path) from exc
    except Exception as exc:  # of the user's class
        raise unreadable(f"{name}[{index}]", value, exc, field=name, row=index) from exc


def _encoded(texts: Sequence[str]) -> list[Buffer] | None:
    """Return texts as bytes, or None if one is not valid text."""
    try:
        return [text.encode() for text in texts]
    except UnicodeEncodeError:
        return None


@lru_cache(4096)
def _array_spec(dtype: np.dtype[Any], shape: tuple[int, ...], loose: bool) -> ColumnSpec:
    name = dtype_name(dtype)
    assert name is not None, dtype
    return ColumnSpec("array", name, shape, loose)


@lru_cache(4096)
def _scalar_spec(dtype: np.dtype[Any], of_python: bool) -> ColumnSpec:
    return ColumnSpec("number" if of_python else "scalar", dtype_name(dtype) or "")


def spec_of(
    dtype: np.dtype[Any],
    shapes: Sequence[tuple[int, ...]],
    loose: bool = False,
    ragged: int | None = None,
) -> tuple[ColumnSpec, list[int]]:
    """Return the spec of arrays of one dtype and rank, and their lengths along the open axes: those
    along which they differ, and `ragged`. Arrays of one dimension that were given one by one may
    always have any length."""
    if ragged is None and loose and len(shapes[0]) == 1:
        ragged = 0
    sides = enumerate(zip(*shapes, strict=True))
    axes = [axis for axis, some in sides if axis == ragged or len({*some}) > 1]
    if not axes:
        return _array_spec(dtype, shapes[0], loose), []
    shape = tuple([OPEN if axis in axes else n for axis, n in enumerate(shapes[0])])
    lengths = [shape[axis] for shape in shapes for axis in axes]
    return _array_spec(dtype, shape, loose), lengths


@lru_cache(4096)
def _vectors(dtype: np.dtype[Any]) -> tuple[ColumnSpec, tuple[Any, ...] | None, bool]:
    """Return the spec of arrays of one dimension; the `_form` of contiguous ones, None for a dtype
    that cannot be stored; and whether they are copied unchanged."""
    if dtype_name(dtype) is None:
        return _OBJECT, None, False
    empty = np.empty(0, dtype)
    form = dtype, (dtype.itemsize,)
    return _array_spec(dtype, (OPEN,), True), form, raw(empty) is empty


def _of_array(name: str, array: Array) -> ValueColumn:
    size = array.nbytes // len(array)
    spec = _array_spec(array.dtype, array.shape[1:], False)
    return ValueColumn(name, len(array), spec, raw(array), array.nbytes, size)


def _of_scalars(name: str, column: Sequence[Any], kind: type[Any]) -> ValueColumn | None:
    """Return a column of Python numbers or NumPy scalars of one type. None if the values do not
    fit one dtype."""
    source: Array | list[Buffer]
    if kind in _NUMBERS:
        try:
            source = np.array(column, _NUMBERS[kind])
        except OverflowError:
            return None
        dtype = source.dtype
    else:
        dtype = column[0].dtype
        is_time = issubclass(kind, (np.datetime64, np.timedelta64))
        if is_time and any([value.dtype != dtype for value in column]):  # of several units
            return None
        if dtype_name(dtype) is None:
            return None
        source = list(map(kind.tobytes, column))
    count, size = len(column), dtype.itemsize
    return ValueColumn(
        name, count, _scalar_spec(dtype, kind in _NUMBERS), source, count * size, size
    )


def _of_vectors(name: str, arrays: Sequence[Array]) -> ValueColumn | None:
    """Return a column of arrays of one dimension and one dtype, as most columns have; None for
    others."""
    spec, form, is_raw = _vectors(arrays[0].dtype)
    count = len(arrays)
    forms: list[Any] = list(map(_form, arrays))
    if forms.count(form) < count:
        return None
    source = list(arrays if is_raw else map(raw, arrays))
    sizes, lengths = list(map(_nbytes, arrays)), lengths_of(name, list(map(len, arrays)), count)
    return ValueColumn(name, count, spec, source, sum(sizes), sizes, lengths)


def _of_arrays(
    name: str, arrays: Sequence[Array], ragged: int | None = None, loose: bool = True
) -> ValueColumn:
    """Return a column of arrays that were given one by one. ragged: an axis in which they may
    differ, if it is known. Arrays that differ in dtype or rank become objects."""
    shapes, dtypes = list(map(_shape, arrays)), list(map(_dtype, arrays))
    if len({*dtypes}) > 1 or len({*map(len, shapes)}) > 1:
        rows = [objects.encode(array) for array in arrays]
        column = _of_rows(name, rows, _OBJECT)
        column.mixed = list(zip(dtypes, shapes, strict=True))
        return column
    spec, lengths = spec_of(dtypes[0], shapes, loose, ragged)
    sizes = list(map(_nbytes, arrays))
    source = list(map(raw, arrays))
    packed = lengths_of(name, lengths, len(source))
    return ValueColumn(name, len(source), spec, source, sum(sizes), sizes, packed)


def _of_bytes(name: str, values: list[Buffer], spec: ColumnSpec) -> ValueColumn:
    """Return a column of texts or bytes."""
    sizes = list(map(len, values))
    lengths = lengths_of(name, sizes, len(values))
    return ValueColumn(name, len(values), spec, values, sum(sizes), sizes, lengths)


def _of_objects(
    name: str,
    column: Sequence[Any],
    check_time: Callable[[], object],
    spec: ColumnSpec = _OBJECT,
) -> ValueColumn:
    rows: list[list[Buffer]] = []
    for index, value in enumerate(column):
        if not index % _TIMED_ROWS:
            check_time()
        try:
            rows.append(objects.encode(value, f"{name}[{index}]"))
        except (InvalidValue, LimitExceeded) as exc:
            exc.details.update(field=name, row=index)
            raise
    return _of_rows(name, rows, spec)


def _of_rows(name: str, rows: list[list[Buffer]], spec: ColumnSpec) -> ValueColumn:
    """Return a column of objects."""
    if max(map(len, rows)) == 1:
        return _of_heads(name, [row[0] for row in rows], spec)
    lengths = [sum([memoryview(buffer).nbytes for buffer in row]) for row in rows]
    gaps = [-length % OBJECT_ALIGNMENT_BYTES for length in lengths]
    source = [[*row, _PADDING[gap]] for row, gap in zip(rows, gaps, strict=True)]
    sizes = [length + gap for length, gap in zip(lengths, gaps, strict=True)]
    packed = lengths_of(name, lengths, len(rows))
    return ValueColumn(name, len(rows), spec, source, sum(sizes), sizes, packed)


def _of_heads(name: str, heads: list[bytes], spec: ColumnSpec) -> ValueColumn:
    """Return a column of objects that contain no arrays."""
    lengths = lengths_of(name, list(map(len, heads)), len(heads))
    source: list[Buffer] = [head + _PADDING[-len(head) % OBJECT_ALIGNMENT_BYTES] for head in heads]
    sizes = list(map(len, source))
    return ValueColumn(name, len(heads), spec, source, sum(sizes), sizes, lengths)


def lengths_of(field: str, lengths: Sequence[int], rows: int) -> bytes:
    """Return the lengths of this many rows as a chunk stores them. Raise LimitExceeded if one is
    too long for a chunk."""
    try:
        return pack(f"<{len(lengths)}I", *lengths)
    except StructError:
        longest = max(lengths)
        row = lengths.index(longest) * rows // len(lengths)
        raise LimitExceeded(
            f"{field}[{row}] has length {longest}, over the limit of {MAX_LENGTH}: split it into "
            "several values",
            field=field,
            row=row,
            limit=MAX_LENGTH,
        ) from None
