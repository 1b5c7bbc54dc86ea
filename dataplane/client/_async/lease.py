"""A lease and what was added under it, until ack, release or drop.

Positions of rows are those of the claim and stay so when some rows were dropped. Added values lie
in the arena at once and travel with the ack of their rows, in one message for all rows to which the
same was added.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from dataplane.client import arguments
from dataplane.client._async.attaching import attach
from dataplane.client._async.calls import UNKNOWN, ask, expect, send
from dataplane.client._async.inlining import landed
from dataplane.client._async.write import write_columns
from dataplane.client.deadline import Deadline
from dataplane.client.handle import Handle
from dataplane.client.session.outgoing import Call
from dataplane.client.session.session import Abandoned
from dataplane.client.write.rows import Names, TagValues, group_positions, tag_columns, take_tags
from dataplane.client.write.written import Written, beside
from dataplane.errors import (
    DataplaneError,
    FieldExists,
    InvalidCall,
    InvalidRows,
    LeaseExpired,
    ShardFull,
    sized,
)
from dataplane.memory.extents import padded
from dataplane.wire.limits import MAX_FRAME_BYTES
from dataplane.wire.messages import (
    Body,
    Claimed,
    Done,
    Fetch,
    Fetched,
    Finish,
    PutDone,
    Request,
)
from dataplane.wire.records import EXTENT, KEY, RANGE, U4, column
from dataplane.wire.tables import Scalar, Table, volume

log = logging.getLogger(__name__)

Outcome = Literal["ack", "release", "drop"]
Index = npt.NDArray[np.intp]
Records = npt.NDArray[Any]
_COLLECTED = (
    "a batch of {} was garbage-collected",
    "Call batch.ack() when you are done with the batch, or use `with part.claim(…) as batch:`",
)
LEFT = (
    "a loop ended and left a batch of {}",
    "Call batch.ack() before `break`, or pass batches=n to the stream, which acks the last batch",
)
_ENDED: dict[Outcome, str] = {"ack": "acked", "release": "released", "drop": "dropped"}


class Added(msgspec.Struct, eq=False):
    """Values that wait for the ack of their rows."""

    at: Index
    """positions of the rows, ascending"""
    written: Written


class Doubt(msgspec.Struct, eq=False):
    """An ack that may have taken effect: it had no reply, or one that does not say so. The client
    sends it again under the same number, and the peer gives the same reply."""

    request: Request
    at: Index | None
    """its rows; None: all"""
    parts: list[Added]
    """what was to be stored with it"""

    def keep(self, ranges: Records) -> None:
        """The ack failed, and the peer keeps its values as these ranges (RANGE) until the lease
        ends: the next ack names them so."""
        for one in self.parts:
            written, count = one.written, len(one.written.ranges)
            mine, ranges = ranges[:count], ranges[count:]
            one.written = msgspec.structs.replace(
                written, ranges=written.ranges[:0], shared=np.concatenate([mine, written.shared])
            )


class Lease:
    """What a claim handed out. Its rows go back when it dies without ack."""

    def __init__(self, handle: Handle, stage: str, claimed: Claimed) -> None:
        self.handle = handle
        self.stage = stage
        self.id = claimed.lease
        self.n = len(claimed.table.rows.keys) // KEY.itemsize
        self.state = "leased"
        self._open: npt.NDArray[np.bool_] | None = None
        """per row whether it was neither finished nor dropped; None: all are open"""
        self._added: list[Added] = []
        self._doubt: Doubt | None = None
        """an ack that may have taken effect"""
        self._lost: list[tuple[Index, set[str]]] = []
        """rows and fields of acks that failed, and whose values the peer did not keep"""
        self._refused: set[str] = set()
        """fields that other writers have set: they are given up by the next `add`"""
        self._abandoned = False

    @property
    def open_rows(self) -> int:
        """Rows that were neither finished nor dropped."""
        if self.state != "leased":
            return 0
        return self.n if self._open is None else int(self._open.sum())

    @property
    def added(self) -> list[str]:
        """Fields that wait for the ack."""
        return list(dict.fromkeys(name for one in self._added for name in one.written.fields))

    def open_among(self, rows: Index | None) -> Index:
        """Those of these rows (None: of all) that are open."""
        rows = np.arange(self.n, dtype=np.intp) if rows is None else rows
        if self.state != "leased":
            return rows[:0]
        return rows if self._open is None else rows[self._open[rows]]

    def check(self) -> None:
        if self.state != "leased":
            raise LeaseExpired(
                f"this batch was already {self.state}, so its rows can no longer be changed, "
                "acked or released: claim a new batch",
                stage=self.stage,
            )

    async def add(
        self, columns: Mapping[str, Any], deadline: Deadline, rows: Index | None = None
    ) -> None:
        """Copy new fields of all rows, or of those at `rows`, into the arena. They are there for
        others after the ack."""
        self.check()
        if self._doubt is not None:
            await self._settle_doubt(deadline)
            self.check()
        at = np.arange(self.n, dtype=np.intp) if rows is None else np.sort(rows)
        there = (one.written.fields for one in self._added if _meet(one.at, at))
        twice = set(columns) & {name for names in there for name in names} - self._refused
        if twice:
            raise FieldExists(
                f"already added to this batch: {', '.join(sorted(twice))}. A field is written "
                "only once, so use another name",
                fields=sorted(twice),
            )
        if (devices := self.handle.session.devices) is not None:
            devices.tell_of_host_copies(columns, "values added to a batch go to host memory")
        written = await write_columns(self.handle, columns, len(at), deadline)
        parts = [*(one.written for one in self._added), written]
        self._check_size(parts, written)
        if rows is not None:  # values are in the order of the rows as they were given
            written, _ = written.take(np.argsort(rows, kind="stable"))
        self._tally(written)
        self._give_up_refused(at)
        self._added.append(Added(at, written))
        for lost, names in self._lost:
            if _meet(lost, at):
                names.difference_update(columns, self._refused)

    def _give_up_refused(self, at: Index) -> None:
        """The caller was told that other writers have set these fields, and adds something else."""
        if not self._refused:
            return
        for one in [one for one in self._added if _meet(one.at, at)]:
            kept = [c for c in one.written.columns if c.field not in self._refused]
            if not kept:
                self._added.remove(one)
                self.handle.session.keep(one.written.ranges)
            elif len(kept) < len(one.written.columns):
                fewer = msgspec.structs.replace(one.written, columns=kept)
                one.written, unused = fewer.take(np.arange(len(one.at)))
                self.handle.session.keep(unused)

    def _check_size(self, parts: list[Written], written: Written) -> None:
        size = sum(map(part_bytes, parts))
        if size > MAX_FRAME_BYTES // 2:
            self.handle.session.keep(written.ranges)
            raise InvalidRows(
                f"the metadata of the values added to these {self.n} rows takes {sized(size)}, "
                f"but the limit is {sized(MAX_FRAME_BYTES // 2)}: claim fewer rows at a time",
                size=size,
            )

    def _tally(self, written: Written) -> None:
        tally = self.handle.session.tally
        tally.of_stage(self.stage, added_bytes=volume(written.columns))
        tally.add("copy", bytes=written.copied_bytes)

    async def fetch(self, fields: Sequence[str], deadline: Deadline) -> Fetched:
        """More fields of the rows."""
        body = Fetch(self.id, arguments.texts(fields, "fields"))
        return await ask(self.handle.session, body, Fetched, deadline)

    async def finish(
        self,
        outcome: Outcome,
        deadline: Deadline,
        rows: Index | None = None,
        tags: TagValues | None = None,
        values: Mapping[str, Any] | None = None,
        then: Call | None = None,
    ) -> None:
        """End the lease for all rows that are still open, or for those at `rows`. tags, values: of
        all, or of those at `rows`. then: goes along with the last message of an ack.

        Only ack takes what was added along, and only release `values`, as progress. Releasing a
        lease that has ended already is no error, unless there is something to be told with it.
        """
        self.check()
        if self._doubt is not None:
            await self._settle_doubt(deadline)
            if self.state != "leased":
                if outcome == "drop" or tags or values:
                    self.check()
                return  # that ack took effect, and nothing is left to be finished
        if self.n and rows is None and self._open is None and not (tags or values or self._added):
            await self._finish_whole(outcome, deadline, then)
            return
        given = tag_columns(tags, self.n if rows is None else len(rows)) if tags else {}
        at = self.open_among(rows)
        order = None
        if rows is None:
            order = None if len(at) == self.n else at
        else:
            order = np.argsort(rows)
            order = order[np.isin(rows[order], at)]
            at = rows[order]
        given = take_tags(given, order)
        body = self._finish_of(outcome, at, given)
        if not len(at):
            if rows is None:
                self._end("finished")
            return
        if outcome == "ack":
            await self._ack(at, deadline, then)
        elif values:
            many = self.n if rows is None else len(rows)
            await self._release_with(body, values, many, order, deadline)
        elif given:
            await self._send(body, deadline)
        else:
            await self._send_bare(body, deadline)
        self._closed_rows(outcome, rows)

    async def _finish_whole(self, outcome: Outcome, deadline: Deadline, then: Call | None) -> None:
        """Of all its rows, with nothing to be told beside."""
        if outcome == "ack":
            self._check_lost(set().union(*(names for _, names in self._lost)))
        await self._send_bare(Finish(self.id, outcome), deadline, then)
        self._end(_ENDED[outcome])

    async def _send_bare(self, body: Finish, deadline: Deadline, then: Call | None = None) -> None:
        """Without tags or values."""
        try:
            await self._send(body, deadline, then)
        except LeaseExpired:
            if body.outcome != "release":
                raise  # released rows went back before

    async def _release_with(
        self,
        body: Finish,
        values: Mapping[str, Any],
        many: int,
        order: Index | None,
        deadline: Deadline,
    ) -> None:
        """Rows and the progress that was made with them go back in one message. order: which of
        `many` values are of its rows."""
        session = self.handle.session
        if session.devices is not None:
            session.devices.tell_of_host_copies(
                values, "values passed to release go to host memory"
            )
        written = await write_columns(self.handle, values, many, deadline)
        self._check_size([written], written)
        if order is not None:
            written, unused = written.take(order)
            session.keep(unused)
        self._tally(written)
        done = await self._send_with(body, written, deadline)
        if isinstance(done, PutDone):
            session.keep(np.frombuffer(done.extents, EXTENT))

    def _finish_of(self, outcome: Outcome, at: Index, tags: dict[str, list[Scalar]]) -> Finish:
        index = None if len(at) == self.n else at.astype(U4).tobytes()
        return Finish(self.id, outcome, index, tags=tags)

    async def _ack(self, at: Index, deadline: Deadline, then: Call | None) -> None:
        """One message for all rows to which the same was added; rows of one that failed stay."""
        self._check_lost({name for rows, names in self._lost if _meet(rows, at) for name in names})
        apart = self._alike(at)
        for rows in apart:
            await self._ack_alike(rows, deadline, then if rows is apart[-1] else None)
            if len(apart) > 1:
                self._closed_rows("ack", rows)

    def _check_lost(self, lost: set[str]) -> None:
        if lost:
            raise InvalidCall(
                f"the values added as {', '.join(sorted(lost))} were lost when an ack failed: add "
                "them again (under another name if the field already exists), or release the "
                "batch",
                fields=sorted(lost),
            )

    def _is_whole(self, at: Index) -> bool:
        """Whether these are all rows, as those are to which something was added."""
        return len(at) == self.n and all([len(one.at) == self.n for one in self._added])

    def _alike(self, at: Index) -> list[Index]:
        """These rows, by what was added to them."""
        if self._is_whole(at):
            return [at]
        has = np.array([np.isin(at, one.at) for one in self._added])
        if has.all():
            return [at]
        _, which = np.unique(has, axis=1, return_inverse=True)
        return [at[which.reshape(-1) == number] for number in range(int(which.max()) + 1)]

    async def _ack_alike(self, at: Index, deadline: Deadline, then: Call | None) -> None:
        """Values stay with the lease until the ack that carries them is answered: whatever fails
        before that, the next ack of the rows carries the same ones."""
        session = self.handle.session
        await self._part_from_others(at, deadline)
        parts = [one for one in self._added if _meet(one.at, at)]
        body = self._finish_of("ack", at, {})
        try:
            done = await self._send(body, deadline, then, at, parts)
        except ShardFull as full:
            if not full.details.get("values"):
                raise
            self.handle.shard_is_full()
            for one in parts:
                if one.written.inline:
                    one.written = await self._landed(one.written, deadline)
            done = await self._send(body, deadline, None, at, parts)
        self._added = [one for one in self._added if one not in parts]
        if isinstance(done, PutDone):
            if done.extents:
                session.keep(np.frombuffer(done.extents, EXTENT))
            if done.kept:
                log.info(
                    "partition %r, stage %r: rows were redelivered, so existing values were kept: "
                    "%s",
                    self.handle.name,
                    self.stage,
                    done.kept,
                )

    async def _part_from_others(self, at: Index, deadline: Deadline) -> None:
        """What was added to these rows and to others becomes two. Nothing has changed where there
        is no room for that."""
        if self._is_whole(at):
            return
        session = self.handle.session
        for one in [one for one in self._added if _meet(one.at, at) and len(one.at) > len(at)]:
            local = np.searchsorted(one.at, at)
            apart, unused = [], np.zeros(0, EXTENT)
            if len(np.setdiff1d(self.open_among(one.at), at)):
                mine, rest, copied = one.written.divide(local, session.writes.view)
                if copied:
                    mine = await self._landed(mine, deadline)
                apart.append(Added(np.setdiff1d(one.at, at), rest))
            else:
                mine, unused = one.written.take(local)
            self._added = [o for o in self._added if o is not one] + [Added(at, mine), *apart]
            session.keep(unused)

    async def _send_with(self, body: Finish, written: Written, deadline: Deadline) -> Body:
        """Values that are stored without an ack. Once more where the shard has no room for what is
        inline."""
        try:
            return await self._send_once(body, written, deadline)
        except ShardFull as full:
            if not full.details.get("values"):
                raise
            self.handle.shard_is_full()
            pin = self.handle.session.pinned(full.details.get("pin", 0))
            written = await self._landed(written, deadline, full)
            done = await self._send_once(body, written, deadline)
            del pin  # what it holds has another holder now
            return done

    async def _send_once(self, body: Finish, written: Written, deadline: Deadline) -> Body:
        call = None
        try:
            body = self._with(body, written)
            deadline.check(body.outcome)
            call = Call(body, deadline)
            return await self._answer(call)
        except BaseException:
            if call is None or not call.in_flight:
                self.handle.session.keep(written.ranges)
            raise

    def _with(self, body: Finish, written: Written) -> Finish:
        """It brings these, and asks for as much room for what is added next."""
        room_bytes = int(padded(written.ranges["length"]).sum()) if len(written.ranges) else 0
        return msgspec.structs.replace(
            body,
            columns=written.columns,
            specs=written.specs,
            ranges=written.ranges.tobytes(),
            shared=written.shared.tobytes(),
            want_bytes=self.handle.session.leftovers[0].ahead(room_bytes),
            inline=written.inline,
        )

    async def _landed(
        self, written: Written, deadline: Deadline, full: ShardFull | None = None
    ) -> Written:
        generation = await attach(self.handle, deadline)
        return await landed(self.handle, generation, written, lambda: True, deadline, full)

    async def _send(
        self,
        body: Finish,
        deadline: Deadline,
        then: Call | None = None,
        at: Index | None = None,
        parts: Sequence[Added] = (),
    ) -> Body:
        """at: the rows, None for all. parts: the values that are stored with an ack."""
        if parts:
            body = self._with(body, beside([one.written for one in parts]))
        deadline.check(body.outcome)
        call = Call(body, deadline, then=then, keeps=body.outcome == "ack")
        try:
            return await self._answer(call)
        except BaseException as exc:
            if call.again is not None:
                self._doubt = Doubt(call.again, at, list(parts))
                self._told(exc)
            raise

    async def _answer(self, call: Call) -> Body:
        """Finish is answered with PutDone where values came along, else Done will do."""
        try:
            reply = await send(self.handle.session, call)
        except LeaseExpired:
            if call.again is None:  # or else it is in doubt, and `_told` says what that means
                self._end("expired")
            raise
        return reply if isinstance(reply, PutDone) else expect(reply, Done, call.body)

    def _told(self, exc: BaseException) -> None:
        """What the failure of an ack says of it. Where it does not say whether the ack took effect,
        that stays in doubt."""
        doubt = self._doubt
        assert doubt is not None
        if isinstance(exc, LeaseExpired):
            self._end("expired")
            return
        if not isinstance(exc, DataplaneError):
            return
        kept = exc.details.pop("ranges", None)
        if kept is None and isinstance(exc, UNKNOWN):
            return
        self._doubt = None
        self.handle.session.answered(doubt.request)
        if isinstance(exc, FieldExists):
            self._refused.add(str(exc.details.get("field")))
        if kept is not None:
            doubt.keep(column(kept, RANGE))
        elif doubt.parts:
            # Nobody has the values: an ack without them must not pass for one with them.
            self._added = [one for one in self._added if one not in doubt.parts]
            names = {name for one in doubt.parts for name in one.written.fields}
            rows = np.arange(self.n, dtype=np.intp) if doubt.at is None else doubt.at
            self._lost.append((rows, names))

    async def _settle_doubt(self, deadline: Deadline) -> None:
        """Ask again, under its own number, for the ack that may have taken effect. Where it has
        failed, its rows and values are here again."""
        doubt = self._doubt
        assert doubt is not None
        deadline.check("ack")
        call = Call(doubt.request.body, deadline, again=doubt.request, keeps=True)
        try:
            await self._answer(call)
        except DataplaneError as exc:
            self._told(exc)
            if self._doubt is not None or self.state != "leased":
                raise
            return
        self._doubt = None
        self._added = [one for one in self._added if one not in doubt.parts]
        self._closed_rows("ack", doubt.at)

    def _closed_rows(self, outcome: Outcome, rows: Index | None) -> None:
        if rows is not None:
            if self._open is None:
                self._open = np.ones(self.n, np.bool_)
            self._open[rows] = False
        if self._open is None or rows is None or not self._open.any():
            self._end(_ENDED[outcome])

    def _end(self, state: str) -> None:
        session = self.handle.session
        self.state = state
        session.leases.discard(self.id)
        if session.spans is not None:
            session.spans.end(self.id, state)
        for ranges in self._unsent():
            session.keep(ranges)
        self._added = []

    def _unsent(self) -> list[Records]:
        """Room with values that no message has named, when the lease ends."""
        doubt, self._doubt = self._doubt, None
        if doubt is None:
            return [one.written.ranges for one in self._added]
        self.handle.session.answered(doubt.request)
        return [one.written.ranges for one in self._added if one not in doubt.parts]

    async def give_back(self, deadline: Deadline) -> None:
        """Release what is held; the rows are back when this returns, also where `abandon` has
        only just said that they are to go."""
        if self.state == "leased":
            await self.finish("release", deadline)
        elif self._abandoned:
            self._abandoned = False
            self.handle.session.leases.discard(self.id)
            deadline.check("release")
            with contextlib.suppress(LeaseExpired):  # it was told already
                call = Call(Finish(self.id, "release"), deadline)
                await send(self.handle.session, call)

    def abandon(self, forgotten: tuple[str, str] | None = None) -> None:
        """Give the rows back without a call: from a finalizer. forgotten: as in `Abandoned`."""
        if self.state == "leased":
            rows = self.open_rows
            self.state, self._abandoned = "released", True
            if self.handle.session.spans is not None:
                self.handle.session.spans.end(self.id, self.state)
            self.handle.session.abandon(
                Abandoned(self.id, self.handle.name, self.stage, rows, forgotten if rows else None),
                self._unsent(),
            )

    def __del__(self) -> None:
        self.abandon(_COLLECTED)


def positions(rows: Sequence[int] | None, groups: Names | None, table: Table, n: int) -> Index:
    """Which rows of n `drop(rows=…)` or `drop(groups=…)` means."""
    if rows is not None and groups is not None:
        raise InvalidCall("pass rows= or groups=, not both")
    if groups is not None:
        return group_positions(table, groups)
    index = np.unique(np.atleast_1d(np.asarray(rows, np.intp)))
    if len(index) and (index[0] < 0 or index[-1] >= n):
        raise InvalidRows(f"rows={rows!r}: expected positions from 0 to {n - 1} in this batch")
    return index


def _meet(one: Index, other: Index) -> bool:
    return bool(np.isin(one, other).any())


def part_bytes(written: Written) -> int:
    """What these values add to a message."""
    records = sum(len(c.values) + len(c.leaf_counts) + len(c.leaves) for c in written.columns)
    return records + len(written.inline) + written.ranges.nbytes + 64 * len(written.specs)
