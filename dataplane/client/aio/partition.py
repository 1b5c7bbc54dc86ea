"""Partition: put, claim, stream, read, and the end of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from dataplane.client import arguments, core
from dataplane.client.aio.batch import Batch, Rows
from dataplane.client.aio.driver import Run
from dataplane.client.aio.plan import Micro, Plan
from dataplane.client.aio.stream import Admission, Loader, Lost, Producer, Stream
from dataplane.client.core import DEFAULT_TIMEOUT_S, Handle
from dataplane.client.operations import changes, reads
from dataplane.client.operations.changes import Dropped, T
from dataplane.client.operations.claiming import Claiming, Demand
from dataplane.client.operations.plan import join, shape_of
from dataplane.client.operations.put import put, unless_too_late
from dataplane.client.ref import Ref
from dataplane.client.write.rows import Names, TagValues
from dataplane.metadata.tables.where import Where
from dataplane.wire.messages import Defined
from dataplane.wire.tables import Name, Scalar


class Partition:
    """A named set of rows. `timeout` is in seconds everywhere: 30 unless given, and for the calls
    that wait for rows (`claim`, `stream`, `wait`) None, which waits for as long as rows can come.
    """

    def __init__(self, run: Run, handle: Handle) -> None:
        self._run = run
        self._handle = handle

    @property
    def name(self) -> str:
        """Its name, alone in the plane."""
        return self._handle.name

    # writing

    async def put(
        self,
        columns: Mapping[str, Any],
        *,
        key: Names | None = None,
        group: Names | Sequence[Name | None] | None = None,
        tags: TagValues | None = None,
        dedup: Collection[str] = (),
        replace: bool = False,
        reuse: bool = False,
        timeout: float | None = DEFAULT_TIMEOUT_S,
    ) -> Ref:
        """Write rows: per field a sequence or an array [n, …]; or a TensorDict.

        A row's value that is a flat list of numbers of one kind is an array (`dataplane.object(x)`
        keeps any as it is); of a nested tensor each row is an array. What is in a TensorDict is a
        field each, "a.b" where one is nested in it; its data that are no tensors are objects.

        key: one id a row (str or int); minted where not given. Rows that are there already get
        the new fields and tags. group: one id a row, or one for all. tags: small scalars, one a
        row or one for all. dedup: fields whose equal values are stored once. replace: overwrite
        fields that are there (FieldExists otherwise).

        Repeating a put with the same keys is safe, and completes a put that ended midway. The put
        skips rows that exist with all of these fields, and rows under these keys or groups that
        have been freed since. `ref.kept` counts both; existing values stay. If nothing was missing,
        the put raises FieldExists, or RowsGone if all rows have been freed. It also raises
        FieldExists for a row that has some of these fields and lacks others. reuse: allow names of
        freed and dropped rows for new rows (RowsDropped otherwise).

        A field whose values all lie on a GPU that the peer has a device arena of is copied into
        that, on the streams of the values, and into host memory where the device has no room.

        Raises BackPressure when the arena stays full, ValueTooLarge for a row or a group that can
        never fit, PutIncomplete when some rows went in and others did not: its `details["rows"]`
        are those that did, put the others.
        """
        handle = self._handle
        putting = put(handle, columns, key, group, tags, dedup, replace, reuse, timeout)
        return await self._run(unless_too_late(handle, putting))

    async def tag(
        self,
        keys: Names,
        tags: TagValues,
        *,
        expect: Mapping[str, Scalar] | None = None,
        timeout: float | None = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Set tags of rows. expect: only where these tags have these values, else TagConflict."""
        await self._run(changes.tag(self._handle, keys, tags, expect, timeout))

    async def close(
        self, group: Name, n: int, *, timeout: float | None = DEFAULT_TIMEOUT_S
    ) -> None:
        """The group is complete with n rows; dropped ones count. Nothing for one that was there
        and has been freed: where its name is used again (`reuse`), put first."""
        await self._run(core.close_group(self._handle, group, n, timeout))

    async def seal(self, *, short: str = "drop", timeout: float | None = DEFAULT_TIMEOUT_S) -> None:
        """No new rows from now on (new fields of rows are welcome). Open groups close as they are.

        In a partition with `group_size` such groups are short, and no claim of whole groups should
        get them: they are dropped (`stats()["short_groups"]`, RowsDropped for whoever still puts
        rows of them). short="keep" closes them with the rows that they have.
        """
        await self._run(core.seal(self._handle, short, timeout))

    async def reset(self, stage: str, *, timeout: float | None = DEFAULT_TIMEOUT_S) -> None:
        """Make every row claimable by the stage again, as for another epoch."""
        await self._run(core.reset(self._handle, stage, timeout))

    async def drop(
        self,
        keys: Names | None = None,
        groups: Names | None = None,
        where: Where | None = None,
        *,
        timeout: float | None = DEFAULT_TIMEOUT_S,
    ) -> Dropped:
        """Drop rows by key, by group or by filter; with none of them the whole partition.

        Late puts of dropped rows raise RowsDropped. Returns how many rows and bytes went.
        """
        return await self._run(changes.drop(self._handle, keys, groups, where, timeout))

    # consuming

    async def claim(
        self,
        stage: str,
        *,
        rows: int | None = None,
        groups: int | None = None,
        budget: Mapping[str, float] | None = None,
        min: int | None = None,
        where: Where | None = None,
        fields: Sequence[str] | None = None,
        unit: str | None = None,
        timeout: float | None = None,
        lease: float | None = None,
    ) -> Batch:
        """Lease rows for a stage: exactly one of `rows`, `groups` (whole ones) or `budget`.

        budget={tag: sum}: as many groups (rows, where the partition has no group_size, or as
        `unit` says) as fit. The tag of a ready row must be a finite number of 0 or more;
        InvalidRows names a row where it is not. min: accept fewer. where: only rows, or whole
        groups, with such tags. fields: what is fetched at once (default: the stage's fields).
        lease: seconds after which the rows go back, even if the holder still works on them.

        Raises ClaimTimeout, and StreamEnd once the partition is sealed and the stage has had all.
        """
        demand = Demand(rows, groups, budget, min, where, unit)
        claiming = Claiming(self._handle, stage, demand, fields, timeout, lease)
        return Batch(self._run, self._handle, stage, await self._run(claiming.claim()))

    def stream(
        self,
        stage: str,
        *,
        rows: int | None = None,
        groups: int | None = None,
        budget: Mapping[str, float] | None = None,
        min: int | None = None,
        where: Where | None = None,
        fields: Sequence[str] | None = None,
        unit: str | None = None,
        batches: int | None = None,
        timeout: float | None = None,
        lease: float | None = None,
    ) -> Stream:
        """Claim batch after batch until the partition is sealed and the stage has had every row.

        Asking for the next batch acks the one before; leaving the loop in any other way releases
        it. batches: end after so many, the last one acked. Other arguments as of `claim`. `timeout`
        is per batch. It is that of its ack or release too, from 1 s up to 30 s.
        """
        return Stream(
            self._run,
            partial(Batch, self._run, self._handle, stage),
            self._handle,
            stage,
            Demand(rows, groups, budget, min, where, unit),
            batches,
            fields=fields,
            timeout=timeout,
            lease_s=lease,
        )

    def loader(
        self,
        stage: str,
        *,
        rows: int | None = None,
        groups: int | None = None,
        budget: Mapping[str, float] | None = None,
        min: int | None = None,
        where: Where | None = None,
        fields: Sequence[str] | None = None,
        unit: str | None = None,
        collate: Callable[[Batch], Any] | None = None,
        prefetch: int = 1,
        batches: int | None = None,
        timeout: float | None = None,
        lease: float | None = None,
    ) -> Loader:
        """As `stream`, for a training loop: the next `prefetch` batches are made ready, in a thread
        or by a task of the event loop, while the body works on one.

        collate: is called there with each batch, and what it returns (or awaits) is what the loop
        gets, such as `lambda batch: batch.tensordict(device="cuda")`; `loader.batch` is the batch
        itself.
        """
        return Loader(
            self._run,
            partial(Batch, self._run, self._handle, stage),
            self._handle,
            stage,
            Demand(rows, groups, budget, min, where, unit),
            collate,
            prefetch,
            batches,
            fields=fields,
            timeout=timeout,
            lease_s=lease,
        )

    async def plan(
        self,
        stage: str,
        *,
        rank: int,
        ranks: int,
        minibatches: int = 1,
        budget: Mapping[str, float] | None = None,
        balance: str | None = None,
        epochs: int = 1,
        seed: int = 0,
        remainder: str = "pad",
        unit: str = "rows",
        fields: Sequence[str] | None = None,
        prefetch: int = 1,
        timeout: float | None = None,
    ) -> Plan:
        """This rank's part of all that the stage has left, for a trainer of `ranks` ranks that all
        call this alike: as many mini- and micro-batches at each, so that no collective hangs.

        Waits until the partition is sealed and every row that the stage has left is ready. Each
        rank gets as many rows as any other (as many whole groups where `unit` is "groups"), of
        sums of the tag `balance` (default: that of the budget) as equal as can be, and cuts them
        into `minibatches` an epoch; each of these into micro-batches, of which none has more than
        budget={tag: sum} unless it is a single row (None: one a mini-batch). Every epoch shuffles
        anew, by `seed`. remainder: where rows are no multiple of ranks × minibatches, "pad" adds
        rows that `micro.mask` marks, "drop" leaves some out, which are acked with the others.

        rank: processes of one replica (tensor or pipeline parallel) pass the same one. fields: what
        is fetched (default: the stage's fields). prefetch: micro-batches that are fetched ahead.

        The rows stay leased until every rank has acked. Raises PartitionConflict where the stage
        has a plan of other arguments, InvalidRows for a row without such a tag, and, as `claim`,
        ClaimTimeout, and StreamEnd once the stage has had every row.
        """
        shape, rank = shape_of(
            rank, ranks, minibatches, budget, balance, epochs, seed, remainder, unit
        )
        ahead = arguments.count(prefetch, "prefetch")
        operation = join(self._handle, stage, shape, rank, fields, timeout)
        return Plan(self._run, partial(Micro, self._run), await self._run(operation), ahead)

    async def wait(
        self,
        stage: str | None = None,
        *,
        rows: int | None = None,
        groups: int | None = None,
        below: int | None = None,
        key: Name | None = None,
        unit: str | None = None,
        where: Where | None = None,
        timeout: float | None = None,
    ) -> None:
        """Until so many rows or groups are ready for the stage, or fewer than `below` of them
        (groups where the partition has a group_size) are not yet done: back-pressure by count.

        where: of those that match. Rows that are leased, or not ready yet, count whatever their
        tags: they may match when they are ready.

        key: wait until a row with this key exists, without a stage: `part.wait(key="version-7")`.

        Raises ClaimTimeout; StreamEnd if the partition is sealed and the condition cannot be met
        any more; RowsGone or RowsDropped if the row of this key was freed or dropped."""
        await self._run(
            core.wait(self._handle, stage, rows, groups, below, unit, where, key, timeout)
        )

    def admit(
        self, n: int, *, per_version: int, max_lag: int = 1, timeout: float | None = None
    ) -> Admission:
        """`async with part.admit(4, per_version=512):` waits until n groups more may be begun, and
        so bounds how far rollout runs ahead of the trainer, which says `advance(version)`.

        At most (max_lag + 1) · per_version groups are permitted, waiting or leased, or finished
        and not yet given back. The groups that this session opens in the body use the permits;
        what is left over goes back at its end, or with the process. A finished group gives its
        place back at the trainer's next `advance`, but none while a group that was begun before it
        was finished is not all there yet; a dropped or lost one at once. All callers name the same
        bound (PartitionConflict). Needs a `group_size`.

        Raises ClaimTimeout, PartitionSealed, PartitionGone; InvalidCall for more groups than there
        can be.
        """
        return Admission(self._run, self._handle, n, max_lag, per_version, timeout)

    async def advance(self, version: int, *, timeout: float | None = DEFAULT_TIMEOUT_S) -> None:
        """The trainer is at this version of the weights, 0 in the beginning: `admit` lets groups be
        begun in place of those that it has finished. Ack what it has trained on before. The same
        version again is nothing; InvalidCall for an older one."""
        await self._run(changes.advance(self._handle, version, timeout))

    def producing(self, items: Iterable[T]) -> Producer[T]:
        """`async for prompt in part.producing(prompts):` yields one item after the other. It ends
        without an error when no items are left, or when the partition takes no new rows: it was
        sealed, its `groups=` have closed, or it was dropped.

        In the body, the same thread or task puts the item's rows through this partition object. A
        put that arrives too late stores nothing and returns a Ref of no rows; `admit` then enters
        its body with `n` 0. Outside such a loop both are errors.
        """
        return Producer(self._run, self._handle, items)

    def lost(self, timeout: float | None = None) -> Lost:
        """Keys of rows whose bytes were lost with a peer, so that a producer can put them again.

        Iterate over it: lists of keys, from the first lost row on, each within seconds of the
        loss; the rows of a group that lost one are among them. Ends when the partition was
        dropped, or is sealed and every stage has had every row. timeout: per list; None waits for
        as long as rows can be lost, otherwise DeadlineExceeded.
        """
        return Lost(self._run, self._handle, timeout)

    # looking

    async def get(
        self,
        keys: Names | None = None,
        fields: Sequence[str] | None = None,
        where: Where | None = None,
        *,
        timeout: float | None = DEFAULT_TIMEOUT_S,
    ) -> Rows:
        """Read rows without a lease: these keys in this order, those of a filter, or all.

        fields None: all of them. RowsGone for rows that were freed or never put.
        """
        found = await self._run(reads.read(self._handle, keys, where, fields, timeout))
        return Rows(self._run, self._handle, *found)

    async def rows(
        self,
        where: Where | None = None,
        *,
        timeout: float | None = DEFAULT_TIMEOUT_S,
    ) -> Rows:
        """The rows' keys, groups and tags, without fetching values."""
        return await self.get(fields=(), where=where, timeout=timeout)

    async def stats(self, *, timeout: float | None = DEFAULT_TIMEOUT_S) -> dict[str, Any]:
        """Rows, groups and bytes of this partition, as nested dicts."""
        return await self._run(core.stats(self._handle, timeout))

    def __reduce__(self) -> Any:
        """The same partition, by a client of the process that unpickles it."""
        plane = self._run.__self__  # type: ignore[attr-defined]
        return _reattached, (plane, self.name, self._handle.defined)

    def __repr__(self) -> str:
        defined = self._handle.defined
        state = "not attached yet" if defined is None else f"generation {defined.generation}"
        return f"<aio.Partition {self.name!r} of plane {self._handle.session.plane!r}, {state}>"


def _reattached(plane: Any, name: str, defined: Defined | None) -> Partition:
    return Partition(plane.run, Handle(plane._session, name, defined))
