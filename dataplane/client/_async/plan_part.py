"""One rank's part of a plan: join the plan, and fetch the rows micro-batch by micro-batch.

All ranks compute the same layout (`client/balancing.py`). One lease holds the rows of all ranks,
and ends when all ranks have acked.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dataplane.client import arguments
from dataplane.client._async.calls import (
    DEFAULT_TIMEOUT_S,
    ask,
    attach_to_wait,
    define,
    milliseconds,
    wait_for,
)
from dataplane.client._async.lease import Lease
from dataplane.client.arguments import Deadline
from dataplane.client.balancing import Layout, Rows
from dataplane.client.read.table import TableReader, reader_of
from dataplane.client.session.session import Handle
from dataplane.errors import (
    FrameTooLarge,
    InvalidRows,
    LeaseExpired,
    RowsGone,
    counted,
    mixed_releases,
)
from dataplane.wire.messages import Claim, Claimed, Fetch, Fetched, Want
from dataplane.wire.packed import U4, column
from dataplane.wire.tables import Shape

log = logging.getLogger(__name__)

Index = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]

SOUGHT = 1_024
"""A rank that lost all rows of a micro-batch checks this many other rows per request."""


class Part(Lease):
    """A plan that this process has joined, and its lease. Its positions are indices into all rows
    of the plan."""

    _ends_whole = True
    layout: Layout

    def __init__(
        self, handle: Handle, stage: str, number: int, rows: int, rank: int, fields: list[str]
    ) -> None:
        super().__init__(handle, stage, number, rows)
        self.rank, self.fields = rank, fields
        self.why = ""
        self.at_once = handle.session.max_rows
        """rows per message; halved when a message was too large"""
        self._minis: dict[tuple[int, int], list[Rows]] = {}
        """of this epoch and the previous one; replaced as a whole, because two threads write it"""

    def check(self) -> None:
        if self.state == "acked":
            raise LeaseExpired(
                "this plan was acked (its loop or `with` block ended, or plan.ack() was called), "
                "so its rows can no longer be read or changed: use each mini-batch inside the loop",
                stage=self.stage,
            )
        if self.state != "leased":
            raise LeaseExpired(
                self.why or f"this plan was {self.state}: call part.plan(…) again",
                stage=self.stage,
            )

    def mini(self, number: int) -> list[Rows]:
        """Return the rows of each micro-batch. number: the mini-batch's number across all
        epochs."""
        at = divmod(number, self.layout.shape.minibatches)
        known = self._minis
        rows = known.get(at)
        if rows is None:
            rows = self.layout.mini(self.rank, *at)
            recent = {key: one for key, one in known.items() if key[0] >= at[0] - 1}
            self._minis = {**recent, at: rows}
        return rows


async def join(
    handle: Handle,
    stage: str,
    shape: Shape,
    rank: int,
    fields: Sequence[str] | None,
    timeout: float | None,
) -> Part:
    """Join a plan. Wait until the partition is sealed and all remaining rows are ready."""
    session = handle.session
    arguments.text(stage, "a stage")
    wanted = arguments.optional_texts(fields, "fields")
    timeout = arguments.seconds(timeout, "timeout")
    generation = await attach_to_wait(handle, timeout)
    body = Claim(
        handle.name,
        generation,
        stage,
        Want(shape.unit, 0, 0),
        wanted,
        declare=None if stage in handle.definition.stages else wanted,
        timeout_ms=milliseconds(timeout),
        plan=shape,
        rank=rank,
        own=session.leases.mine(handle.name),
    )
    began, claimed = time.monotonic(), None
    try:
        claimed = await wait_for(session, body, Claimed, timeout)
    finally:
        session.tally.claim_waited(stage, time.monotonic() - began)
        if session.spans is not None:
            lease = claimed.lease if claimed is not None else None
            session.spans.claim(handle.name, stage, began, lease)
    session.leased(claimed.lease, handle.name)
    if claimed.plan is None:
        raise mixed_releases("unexpected reply to a plan request: expected a plan, got a batch")
    part = Part(handle, stage, claimed.lease, claimed.plan.rows, rank, wanted or [])
    try:
        if wanted is None:
            if stage not in handle.definition.stages:  # another process has declared it since
                await define(handle, None, Deadline(DEFAULT_TIMEOUT_S))
            part.fields = handle.definition.stages[stage]
        part.layout = Layout(shape, claimed.plan)
    except InvalidRows:
        await part.give_back(Deadline(DEFAULT_TIMEOUT_S))
        raise
    except BaseException:
        part.abandon()
        raise
    return part


Fetching = tuple[TableReader, Index, Index, Mask]
"""The fetched rows; for each row of a micro-batch, its index among them; its position in the plan;
and a mask that is False for padding."""


async def fetch(part: Part, rows: Rows) -> Fetching:
    """Fetch the rows of a micro-batch. Padding replaces rows that were dropped or lost, so that
    every rank takes the same number of steps."""
    wanted = np.array(rows, np.intp)
    mask = wanted >= 0
    positions = np.where(mask, wanted, ~wanted)
    deadline = Deadline(DEFAULT_TIMEOUT_S)
    reader, there = await fetch_rows(part, part.fields, np.unique(positions), deadline)
    if not len(there):
        reader, there = await _any_row(part, deadline)
    gone = ~np.isin(positions, there)
    if gone.any():
        log.warning(
            "partition %r, stage %r: %s dropped or lost, and replaced with padding",
            part.handle.name,
            part.stage,
            counted(int((gone & mask).sum()), "row of the plan was", "rows of the plan were"),
        )
        mask &= ~gone
        positions = np.where(gone, there[0], positions)
    part.handle.session.tally.claimed(part.stage, int(mask.sum()), reader.volume)
    return reader, np.searchsorted(there, positions), positions, mask


async def _any_row(part: Part, deadline: Deadline) -> tuple[TableReader, Index]:
    """Fetch one row of the plan that still exists. Raise RowsGone if there is none."""
    start = 0
    while start < part.n:
        some = np.arange(start, min(start + SOUGHT, part.n), dtype=np.intp)
        _, left = await fetch_rows(part, [], some, deadline)
        if not len(left):
            start += SOUGHT
            continue
        reader, there = await fetch_rows(part, part.fields, left[:1], deadline)
        if len(there):  # otherwise it was just removed
            return reader, there
    raise RowsGone(
        "every row of this plan was dropped or lost: release the plan and call part.plan(…) again",
        rows=part.n,
    )


async def fetch_rows(
    part: Part, fields: Sequence[str], positions: Index, deadline: Deadline
) -> tuple[TableReader, Index]:
    """Fetch rows, with several messages if their small values exceed the size of one. Return also
    their positions in the plan, in ascending order: rows that are gone are left out."""
    session = part.handle.session
    done: list[Fetched] = []
    at = 0
    try:
        while at < len(positions) or not done:
            some = positions[at : at + part.at_once]
            body = Fetch(part.id, list(fields), index=some.astype(U4).tobytes())
            try:
                done.append(await ask(session, body, Fetched, deadline))
            except FrameTooLarge:
                if len(some) == 1:
                    raise
                part.at_once = -(-len(some) // 2)
                continue
            at += len(some)
    except BaseException as exc:
        # Release the pins of earlier replies with an unreferenced object.
        session.pinned(*(one.pin for one in done))
        if isinstance(exc, LeaseExpired):
            part.why = exc.message
            part._end("expired")
        raise
    there = column(b"".join(one.index for one in done), U4).astype(np.intp)
    return reader_of(session, *done), there
