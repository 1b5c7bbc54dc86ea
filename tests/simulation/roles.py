"""What the clients of a run do: put groups, claim them for a stage, add and ack; over and over."""

from __future__ import annotations

import asyncio
import math
import random
import zlib
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from dataplane.client.read.chunk_columns import form_of
from dataplane.errors import (
    BackPressure,
    ClaimTimeout,
    DataplaneError,
    DeadlineExceeded,
    FieldExists,
    GroupClosed,
    InvalidCall,
    LeaseExpired,
    PartitionGone,
    PartitionSealed,
    PartitionUndefined,
    PeerLost,
    PutIncomplete,
    RowsDropped,
    RowsGone,
    RowsLost,
    StaleEpoch,
    StreamEnd,
    TransferFailed,
    Unavailable,
)
from dataplane.memory.extents import padded
from dataplane.metadata.tables import bits
from dataplane.metadata.tables.keys import KEY_BYTES, hash_name, mint_many
from dataplane.wire import layouts
from dataplane.wire import messages as m
from dataplane.wire.limits import ALIGNMENT_BYTES, INLINE_ROW_BYTES
from dataplane.wire.packed import EXTENT, U4, U8, column
from dataplane.wire.tables import INLINE, Chunk, Name, Owner, Piece, Rows, Shape, Table, Values
from tests.placing import place
from tests.simulation.ledger import Group, Ledger, Row
from tests.simulation.line import Client

MAX_LENGTH = 97
PATIENT_MS, ENDLESS_MS = 5000, -1
"""Most claims wait for so long, some hardly or not at all, and some until they are met."""
CHUNK_BYTES = 16 << 10
"""Of several rows."""
AGAIN = (
    Unavailable,
    PeerLost,
    DeadlineExceeded,
    BackPressure,
    RowsGone,
    TransferFailed,
    PutIncomplete,
    PartitionUndefined,
    StaleEpoch,
)
"""After these a call is made anew: they say that it may be."""
LAYOUT = layouts.encode((layouts.ColumnSpec("array", "uint8", (-1,)),))


