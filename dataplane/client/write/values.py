"""The columns of a put, brought into the two forms that travel: arrays and objects.

Runs in the client, before any room is asked for. Everything stays a view of the caller's memory
until the one copy into the arena; only encoded objects, flat lists of numbers and arrays that numpy
cannot read in place (non-contiguous, byte-swapped, on a device) are made anew. Bytes are never
looked at here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from dataplane.client.write import schema
from dataplane.errors import (
    FieldUnknown,
    InvalidCall,
    InvalidRows,
    InvalidValue,
    LimitExceeded,
    counted,
)
from dataplane.wire import objects
from dataplane.wire.arrays import (
    Array,
    as_array,
    dtype_name,
    is_jagged,
    is_ready,
    is_torch,
    jagged_parts,
    kind_of,
    raw,
    spec_of,
)
from dataplane.wire.limits import (
    MAX_FIELDS,
    MAX_NAME_BYTES,
    MAX_SPECS_PER_MESSAGE,
    PACK_LIMIT_BYTES,
)
from dataplane.wire.tables import Spec

Buffer = Any
"""bytes, or a contiguous array whose dtype the buffer protocol knows."""
_OBJECT, _LOOSE_OBJECT = Spec("object"), Spec("object", loose=True)
_TIMED_ROWS = 1_024
"""Objects are encoded in Python: after so many the call looks whether its time is up."""
_NUMBERS: dict[type, type[np.generic]] = {bool: np.bool_, int: np.int64, float: np.float64}
_ANY_LENGTH = (1,)
"""Whatever the length of a row of one dimension, its spec is the same."""
_nbytes, _ndim = attrgetter("nbytes"), attrgetter("ndim")
_dtype, _shape = attrgetter("dtype"), attrgetter("shape")


class Strip(msgspec.Struct, eq=False):
    """Values of one field in order: one a row, or the array leaves of its objects.

    source: uint8 [count, row bytes] where all have one shape, else one contiguous buffer a value.
    sizes, specs: a value each, or one number for all.
    """

    count: int
    source: npt.NDArray[np.uint8] | list[Buffer]
    sizes: int | npt.NDArray[np.int64]
    specs: int | npt.NDArray[np.uint32]


class PreparedColumn(msgspec.Struct, eq=False):
    """One field: its values, and the leaves of its objects where there are any."""

    field: str
    values: Strip
    leaf_counts: npt.NDArray[np.int64] | None = None
    leaves: Strip | None = None
    dedup: bool = False


class Prepared(msgspec.Struct, eq=False):
    """The columns of one put. `specs` is what the spec numbers of the strips index."""

    n: int
    columns: list[PreparedColumn]
    specs: list[Spec]


class Kept:
    """A value, or a column of values, that is stored as a Python object.

    For example, `dataplane.object([1, 2])` is read back as a list, not as an array. In a
    TensorDict, such a value becomes non-tensor data.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"dataplane.object({self.value!r:.60})"


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
    columns: Mapping[str, Any],
    n: int | None = None,
    dedup: Collection[str] = (),
    fields: Mapping[str, str] | None = None,
    whose: str = "key= names",
    check_time: Callable[[], object] = lambda: None,
) -> Prepared:
    """Bring the columns of a put of `n` rows (None: as many as they have) into travelling form.

    A column is an array or tensor [n, ...], a nested tensor, or a sequence of n values, of which
    flat lists of numbers of one kind are arrays. Arrays of one dimension are one 0-d value a row.
    fields: the partition's schema. whose: who says n, for an error. check_time: is called now and
    then, and raises once the time of the call is up. InvalidRows where the columns do not fit
    together, InvalidValue with field and row for a value that cannot travel or is not as the schema
    says.
    """
    columns, fields = by_name(columns), fields or {}
    if not isinstance(columns, (dict, Mapping)):  # an ABC is slow to tell
        raise InvalidRows(
            "columns must be a mapping of field names to columns with one entry per row, "
            f"such as {{'tokens': [[1, 2], [3]]}}, not {columns!r:.60}"
        )
    sized = {checked_name(name): _column(name, column) for name, column in columns.items()}
    rows = _common_length(sized, n, whose)
    if len(sized) > MAX_FIELDS:
        raise LimitExceeded(
            f"this call has {len(sized)} fields, over the limit of {MAX_FIELDS}", limit=MAX_FIELDS
        )
    for name in dedup:
        if name not in sized:
            raise FieldUnknown(f"dedup= names field {name!r}, which this put does not have")
    specs = Specs()
    prepared = []
    for name, column in sized.items():
        check_time()
        prepared.append(_prepare(name, column, specs, check_time, fields.get(name)))
    if len(specs.specs) > MAX_SPECS_PER_MESSAGE:
        raise LimitExceeded(
            f"the values of this call have {len(specs.specs)} different dtypes and shapes, over "
            f"the limit of {MAX_SPECS_PER_MESSAGE}: split the rows across several put() calls",
            limit=MAX_SPECS_PER_MESSAGE,
        )
    if dedup:
        for one in prepared:
            one.dedup = one.field in dedup
    made = Prepared(rows, prepared, specs.specs)
    if fields:
        schema.check(made, fields)
    return made


