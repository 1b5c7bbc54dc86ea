"""Filters over tags: `tag("version") >= 6`, combined with & | ~.

The client builds them, they travel as nested lists, and a store tests them block by block. A tag
that a row lacks makes every comparison false; values of kinds that have no order (a str and a
number) are never smaller or greater than each other. Testing never raises.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any, TypeVar

import numpy as np

from dataplane.errors import InvalidValue, LimitExceeded, ProtocolError, mixed_releases
from dataplane.metadata.tables.keys import unencodable
from dataplane.metadata.tables.tags import Tags
from dataplane.wire.arrays import items_of, reader, shown
from dataplane.wire.limits import MAX_NAME_BYTES, MAX_NESTING, MAX_WHERE_NODES
from dataplane.wire.tables import Scalar
from dataplane.wire.tables import Where as WireWhere

_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
_JOINTS = ("and", "or")
T = TypeVar("T")


class Where:
    """A filter over tags. Combine filters with `&`, `|` and `~`."""

    __slots__ = ("_wire",)

    def __init__(self, wire: WireWhere) -> None:
        self._wire = wire

    def to_wire(self) -> WireWhere:
        """Return the filter in wire form. Raises LimitExceeded if the filter is too large or too
        deeply nested."""
        try:
            return checked(self._wire)
        except ProtocolError as exc:
            raise LimitExceeded(exc.message, **exc.details) from exc

    def __and__(self, other: Where) -> Where:
        return self._joined("and", other)

    def __or__(self, other: Where) -> Where:
        return self._joined("or", other)

    def __invert__(self) -> Where:
        return Where(["not", self._wire])

    def __bool__(self) -> bool:
        raise TypeError(
            "a filter has no truth value: combine filters with & and |, not with and/or"
        )

    def __repr__(self) -> str:
        return f"Where({_text(self._wire)})"

    def _joined(self, joint: str, other: Where) -> Where:
        if not isinstance(other, Where):
            return NotImplemented
        # one flat list, so that a long chain of & does not nest
        first = self._wire[1:] if self._wire[0] == joint else [self._wire]
        second = other._wire[1:] if other._wire[0] == joint else [other._wire]
        return Where([joint, *first, *second])


class Tag:
    """A tag of a row. Comparing a tag with a scalar returns a `Where` filter."""

    __slots__ = ("_name",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, name: str) -> None:
        self._name = _name(name)

    def __eq__(self, value: Scalar) -> Where:  # type: ignore[override]
        return self._compared("eq", value)

    def __ne__(self, value: Scalar) -> Where:  # type: ignore[override]
        return self._compared("ne", value)

    def __lt__(self, value: Scalar) -> Where:
        return self._compared("lt", value)

    def __le__(self, value: Scalar) -> Where:
        return self._compared("le", value)

    def __gt__(self, value: Scalar) -> Where:
        return self._compared("gt", value)

    def __ge__(self, value: Scalar) -> Where:
        return self._compared("ge", value)

    def isin(self, values: Iterable[Scalar]) -> Where:
        """Return a filter for rows whose tag equals one of `values`."""
        listed = _listed(values, f"tag({self._name!r}).isin(…)")
        return Where(["in", self._name, [_scalar(value) for value in listed]])

    def exists(self) -> Where:
        """Return a filter for rows that have this tag."""
        return Where(["exists", self._name])

    def __bool__(self) -> bool:
        raise TypeError("a tag has no truth value: compare it, or use .exists()")

    def __repr__(self) -> str:
        return f"tag({self._name!r})"

    def _compared(self, how: str, value: Scalar) -> Where:
        return Where([how, self._name, _scalar(value)])


def tag(name: str) -> Tag:
    """Return a tag to filter by: `where=dataplane.tag("version") >= 6`."""
    return Tag(name)


@reader(InvalidValue, "the name of a tag")
def _name(name: object) -> str:
    if not isinstance(name, str):
        raise InvalidValue(
            f"invalid tag name {shown(name):.40} ({type(name).__name__}): pass a str"
        )
    return _checked(str.__str__(name))


@reader(InvalidValue)
def _listed(values: object, what: str) -> list[Any]:
    if not isinstance(values, Iterable):
        raise InvalidValue(f"{what} got {shown(values):.80}: pass a list of values")
    return items_of(what, values)


@reader(InvalidValue, "the value that a tag is compared with")
def _scalar(value: Any) -> Scalar:
    if isinstance(value, np.generic) and value.dtype.kind not in "mM":  # whose item may be an int
        value = value.item()
    if value is None or type(value) in (bool, int, float, str):
        scalar: Scalar = _checked(value)
        return scalar
    raise InvalidValue(
        f"cannot compare a tag with {shown(value):.40} of type {type(value).__name__}: pass a "
        "bool, int, float, str or None"
    )


def _checked(value: T) -> T:
    """Raise InvalidValue for an int or a text that has no wire form."""
    reason = unencodable(value)
    if reason is not None:
        raise InvalidValue(f"cannot filter by {shown(value):.80}, {reason}")
    return value


def _text(wire: Any) -> str:
    how, *rest = wire
    if how in _JOINTS:
        return f" {'&' if how == 'and' else '|'} ".join(f"({_text(part)})" for part in rest)
    if how == "not":
        return f"~({_text(rest[0])})"
    if how == "exists":
        return f"{rest[0]} exists"
    return f"{rest[0]} {how} {rest[1]!r}"


def checked(wire: Any) -> WireWhere:
    """Return a received filter. Raises ProtocolError for an unknown form or a broken limit."""
    _check(wire, MAX_NESTING, [MAX_WHERE_NODES])
    return wire  # type: ignore[no-any-return]


def _check(wire: Any, depth: int, budget: list[int]) -> None:
    if not isinstance(wire, list) or not wire or not isinstance(wire[0], str):
        raise mixed_releases(
            f"invalid filter {shown(wire):.80}: expected a list that starts with the name of an "
            "operator"
        )
    _spend(budget, 1)
    if depth == 0:
        raise ProtocolError(
            f"the filter has more than {MAX_NESTING} levels of nesting: flatten it",
            limit=MAX_NESTING,
        )
    how, rest = wire[0], wire[1:]
    if (how in _JOINTS and rest) or (how == "not" and len(rest) == 1):
        for part in rest:
            _check(part, depth - 1, budget)
        return
    if how == "exists" and len(rest) == 1:
        values = []
    elif how == "in" and len(rest) == 2 and isinstance(rest[1], list):
        values = rest[1]
        _spend(budget, len(values))
    elif how in _COMPARISONS and len(rest) == 2:
        values = rest[1:]
    else:
        raise ProtocolError(_misused(how, rest))
    if not isinstance(rest[0], str) or len(rest[0]) > MAX_NAME_BYTES:
        raise ProtocolError(
            f"invalid tag name {shown(rest[0]):.80} in a filter: pass a str of at most "
            f"{MAX_NAME_BYTES} characters"
        )
    for value in values:
        if value is not None and not isinstance(value, bool | int | float | str):
            raise ProtocolError(
                f"cannot compare a tag with a value of type {type(value).__name__}: use a bool, "
                "int, float, str or None"
            )


def _misused(how: str, rest: list[Any]) -> str:
    """Why these operands do not belong to this operator."""
    takes = {
        **dict.fromkeys(_JOINTS, "at least 1 operand"),
        **dict.fromkeys(("not", "exists"), "1 operand"),
        **dict.fromkeys(("in", *_COMPARISONS), "2 operands"),
    }
    if how not in takes:
        return f"unknown filter operator {how!r:.40}: install the same dataplane release everywhere"
    if how == "in" and len(rest) == 2:
        kind = type(rest[1]).__name__
        return (
            f"the second operand of filter operator 'in' must be a list, not {kind}: "
            "pass a list of values"
        )
    return f"filter operator {how!r} takes {takes[how]}, got {len(rest)}: pass {takes[how]}"


def tags_of(where: WireWhere, exists: bool = True) -> set[str]:
    """The names of the tags in a checked filter. exists: include tags of which it only asks
    whether a row has them."""
    how, *rest = where
    if how in _JOINTS or how == "not":
        return set[str]().union(*(tags_of(part, exists) for part in rest))
    return {rest[0]} if exists or how != "exists" else set()


def wanted_values(where: WireWhere) -> list[tuple[str, list[Scalar]]]:
    """Return (tag, accepted values) for each `==` and `in` comparison of a checked filter. Skip
    negated parts."""
    how, *rest = where
    if how in _JOINTS:
        return [one for part in rest for one in wanted_values(part)]
    if how in ("eq", "in"):
        return [(rest[0], rest[1] if how == "in" else [rest[1]])]
    return []


def _spend(budget: list[int], nodes: int) -> None:
    budget[0] -= nodes
    if budget[0] < 0:
        raise ProtocolError(
            f"the filter has more than {MAX_WHERE_NODES} parts: use a simpler filter",
            limit=MAX_WHERE_NODES,
        )


def test(where: WireWhere, tags: Tags) -> int:
    """The rows that match a checked filter. Never raises, whatever the tags are."""
    how, first, *rest = where
    if how == "exists":
        return tags.has(first)
    if how == "not":
        return tags.rows & ~test(first, tags)
    if how in _JOINTS:
        joined = operator.and_ if how == "and" else operator.or_
        return reduce(joined, [test(part, tags) for part in where[1:]])
    if how == "in":
        found = [tags.compare(first, operator.eq, value) for value in rest[0]]
        return reduce(operator.or_, found, 0)
    return tags.compare(first, _COMPARISONS[how], rest[0])


test.__test__ = False  # type: ignore[attr-defined]  # no test case, whatever pytest thinks
