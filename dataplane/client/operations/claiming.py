"""claim: what its arguments ask for, and the rows that a shard leases. Operations without I/O."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, Literal

import msgspec

from dataplane.client import arguments
from dataplane.client.core import Handle, Operation, expect, limit_beside, milliseconds
from dataplane.client.deadline import Deadline
from dataplane.client.session.outgoing import Call
from dataplane.errors import InvalidCall
from dataplane.metadata.tables.where import Where
from dataplane.wire.messages import Claim, Claimed, Want
from dataplane.wire.records import KEY
from dataplane.wire.tables import volume


class Demand(msgspec.Struct, eq=False):
    """What a claim's arguments ask for; `want` checks them."""

    rows: int | None
    groups: int | None
    budget: Mapping[str, float] | None
    minimum: int | None
    where: Where | None
    unit: str | None

    def want(self, default_unit: str) -> Want:
        """The demand as it travels. InvalidCall unless it is exactly one of the three."""
        if sum(a is not None for a in (self.rows, self.groups, self.budget)) != 1:
            raise InvalidCall("a claim takes exactly one of rows=, groups= and budget={tag: sum}")
        where = arguments.filter_of(self.where)
        if self.budget is not None:
            return self._budget(self.budget, self.unit or default_unit, where)
        kind: Literal["rows", "groups"] = "rows" if self.rows is not None else "groups"
        count = arguments.count(self.rows if self.rows is not None else self.groups, kind)
        if self.unit not in (None, kind):
            raise InvalidCall(
                f"unit={self.unit!r} can only be combined with budget=; {kind}= already sets "
                "the unit"
            )
        least = count if self.minimum is None else arguments.count(self.minimum, "min")
        if least > count:
            raise InvalidCall(f"min={least!r}: expected a number from 1 to {kind}={count}")
        return Want(kind, count, least, where)

    def _budget(self, budget: Mapping[str, float], unit: str, where: list[Any] | None) -> Want:
        shown = dict(arguments.mapping(budget, "budget", "{tag: sum}"))
        if len(budget) != 1:
            raise InvalidCall(
                f"budget={shown!r}: expected one tag and the largest sum of its values"
            )
        if self.minimum is not None:
            raise InvalidCall("min= cannot be combined with budget=, which takes whatever fits")
        if unit not in ("rows", "groups"):
            raise InvalidCall(f"unit={unit!r}: expected 'rows' or 'groups'")
        ((tag, amount),) = budget.items()
        number = isinstance(amount, Real) and not isinstance(amount, bool)
        if not number or not 0 < amount < math.inf:
            raise InvalidCall(f"budget={shown!r}: the sum must be a finite number above 0")
        arguments.text(tag, "a tag")
        kind: Literal["rows", "groups"] = "rows" if unit == "rows" else "groups"
        return Want(kind, 0, 0, where, tag, float(amount))


class Claiming:
    """Rows of a stage to be claimed, once or again and again. InvalidCall for what is no claim."""

    def __init__(
        self,
        handle: Handle,
        stage: str,
        demand: Demand,
        fields: Sequence[str] | None,
        timeout: float | None,
        lease_s: float | None,
        ahead: bool = False,
    ) -> None:
        """timeout: waits so long, or for as long as rows can come. ahead: claims while the caller
        works on what was claimed before, and does not wait."""
        self._handle, self._demand, self._ahead = handle, demand, ahead
        self._unit = handle.unit
        self._want = demand.want(self._unit)
        self._stage = arguments.text(stage, "a stage")
        self._wanted = arguments.optional_texts(fields, "fields")
        self._timeout = arguments.seconds(timeout, "timeout")
        self.limit_s = limit_beside(self._timeout)
        """for the acks and releases of what is claimed"""
        lease_s = arguments.seconds(lease_s, "lease")
        if lease_s is not None and lease_s <= 0:
            raise InvalidCall(f"lease={lease_s:g}: expected a positive number of seconds, or None")
        self._lease_ms = 0 if lease_s is None else max(1, int(lease_s * 1e3))

    def claim(self) -> Operation[Claimed]:
        """Rows, leased."""
        if self._handle.defined is None:
            yield from self._handle.attach_to_wait(self._timeout)
        return (yield from self.claimed(self.call()))

    def call(self, after: int | None = None) -> Call:
        """The request, of a handle that is attached. after: the lease that is finished before."""
        handle = self._handle
        if self._unit != handle.unit:  # it was attached since
            self._unit, self._want = handle.unit, self._demand.want(handle.unit)
        body = Claim(
            handle.name,
            handle.generation,
            self._stage,
            self._want,
            self._wanted,
            declare=None if self._stage in handle.definition.stages else self._wanted,
            timeout_ms=milliseconds(self._timeout),
            lease_ms=self._lease_ms,
            own=not self._ahead and handle.session.leases.mine(handle.name, but=after),
        )
        return Call(body, Deadline(self._timeout), True)

    def claimed(self, call: Call) -> Operation[Claimed]:
        """What it is answered."""
        session, stage, began = self._handle.session, self._stage, time.monotonic()
        try:
            claimed = expect((yield call), Claimed, call.body)
        except BaseException:
            session.tally.of_stage(stage, wait_s=time.monotonic() - began)
            if session.spans is not None:
                session.spans.claim(self._handle.name, stage, began, ahead=self._ahead)
            raise
        session.leased(claimed.lease, self._handle.name)
        rows = claimed.table.rows
        session.tally.of_stage(
            stage,
            wait_s=time.monotonic() - began,
            claims=1,
            rows=len(rows.keys) // KEY.itemsize,
            bytes=volume(claimed.table.columns),
        )
        if session.spans is not None:
            tags = claimed.table.tags
            session.spans.claim(
                self._handle.name, stage, began, claimed.lease, tags, ahead=self._ahead
            )
        session.familiar.note(self._handle.generation, rows.group_keys or rows.keys)
        return claimed
