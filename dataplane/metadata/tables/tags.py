"""The tags of rows: one typed column a tag, with which rows have it.

A column holds int64, float64 or bool as long as all its values have that very type, and Python
objects from the first one that has not, so that what went in comes out with its type.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dataplane.errors import InvalidRows, InvalidValue, LimitExceeded, counted
from dataplane.memory.extents import every, some
from dataplane.metadata.tables.columns import Array, grow
from dataplane.wire.limits import MAX_NAME_BYTES, MAX_TAGS
from dataplane.wire.tables import Scalar

_DTYPES: dict[type, np.dtype[Any]] = {
    int: np.dtype(np.int64),
    float: np.dtype(np.float64),
    bool: np.dtype(np.bool_),
}
_OBJECT = np.dtype(object)
_SCALARS = {bool, int, float, str, type(None)}
_ORDERS = (operator.lt, operator.le, operator.gt, operator.ge)


class _Column:
    __slots__ = ("present", "values")

    def __init__(self, dtype: np.dtype[Any], capacity: int) -> None:
        self.values: Array = np.zeros(capacity, dtype)
        self.present: Array = np.zeros(capacity, np.bool_)

    def to_objects(self) -> None:
        kept = self.present.nonzero()[0]
        objects: Array = np.zeros(len(self.values), _OBJECT)
        objects[kept] = self.values[kept].tolist()
        self.values = objects


class Tags:
    """All tags of a store's rows."""

    def __init__(self) -> None:
        self._columns: dict[str, _Column] = {}
        self._capacity = 0

    @property
    def nbytes(self) -> int:
        columns = self._columns.values()
        return sum(column.values.nbytes + column.present.nbytes for column in columns)

    def reserve(self, capacity: int) -> None:
        self._capacity = capacity
        for column in self._columns.values():
            grow(column.values, capacity)
            grow(column.present, capacity)

    def check(self, tags: Mapping[str, Sequence[Scalar]], rows: int) -> None:
        """InvalidRows, InvalidValue or LimitExceeded unless these can be set on `rows` rows."""
        for name, values in tags.items():
            if len(name) > MAX_NAME_BYTES:
                raise LimitExceeded(f"the name of tag {name[:40]!r}… is too long")
            if len(values) != rows and len(values) != 1:
                raise InvalidRows(
                    f"tag {name!r} has {counted(len(values), 'value')} for {counted(rows, 'row')}; "
                    "give one value a row, "
                    "or one for all",
                    tag=name,
                    values=len(values),
                    rows=rows,
                )
            wrong = set(map(type, values)) - _SCALARS
            if wrong:
                raise InvalidValue(
                    f"tag {name!r} has a {wrong.pop().__name__}; a tag is a bool, int, float, str "
                    "or None",
                    tag=name,
                )
        if len(tags) + len(self._columns) > MAX_TAGS and (
            len(self._columns.keys() | tags.keys()) > MAX_TAGS
        ):
            raise LimitExceeded(
                f"a partition has at most {MAX_TAGS} different tags", limit=MAX_TAGS
            )

    def set(self, slots: Array, tags: Mapping[str, Sequence[Scalar]]) -> None:
        """Merge checked tags into those of the rows: a list of one value a row, or one for all."""
        for name, values in tags.items():
            kinds = {type(values[0])} if len(values) == 1 else set(map(type, values))
            dtype = _DTYPES.get(kinds.pop(), _OBJECT) if len(kinds) == 1 else _OBJECT
            column = self._columns.get(name)
            if column is None:
                column = self._columns[name] = _Column(dtype, self._capacity)
            if column.values.dtype != dtype and column.values.dtype != _OBJECT:
                column.to_objects()
            self._write(column, slots, values)

    def clear(self, slots: Array) -> None:
        """The rows are no more."""
        for column in self._columns.values():
            column.present[slots] = False
            if column.values.dtype == _OBJECT:
                column.values[slots] = None

    def has(self, name: str, slots: Array) -> Array:
        column = self._columns.get(name)
        if column is None:
            return np.zeros(len(slots), np.bool_)
        present: Array = column.present[slots]
        return present

    def compare(
        self, name: str, how: Callable[[Any, Any], Any], value: Scalar, slots: Array
    ) -> Array:
        """Per row: has the tag, and `how(tag, value)`. False where the two have no order."""
        present = self.has(name, slots)
        if name not in self._columns:
            return present
        values = self._columns[name].values[slots]
        if values.dtype == _OBJECT:
            result: Array = np.fromiter(
                (_compared(how, one, value) for one in values.tolist()), np.bool_, len(slots)
            )
        elif isinstance(value, bool | int | float):
            result = how(values, value)
        else:
            result = np.full(len(slots), how is operator.ne)
        return result & present

    def numbers(self, name: str, slots: Array) -> Array:
        """The tag as float64, 0 where the row lacks it or it is no number."""
        column = self._columns.get(name)
        if column is None:
            return np.zeros(len(slots))
        values = column.values[slots]
        if values.dtype == _OBJECT:
            plain = [v if isinstance(v, bool | int | float) else 0 for v in values.tolist()]
            values = np.array(plain, np.float64)
        return np.where(column.present[slots], values, 0).astype(np.float64)

    def expected(self, slots: Array, expect: Mapping[str, Scalar]) -> Array:
        """Per row: do all these tags have these values. None also expects a missing tag."""
        result = np.ones(len(slots), np.bool_)
        for name, value in expect.items():
            same = self.compare(name, operator.eq, value, slots)
            if value is None:
                same = same | ~self.has(name, slots)
            result &= same
        return result

    def table(self, slots: Array) -> dict[str, list[Scalar]]:
        """Every tag that one of the rows has, one value a row, None where a row lacks it."""
        result: dict[str, list[Scalar]] = {}
        for name, column in self._columns.items():
            present = column.present[slots]
            if some(present):
                values: list[Scalar] = column.values[slots].tolist()
                if not every(present):
                    there = present.tolist()
                    values = [v if here else None for v, here in zip(values, there, strict=True)]
                result[name] = values
        return result

    def held(self, slots: Array) -> Iterator[tuple[str, Array, list[Scalar]]]:
        """Per tag that one of the rows has: which have it, and the values of these."""
        for name, column in self._columns.items():
            present = column.present[slots]
            if present.any():
                yield name, present, column.values[slots[present]].tolist()

    def _write(self, column: _Column, slots: Array, values: Sequence[Scalar]) -> None:
        if column.values.dtype == _OBJECT:
            # equal strings are kept once: a status has few values and many rows
            values = [sys.intern(v) if type(v) is str else v for v in values]
        try:
            column.values[slots] = values[0] if len(values) == 1 else values
        except OverflowError:  # an int beyond int64
            column.to_objects()
            column.values[slots] = values[0] if len(values) == 1 else values
        column.present[slots] = True


def _compared(how: Callable[[Any, Any], Any], one: Scalar, other: Scalar) -> bool:
    if how in _ORDERS:
        numbers = isinstance(one, int | float) and isinstance(other, int | float)
        if not numbers and not (isinstance(one, str) and isinstance(other, str)):
            return False
    return bool(how(one, other))
