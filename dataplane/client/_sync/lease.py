"""A lease, and the values added to its rows, until ack, release or drop.

Row positions are those of the claim, also after some rows were dropped. `add` copies values into
the arena at once. The ack of the rows names their chunks, with one message for all rows that have
the same added fields. The peer keeps a chunk that a later ack will name again.


Generated from dataplane/client/_async/lease.py: change that.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from dataplane.client import arguments
from dataplane.client._sync.calls import UNKNOWN, Call, ask, attach, send
from dataplane.client._sync.space import give_back, land, write_columns
from dataplane.client.arguments import Deadline
from dataplane.client.read.selection import positions
from dataplane.client.session.connection import expect
from dataplane.client.session.session import Abandoned, Handle
from dataplane.client.write.chunks import (
    NewChunk,
    NewPiece,
    chunks_of,
    committed,
    message_bytes,
    room_of,
    select,
    spaces_of,
    unnamed,
    values_of,
    without,
)
from dataplane.client.write.rows import (
    Index,
    Names,
    TagValues,
    group_positions,
    tag_columns,
    take_tags,
)
from dataplane.errors import (
    DataplaneError,
    FieldExists,
    InvalidCall,
    InvalidRows,
    LeaseExpired,
    ShardFull,
    counted,
    sized,
)
from dataplane.memory.extents import Extent
from dataplane.metadata.tables.bits import all_of, of_mask, picked, rows_of
from dataplane.metadata.tables.pieces import UNUSED
from dataplane.wire.limits import MAX_CHUNKS_PER_MESSAGE, MAX_FRAME_BYTES
from dataplane.wire.messages import (
    Body,
    Done,
    Fetch,
    Fetched,
    Finish,
    PutDone,
    Request,
)
from dataplane.wire.packed import U4, U8, column
from dataplane.wire.tables import Scalar, Table

log = logging.getLogger(__name__)

_CALLS = {"keep": "add"}
"""The public names of outcomes that have another name in messages."""
Outcome = Literal["ack", "release", "drop"]
_COLLECTED = (
    "a batch of {} was garbage-collected",
    "Call batch.ack() when you are done with the batch, or use `with part.claim(…) as batch:`",
)
LEFT = (
    "a loop ended and left a batch of {}",
    "Call batch.ack() before `break`, or pass batches=n to the stream, which acks the last batch",
)
ENDED: dict[str, str] = {"ack": "acked", "release": "released", "drop": "dropped"}


class Added(msgspec.Struct, eq=False):
    """Values of leased rows that a message is to store: with the next ack, or with a release.
    `rows` is a bit mask of positions in the lease."""

    rows: int
    pieces: list[NewPiece]

    @property
    def fields(self) -> list[str]:
        names = dict.fromkeys([field for piece in self.pieces for field in piece.fields])
        return [name for name in names if name != UNUSED]

    def of(self, rows: int) -> list[NewPiece]:
        """Return the pieces with only the rows in `rows`, renumbered from 0."""
        if not self.rows & ~rows:
            return self.pieces
        return select(self.pieces, self._places(rows))

    def needs(self, chunks: Collection[NewChunk], rows: int) -> bool:
        """Return whether any of these rows has a value in one of these chunks."""
        return bool(select([p for p in self.pieces if p.chunk in chunks], self._places(rows)))

    def _places(self, rows: int) -> Sequence[int]:
        return rows_of(picked(self.rows & rows, rows_of(self.rows)))


class Doubt(msgspec.Struct, eq=False):
    """An ack, release or drop that got no reply and may have taken effect. The client sends it
    again with the same operation id, and the peer repeats its reply."""

    request: Request
    outcome: str
    rows: int
    """bit mask of positions"""
    parts: list[Added] = []
    """the values that it stores"""
    chunks: list[NewChunk] = []
    """the chunks that the message names to the peer"""


class Lease:
    """The rows of one claim. If the lease is garbage-collected before an ack, its rows return to
    their stage."""

    _ends_whole = False
    """The shard only accepts an ack or a release of all rows, without an index."""

    def __init__(
        self, handle: Handle, stage: str, number: int, n: int, groups: bytes = b""
    ) -> None:
        """n: how many rows. groups: u4 per row, as in `Rows`."""
        self.handle = handle
        self.stage = stage
        self.id = number
        self.n = n
        self.state = "leased"
        self._groups = groups
        self._all = all_of(n)
        self._closed = 0
        """the rows that are finished or dropped, as a bit mask of positions"""
        self._finished = 0
        """the rows that are acked or released"""
        self._added: list[Added] = []
        self._doubt: Doubt | None = None
        """a call that may have taken effect"""
        self._lost: list[tuple[int, set[str]]] = []
        """rows and fields of failed acks whose values the peer did not keep"""
        self._refused: set[str] = set()
        """fields that other writers have set; the next `add` discards them"""
        self._is_unsure = False
        """whether the shard may have finished more rows than this client knows"""
        self._abandoned = False
        self._since = time.monotonic()
        """when the client got the rows, plus the time that it spent on copying added values"""

    @property
    def open_rows(self) -> int:
        """The number of rows that are neither finished nor dropped."""
        return self.open_among(None).bit_count()

    @property
    def added(self) -> list[str]:
        """The added fields that are not acked yet."""
        return list(dict.fromkeys(name for one in self._added for name in one.fields))

    def open_among(self, rows: Index | None) -> int:
        """Return the open rows among `rows` (None: among all rows), as a bit mask of positions."""
        return self._bits(rows) & ~self._closed if self.state == "leased" else 0

    def check(self) -> None:
        if self.state != "leased":
            raise LeaseExpired(
                f"this batch is already {self.state}, so its rows can no longer be changed, "
                "acked or released: claim a new batch",
                stage=self.stage,
            )

    def add(
        self, columns: Mapping[str, Any], deadline: Deadline, rows: Index | None = None
    ) -> None:
        """Copy new fields of all rows, or of those at `rows`, into the arena. The ack makes them
        visible to other clients."""
        self.check()
        if self._doubt is not None:
            self._settle_doubt(deadline)
            self.check()
        at = self._bits(rows)
        if finished := at & self._finished:
            raise LeaseExpired(
                f"cannot add values to {counted(at.bit_count(), 'row')}: {finished.bit_count()} of "
                "them are already acked or released. Add values to the others: batch.rows([…])",
                stage=self.stage,
                rows=[*rows_of(finished)],
            )
        if self._added:
            self._check_new(columns, at)
        # values are in the order of the rows as they were given
        order = None if rows is None else np.argsort(rows, kind="stable").tolist()
        groups, what = self._groups_of(at), "values added to a batch"
        pieces = self._write(what, columns, deadline, order, groups, at.bit_count())
        if self._refused:
            self._give_up_refused(at)
        self._added.append(Added(at, pieces))
        if self.state != "leased":  # the end of a loop abandoned the lease during the copy
            self.handle.session.keep(self._unsent())
            self.check()
        for lost, names in self._lost:
            if lost & at:
                names.difference_update(columns, self._refused)

    def _check_new(self, columns: Mapping[str, Any], at: int) -> None:
        """Raise FieldExists if one of these fields was added to some of the rows before."""
        there = [one.fields for one in self._added if one.rows & at]
        twice = set(columns) & {name for names in there for name in names} - self._refused
        if twice:
            raise FieldExists(
                f"{'fields' if len(twice) > 1 else 'field'} {', '.join(map(repr, sorted(twice)))} "
                f"{'were' if len(twice) > 1 else 'was'} already added to this batch, and a field "
                "can be written only once: use "
                f"{'other names' if len(twice) > 1 else 'another name'}",
                fields=sorted(twice),
            )

    def _bits(self, rows: Index | None) -> int:
        """The bit mask of these positions; None: all."""
        if rows is None or len(rows) == self.n:
            return self._all
        mask = np.zeros(self.n, np.bool_)
        mask[rows] = True
        return of_mask(mask)

    def _groups_of(self, rows: int) -> list[int] | None:
        """The group of each of these rows, in their order."""
        if not self._groups:
            return None
        groups: list[int] = column(self._groups, U4, self.n).tolist()
        return groups if rows == self._all else [groups[row] for row in rows_of(rows)]

    def _give_up_refused(self, at: int) -> None:
        """Discard the values of refused fields: the caller knows of FieldExists, and adds other
        values."""
        for one in [one for one in self._added if one.rows & at]:
            kept = without(one.pieces, self._refused)
            if not kept:
                self._added.remove(one)
            self._give_back(one.pieces, kept)
            one.pieces = kept

    def _give_back(self, pieces: Sequence[NewPiece], kept: Sequence[NewPiece] = ()) -> None:
        """Return the space of the chunks that no message has named and that `kept` does not
        need."""
        still = {*chunks_of(kept)}
        unused = [chunk for chunk in chunks_of(pieces) if chunk not in still]
        give_back(self.handle.session, unused)

    def _write(
        self,
        what: str,
        columns: Mapping[str, Any],
        deadline: Deadline,
        order: list[int] | None,
        groups: list[int] | None,
        n: int,
    ) -> list[NewPiece]:
        """Copy values of some rows into the arena. The columns have n rows. order: the row of the
        columns for each of these rows; None: as given. groups: of each of these rows. what: names
        the values for the log."""
        if (pools := self.handle.session.pools) is not None:
            pools.log_host_copies(columns, f"{what} go to host memory")
        check, began = self._check_message_size, time.monotonic()
        pieces = write_columns(self.handle, columns, n, deadline, order, groups, check)
        self._since += time.monotonic() - began
        nbytes = sum([chunk.nbytes for chunk in chunks_of(pieces)])
        self.handle.session.tally.added(self.stage, nbytes)
        return pieces

    def _check_message_size(self, pieces: list[NewPiece]) -> None:
        """Raise InvalidRows if these pieces and all that was added exceed one ack."""
        added = [piece for one in self._added for piece in one.pieces]
        chunks = chunks_of([*added, *pieces])
        size, count = message_bytes(chunks), len(chunks)
        if size > MAX_FRAME_BYTES // 2 or count > MAX_CHUNKS_PER_MESSAGE:
            raise InvalidRows(
                f"the values to add to {counted(self.n, 'row')} would take {count} chunks (limit: "
                f"{MAX_CHUNKS_PER_MESSAGE}) and {sized(size)} of metadata (limit: "
                f"{sized(MAX_FRAME_BYTES // 2)}). Nothing was added. Claim fewer rows at a time, "
                "or ack a part of the batch, such as batch[0:16], before adding values to the rest",
                size=size,
            )

    def fetch(self, fields: Sequence[str], deadline: Deadline) -> Fetched:
        """Fetch more fields of the rows."""
        body = Fetch(self.id, arguments.texts(fields, "fields"))
        return ask(self.handle.session, body, Fetched, deadline)

    def finish(
        self,
        outcome: Outcome,
        deadline: Deadline,
        rows: Index | None = None,
        tags: TagValues | None = None,
        values: Mapping[str, Any] | None = None,
        then: Call | None = None,
    ) -> None:
        """End the lease for all open rows, or for those at `rows`. tags, values: one per row of the
        batch, or per row at `rows`. then: a call that is sent with the last message of an ack.

        Only an ack stores added values. Only a release stores `values`, as progress. Releasing a
        lease that has already ended is an error only if there are tags or values to store.
        """
        self.check()
        if self._doubt is not None:
            stores = bool(tags or values)
            if self._is_settled(self._doubt, outcome, rows, stores, deadline):
                return
        given = tag_columns(tags, self.n if rows is None else len(rows))
        at = self.open_among(rows)
        if not at:
            if rows is None:
                self._end("finished")
        elif outcome == "ack":
            self._ack(at, deadline, then)
        else:
            order = self._order(rows, at) if given or values else None
            body = self._finish_of(outcome, at, take_tags(given, order))
            parts: list[Added] = []
            if values:
                many, groups = self.n if rows is None else len(rows), self._groups_of(at)
                what, listed = "values passed to release", None if order is None else order.tolist()
                pieces = self._write(what, values, deadline, listed, groups, many)
                parts = [Added(at, pieces)]
            try:
                self.send(body, at, parts, deadline)
            except LeaseExpired:
                if outcome != "release" or given or values:
                    raise  # the rows are already released
            self._close(outcome, at)

    def _is_settled(
        self, doubt: Doubt, outcome: Outcome, rows: Index | None, stores: bool, deadline: Deadline
    ) -> bool:
        """Settle the call in doubt. Return whether it has finished all of these rows with
        `outcome`. Raise LeaseExpired if it has finished some of them with another outcome. stores:
        whether there are tags or values to store."""
        try:
            self._settle_doubt(deadline)
        except LeaseExpired:
            if outcome != "release" or stores:
                raise
            return True  # the rows are already released
        left = self.open_among(rows)
        asked = self._bits(rows)
        taken = (asked & doubt.rows & ~left).bit_count()
        refused = stores or outcome not in (doubt.outcome, "release")
        if taken and refused and (rows is not None or not left):
            raise LeaseExpired(
                f"cannot {outcome} {counted(asked.bit_count(), 'row')}: an earlier call, whose "
                f"reply was lost, already {ENDED[doubt.outcome]} {taken} of them. Retry without "
                "the rows of that call, or claim a new batch",
                stage=self.stage,
            )
        return not left

    def _order(self, rows: Index | None, at: int) -> Index | None:
        """Return the indices of the values for the rows `at` (ascending), among values given for
        `rows` (None: for all rows). None: all values, in the order given."""
        if rows is None:
            return np.array(rows_of(at), np.intp) if self._closed else None
        order = np.argsort(rows, kind="stable")
        return order[np.isin(rows[order], rows_of(at))] if self._closed else order

    def _finish_of(self, outcome: Outcome, rows: int, tags: dict[str, list[Scalar]]) -> Finish:
        whole = rows == self._all and (self._ends_whole or not self._is_unsure)
        index = None if whole else np.array(rows_of(rows), U4).tobytes()
        worked_s = max(0.0, time.monotonic() - self._since)
        return Finish(self.id, outcome, index, tags=tags, client_s=worked_s)

    def _ack(self, rows: int, deadline: Deadline, then: Call | None) -> None:
        """Send one message per set of rows with the same added fields. If a message fails, its rows
        and values stay, and the next ack sends the same ones."""
        if lost := {name for of, names in self._lost if of & rows for name in names}:
            raise InvalidCall(
                f"the values added to this batch for {'fields' if len(lost) > 1 else 'field'} "
                f"{', '.join(map(repr, sorted(lost)))} were lost when an ack failed: add them "
                "again (for a field that the rows already have, use another field name), or "
                "release the batch",
                fields=sorted(lost),
            )
        apart = self._alike(rows)
        for some in apart:
            parts = [one for one in self._added if one.rows & some]
            body = self._finish_of("ack", some, {})
            self.send(body, some, parts, deadline, then if some is apart[-1] else None)
            self._close("ack", some)

    def _alike(self, rows: int) -> list[int]:
        """Split the rows into sets with the same added fields."""
        apart = [rows]
        for one in self._added:
            if rows & ~one.rows:
                parts = [part for some in apart for part in (some & one.rows, some & ~one.rows)]
                apart = [part for part in parts if part]
        return apart

    def _others(self, one: Added, rows: int) -> int:
        """The open rows with these added values, except `rows`."""
        return one.rows & ~rows & ~self._closed

    def send(
        self,
        body: Finish,
        rows: int,
        parts: Sequence[Added],
        deadline: Deadline,
        then: Call | None = None,
    ) -> None:
        """Send a message that ends `rows` and stores the values in `parts`. If the shard has no
        space for inline values, send them again from the arena, without `then`."""
        try:
            self._send(body, rows, parts, deadline, then)
        except ShardFull as full:
            lost = body.outcome == "ack" and not all([one in self._added for one in parts])
            if lost or not full.details.get("values"):
                raise
            self.handle.shard_is_full()
            held = self.handle.session.pinned(full.details.get("pin", 0))
            pieces = [piece for one in parts for piece in one.pieces]
            generation = attach(self.handle, deadline)
            land(self.handle, generation, pieces, True, deadline)
            self._send(body, rows, parts, deadline)
            del held  # other pieces hold the values now

    def _send(
        self,
        body: Finish,
        rows: int,
        parts: Sequence[Added],
        deadline: Deadline,
        then: Call | None = None,
    ) -> None:
        """Send one message as `send` describes it, and note its outcome. If it may have taken
        effect, it stays in doubt. If it did not leave this process, the next ack uses the values of
        an ack, and the space of other values is returned."""
        session = self.handle.session
        chunks: list[NewChunk] = []
        offsets: list[int] = []
        call = Call(body, deadline, then=then, keeps=body.outcome != "keep")
        try:
            if parts:
                call.body, chunks = self._with_values(body, rows, parts)
            deadline.check(_CALLS.get(body.outcome, body.outcome))
            offsets = [chunk.offset for chunk in chunks]
            committed(chunks)  # from here on, the message owns their space
            done = self._answer(call)
        except BaseException as exc:
            if call.again is not None:
                self._doubt = Doubt(call.again, body.outcome, rows, list(parts), chunks)
                self._note_failure(exc)
            elif not call.in_flight:
                for chunk, offset in zip(chunks, offsets, strict=False):
                    chunk.offset = offset
                if body.outcome != "ack" or self.state != "leased":
                    give_back(session, chunks_of([piece for one in parts for piece in one.pieces]))
            elif parts and isinstance(exc, DataplaneError):
                committed(chunks, column(exc.details.pop("chunks", b""), U8))
            raise
        if parts:
            self._stored(rows, parts, chunks, done)

    def _with_values(
        self, body: Finish, rows: int, parts: Sequence[Added]
    ) -> tuple[Finish, list[NewChunk]]:
        """Return the message with the values that `parts` has for `rows`, and the chunks that it
        names to the peer. Raise InvalidCall if a message in flight names one of them."""
        session = self.handle.session
        pieces = [piece for one in parts for piece in one.of(rows)]
        chunks = unnamed(pieces)
        if any([chunk.offset < 0 for chunk in chunks]):
            self.check()
            raise InvalidCall(
                "another call that acks rows of this batch is not finished, and its rows share "
                "added values with these rows: ack them after that call",
                stage=self.stage,
            )
        again = False  # whether a later ack names a chunk of this one
        if body.outcome == "ack" and self._closed | rows != self._all:
            named = {*chunks}
            again = any([one.needs(named, self._others(one, rows)) for one in parts])
        filled = msgspec.structs.replace(
            body,
            values=values_of(session.owner, pieces),
            want_bytes=session.slabs[0].ahead(room_of(chunks)),
            again=again,
        )
        return filled, chunks

    def _stored(
        self, rows: int, parts: Sequence[Added], chunks: list[NewChunk], done: Body
    ) -> None:
        """Note that the shard has these values, and the peer these chunks. Keep those that open
        rows need again."""
        told = done if isinstance(done, PutDone) else PutDone()
        committed(chunks, column(told.chunks, U8) if told.chunks else None)
        for one in parts:
            if one in self._added and not self._others(one, rows):
                self._added.remove(one)
                if one.rows != rows:
                    self._give_back(one.pieces)
        if told.kept:
            log.info(
                "partition %r, stage %r: some rows already had values from an earlier lease, "
                "so their new values were discarded (number of rows by field: %s)",
                self.handle.name,
                self.stage,
                told.kept,
            )

    def _answer(self, call: Call) -> Body:
        """Send the call. The reply is PutDone if the message has values, else Done."""
        try:
            reply = send(self.handle.session, call)
        except LeaseExpired:
            if call.again is None:  # or else it is in doubt: see `_note_failure`
                self._end("expired")
            raise
        return reply if isinstance(reply, PutDone) else expect(reply, Done, call.body)

    def _note_failure(self, exc: BaseException) -> None:
        """Apply what the failure of a call says about its effect. If it does not say whether the
        call took effect, the call stays in doubt."""
        doubt = self._doubt
        assert doubt is not None
        if isinstance(exc, LeaseExpired):
            self._end("expired")
            return
        if not isinstance(exc, DataplaneError):
            return
        if _is_unknown(exc):
            return
        self._is_unsure |= isinstance(exc, UNKNOWN)
        kept = exc.details.pop("chunks", None)
        self._doubt = None
        self.handle.session.answered(doubt.request)
        if isinstance(exc, FieldExists):
            self._refused.add(str(exc.details.get("field")))
        if not doubt.parts:
            return
        if kept is not None:
            committed(doubt.chunks, column(kept, U8))
        elif doubt.outcome == "ack":
            # The values are lost, so a later ack must not succeed without them.
            self._added = [one for one in self._added if one not in doubt.parts]
            names = {name for one in doubt.parts for name in one.fields}
            self._lost.append((doubt.rows, names))

    def _settle_doubt(self, deadline: Deadline) -> None:
        """Retry the call in doubt under its own operation id. If an ack has failed, the lease has
        its rows and values again."""
        doubt = self._doubt
        assert doubt is not None
        deadline.check(_CALLS.get(doubt.outcome, doubt.outcome))
        call = Call(doubt.request.body, deadline, again=doubt.request, keeps=True)
        try:
            done = self._answer(call)
        except DataplaneError as exc:
            self._note_failure(exc)
            if self._doubt is not None or self.state != "leased":
                raise
            return
        self._doubt = None
        if doubt.parts:
            # Undoing the cancelled call returns the memory that the reply grants.
            self._stored(doubt.rows, doubt.parts, doubt.chunks, done)
        self._close(doubt.outcome, doubt.rows)

    def _close(self, outcome: str, rows: int) -> None:
        """Note that these rows are finished or dropped. The lease ends with the last of them."""
        self._closed |= rows
        if outcome != "drop":
            self._finished |= rows
        if self._closed == self._all:
            self._end(ENDED[outcome])

    def _end(self, state: str) -> None:
        session = self.handle.session
        self.state = state
        session.leases.discard(self.id)
        if session.spans is not None:
            session.spans.end(self.id, state)
        if self._added or self._doubt is not None:
            session.keep(self._unsent())

    def _unsent(self) -> list[Extent]:
        """Take and return the space of added values that no message has named, when the lease
        ends. If a finalizer does the same in another thread, each value goes to one of the two,
        because `pop` is atomic."""
        doubt = self._doubt
        added: list[Added] = []
        with contextlib.suppress(IndexError):
            while True:
                added.append(self._added.pop())
        if doubt is not None:
            self._doubt = None
            self.handle.session.answered(doubt.request)
        chunks = chunks_of([piece for one in added for piece in one.pieces])
        unsent = [chunk for chunk in chunks if chunk.offset >= 0]
        spaces = spaces_of(unsent)
        for chunk in unsent:
            chunk.offset = -1
        return spaces

    def give_back(self, deadline: Deadline) -> None:
        """Release the lease and wait until its rows are back in their stage, even if `abandon`
        has already requested the release."""
        if self.state == "leased":
            self.finish("release", deadline)
        elif self._abandoned:
            deadline.check("release")
            self._abandoned, session = False, self.handle.session
            was_due = session.leases.discard(self.id) is not None
            call = Call(Finish(self.id, "release"), deadline)
            try:
                send(session, call)
            except LeaseExpired:
                pass  # the peer has already released it
            except BaseException:
                if was_due and not call.in_flight:
                    session.leases.add(self.id, self.handle.name)
                    session.abandon(Abandoned(self.id, self.handle.name, self.stage, 0), [])
                raise

    def abandon(self, forgotten: tuple[str, str] | None = None) -> None:
        """Return the rows to their stage from a finalizer, without waiting. A loop may end while
        another thread or task uses the batch. A message in flight keeps the space that it names.
        forgotten: as in `Abandoned`."""
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


def _is_unknown(exc: DataplaneError) -> bool:
    """Whether this failure leaves open if the call took effect."""
    return isinstance(exc, UNKNOWN) and "chunks" not in exc.details


def dropped(rows: object, groups: Names | None, table: Table, n: int) -> Index:
    """Return the positions of the rows that `drop(rows=…)` or `drop(groups=…)` names."""
    if rows is not None and groups is not None:
        raise InvalidCall("drop() got both rows= and groups=: pass only one of them")
    return positions(rows, "rows", n) if groups is None else group_positions(table, groups)
