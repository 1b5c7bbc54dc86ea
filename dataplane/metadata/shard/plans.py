"""The plan of a stage: all rows that it has left, under one lease, for the ranks of a trainer.

The shard lists the rows in a stable order with weights, and every rank computes the same layout
from them (`client/operations/balancing.py`). The lease ends when each rank has acked. A member
that leaves before it has acked ends the plan for all: the rows return, and the next call starts
another plan.
"""

from __future__ import annotations

import numpy as np

from dataplane.errors import (
    InvalidCall,
    InvalidRows,
    LeaseExpired,
    LimitExceeded,
    PartitionConflict,
    ProtocolError,
    counted,
    duration,
)
from dataplane.metadata.shard import finishes, weights
from dataplane.metadata.shard.blocks import Rows
from dataplane.metadata.shard.leases import Lease, Member, Plan
from dataplane.metadata.shard.stages import Stage
from dataplane.metadata.shard.state import State
from dataplane.metadata.shard.weights import weight
from dataplane.wire import tables as wire
from dataplane.wire.events import EventRecord, Kind, Reason
from dataplane.wire.journal import Joined
from dataplane.wire.limits import MAX_PLAN_PARTS, MAX_RANKS, NO_GROUP
from dataplane.wire.messages import Claimed, Finish
from dataplane.wire.packed import U4
from dataplane.wire.tables import Definition, PlanRows, Shape

MAX_PLAN_ROWS = 1 << 20
"""A message holds this many rows of a plan, at 40 bytes a row."""


def check(shape: Shape, rank: int) -> None:
    """Raise ProtocolError for an impossible plan or rank."""
    if not 0 < shape.ranks <= MAX_RANKS:
        raise ProtocolError(
            f"ranks={shape.ranks} is invalid for a plan: expected a value from 1 to {MAX_RANKS}"
        )
    if not 0 <= rank < shape.ranks:
        raise ProtocolError(
            f"rank={rank} is invalid for a plan with {counted(shape.ranks, 'rank')}: "
            f"expected a value from 0 to {shape.ranks - 1}"
        )
    if not shape.ranks <= shape.ranks * shape.minibatches <= MAX_PLAN_PARTS:
        raise ProtocolError(
            f"minibatches={shape.minibatches} is invalid for a plan with "
            f"{counted(shape.ranks, 'rank')}: expected a value from 1 to "
            f"{MAX_PLAN_PARTS // shape.ranks}"
        )


def may_join(state: State, stage: str) -> bool:
    """Whether a plan exists, or all rows that the stage has left are ready for one."""
    if state.leases.plans.get(stage) is not None:
        return True
    rows = state.stage(stage).rows.count()
    return state.sealed and rows.ready == rows.outstanding > 0


def join(
    state: State, name: str, shape: Shape, rank: int, holder: int, now: float, claim: int = 0
) -> Member | None:
    """Let a process join a stage's plan as this rank. The first one starts the plan and leases all
    rows that are left. Return None while that must wait: for rows, for the seal, or for other ranks
    to ack.

    Raises PartitionConflict if the plan differs, and InvalidRows if rows lack the tag that
    weighs them.
    """
    stage = state.stage(name)
    check(shape, rank)
    if not may_join(state, stage.name):
        return None
    plan = state.leases.plans.get(stage.name)
    if plan is None:
        plan = _begin(state, stage, shape, now)
    if plan.shape != shape:
        raise PartitionConflict(
            f"the plan of stage {stage.name!r} was started with "
            f"{difference(plan.shape, shape)}: pass the same arguments, except rank=, "
            "to plan() on all ranks",
            stage=stage.name,
        )
    of_rank = [one for one in plan.members.values() if one.rank == rank]
    if of_rank and all(one.acked for one in of_rank):
        return None
    if any(one.holder == holder and not one.acked for one in of_rank):
        raise InvalidCall(
            f"this process already takes part in the plan of stage {stage.name!r} as rank {rank}: "
            "ack or release that plan first. If the plan is used in a `with` block, the end of "
            "the block does that",
            stage=stage.name,
        )
    if len(plan.members) >= MAX_RANKS:
        raise LimitExceeded(
            f"the plan of stage {stage.name!r} already has {MAX_RANKS} processes, the "
            "maximum: start fewer processes",
            limit=MAX_RANKS,
        )
    member = Member(next(state.numbers), plan, rank, holder, claim, now)
    plan.members[member.number] = member
    state.happened(_record(Kind.LEASE_BEGIN, member))
    state.tell(Joined(name, plan.lease.number, shape, member.number, rank, holder, claim))
    return member


def part(member: Member) -> Claimed:
    """The reply to a member, with the inputs of the layout."""
    return Claimed(member.number, 0, wire.Table(wire.Rows(b"")), member.plan.rows)


def waits_for(state: State, stage: str, rank: int, now: float) -> str:
    """Why a rank must wait, if rows are not the reason."""
    plan = state.leases.plans.get(stage)
    if plan is not None:
        came = {one.rank for one in plan.members.values()}
        absent = [one for one in range(plan.shape.ranks) if one not in came]
        why = (
            f"rank {rank} has already acked the current plan of this stage. That plan "
            f"started {duration(max(0.0, now - plan.lease.started))} ago and ends when "
            "every rank has acked"
        )
        if working := sorted({one.rank for one in plan.working}):
            why += f"; ranks yet to ack: {_shown(working)}"
        return why + (f"; ranks yet to join: {_shown(absent)}" if absent else "")
    return "" if state.sealed else "the partition is not sealed yet"


