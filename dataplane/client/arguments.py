"""Check the arguments of public calls. InvalidCall names the argument and its value. A `timeout`
becomes a `Deadline`, and the arguments of a claim or a plan become what their message carries.

`client/write` checks whether the rows of a call fit together. Checks of built-in types run no code
of the user, so they need no `reader` guard.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from numbers import Real
from operator import index
from typing import Any, Literal

import msgspec

from dataplane.errors import DeadlineExceeded, InvalidCall, LimitExceeded, joined
from dataplane.metadata.tables.where import Where
from dataplane.wire.arrays import is_time, items_of, pairs_of, reader, shown
from dataplane.wire.limits import MAX_NAME_BYTES, MAX_PLAN_PARTS, MAX_RANKS
from dataplane.wire.messages import Want
from dataplane.wire.tables import Shape
from dataplane.wire.tables import Where as WireWhere

_FOREVER_S = 1e9
_MAX_COUNT = 2**63 - 1


def text(value: object, what: str, role: str = "the name of ") -> str:
    """Return the name of `what`. Raise InvalidCall unless it is a non-empty str."""
    if type(value) is str and 0 < len(value) <= MAX_NAME_BYTES and value.isascii():
        return value
    return _unusual_text(value, what, role)


@reader(InvalidCall)
def _unusual_text(value: object, what: str, role: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidCall(f"{role}{what} is {shown(value):.80}: expected a non-empty str")
    try:
        nbytes = len(value) if len(value) > MAX_NAME_BYTES else len(value.encode())
    except UnicodeEncodeError as exc:
        raise InvalidCall(
            f"{role}{what} is {shown(value):.80}, which cannot be encoded as UTF-8 "
            f"({exc.reason}): use another name"
        ) from None
    if nbytes > MAX_NAME_BYTES:
        raise LimitExceeded(
            f"{role}{what} ({shown(value):.40}…) is longer than {MAX_NAME_BYTES} bytes: use a "
            "shorter name",
            limit=MAX_NAME_BYTES,
        )
    # numpy's own texts are of a class that no encoder takes
    return value if type(value) is str else str.__str__(value)


def texts(values: object, what: str) -> list[str]:
    """Return a list of names, such as fields. Raise InvalidCall for a single str."""
    listed: Any = values if type(values) in (list, tuple) else _listed(values, what)
    return [text(value, what, "an entry of ") for value in listed]


@reader(InvalidCall)
def _listed(values: object, what: str) -> list[Any]:
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise InvalidCall(f"{what}={shown(values):.80}: expected a list of names")
    return items_of(what, values, InvalidCall)


def optional_texts(values: object, what: str) -> list[str] | None:
    return None if values is None else texts(values, what)


def count(value: object, what: str) -> int:
    """Return a positive int. NumPy ints are accepted."""
    if type(value) is int and 0 < value <= _MAX_COUNT:
        return value
    return _unusual_count(value, what)


@reader(InvalidCall)
def _unusual_count(value: object, what: str) -> int:
    number = integer(value)
    if not 0 < number <= _MAX_COUNT:
        raise InvalidCall(f"{what}={shown(value):.80}: expected a positive int")
    return number


@reader(InvalidCall)
def whole(value: object, what: str) -> int:
    """Return an int of 0 or more. NumPy ints are accepted."""
    number = integer(value)
    if not 0 <= number <= _MAX_COUNT:
        raise InvalidCall(f"{what}={shown(value):.80}: expected a non-negative int")
    return number


def integer(value: object) -> int:
    """Return an int, or -1 for anything else. NumPy ints are accepted."""
    if hasattr(type(value), "__index__") and not isinstance(value, bool):
        number: Any = value
        with suppress(TypeError):
            return index(number)
    return -1


def flag(value: object, what: str) -> bool:
    if type(value) is not bool:
        raise InvalidCall(f"{what}={shown(value):.80}: expected True or False")
    return value


@reader(InvalidCall)
def choice(value: object, what: str, *options: str) -> str:
    """Return the value if it is one of the options."""
    if not isinstance(value, str) or value not in options:
        expected = joined([repr(option) for option in options], " or ")
        raise InvalidCall(f"{what}={shown(value):.40}: expected {expected}")
    return value


def seconds(value: object, what: str) -> float | None:
    """Return a duration in seconds, or None for no limit. More than 30 years counts as no limit. A
    negative duration is over already."""
    if value is None:
        return None
    if (type(value) is float or type(value) is int) and -_FOREVER_S < value < _FOREVER_S:
        return float(value)
    return _unusual_seconds(value, what)


@reader(InvalidCall)
def _unusual_seconds(value: object, what: str) -> float | None:
    if not _is_number(value):
        raise InvalidCall(
            f"{what}={shown(value):.80}: expected a number of seconds, or None for no limit"
        )
    number: Any = value
    return max(-_FOREVER_S, float(number)) if number < _FOREVER_S else None


class Deadline:
    """The deadline of one operation. timeout_s: as the caller passed it; None: no limit. until: the
    time on the monotonic clock; `math.inf`: no limit."""

    __slots__ = ("timeout_s", "until")

    def __init__(self, timeout_s: float | None) -> None:
        """Raise InvalidCall unless `timeout_s` is a number or None. A deadline with a negative
        timeout has already passed."""
        self.timeout_s = limit_s = seconds(timeout_s, "timeout")
        if limit_s is None:
            self.until = math.inf
        else:
            self.until = time.monotonic() + (limit_s if limit_s > 0 else 0.0)

    def check(self, doing: str) -> None:
        """Raise DeadlineExceeded if the deadline has passed. doing: names the operation."""
        if self.until <= time.monotonic():
            raise DeadlineExceeded(
                f"{doing} did not finish within {self.timeout_s} s: pass a longer timeout=",
                limit_s=self.timeout_s,
            )

    def left(self, doing: str) -> float | None:
        """Return the seconds left, or None for no limit. Raise DeadlineExceeded if none are
        left."""
        self.check(doing)
        return None if self.timeout_s is None else self.until - time.monotonic()


@reader(InvalidCall)
def moment(value: object, what: str) -> float:
    """Return a time on a monotonic clock, in seconds."""
    if not _is_number(value):
        raise InvalidCall(
            f"{what}={shown(value):.80}: expected a time in seconds, such as an event's `at`"
        )
    found: Any = value
    return float(max(-_FOREVER_S, min(found, _FOREVER_S)))


def _is_number(value: object) -> bool:
    """Return whether this is a number other than NaN. NumPy counts its durations as ints."""
    return isinstance(value, Real) and not (
        isinstance(value, bool) or is_time(value) or value != value
    )


@reader(InvalidCall, "the limit in budget=")
def _limit(value: object) -> float:
    """Return the limit as a float, or 0 if it is no number that a float can hold."""
    if isinstance(value, Real) and not isinstance(value, bool):
        with suppress(OverflowError):
            return float(value)
    return 0.0


@reader(InvalidCall)
def mapping(value: object, what: str, form: str) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise InvalidCall(f"{what}={shown(value):.80}: expected a mapping {form}")
    return pairs_of(f"{what}=", value, InvalidCall)


def filter_of(where: object) -> WireWhere | None:
    """Return a filter as messages carry it."""
    return None if where is None else _filter_of(where)


@reader(InvalidCall, "where=")
def _filter_of(where: object) -> WireWhere:
    if not isinstance(where, Where):
        raise InvalidCall(
            f"where={shown(where):.80}: expected a filter over tags, such as "
            "dataplane.tag('version') >= 6"
        )
    return where.to_wire()


# the arguments of a claim, and of a plan


class Demand(msgspec.Struct, eq=False):
    """The arguments of a claim. `want` checks them."""

    rows: int | None
    groups: int | None
    budget: Mapping[str, float] | None
    minimum: int | None
    where: Where | None
    unit: str | None
    in_order: bool = False

    def want(self, default_unit: str) -> Want:
        """Return the demand as messages carry it. Raise InvalidCall if it is invalid."""
        given = (self.rows is not None) + (self.groups is not None) + (self.budget is not None)
        if given != 1:
            raise InvalidCall(
                "a claim takes exactly one of rows=, groups= and budget={tag: limit}, got "
                f"{given or 'none'}: pass one of them"
            )
        where, in_order = filter_of(self.where), flag(self.in_order, "in_order")
        if self.budget is not None:
            unit = default_unit if self.unit is None else self.unit
            return self._budget(self.budget, unit, where)
        kind: Literal["rows", "groups"] = "rows" if self.rows is not None else "groups"
        most = count(self.rows if self.rows is not None else self.groups, kind)
        if self.unit is not None and choice(self.unit, "unit", "rows", "groups") != kind:
            raise InvalidCall(
                f"unit={self.unit!r} can only be combined with budget=, because {kind}= already "
                "sets the unit: leave out unit="
            )
        least = most if self.minimum is None else count(self.minimum, "min")
        if least > most:
            raise InvalidCall(
                f"min={least!r}: expected a number from 1 to {most}, because {kind}={most}"
            )
        return Want(kind, most, least, where, in_order=in_order)

    def _budget(self, budget: Mapping[str, float], unit: str, where: list[Any] | None) -> Want:
        given = mapping(budget, "budget", "{tag: limit}")
        if len(given) != 1:
            raise InvalidCall(
                f"budget={shown(given):.80}: expected one tag with a limit on the sum of its "
                "values, for example {'tokens': 65536}"
            )
        if self.minimum is not None:
            raise InvalidCall(
                "min= cannot be combined with budget=, which claims as many rows or groups as "
                "fit: leave out min="
            )
        choice(unit, "unit", "rows", "groups")
        ((tag, amount),) = given.items()
        limit = _limit(amount)
        if not 0 < limit <= sys.float_info.max:
            raise InvalidCall(
                f"the limit in budget= is {shown(amount):.80}: expected a finite number above 0"
            )
        text(tag, "a tag")
        return Want(unit, 0, 0, where, tag, limit)  # type: ignore[arg-type]


def shape_of(
    rank: int,
    ranks: int,
    minibatches: int,
    budget: Mapping[str, float] | None,
    balance: str | None,
    epochs: int,
    seed: int,
    remainder: str,
    unit: str,
) -> tuple[Shape, int]:
    """Return the shape from the arguments of `plan(…)`, and the rank. Raise InvalidCall if one is
    invalid."""
    rank, ranks = whole(rank, "rank"), count(ranks, "ranks")
    if ranks > MAX_RANKS:
        raise InvalidCall(f"ranks={ranks}: expected at most {MAX_RANKS} ranks in a plan")
    if rank >= ranks:
        raise InvalidCall(
            f"rank={rank}: expected a value from 0 to {ranks - 1}, because ranks={ranks}"
        )
    minibatches = count(minibatches, "minibatches")
    if ranks * minibatches > MAX_PLAN_PARTS:
        raise InvalidCall(
            f"ranks={ranks} × minibatches={minibatches} exceeds the limit of {MAX_PLAN_PARTS} "
            "parts: use fewer mini-batches"
        )
    choice(remainder, "remainder", "pad", "drop")
    choice(unit, "unit", "rows", "groups")
    tag, amount = None, 0.0
    if budget is not None:
        want = Demand(None, None, budget, None, None, None).want("rows")
        tag, amount = want.budget_tag, want.budget
    shape = Shape(
        ranks,
        minibatches,
        tag,
        amount,
        tag if balance is None else text(balance, "a tag"),
        count(epochs, "epochs"),
        whole(seed, "seed"),
        remainder,  # type: ignore[arg-type]
        unit,  # type: ignore[arg-type]
    )
    return shape, rank
