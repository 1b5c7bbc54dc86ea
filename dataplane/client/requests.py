"""Check the arguments of `partition`, `claim` and `plan`, and convert them for messages.

Pure functions. InvalidCall names the wrong argument.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, Literal

import msgspec

from dataplane.client import arguments
from dataplane.client.write import schema
from dataplane.errors import InvalidCall
from dataplane.metadata.tables.where import Where
from dataplane.wire.arrays import shown, unreadable
from dataplane.wire.limits import MAX_PLAN_PARTS, MAX_RANKS
from dataplane.wire.messages import Want
from dataplane.wire.tables import Definition, Shape


def definition_of(
    stages: Mapping[str, Sequence[str]] | None,
    group_size: int | None,
    groups: int | None,
    free: str | None,
    replicas: int,
    fields: Mapping[str, str] | None = None,
) -> Definition | None:
    """Return the definition from the arguments of `partition(…)`; None if they only attach."""
    if (stages, group_size, groups, free, replicas, fields) == (None, None, None, None, 1, None):
        return None
    if group_size is not None:
        group_size = arguments.count(group_size, "group_size")
    if groups is not None:
        groups = arguments.count(groups, "groups")
    free = free or ("acked" if stages else "drop")
    if free not in ("acked", "drop"):
        raise InvalidCall(f"free={free!r}: expected 'acked' or 'drop'")
    if arguments.integer(replicas) not in (1, 2):
        raise InvalidCall(
            f"replicas={shown(replicas):.80}: expected 1, or 2 to keep a second copy on another "
            "peer"
        )
    named: dict[str, list[str]] = {}
    form = "of stage names to lists of fields"
    for stage, needed in arguments.mapping(
        {} if stages is None else stages, "stages", form
    ).items():
        named[arguments.text(stage, "a stage")] = arguments.texts(needed, f"stages[{stage!r}]")
    return Definition(
        named,
        group_size,
        groups,
        free,  # type: ignore[arg-type]
        int(replicas),  # type: ignore[arg-type]
        schema.canonical({} if fields is None else fields),
    )


class Demand(msgspec.Struct, eq=False):
    """The arguments of a claim. `want` checks them."""

    rows: int | None
    groups: int | None
    budget: Mapping[str, float] | None
    minimum: int | None
    where: Where | None
    unit: str | None

    def want(self, default_unit: str) -> Want:
        """Return the demand as messages carry it. Raise InvalidCall for invalid arguments."""
        given = (self.rows is not None) + (self.groups is not None) + (self.budget is not None)
        if given != 1:
            raise InvalidCall(
                "a claim takes exactly one of rows=, groups= and budget={tag: limit}, got "
                f"{given or 'none'}: pass one of them"
            )
        where = arguments.filter_of(self.where)
        if self.budget is not None:
            return self._budget(self.budget, self.unit or default_unit, where)
        kind: Literal["rows", "groups"] = "rows" if self.rows is not None else "groups"
        count = arguments.count(self.rows if self.rows is not None else self.groups, kind)
        if self.unit not in (None, kind):
            raise InvalidCall(
                f"unit={self.unit!r} can only be combined with budget=, because {kind}= already "
                "sets the unit: leave out unit="
            )
        least = count if self.minimum is None else arguments.count(self.minimum, "min")
        if least > count:
            raise InvalidCall(
                f"min={least!r}: expected a number from 1 to {count}, because {kind}={count}"
            )
        return Want(kind, count, least, where)

    def _budget(self, budget: Mapping[str, float], unit: str, where: list[Any] | None) -> Want:
        given = arguments.mapping(budget, "budget", "{tag: limit}")
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
        if unit not in ("rows", "groups"):
            raise InvalidCall(f"unit={unit!r}: expected 'rows' or 'groups'")
        ((tag, amount),) = given.items()
        limit = 0.0
        if isinstance(amount, Real) and not isinstance(amount, bool):
            try:
                limit = float(amount)
            except OverflowError:
                pass
            except Exception as exc:  # of the user's number
                raise unreadable("the limit in budget=", amount, exc, InvalidCall) from exc
        if not 0 < limit <= sys.float_info.max:
            raise InvalidCall(
                f"budget={shown(given):.80}: expected a limit that is a finite number above 0"
            )
        arguments.text(tag, "a tag")
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
    rank, ranks = arguments.whole(rank, "rank"), arguments.count(ranks, "ranks")
    if ranks > MAX_RANKS:
        raise InvalidCall(f"ranks={ranks}: expected at most {MAX_RANKS} ranks in a plan")
    if rank >= ranks:
        raise InvalidCall(
            f"rank={rank}: expected a value from 0 to {ranks - 1}, because ranks={ranks}"
        )
    minibatches = arguments.count(minibatches, "minibatches")
    if ranks * minibatches > MAX_PLAN_PARTS:
        raise InvalidCall(
            f"ranks={ranks} × minibatches={minibatches} exceeds the limit of {MAX_PLAN_PARTS} "
            "parts: use fewer mini-batches"
        )
    if remainder not in ("pad", "drop"):
        raise InvalidCall(f"remainder={shown(remainder):.40}: expected 'pad' or 'drop'")
    if unit not in ("rows", "groups"):
        raise InvalidCall(f"unit={shown(unit):.40}: expected 'rows' or 'groups'")
    tag, amount = None, 0.0
    if budget is not None:
        want = Demand(None, None, budget, None, None, None).want("rows")
        tag, amount = want.budget_tag, want.budget
    shape = Shape(
        ranks,
        minibatches,
        tag,
        amount,
        tag if balance is None else arguments.text(balance, "a tag"),
        arguments.count(epochs, "epochs"),
        arguments.whole(seed, "seed"),
        remainder,  # type: ignore[arg-type]
        unit,  # type: ignore[arg-type]
    )
    return shape, rank