def finish(state: State, member: Member, asked: Finish, now: float) -> dict[str, int]:
    """`Store.finish` of a member of a plan: add fields to some rows (`keep`), ack everything
    that its rank has, end the plan for all (`release`), or leave because the reply never arrived
    (`leave`). A retry of an ack raises LeaseExpired with `repeated`."""
    plan = member.plan
    if member.acked:
        retried = finishes.retry_key(asked, None) == finishes.member_key(member.number)
        raise LeaseExpired(
            "this rank has already acked its part of the plan: call part.plan(…) to join "
            "the next plan",
            lease=member.number,
            **({"repeated": True} if retried else {}),
        )
    if asked.outcome == "leave":
        _leave(state, member, now)
        return {}
    if asked.outcome == "keep":
        return finishes.finish(state, plan.lease, asked)
    whole = asked.outcome in ("ack", *finishes.BACK) and asked.index is None
    if not whole:
        raise InvalidRows(
            "a plan can only be acked or released as a whole: call plan.ack() or "
            "plan.release(). To drop individual rows, use part.drop(keys=…)"
        )
    if asked.values.fields or asked.values.chunks or asked.tags:
        raise InvalidRows(
            "cannot add fields or tags while acking or releasing a plan: add them in an "
            "earlier call"
        )
    if asked.outcome != "ack":
        end(state, member, finishes.REASONS[asked.outcome])
        return {}
    member.acked = True
    ended = _record(Kind.LEASE_END, member, Reason.ACK)
    ended.client_s = asked.client_s
    state.happened(ended, member.started)
    return _finish_if_done(state, plan, now)


def _leave(state: State, member: Member, now: float) -> None:
    """The last one ends the plan."""
    plan = member.plan
    state.happened(_record(Kind.LEASE_END, member, Reason.RELEASE), member.started)
    del plan.members[member.number]
    if plan.members:
        _finish_if_done(state, plan, now)
        return
    state.leases.end_plan(plan)
    finishes.give_back(state, plan.lease, Reason.RELEASE)


def end(state: State, member: Member, reason: Reason = Reason.DIED) -> int:
    """End a plan because a member leaves before it has acked. Return how many rows are ready
    again."""
    plan = member.plan
    for one in plan.working:
        how = reason if one is member else Reason.RELEASE
        state.happened(_record(Kind.LEASE_END, one, how), one.started)
    state.leases.end_plan(
        plan,
        f"this plan has ended, because rank {member.rank} of {plan.shape.ranks} exited or "
        "released the plan before it had acked. All rows were returned to the stage: leave "
        "the loop on every rank and call part.plan(…) again",
    )
    return finishes.give_back(state, plan.lease, reason)


def plan_rows(lease: Lease, shape: Shape) -> PlanRows:
    """The inputs from which all ranks compute the layout of a plan, until the first rank leaves."""
    told = {
        tag: np.array([float(weight(block, row, tag) or 0) for block, row in lease.rows]).tobytes()
        for tag in shape.tags
    }
    if shape.unit == "rows":
        return PlanRows(lease.count, weights=told)
    numbers: dict[bytes, int] = {b"": NO_GROUP}
    groups = [numbers.setdefault(block.group, len(numbers) - 1) for block, _ in lease.rows]
    return PlanRows(lease.count, np.array(groups, U4).tobytes(), told)


def _record(kind: Kind, member: Member, reason: Reason = Reason.NONE) -> EventRecord:
    """The event record of a member, without rows: only its process knows which ones it works on."""
    stage = member.plan.lease.stage.name
    return EventRecord(kind, reason=reason, stage=stage, worker=member.holder, lease=member.number)


def _shown(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (" …" if len(ranks) > 8 else "")


def _begin(state: State, stage: Stage, shape: Shape, now: float) -> Plan:
    """Lease all ready rows in the order of their keys, so the same rows make the same plan,
    whenever each became ready. Take whole groups if every row has one."""
    ready = Rows(list(stage.rows.plain))
    if len(ready) > MAX_PLAN_ROWS:
        raise LimitExceeded(
            f"stage {stage.name!r} has {len(ready)} rows left, but a plan can have at "
            f"most {MAX_PLAN_ROWS} rows: put fewer rows into each partition, or claim some of "
            "the rows first",
            rows=len(ready),
            limit=MAX_PLAN_ROWS,
        )
    for tag in shape.tags:
        weights.check(ready.parts, tag, "the plan", state.tag_names)
    rows = Rows.of(sorted(ready, key=lambda one: one[0].keys[one[1]]))
    groups = [group for group, _ in stage.groups.plain]
    whole = sum([group.live for group in groups]) == len(rows)
    if whole:
        for group in groups:
            stage.lease_group(group)
    else:
        state.take_rows(stage, rows.parts)
    lease = state.lease(stage, "groups" if whole else "rows", rows, 0, now)
    plan = Plan(lease, shape, plan_rows(lease, shape))
    state.leases.plans[stage.name] = plan
    return plan


def _finish_if_done(state: State, plan: Plan, now: float) -> dict[str, int]:
    if plan.working or len({one.rank for one in plan.members.values()}) < plan.shape.ranks:
        return {}
    state.leases.end_plan(plan)
    for number in plan.members:
        state.leases.retry_keys.add(finishes.member_key(number), now)
    return finishes.finish(state, plan.lease, Finish(plan.lease.number, "ack"))


def difference(begun: Shape | Definition, other: Shape | Definition) -> str:
    """The differences of two shapes, such as `ranks=2 (this call: 4)`."""
    return ", ".join(
        f"{name}={getattr(begun, name)!r} (this call: {getattr(other, name)!r})"
        for name in begun.__struct_fields__
        if getattr(begun, name) != getattr(other, name)
    )
