"""Partition: put, claim, stream, read, seal and drop."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from dataplane.client import arguments
from dataplane.client._async import changes
from dataplane.client._async.batch import Batch, Rows
from dataplane.client._async.calls import (
    DEFAULT_TIMEOUT_S,
    ask,
    attach,
    attach_to_wait,
    milliseconds,
    public,
    wait_for,
)
from dataplane.client._async.claiming import Claiming
from dataplane.client._async.loader import Loader
from dataplane.client._async.lost import Lost
from dataplane.client._async.plan import Plan
from dataplane.client._async.plan_part import join
from dataplane.client._async.producing import Admission, Producer, T
from dataplane.client._async.put import put
from dataplane.client._async.queries import partition_stats
from dataplane.client._async.reads import read
from dataplane.client._async.stream import Stream
from dataplane.client.arguments import Deadline, Demand, shape_of
from dataplane.client.ref import Dropped, Ref
from dataplane.client.session.session import Handle
from dataplane.client.tracebacks import public_at_once
from dataplane.client.write.rows import Names, TagValues, name_list
from dataplane.errors import InvalidCall
from dataplane.metadata.tables.keys import hash_name
from dataplane.metadata.tables.where import Where
from dataplane.wire.messages import Advance, Close, Defined, Done, Reset, Seal, Wait
from dataplane.wire.tables import Name, Scalar


class Partition:
    """A named set of rows.

    Every `timeout` is in seconds. The default is 30, but None for calls that wait for rows
    (`claim`, `stream`, `plan`, `wait`, `admit`): these wait as long as rows can still arrive.
    """

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    @property
    def name(self) -> str:
        """The partition's name, unique in the plane."""
        return self._handle.name

    # writing

    @public
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
        """Put rows. `columns` maps each field to a sequence or an array `[n, …]`, or is a
        TensorDict.

        A value that is a flat list of numbers of one type is stored as an array; to store it as a
        list, wrap it in `dataplane.object(x)`. Each row of a nested tensor is an array. The fields
        of a nested TensorDict are named "a.b". Non-tensor data are stored as Python objects.

        - `key`: one id per row, str or int. Rows without a key get a generated one. If a row with
          this key exists, it gets the new fields and tags.
        - `group`: one id per row, or one for all rows.
        - `tags`: small scalars, one per row or one for all rows.
        - `dedup`: fields whose equal values are stored only once per host.
        - `replace`: overwrite fields that exist, instead of raising FieldExists.
        - `reuse`: let new rows use the keys and group ids of freed and dropped rows, instead of
          raising RowsDropped.

        Repeating a put with the same keys never stores a row twice. The retry stores the rows that
        the first attempt did not store, and skips rows that already have all fields of the put or
        have been freed. `ref.kept` is the number of skipped rows. If nothing is left to store, the
        put raises FieldExists, or RowsGone if every row has been freed. A put also raises
        FieldExists if a row has some but not all of the put's fields.

        If all values of a field are on a GPU on which the peer has a device arena, the put copies
        them into that arena, each value on the CUDA stream that its array reports. Otherwise, or if
        that arena is full, it copies them into host memory.

        Raises BackPressure if the arena in host memory stays full, and ValueTooLarge for a row or
        group that can never fit. Raises PutIncomplete if only some rows were stored;
        `details["rows"]` lists the positions of the stored rows. Repeat the put with the same keys
        to store the other rows.
        """
        return await put(self._handle, columns, key, group, tags, dedup, replace, reuse, timeout)

    @public
    async def tag(
        self,
        keys: Names,
        tags: TagValues,
        *,
        expect: Mapping[str, Scalar] | None = None,
        timeout: float | None = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Set tags on rows. `expect`: set the tags only if the rows now have these tag values;
        otherwise raise TagConflict."""
        await changes.tag(self._handle, keys, tags, expect, timeout)

    @public
    async def close(
        self, group: Name, n: int, *, timeout: float | None = DEFAULT_TIMEOUT_S
    ) -> None:
        """Set the size of a group to n rows, including dropped rows. The group closes when it has
        n rows.

        The call does nothing if the group has been freed. To close a new group with the same id,
        first put its rows with `reuse=True`.
        """
        handle, deadline = self._handle, Deadline(timeout)
        (name,) = name_list([group], "group")
        n = arguments.count(n, "n")
        body = Close(handle.name, await attach(handle, deadline), name, n)
        await ask(handle.session, body, Done, deadline)

    @public
    async def seal(self, *, short: str = "drop", timeout: float | None = DEFAULT_TIMEOUT_S) -> None:
        """Seal the partition: it accepts no new rows from now on, only new fields of existing rows.

        Without `group_size`, open groups close with the rows that they have. With `group_size`,
        any group that is still open is short, and is dropped. `stats()["short_groups"]` counts
        these groups, and a later put of their rows raises RowsDropped. `short="keep"` keeps short
        groups.
        """
        handle, deadline = self._handle, Deadline(timeout)
        keep = arguments.choice(short, "short", "drop", "keep") == "keep"
        body = Seal(handle.name, await attach(handle, deadline), keep)
        await ask(handle.session, body, Done, deadline)

    @public
    async def reset(self, stage: str, *, timeout: float | None = DEFAULT_TIMEOUT_S) -> None:
        """Make every row claimable by the stage again, for another epoch."""
        handle, deadline = self._handle, Deadline(timeout)
        arguments.text(stage, "a stage")
        body = Reset(handle.name, await attach(handle, deadline), stage)
        await ask(handle.session, body, Done, deadline)

    @public
    async def drop(
        self,
        keys: Names | None = None,
        groups: Names | None = None,
        where: Where | None = None,
        *,
        timeout: float | None = DEFAULT_TIMEOUT_S,
    ) -> Dropped:
        """Drop rows by key, group or filter. Without any of these, drop the whole partition.

        A later put of these rows raises RowsDropped. Returns the number of dropped rows and the
        approximate size of their values in bytes.
        """
        return await changes.drop(self._handle, keys, groups, where, timeout)

    # consuming

    @public
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
        in_order: bool = False,
        timeout: float | None = None,
        lease: float | None = None,
    ) -> Batch:
        """Lease rows for a stage. Pass exactly one of `rows`, `groups` or `budget`.

        - `rows`, `groups`: how many rows or groups to claim. Groups are never split.
        - `budget={tag: limit}`: claim at least one group, and more as long as the sum of this tag
          stays within the limit. Without `group_size`, claim rows instead. Raises
          InvalidRows if the tag of a row is not a finite, non-negative number.
        - `unit`: "groups" or "rows", to choose what `budget` claims.
        - `min`: accept fewer rows or groups, but at least this many.
        - `where`: claim only rows whose tags match, or only groups in which every row matches.
        - `fields`: which fields to fetch with the claim. Default: the fields of the stage.
        - `in_order`: claim the oldest ready rows, even if others are on this host. Rows that a
          lease returned go first.
        - `lease`: seconds after which the rows return to the stage, even if this process is still
          working on them. Default: the lease lasts as long as the process.

        Raises ClaimTimeout if too few rows become ready in time, and StreamEnd if the partition is
        sealed and the stage has received every row.
        """
        demand = Demand(rows, groups, budget, min, where, unit, in_order)
        claiming = Claiming(self._handle, stage, demand, fields, timeout, lease)
        return Batch(self._handle, stage, *await claiming.claim())

    @public_at_once
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
        in_order: bool = False,
        batches: int | None = None,
        timeout: float | None = None,
        lease: float | None = None,
    ) -> Stream:
        """Claim batches until the partition is sealed and the stage has received every row.

        Advancing to the next batch acks the current one. `break`, `return` or an exception releases
        it.

        - `batches`: end the loop after this many batches, and ack the last one.
        - `timeout`: seconds to wait for each batch. Acks and releases use the same timeout, clamped
          to between 1 and 30 seconds.

        The other arguments are those of `claim`.
        """
        return Stream(
            self._handle,
            stage,
            Demand(rows, groups, budget, min, where, unit, in_order),
            batches,
            fields=fields,
            timeout=timeout,
            lease_s=lease,
        )

    @public_at_once
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
        in_order: bool = False,
        collate: Callable[[Batch], Any] | None = None,
        prefetch: int = 1,
        batches: int | None = None,
        timeout: float | None = None,
        lease: float | None = None,
    ) -> Loader:
        """Return a loader: a stream for training loops. While your loop works on one batch, the
        loader prepares the next `prefetch` batches in a thread, or in a task of the event loop.

        That thread or task passes each batch to `collate`, for example
        `lambda batch: batch.tensordict(device="cuda")`, and the training loop gets the result.
        `loader.batch` is the batch before `collate`. The other arguments are those of `stream`.
        """
        return Loader(
            self._handle,
            stage,
            Demand(rows, groups, budget, min, where, unit, in_order),
            collate,
            prefetch,
            batches,
            fields=fields,
            timeout=timeout,
            lease_s=lease,
        )

    @public
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
        """Return this rank's part of the stage's remaining rows.

        All ranks of a trainer must call this with the same arguments, except `rank`. Every rank
        gets the same number of mini-batches and micro-batches, so no collective hangs. The call
        waits until the partition is sealed and all remaining rows are ready.

        - `rank`, `ranks`: the rank of this process, and the number of ranks. All processes of one
          tensor- or pipeline-parallel replica pass the same rank.
        - `minibatches`: the number of mini-batches per epoch.
        - `budget={tag: limit}`: the tag's values in a micro-batch add up to at most this limit. A
          row that alone exceeds the limit is a micro-batch of its own. None: one micro-batch per
          mini-batch.
        - `balance`: the tag whose sums are made as equal as possible across ranks. Default: the
          tag of `budget`. Every rank gets the same number of rows or, if `unit="groups"`, the same
          number of groups.
        - `epochs`, `seed`: the number of epochs, and the seed for reshuffling the rows in every
          epoch.
        - `remainder`: if the number of rows is not a multiple of ranks × minibatches, "pad" adds
          padding rows, which `micro.mask` marks; "drop" leaves the surplus rows out of the plan,
          and acks them when the plan is acked.
        - `fields`: which fields to fetch. Default: the fields of the stage.
        - `prefetch`: how many micro-batches to fetch ahead.

        The rows stay leased until every rank has acked. Raises PartitionConflict if the stage has a
        plan with different arguments, InvalidRows if a row lacks the tag of `budget` or `balance`,
        ClaimTimeout if the rows are not ready in time, and StreamEnd if the stage has received
        every row.
        """
        shape, rank = shape_of(
            rank, ranks, minibatches, budget, balance, epochs, seed, remainder, unit
        )
        ahead = arguments.count(prefetch, "prefetch")
        return Plan(await join(self._handle, stage, shape, rank, fields, timeout), ahead)

    @public
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
        """Wait until enough rows or groups are ready for a stage, until the number of unfinished
        ones falls below a limit, or until a row exists.

        - `rows`, `groups`: wait until at least this many are ready.
        - `below`: wait until fewer than this many are unfinished: groups if the partition has a
          `group_size`, else rows. A producer can use this to limit how far it runs ahead.
        - `where`: count only rows that match. For `below`, rows that are leased or not ready yet
          count in any case, because their tags may still change.
        - `key`: wait until a row with this key exists, as in `part.wait(key="version-7")`.
          Do not pass a stage with it.

        Raises ClaimTimeout if the condition is not met in time. Raises StreamEnd if the partition
        is sealed and the condition can no longer be met. Raises RowsGone or RowsDropped if the row
        with this key was freed or dropped.
        """
        handle = self._handle
        if key is not None:
            if any(a is not None for a in (stage, rows, groups, below, unit, where)):
                raise InvalidCall(
                    "wait(key=…) can be combined only with timeout=: leave out the other arguments"
                )
            timeout = arguments.seconds(timeout, "timeout")
            (name,) = name_list([key], "key")
            hash_name(name)  # raises for a key that no row can have
            generation = await attach_to_wait(handle, timeout)
            limit_ms = milliseconds(timeout)
            body = Wait(handle.name, generation, "", "rows", timeout_ms=limit_ms, key=name)
            await wait_for(handle.session, body, Done, timeout)
            return
        if stage is None or sum(n is not None for n in (rows, groups, below)) != 1:
            raise InvalidCall(
                "wait() needs either key=, or a stage and exactly one of rows=, groups= and below="
            )
        unit = handle.unit if unit is None else arguments.choice(unit, "unit", "rows", "groups")
        wanted = most = 0
        if below is not None:
            most = arguments.count(below, "below")
        else:
            unit = "rows" if groups is None else "groups"
            wanted = arguments.count(rows if groups is None else groups, unit)
        timeout = arguments.seconds(timeout, "timeout")
        arguments.text(stage, "a stage")
        generation = await attach_to_wait(handle, timeout)
        body = Wait(
            handle.name,
            generation,
            stage,
            unit,  # type: ignore[arg-type]
            count=wanted,
            below=most,
            timeout_ms=milliseconds(timeout),
            where=arguments.filter_of(where),
        )
        await wait_for(handle.session, body, Done, timeout)

    @public_at_once
    def admit(
        self, n: int, *, per_version: int, max_lag: int = 1, timeout: float | None = None
    ) -> Admission:
        """Wait until `n` more groups may start: `async with part.admit(4, per_version=512):`. This
        limits how far rollout runs ahead of the trainer, which calls `advance(version)`.

        There are (max_lag + 1) × per_version slots. Each group that starts takes one slot, and
        keeps it until all stages have acked the group and the trainer has then called `advance`. A
        slow group holds others back: groups that finish while the slow group is in progress keep
        their slots until the slow group has all its rows and fields. Dropped and lost groups free
        their slots at once.

        Groups that this client starts inside the `with` block use the permits. Unused permits are
        returned at the end of the block, or when the process ends. All callers must pass the same
        `max_lag` and `per_version`, and the partition must have a `group_size`.

        Raises ClaimTimeout if `n` slots do not become free in time, and PartitionSealed or
        PartitionGone if the partition accepts no new groups. Raises PartitionConflict if `max_lag`
        or `per_version` differs from that of other callers, and InvalidCall if `n` exceeds the
        number of slots.
        """
        return Admission(self._handle, n, max_lag, per_version, timeout)

    @public
    async def advance(self, version: int, *, timeout: float | None = DEFAULT_TIMEOUT_S) -> None:
        """Set the version of the trainer's weights, which starts at 0. This frees the `admit`
        slots of finished groups, so ack those groups before this call. Repeating a version is a
        no-op. An older version raises InvalidCall."""
        handle, deadline = self._handle, Deadline(timeout)
        version = arguments.whole(version, "version")
        body = Advance(handle.name, await attach(handle, deadline), version)
        await ask(handle.session, body, Done, deadline)

    @public_at_once
    def producing(self, items: Iterable[T]) -> Producer[T]:
        """Loop over `items`, and put rows for each: `async for prompt in part.producing(prompts):`.

        The loop ends without an error when no items are left, or when the partition accepts no new
        rows: it was sealed or dropped, or it has reached the limit set by `groups=`.

        In the loop's body, put the item's rows through this partition object, in the same thread or
        task. If the partition stops accepting rows in the meantime, a put stores nothing and
        returns an empty ref, and `admit` returns permits with `n` = 0. In code outside the loop,
        both calls raise an error in that case.
        """
        return Producer(self._handle, items)

    def lost(self, timeout: float | None = None) -> Lost:
        """Iterate over the keys of rows that were lost when a peer died or left, one list at a
        time, so that you can put these rows again.

        The first list contains the keys of all rows lost so far. A new list follows within seconds
        of each later loss. If a row of a group was lost, the list contains the keys of all rows of
        the group. The loop ends when the partition is dropped, or when it is sealed and every stage
        has received every row.

        `timeout`: seconds to wait for each list before raising DeadlineExceeded. With None, wait
        without a limit.
        """
        return Lost(self._handle, timeout)

    # looking

    @public
    async def get(
        self,
        keys: Names | None = None,
        fields: Sequence[str] | None = None,
        where: Where | None = None,
        *,
        timeout: float | None = DEFAULT_TIMEOUT_S,
    ) -> Rows:
        """Read rows without a lease: the rows with these `keys`, in that order; the rows that match
        `where`; or all rows.

        `fields`: which fields to read; None reads all fields. Raises RowsGone for rows that were
        freed or never put.
        """
        return Rows(self._handle, await read(self._handle, keys, where, fields, timeout))

    @public
    async def rows(
        self,
        where: Where | None = None,
        *,
        timeout: float | None = DEFAULT_TIMEOUT_S,
    ) -> Rows:
        """Return the keys, groups and tags of rows, without their values."""
        return await self.get(fields=(), where=where, timeout=timeout)

    @public
    async def stats(self, *, timeout: float | None = DEFAULT_TIMEOUT_S) -> dict[str, Any]:
        """Return statistics of this partition as nested dicts: rows, groups, bytes and stages.

        `open_groups` lists the oldest 1,000 groups that are still open, with the number of
        rows that each group has (`rows`) and will have (`of`; None until `close` sets it). `bytes`
        counts each stored value once. Values of a dropped row still count until all rows that were
        stored in the same chunk are freed.
        """
        return await partition_stats(self._handle, timeout)

    def __reduce__(self) -> Any:
        """Pickle the partition. The other process uses it through a client of its own."""
        return _reattached, (self._handle.plane, self.name, self._handle.defined)

    def __repr__(self) -> str:
        defined = self._handle.defined
        state = "not attached yet" if defined is None else f"generation {defined.generation}"
        return f"<aio.Partition {self.name!r} of plane {self._handle.session.plane!r}, {state}>"


def _reattached(plane: Any, name: str, defined: Defined | None) -> Partition:
    return Partition(Handle(plane._session, name, defined, plane))
