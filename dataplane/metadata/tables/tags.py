"""The tags of a block's rows: a list with one value per row, or with one value for all of them.

A value keeps its type. A list may belong to a message, so no list is ever changed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dataplane.errors import InvalidRows, InvalidValue, LimitExceeded, counted
from dataplane.metadata.tables.bits import all_of, bits_of, rows_of
from dataplane.wire.limits import MAX_NAME_BYTES, MAX_TAGS
from dataplane.wire.tables import Scalar

MISSING: Any = ...
"""In place of a tag that a row lacks; None is a value."""
_NUMBERS = {bool, int, float}
_SCALARS = {bool, int, float, str, type(None)}
_ORDERS = (operator.lt, operator.le, operator.gt, operator.ge)


_MANY_TEXTS, _LONG = 4_096, 64
_texts: dict[str, str] = {}
"""Short texts seen recently. `sys.intern` would keep them for ever up to Python 3.12.4."""


def _kept_once(text: str) -> str:
    """Return one shared copy of equal texts: many rows share few values, such as a status."""
    if len(text) > _LONG:
        return text
    if len(_texts) >= _MANY_TEXTS:
        _texts.clear()
    return _texts.setdefault(text, text)


def check(tags: Mapping[str, Sequence[Scalar]], rows: int, known: Iterable[str]) -> None:
    """Raise InvalidRows, InvalidValue or LimitExceeded unless these tags can be set on `rows`
    rows of a partition with these `known` tags."""
    for name, values in tags.items():
        if len(name) > MAX_NAME_BYTES:
            raise LimitExceeded(
                f"tag name {name[:40]!r}… has {len(name)} characters, over the limit of "
                f"{MAX_NAME_BYTES}: use a shorter name"
            )
        if len(values) != rows and len(values) != 1:
            raise InvalidRows(
                f"tag {name!r} has {counted(len(values), 'value')} for {counted(rows, 'row')}: "
                "pass one value per row, or one value for all rows",
                tag=name,
                values=len(values),
                rows=rows,
            )
        wrong = set(map(type, values)) - _SCALARS
        if wrong:
            raise InvalidValue(
                f"tag {name!r} has a value of type {wrong.pop().__name__}: pass a bool, "
                "int, float, str or None",
                tag=name,
            )
    if tags and len(tags.keys() | known) > MAX_TAGS:
        raise LimitExceeded(
            f"cannot add {counted(len(tags.keys() - set(known)), 'tag')}, because a "
            f"partition can have at most {MAX_TAGS} different tags: store the values in a "
            "field instead",
            limit=MAX_TAGS,
        )


def only(
    tags: Mapping[str, Sequence[Scalar]], rows: Sequence[int], count: int
) -> dict[str, list[Scalar]]:
    """The tags of a message of `count` rows, for some of them."""
    return {
        name: [values[i] for i in rows] if len(values) == count > 1 else list(values)
        for name, values in tags.items()
    }


class Tags:
    """The tags of the `count` rows of one block."""

    __slots__ = ("_texts", "_values", "count")

    def __init__(self, count: int) -> None:
        self.count = count
        self._values: dict[str, Sequence[Scalar]] = {}
        self._texts: dict[str, int] = {}
        """bytes of the different texts of a tag"""

    def copy(self) -> Tags:
        """A copy that can be changed."""
        made = Tags(self.count)
        made._values, made._texts = self._values.copy(), self._texts.copy()
        return made

    @property
    def rows(self) -> int:
        return all_of(self.count)

    @property
    def nbytes(self) -> int:
        each = sum([100 + 36 * len(values) for values in self._values.values()])
        return each + sum(self._texts.values())

    def values_of(self, name: str, rows: int) -> set[Scalar]:
        """The different values that these rows, a bit mask, have of a tag."""
        values = self._values.get(name, ())
        if len(values) > 1:
            values = [values[row] for row in rows_of(rows)]
        return {value for value in values if value is not MISSING} if rows else set()

    def set(self, rows: Sequence[int], tags: Mapping[str, Sequence[Scalar]]) -> None:
        """Merge checked tags into those of some rows: a list with one value per row, or with one
        for all."""
        for name, values in tags.items():
            if texts := any([type(value) is str for value in values]):
                values = [_kept_once(v) if type(v) is str else v for v in values]
            if len(rows) != self.count or rows != range(self.count):
                before = self._of(name)
                each = values if len(values) == len(rows) else [values[0]] * len(rows)
                for row, value in zip(rows, each, strict=True):
                    before[row] = value
                values = before
            self._values[name] = values
            if texts or name in self._texts:
                self._texts[name] = sum([len(v) for v in set(values) if type(v) is str])

    def has(self, name: str) -> int:
        values = self._values.get(name)
        if values is None:
            return 0
        if MISSING not in values:
            return self.rows
        return bits_of(row for row, value in enumerate(values) if value is not MISSING)

    def compare(self, name: str, how: Callable[[Any, Any], Any], value: Scalar) -> int:
        """The rows that have the tag and for which `how(tag, value)` holds. Kinds without a
        common order never match."""
        values = self._values.get(name)
        if values is None:
            return 0
        kinds = set(map(type, values))
        if type(value) in _NUMBERS and kinds <= _NUMBERS:
            hit = [how(one, value) for one in values]
        else:
            hit = [one is not MISSING and _compared(how, one, value) for one in values]
        if len(hit) == 1:
            return self.rows if hit[0] else 0
        return int("".join(["1" if one else "0" for one in reversed(hit)]), 2)

    def expected(self, expect: Mapping[str, Scalar]) -> int:
        """The rows that have all these tags with these values. None also matches a missing tag."""
        rows = self.rows
        for name, value in expect.items():
            same = self.compare(name, operator.eq, value)
            rows &= same | (~self.has(name) if value is None else 0)
        return rows

    def get(self, name: str, row: int) -> Scalar:
        """The tag of a row, or `MISSING`."""
        values = self._values.get(name)
        if values is None:
            return MISSING  # type: ignore[no-any-return]
        return values[row if len(values) > 1 else 0]

    def items(self, rows: Sequence[int]) -> list[tuple[str, list[Scalar]]]:
        """Each tag that one of these rows has, with one value per row or `MISSING`."""
        found = []
        for name, values in self._values.items():
            if len(values) == 1:
                found.append((name, [values[0]] * len(rows)))
            elif len(rows) == self.count and rows == range(self.count):
                found.append((name, list(values)))
            else:
                found.append((name, [values[row] for row in rows]))
        return [
            (name, values)
            for name, values in found
            if any(value is not MISSING for value in values)
        ]

    def _of(self, name: str) -> list[Scalar]:
        """One value per row."""
        values = self._values.get(name, [MISSING])
        return list(values) * self.count if len(values) == 1 else list(values)


def _compared(how: Callable[[Any, Any], Any], one: Scalar, other: Scalar) -> bool:
    if how in _ORDERS:
        numbers = isinstance(one, int | float) and isinstance(other, int | float)
        if not numbers and not (isinstance(one, str) and isinstance(other, str)):
            return False
    return bool(how(one, other))