def content(key: bytes, field: str, nbytes: int) -> bytes:
    """What a field of a row holds."""
    return ((key + field.encode()) * (nbytes // (KEY_BYTES + len(field)) + 1))[:nbytes]


def rows_a_chunk(nbytes: int) -> int:
    return max(1, CHUNK_BYTES // nbytes)


def chunks_of(field: str, keys: list[bytes], nbytes: int) -> list[bytes]:
    """The chunks of a field, whichever groups these rows are in."""
    parts, many = list[bytes](), rows_a_chunk(nbytes)
    for at in range(0, len(keys), many):
        some = keys[at : at + many]
        lengths = np.full(len(some), nbytes, U4).tobytes()
        lengths += bytes(-len(lengths) % ALIGNMENT_BYTES)
        parts.append(lengths + b"".join([content(key, field, nbytes) for key in some]))
    return parts


def values_of(
    field: str, rows: int, nbytes: int, owner: Owner, parts: list[bytes], at: Sequence[int] = ()
) -> Values:
    """The values of so many rows in these chunks. at: where they were written."""
    many, chunks, pieces = rows_a_chunk(nbytes), list[Chunk](), list[Piece]()
    for number, part in enumerate(parts):
        here = min(many, rows - number * many)
        inline, offset = (part, 0) if owner == INLINE else (b"", at[number])
        chunks.append(Chunk(0, 0, here, len(part), 0, inline, offset))
        pieces.append(Piece(number, (0,), number * many, bits.bytes_of(bits.all_of(here))))
    return Values([field], [owner], [LAYOUT], chunks, pieces)


def part_of(added: Values, rows: list[int]) -> Values:
    """What was added to some of the rows, as their own message says it."""
    pieces = list[Piece]()
    for piece in added.pieces:
        there = range(piece.base, piece.base + added.chunks[piece.chunk].rows)
        mine = [(number, row) for number, row in enumerate(rows) if row in there]
        if mine:
            base = mine[0][0]
            given = bits.bytes_of(bits.bits_of([number - base for number, _ in mine]))
            at = np.array([row - piece.base for _, row in mine], U4).tobytes()
            pieces.append(Piece(piece.chunk, (0,), base, given, 0, at))
    return msgspec.structs.replace(added, pieces=pieces)


def is_written(values: Values) -> bool:
    """Whether the values are in the arena."""
    return INLINE not in values.owners


class Role:
    def __init__(self, client: Client, ledger: Ledger, rng: random.Random) -> None:
        self.client = client
        self.ledger = ledger
        self.partition = ledger.partition
        self.rng = rng
        self.generation = 0
        """of the partition that it is attached to in this session, if any"""
        self.doing = "nothing yet"
        self.told = ""
        """what a peer said to it last"""
        self.done = False
        self.permits: list[int] = []

    def __repr__(self) -> str:
        return f"{self.client!r}: {self.doing}{self.told and f', was told {self.told}'}"

    async def _patiently(self, work: Any) -> Any:
        """Until it is done, with a new session where the one before ended."""
        while True:
            try:
                if not self.client.alive:
                    self.doing, self.generation = "connects", 0
                    await self.client.connect()
                if not self.generation:
                    self.doing = "attaches"
                    body = m.Define(self.partition, self.ledger.definition)
                    self.generation = (await self.client.call(body, m.Defined)).generation
                return await work()
            except PartitionGone as exc:
                if not (self.ledger.beginnings or self.ledger.over):
                    raise  # nothing was lost that it may have been in
                self.told, self.generation = f"PartitionGone: {exc}", 0
            except AGAIN as exc:
                self.told = f"{type(exc).__name__}: {exc}"
                await asyncio.sleep(self.rng.uniform(0.02, 0.5))

    def compare(self, table: Table, keys: list[bytes]) -> None:
        """What was read with what was put. Rows may lack a field only of progress."""
        assert self.client.peer is not None
        view = self.client.peer.host.arena.view
        values, places = table.values, column(table.places, EXTENT, len(table.values.chunks))
        for piece in values.pieces:
            chunk, place = values.chunks[piece.chunk], places[piece.chunk]
            memory = view[int(place["offset"]) :][: int(place["length"])]
            if values.owners[chunk.owner] == INLINE:
                memory = memoryview(chunk.inline)
            form = form_of(values.layouts[chunk.layout], chunk.rows)
            columns = form.columns(np.frombuffer(memory, np.uint8))
            given = bits.rows_of(bits.in_bytes(piece.given))
            at = column(piece.at, U4) if piece.at else piece.first + np.arange(len(given))
            for number, one in zip(piece.fields, columns, strict=True):
                if number < 0:
                    continue
                field = values.fields[number]
                for row, chunk_row in zip(given, at.tolist(), strict=True):
                    found = one.array(chunk_row).tobytes()
                    if found != content(keys[piece.base + row], field, len(found)):
                        self.ledger.wrong(f"{self!r} read other bytes than were put as {field}")

    async def run(self) -> None:
        try:
            await self._run()
        except DataplaneError as exc:
            self.ledger.wrong(f"{self!r} failed: {exc!r}")
        self.done = True

    async def _run(self) -> None:
        raise NotImplementedError

    async def write(self, field: str, keys: list[bytes], nbytes: int, known: bool) -> Values:
        """Values in chunks of the arena, or small ones inline."""
        if nbytes <= INLINE_ROW_BYTES and self.rng.random() < 0.7:
            return self.inline(field, keys, nbytes)
        parts = chunks_of(field, keys, nbytes)
        sizes = np.array([len(part) for part in parts], U8)
        body = m.Reserve(self.partition, self.generation, [sizes.tobytes()], known)
        reserved = await self.client.call(body, m.Reserved, 5.0)
        granted = column(reserved.extents, EXTENT)
        starts = place(padded(sizes), granted)
        self._give_back_rest(starts + padded(sizes), granted)
        if not self.client.alive:  # what it was granted has gone with its peer
            raise PeerLost("the peer ended when it had answered")
        assert self.client.peer is not None
        view = self.client.peer.host.arena.view
        for start, part in zip(starts.tolist(), parts, strict=True):
            view[start : start + len(part)] = part
        return values_of(field, len(keys), nbytes, self.client.owner, parts, starts.tolist())

    @staticmethod
    def inline(field: str, keys: list[bytes], nbytes: int) -> Values:
        """All of it goes with the message."""
        parts = chunks_of(field, keys, nbytes)
        return values_of(field, len(keys), nbytes, INLINE, parts)

    def _give_back_rest(self, ends: Any, granted: Any) -> None:
        """Grants are of whole pages."""
        for extent in granted:
            start, end = int(extent["offset"]), int(extent["offset"] + extent["length"])
            used = max([start, *(int(e) for e in ends if start < e <= end)])
            if used < end:
                rest = np.array([(used, end - used)], EXTENT)
                self.client.tell(m.GiveBack(rest.tobytes()))


def limit_s(wait_ms: int) -> float:
    """How long a call that waits so long may take."""
    return math.inf if wait_ms == ENDLESS_MS else PATIENT_MS / 1000


def rows_of(groups: list[Group], only: list[Row] | None = None) -> Rows:
    """Rows of groups, all of them or some of one, as a put names them."""
    names: list[Name] | None = None
    if only is None and all(group.names is not None for group in groups):
        names = [name for group in groups for name in group.names or ()]
    keys = b"".join(row.key for group in groups for row in only or group.rows)
    if only is not None and groups[0].names is not None:
        names = [groups[0].names[groups[0].rows.index(row)] for row in only]
    index = np.repeat(np.arange(len(groups), dtype=U4), len(only or groups[0].rows))
    group_keys = b"".join(hash_name(group.name) for group in groups)
    return Rows(keys, names, index.tobytes(), group_keys, [group.name for group in groups])


def keys_of(table: Table) -> list[bytes]:
    raw = table.rows.keys
    return [raw[at : at + KEY_BYTES] for at in range(0, len(raw), KEY_BYTES)]


def band_of(group: Group) -> int:
    """A tag that all rows of a group have."""
    return zlib.crc32(group.name.encode()) % 2


def length_of(key: bytes) -> int:
    """Another, of each row its own."""
    return zlib.crc32(key) % MAX_LENGTH + 1


class Producer(Role):
    """Puts groups, one or a few at a time, each until it is in."""

    groups = 8
    sizes: tuple[int, ...] = (40, 300, 5000)
    """of values"""
    pause_s = 0.5

    async def _run(self) -> None:
        number = 0
        while number < self.groups:
            await self._patiently(self._attached)
            count = min(self.rng.choice((1, 1, 2, 3)), self.groups - number)
            given = self.rng.random() < 0.5
            groups = [self._group(number + i, given) for i in range(count)]
            number += count
            for group in groups:
                self.ledger.opened(group)
            await self._patiently(lambda many=count: self._admit(many))
            await self._patiently(lambda some=groups: self._put_all(some))
            await self._patiently(self._leave)
            await asyncio.sleep(self.rng.expovariate(1 / self.pause_s))
        self.doing = "has put everything"

    async def _attached(self) -> None:
        pass

    async def _admit(self, count: int) -> None:
        """Perhaps with permits; where the trainer does not go on, without."""
        if self.rng.random() < 0.5:
            return
        self.doing = f"waits to be let begin {count} groups"
        wait_ms = self.rng.choice((0, 300, PATIENT_MS))
        count += self.rng.choice((0, 0, 1, 3))  # more than it needs
        body = m.Admit(self.partition, self.generation, count, 1, 4, wait_ms)
        try:
            admitted = await self.client.call(body, m.Admitted, 5.0)
        except (ClaimTimeout, PartitionSealed) as exc:
            self.told = str(exc)
            return
        self.permits = [*self.permits, admitted.permit]

    async def _leave(self) -> None:
        """What was not used goes back, unless it is left to the end of the session."""
        mine, self.permits = self.permits, []
        if mine and self.rng.random() < 0.7:
            body = m.Withdraw(self.partition, self.generation, mine)
            await self.client.call(body, m.Done, 10.0)

    def _group(self, number: int, given: bool) -> Group:
        name = f"{self.client.name}-{number}"
        group = Group(name)
        if given:
            group.names = [f"{name}-{i}" for i in range(self.ledger.group_rows)]
            keys = [hash_name(row) for row in group.names]
        else:
            session = zlib.crc32(name.encode())
            keys = [
                mint_many(session, number * self.ledger.group_rows + i, 1)
                for i in range(self.ledger.group_rows)
            ]
        group.rows = [Row(key, group) for key in keys]
        return group

    async def _put_all(self, groups: list[Group]) -> None:
        """All at once at first; one by one when nobody said what became of them."""
        if not any(group.repeated for group in groups):
            await self._put(groups)
            return
        for group in groups:
            if not group.acked and not group.cancelled:
                await self._put([group])

    async def _put(self, groups: list[Group]) -> None:
        self.doing = f"puts {', '.join(group.name for group in groups)}"
        began, generation = self.client.cluster.loop.now, self.generation
        try:
            await self.call_put(rows_of(groups), [r.key for g in groups for r in g.rows], groups)
        except (FieldExists, GroupClosed) as exc:
            if not all(group.repeated for group in groups):
                self.ledger.wrong(f"{self!r} was told {exc!r}, and had put it but once")
        except RowsDropped as exc:
            if not any(group.dropping for group in groups):
                self.ledger.wrong(f"{self!r} was told {exc!r}, and nobody had dropped any")
            if len(groups) > 1:
                self._again(groups)
                raise Unavailable("one of several groups is cancelled: put the others") from exc
            groups[0].cancelled = True
            return
        except AGAIN:
            self._again(groups)
            raise
        for group in groups:
            if self.ledger.refused(group, began, generation):
                self.ledger.wrong(f"{self!r} put {group.name}, which had been dropped")
            if self.client.owner in self.ledger.gone and self.ledger.replicas == 1:
                group.excused = "its peer was lost already"
            if generation <= self.ledger.undone:
                group.excused = "its partition was lost already"
            group.acked, group.generation = True, generation

    async def call_put(self, rows: Rows, keys: list[bytes], groups: list[Group]) -> None:
        """Rows with their tags and the first field."""
        nbytes = self.rng.choice(self.sizes)
        values = await self.write("x", keys, nbytes, False)
        tags: dict[str, Any] = {
            "group": [self.ledger.rows[key].group.name for key in keys],
            "band": [band_of(self.ledger.rows[key].group) for key in keys],
            "length": [length_of(key) for key in keys],
        }
        body = m.Put(self.partition, self.generation, rows, values, tags)
        for group in groups if is_written(values) else ():
            group.owners.add(self.client.owner)
        await self.client.call(body, m.PutDone, 10.0)

    def _again(self, groups: list[Group]) -> None:
        for group in groups:
            group.repeated = True


class Filler(Producer):
    """Puts many rows that stay until the end: what a new backup gets of them takes a while."""

    groups = 6
    sizes = (1100, 2000, 4200)


class Trickler(Producer):
    """Puts a group now and then: who claims them has waited long."""

    groups = 4
    sizes = (40, 300)
    pause_s = 4.0

    async def _run(self) -> None:
        await asyncio.sleep(self.rng.expovariate(1 / self.pause_s))
        await super()._run()


class Consumer(Role):
    """Claims for one stage until it has had everything."""

    stage = "train"
    hold_s = 0.3
    patience = 3
    """claims that may end in vain before it takes whatever is ready, row by row"""
    in_vain = 0
    waits_ms: tuple[int, ...] = (0, 300, PATIENT_MS, ENDLESS_MS)

    async def _run(self) -> None:
        while await self._patiently(self._go_on):
            pass

    async def _go_on(self) -> bool:
        return not self.ledger.over and await self._once()

    async def _once(self) -> bool:
        want = self._want()
        self.doing = f"claims {want} of {self.stage}"
        limit_ms = self.rng.choice((0, 0, 0, 200, 2000))
        wait_ms = self.rng.choice(self.waits_ms)
        body = m.Claim(
            self.partition, self.generation, self.stage, want, timeout_ms=wait_ms, lease_ms=limit_ms
        )
        began = self.client.cluster.loop.now
        try:
            claimed = await self.client.call(body, m.Claimed, limit_s(wait_ms))
        except ClaimTimeout as exc:
            self.told = str(exc)
            self.in_vain += wait_ms == PATIENT_MS
            await asyncio.sleep(self.rng.uniform(0.01, 0.2))
            return True
        except (StreamEnd, RowsLost):
            if want.where is not None:  # of what matches: others may be left
                await asyncio.sleep(self.rng.uniform(0.01, 0.2))
                return True
            if want.unit == "groups":  # rows of some may be left that others took singly
                self.in_vain = self.patience
                return True
            self.doing = f"has had all of {self.stage}"
            return False
        self.in_vain = 0
        keys = keys_of(claimed.table)
        whole = want.unit == "groups"
        self.ledger.claimed(self.client, claimed.lease, self.stage, keys, whole, began)
        self._fits(want, keys)
        try:
            self.compare(claimed.table, keys)
            await asyncio.sleep(self.rng.expovariate(1 / self.hold_s))
            await self._finish(claimed, keys, whole)
        except AGAIN:
            self.client.tell(m.Finish(claimed.lease, "release"))
            raise
        finally:
            self.ledger.let_go(self.client, self.stage, keys)
            self.client.tell(m.Unpin([claimed.pin]))
        return True

    def _want(self) -> m.Want:
        """Groups or rows, any or of one band, so many or what fits a budget."""
        unit: Any = self.rng.choice(("groups", "groups", "rows"))
        few = self.ledger.group_rows // 4
        where = ["eq", "band", self.rng.randrange(2)] if self.rng.random() < 0.25 else None
        if self.rng.random() < 0.25:
            least = MAX_LENGTH * (self.ledger.group_rows if unit == "groups" else few)
            want = m.Want(unit, 0, 0, where, "length", float(least * self.rng.choice((1, 2))))
        else:
            many = self.rng.choice((1, 2, 3)) * (few if unit == "rows" else 1)
            want = m.Want(unit, many, 1, where)
        return want if self.in_vain < self.patience else m.Want("rows", 3 * few, 1)

    def _fits(self, want: m.Want, keys: list[bytes]) -> None:
        rows = [self.ledger.rows[key] for key in keys if key in self.ledger.rows]
        if want.where is not None and any(band_of(row.group) != want.where[2] for row in rows):
            self.ledger.wrong(f"{self!r} got rows of another band")
        if want.budget_tag and sum(length_of(row.key) for row in rows) > want.budget:
            self.ledger.wrong(f"{self!r} got more than its budget of {want.budget}")
        units = len({row.group.name for row in rows}) if want.unit == "groups" else len(rows)
        if want.count and units > want.count:
            self.ledger.wrong(f"{self!r} got {units} {want.unit} instead of {want.count}")

    async def _finish(self, claimed: m.Claimed, keys: list[bytes], whole: bool) -> None:
        if self.rng.random() < 0.1:
            self.doing = f"releases rows of {self.stage}"
            with_lease = m.Finish(claimed.lease, "release")
            if self.rng.random() < 0.5:
                await self._with_progress(with_lease, keys)
            self.ledger.let_go(self.client, self.stage, keys)  # part by part, from now on
            await self._ended(with_lease, [])
            return
        if self.rng.random() < 0.05:
            await self._drop(claimed, keys)
            return
        self.doing = f"acks rows of {self.stage}"
        body = m.Finish(claimed.lease, "ack")
        if self.stage == "reward":
            nbytes = self.rng.choice((24, 5000))
            body.values = await self.write("reward", keys, nbytes, True)
            for key in keys if is_written(body.values) else ():
                group = self.ledger.rows[key].group
                group.owners.add(self.client.owner)
                if self.client.owner in self.ledger.gone and self.ledger.replicas == 1:
                    group.excused = group.excused or "its peer was lost already"
            if len(keys) > 1 and not whole and self.rng.random() < 0.5:
                await self._ack_in_parts(body, keys)
                return
        await self._ended(body, keys)

    async def _ack_in_parts(self, body: m.Finish, keys: list[bytes]) -> None:
        """Each second row first: the other ones' ack names the same chunks again."""
        added = body.values
        rows = list(range(len(keys)))
        for some in (rows[::2], rows[1::2]):
            body = m.Finish(body.lease, "ack", np.array(some, U4).tobytes(), part_of(added, some))
            body.again = not some[0] and is_written(added)
            done = await self._ended(body, [keys[row] for row in some])
            if done is None:
                return
            if done.chunks:
                numbers = column(done.chunks, U8).tolist()
                chunks = [
                    Chunk(0, number, chunk.rows, chunk.nbytes, 0)
                    for number, chunk in zip(numbers, added.chunks, strict=True)
                ]
                added = msgspec.structs.replace(added, chunks=chunks)

    async def _with_progress(self, body: m.Finish, keys: list[bytes]) -> None:
        """What the stage has so far: its next claim of the rows reads it, if it outlives its peer.
        Each stage has a field of its own, of which the ledger knows nothing."""
        nbytes = self.rng.choice((24, 5000))
        field = f"{self.stage} so far"
        body.values = await self.write(field, keys, nbytes, True)

    async def _drop(self, claimed: m.Claimed, keys: list[bytes]) -> None:
        self.doing = f"drops rows of {self.stage}"
        rows = [self.ledger.rows[key] for key in keys]
        for row in rows:
            row.dropping = True
        try:
            await self.client.call(m.Finish(claimed.lease, "drop"), m.PutDone, 10.0)
        except LeaseExpired:
            return
        self.ledger.dropped(rows, self.client.cluster.loop.now, self.generation)

    async def _ended(self, body: m.Finish, keys: list[bytes]) -> m.PutDone | None:
        """None where the lease had ended before."""
        try:
            done: m.PutDone = await self.client.call(body, m.PutDone, 10.0)
        except LeaseExpired:
            self.ledger.acked(self.stage, keys, False)  # a part of it may have ended in time
            return None
        except AGAIN:
            self.ledger.acked(self.stage, keys, False)
            raise
        self.ledger.acked(self.stage, keys, True)
        if keys and self.stage == "train" and self.rng.random() < 0.3:
            await self._advance()
        return done

    async def _advance(self) -> None:
        """Whichever of several trainers goes on first."""
        self.ledger.version += 1
        body = m.Advance(self.partition, self.generation, self.ledger.version)
        try:
            await self.client.call(body, m.Done, 10.0)
        except InvalidCall as exc:
            self.told = str(exc)


class Patient(Consumer):
    """Claims as one does who gives no time-out, and nothing less than it asks for."""

    waits_ms = (ENDLESS_MS,)

    def _want(self) -> m.Want:
        unit: Any = self.rng.choice(("groups", "rows"))
        count = self.rng.choice((1, 2))
        return m.Want(unit, count, count) if self.in_vain < self.patience else super()._want()


class Watcher(Consumer):
    """Waits for groups to be ready, or to go, again and again until none will be."""

    async def _once(self) -> bool:
        body = m.Wait(self.partition, self.generation, self.stage, "groups")
        if self.rng.random() < 0.5:
            body.count = self.rng.choice((1, 2))
        else:
            body.below = self.rng.choice((1, 2))
        self.doing = f"waits for {body.count} ready, or fewer than {body.below} left"
        try:
            await self.client.call(body, m.Done, math.inf)
        except StreamEnd:
            self.doing = f"has waited for all of {self.stage}"
            return False
        await asyncio.sleep(self.rng.uniform(0.5, 2.0))
        return True


class Rank(Consumer):
    """One of the ranks of a trainer: takes its part of the stage's plan, and of every plan after it
    until the stage has had everything. Each takes every so many rows, so that no row is two's."""

    rank = 0
    ranks = 1
    hold_s = 1.0
    mine: list[bytes]
    """rows of the last plan that it has acked: the stage has, when that is drained"""

    async def _run(self) -> None:
        self.mine = []
        await super()._run()
        self.ledger.acked(self.stage, self.mine, True)

    async def _once(self) -> bool:
        self.doing = f"takes part in a plan of {self.stage} as rank {self.rank} of {self.ranks}"
        body = m.Claim(self.partition, self.generation, self.stage, m.Want("rows", 0, 0))
        body.plan, body.rank = Shape(self.ranks, balance="length", seed=1), self.rank
        body.timeout_ms = self.rng.choice(self.waits_ms)
        began = self.client.cluster.loop.now
        try:
            claimed = await self.client.call(body, m.Claimed, limit_s(body.timeout_ms))
        except ClaimTimeout as exc:
            self.told = str(exc)
            await asyncio.sleep(self.rng.uniform(0.01, 0.2))
            return True
        except (StreamEnd, RowsLost):
            self.doing = f"has had all of {self.stage}"
            return False
        assert claimed.plan is not None
        part = np.arange(self.rank, claimed.plan.rows, self.ranks)
        trained: list[bytes] = []
        try:
            for micro in np.array_split(part, max(1, -(-len(part) // 5))):
                if len(micro):
                    trained += await self._train(claimed.lease, micro, began)
            self.doing = f"acks its part of a plan of {self.stage}"
            await self._ended(m.Finish(claimed.lease, "ack"), [])
            self.mine = trained
        except LeaseExpired as exc:
            self.told = str(exc)
        except AGAIN:
            self.client.tell(m.Finish(claimed.lease, "release"))
            raise
        finally:  # it may have been acked, by all: nobody says so to one of them
            self.ledger.acked(self.stage, trained, False)
            self.ledger.let_go(self.client, self.stage, trained)
        return True

    async def _train(self, lease: int, micro: Any, began: float) -> list[bytes]:
        if self.rng.random() < 0.05:
            self.client.close()
            raise PeerLost("its process ended, and another takes its place")
        body = m.Fetch(lease, ["x"], index=micro.astype(U4).tobytes())
        fetched = await self.client.call(body, m.Fetched, 10.0)
        keys = keys_of(fetched.table)
        self.ledger.claimed(self.client, lease, self.stage, keys, False, began)
        self.compare(fetched.table, keys)
        self.client.tell(m.Unpin([fetched.pin]))
        await asyncio.sleep(self.rng.expovariate(1 / self.hold_s))
        return keys


class Sealer(Role):
    """Seals once every producer is done; again where the partition began anew meanwhile, for who is
    left would wait for the end of an empty one, and where its peer was lost: a part of the plane
    that was cut off may have said that it is sealed when the others went on without it."""

    producers: list[Role]
    others: list[Role]
    drops = False
    """the partition, instead, while others wait for more"""

    async def _run(self) -> None:
        sealed = -1
        while not all(one.done for one in self.others):
            await asyncio.sleep(0.2)
            anew = self.ledger.beginnings != sealed or self.client.owner in self.ledger.gone
            anew = anew or not self.client.alive  # its peer may be of a plane that began since
            if anew and all(one.done for one in self.producers):
                sealed = self.ledger.beginnings
                self.doing = "seals"
                await self._patiently(self._seal)
                self.doing = "has sealed"

    async def _seal(self) -> None:
        if self.drops:
            self.ledger.over = True
            self.ledger.condemn(list(self.ledger.rows))
            await self.client.call(m.Drop(self.partition, self.generation), m.Dropped, 30.0)
            return
        await self.client.call(m.Seal(self.partition, self.generation), m.Done, 30.0)
