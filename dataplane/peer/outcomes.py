"""How a waiting claim can end, as its stage's home says it, and what its caller is told."""

from __future__ import annotations

from typing import Any

import msgspec

from dataplane.errors import (
    ClaimTimeout,
    DeadlineExceeded,
    FieldUnknown,
    PartitionGone,
    RowsLost,
    StreamEnd,
    Unavailable,
    ValueTooLarge,
    counted,
)
from dataplane.peer.host import Known
from dataplane.wire.messages import Claim, LossesDone
from dataplane.wire.tables import Table

COMPLETE, AWAY, MOVED, STARVED = "complete", "away", "moved", "starved"


class HomeAway(Exception):
    """The home of a waiting claim cannot be reached, or was started anew."""


class HomeMoved(Exception):
    """Another peer is the stage's home now."""


class BytesLost(Exception):
    """Rows were granted whose bytes went with a peer: their shards do not know that yet, or where
    second copies are."""


class Starved(Exception):
    """What a claim would be granted next cannot be pulled now."""

    def __init__(self, needed_bytes: int) -> None:
        self.needed_bytes = needed_bytes


def check(outcome: str, entry: Known, body: Claim, needed_bytes: int) -> None:
    """Returns where the claim has all that it asked for. StreamEnd, PartitionGone, ValueTooLarge;
    the three above are not for callers: the claim queues again."""
    match outcome:
        case "starved":
            raise Starved(needed_bytes)
        case "away":
            raise HomeAway
        case "moved":
            raise HomeMoved
        case "ended":
            raise StreamEnd(
                f"partition {entry.name!r} is sealed and stage {body.stage!r} has had every row"
            )
        case "dropped":
            raise PartitionGone(f"partition {entry.name!r} was dropped", partition=entry.name)
        case "unmeetable":
            raise ValueTooLarge(
                f"the next unit alone exceeds the budget of {body.want.budget:g} "
                f"{body.want.budget_tag!r}: claim with a larger budget, or rows=1"
            )


def rows_lost(body: Claim, lost: LossesDone) -> RowsLost:
    """Of a claim that got nothing, and would have if no peer had been lost."""
    return RowsLost(
        f"partition {body.partition!r} is sealed and stage {body.stage!r} has had every row that "
        f"is left, but {counted(lost.after, 'row was', 'rows were')} lost with their peer, such as "
        f"{lost.names[:3]}: part.lost() names them all; put them into a new partition",
        partition=body.partition,
        rows=lost.after,
        keys=lost.names,
    )


def what_is_left(body: Claim, end: float | None, now: float) -> Claim:
    """A claim that queues again, with the time until its end."""
    if end is None:
        return body
    return msgspec.structs.replace(body, timeout_ms=max(0, int((end - now) * 1000)))


def in_vain(entry: Known, body: Claim, why: str, details: dict[str, Any]) -> ClaimTimeout:
    """Its time is up. why: what it waited for."""
    within_s = body.timeout_ms / 1000
    return ClaimTimeout(
        f"claim of stage {body.stage!r} of {entry.name!r} was not met within {within_s:g} s: {why}",
        **details,
    )


def too_late(exc: DeadlineExceeded, entry: Known) -> ClaimTimeout:
    """Of a claim whose rows were granted, and whose values did not arrive."""
    return ClaimTimeout(
        f"rows of {entry.name!r} were granted, but their values did not arrive in time, and the "
        f"rows went back: {exc.message}"
    )


def fields_of(entry: Known, body: Claim) -> list[str]:
    """What a claim fetches."""
    return entry.definition.stages[body.stage] if body.fields is None else body.fields


def given_up(exc: Exception, entry: Known) -> Exception:
    """What the caller is told in the end of a claim that was granted what went meanwhile."""
    if isinstance(exc, BytesLost):
        return Unavailable(
            f"values of rows of {entry.name!r} went with a peer, and the peer that has the rows "
            f"does not know yet ({exc.__cause__}): claim again",
            partition=entry.name,
        )
    return exc


def check_fields(tables: list[Table], asked: list[str] | None) -> None:
    """FieldUnknown for a field that none of these rows has."""
    there = {c.field for table in tables for c in table.columns}
    for name in asked or ():
        if name not in there:
            raise FieldUnknown(
                f"no row of this claim has a field {name!r}, the rows were given back; claim "
                f"without it (there are {sorted(there)})",
                field=name,
            )