def by_name(columns: Any) -> Any:
    """A TensorDict as a mapping of names to columns: nested keys are joined with ".", data that are
    no tensors keep their Python types. Other columns are returned as they are.

    InvalidRows for one without a batch size, with a "." in a key, or whose rows have different
    keys. A field of a tensorclass that is None is not put.
    """
    if not objects.is_tensordict(columns):
        return columns
    if not columns.batch_size:
        raise InvalidRows("a TensorDict with batch_size [] has no rows: give it a batch_size [n]")
    found = {}
    for key, column in _leaves(objects.tensordict_of(columns), ()):
        if any("." in part for part in key):
            raise InvalidRows(
                f"the TensorDict's key {key[-1]!r} contains '.', which separates the keys "
                "of nested TensorDicts; rename it"
            )
        found[".".join(key)] = column
    return found


def named_once(columns: Any, named: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a call that takes them in a mapping and by name. InvalidCall if a field
    is in both."""
    given = {} if columns is None else dict(by_name(columns))
    if twice := given.keys() & named.keys():
        raise InvalidCall(
            f"the call has field {min(twice)!r} in its mapping and by name: pass each field once"
        )
    return {**given, **named}


def _leaves(tensordict: Any, above: tuple[str, ...]) -> Iterable[tuple[tuple[str, ...], Any]]:
    """The columns of a TensorDict at the keys `above`, each with the keys that lead to it."""
    library = sys.modules["tensordict"]
    odd = objects.uneven_keys(tensordict)
    if odd is not None:
        field, one = ".".join((*above, odd[0])), "row" if tensordict.stack_dim == 0 else "member"
        raise InvalidRows(
            f"the TensorDict's key {field!r} is in {one} {odd[2]} but not in {one} {odd[1]}, and "
            "every row of a put needs the same fields: put rows with different keys in separate "
            "put() calls, or give the key a value in every row",
            field=field,
            row=odd[1],
        )
    for name in tensordict.keys():  # noqa: SIM118
        key = (*above, name)
        lazy = isinstance(tensordict, library.LazyStackedTensorDict) and tensordict.stack_dim == 0
        if lazy:
            rows = [_got(objects.tensordict_of(row), key) for row in tensordict.tensordicts]
            kinds = {_kind(row, library) for row in rows}
            if "TensorDict" not in kinds:  # stacked, they would have to be of one shape and kind
                plain = [objects.as_plain(row) for row in rows]
                yield key, plain if kinds == {"tensor"} else Kept(plain)
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
            yield key, Kept(_entries(column, tensordict.batch_size[0], library))
        elif library.is_tensor_collection(column):
            yield from _leaves(objects.tensordict_of(column), key)
        else:
            yield key, column


def _got(tensordict: Any, key: tuple[str, ...]) -> Any:
    try:
        return tensordict.get(key[-1])
    except RuntimeError as exc:  # a stack of several shapes inside a stack
        name = ".".join(key)
        raise InvalidValue(f"the TensorDict's key {name!r}: {exc}", field=name) from exc


def _kind(value: Any, library: Any) -> str:
    if library.is_tensor_collection(value) and not library.is_non_tensor(value):
        return "TensorDict"
    return "tensor" if is_torch(value) else "object"


def _entries(column: Any, n: int, library: Any) -> list[Any]:
    """Of data that are no tensors, one a row. An array of n objects, which a TensorDict takes for
    one value of all rows, has an item a row, as outside a TensorDict."""
    if not isinstance(column, library.NonTensorData):
        return objects.listed(column)
    whole = column.data
    of_rows = isinstance(whole, np.ndarray) and whole.dtype == object and whole.shape[:1] == (n,)
    return list(whole) if of_rows else [whole] * n


def checked_name(name: object) -> str:
    """InvalidRows for what cannot name a field, such as half of a surrogate pair."""
    try:
        fits = isinstance(name, str) and 0 < len(name.encode()) <= MAX_NAME_BYTES
    except UnicodeEncodeError:
        fits = False
    if not isinstance(name, str) or not fits:
        raise InvalidRows(
            f"the name of a field must be a str of 1 to {MAX_NAME_BYTES} bytes, not {name!r:.80}"
        )
    return name if type(name) is str else str.__str__(name)


def _common_length(columns: dict[str, Sequence[Any] | Array], n: int | None, whose: str) -> int:
    found = set(map(len, columns.values()))
    if not found:
        raise InvalidRows("the call has no fields to write: pass at least one")
    expected = n if n is not None else len(next(iter(columns.values())))
    if found != {expected}:
        lengths = {name: len(column) for name, column in columns.items()}
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
        raise InvalidRows("the columns have no rows to write: pass at least one")
    return expected


def _column(name: str, column: Any) -> Sequence[Any] | Array:
    """A column as a list, a tuple or a plain array whose first axis is the rows."""
    if isinstance(column, (list, tuple)):
        return column
    if isinstance(column, Kept):
        return [Kept(value) for value in _column(name, column.value)]
    if isinstance(column, (str, bytes, bytearray, memoryview, Mapping, Set)):
        raise InvalidRows(
            f"field {name!r}: expected a list or an array with one entry per row, got "
            f"{kind_of(column)}"
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
        try:
            return list(column)
        except TypeError:
            pass
    elif array.ndim:
        rows: Sequence[Any] | Array = array
        return rows
    raise InvalidRows(
        f"field {name!r}: expected a list or an array with one entry per row, got {column!r:.60}"
    )


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


def _prepare(
    name: str,
    column: Sequence[Any] | Array,
    specs: Specs,
    check_time: Callable[[], object],
    form: str | None = None,
) -> PreparedColumn:
    if isinstance(column, np.ndarray):
        return PreparedColumn(name, _dense(column, specs))
    if isinstance(column, _Rows):
        return PreparedColumn(name, _ragged(column, specs))
    if isinstance(column, _JaggedRows):
        return PreparedColumn(name, _loose(column, specs, column.axis))
    if form is not None and schema.parsed(form).shape == ():
        numbers = _of_flat(list(column))  # of Python, which are objects where nobody says a dtype
        if isinstance(numbers, np.ndarray):
            return PreparedColumn(name, _dense(numbers, specs))
    kinds = set(map(type, column))
    heads = None if np.ndarray in kinds else objects.encode_many(column)
    if heads is not None:
        return PreparedColumn(name, _heads(heads, specs))
    if Kept in kinds:
        column = [v.value if type(v) is Kept else v for v in column]
        return _objects(name, column, specs, check_time, _LOOSE_OBJECT)
    if list in kinds:
        column = _without_flat_lists(column, schema.empty_dtype(form))
    arrays = _arrays(name, column)
    if arrays is not None:
        return PreparedColumn(name, _loose(arrays, specs))
    return _objects(name, column, specs, check_time)


def _without_flat_lists(column: Sequence[Any], empty_dtype: np.dtype[Any]) -> list[Any]:
    """The column with arrays for flat lists of numbers of one kind; an empty one is of the dtype of
    the others, where they are arrays, and of `empty_dtype` where all are empty."""
    found = [_of_flat(value) if type(value) is list else value for value in column]
    if not any(type(value) is list and not value for value in found):
        return found
    dtypes = {getattr(v, "dtype", None) for v in found if not (type(v) is list and not v)}
    if all(isinstance(dtype, np.dtype) for dtype in dtypes) and len(dtypes) < 2:
        empty = np.zeros(0, dtypes.pop() if dtypes else empty_dtype)
        return [empty if type(value) is list and not value else value for value in found]
    return found


def _of_flat(values: list[Any]) -> Any:
    """Numbers of one kind as an array: bool, int64 or float64, or the dtype of numpy's; else the
    list."""
    kinds = set(map(type, values))
    if len(kinds) != 1:
        return values
    kind = kinds.pop()
    try:
        if kind in _NUMBERS:
            return np.array(values, _NUMBERS[kind])
        if issubclass(kind, np.generic) and dtype_name(values[0].dtype) is not None:
            # numpy would bring times of several units to the finest one, which may overflow
            return np.array(values) if len({value.dtype for value in values}) == 1 else values
    except OverflowError:
        pass
    return values


def _dense(array: Array, specs: Specs) -> Strip:
    n, shape = len(array), array.shape[1:]
    spec = specs.number(spec_of(array.dtype, shape))
    size = array.nbytes // n
    if size == 0:
        return Strip(n, np.empty((n, 0), np.uint8), 0, spec)
    return Strip(n, array.reshape(n, -1).view(np.uint8), size, spec)


def _arrays(name: str, column: Sequence[Any]) -> list[Array] | None:
    """The column as plain arrays; None where not every value is one."""
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


def _loose(arrays: list[Array], specs: Specs, ragged: int | None = None) -> Strip:
    """Rows that were given one by one. ragged: the axis in which they differ, where it is known."""
    if len(arrays) == 1:
        one = arrays[0]
        shape = one.shape if ragged or one.ndim != 1 else _ANY_LENGTH
        spec = specs.number(spec_of(one.dtype, shape, True, ragged or 0))
        return Strip(1, [raw(one)], one.nbytes, spec)
    if ragged is None and set(map(_ndim, arrays)) == {1} and len(set(map(_dtype, arrays))) == 1:
        sizes = np.fromiter(map(_nbytes, arrays), np.int64, len(arrays))
        spec = specs.number(spec_of(arrays[0].dtype, _ANY_LENGTH, True))
        return Strip(len(arrays), [raw(array) for array in arrays], sizes, spec)
    if ragged is None:
        shapes = set(map(_shape, arrays))
        lengths = list(map(set, zip(*shapes, strict=False)))
        differ = [axis for axis, some in enumerate(lengths) if len(some) > 1]
        alike = len(set(map(len, shapes))) == 1
        ragged = differ[0] if alike and len(differ) == 1 else 0
    return _ragged(arrays, specs, True, ragged)


def _ragged(arrays: list[Array], specs: Specs, loose: bool = False, ragged: int = 0) -> Strip:
    count = len(arrays)
    sizes = np.fromiter(map(_nbytes, arrays), np.int64, count)
    forms = list(zip(map(_dtype, arrays), map(_shape, arrays), strict=True))
    if not ragged:
        forms = [(dtype, shape if len(shape) != 1 else _ANY_LENGTH) for dtype, shape in forms]
    different = dict.fromkeys(forms)
    numbers = {form: specs.number(spec_of(*form, loose, ragged)) for form in different}
    if len(set(numbers.values())) == 1:
        return Strip(count, [raw(array) for array in arrays], sizes, next(iter(numbers.values())))
    each = np.fromiter(map(numbers.__getitem__, forms), np.uint32, count)
    return Strip(count, [raw(array) for array in arrays], sizes, each)


def _heads(heads: list[bytes], specs: Specs, spec: Spec = _OBJECT) -> Strip:
    if len(heads) == 1:
        return Strip(1, heads, len(heads[0]), specs.number(spec))
    sizes = np.fromiter(map(len, heads), np.int64, len(heads))
    return Strip(len(heads), heads, sizes, specs.number(spec))


def _objects(
    name: str,
    column: Sequence[Any],
    specs: Specs,
    check_time: Callable[[], object],
    spec: Spec = _OBJECT,
) -> PreparedColumn:
    heads: list[bytes] = []
    leaves: list[Array] = []
    counts = np.zeros(len(column), np.int64)
    for index, value in enumerate(column):
        if not index % _TIMED_ROWS:
            check_time()
        try:
            head, own = objects.encode(value, f"{name}[{index}]")
        except (InvalidValue, LimitExceeded) as exc:
            exc.details.update(field=name, row=index)
            raise
        heads.append(head)
        leaves += own
        counts[index] = len(own)
    values = _heads(heads, specs, spec)
    if not leaves:
        return PreparedColumn(name, values)
    return PreparedColumn(name, values, counts, _ragged(leaves, specs))
