"""Partition on an event loop: as `dataplane.Partition`, with `await`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

from dataplane.client import changes, core, reads
from dataplane.client.aio_batch import Batch, Rows, Run
from dataplane.client.changes import Dropped
from dataplane.client.core import DEFAULT_TIMEOUT_S, Handle
from dataplane.client.lease import Demand, claim
from dataplane.client.losses import AsyncLost
from dataplane.client.putting import put
from dataplane.client.ref import Ref
from dataplane.client.rows import Names, TagValues
from dataplane.client.stream import AsyncStream
from dataplane.metadata.where import Where
from dataplane.wire.messages import Defined
from dataplane.wire.tables import Name, Scalar


class Partition:
    """A named set of rows; see `dataplane.Partition`."""

    def __init__(self, run: Run, handle: Handle) -> None:
        self._run = run
        self._handle = handle

    @property
    def name(self) -> str:
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
        overflow: str | None = None,
        timeout: float | None = DEFAULT_TIMEOUT_S,
    ) -> Ref:
        """As `dataplane.Partition.put`."""
        return await self._run(
            put(self._handle, columns, key, group, tags, dedup, replace, overflow, timeout)
        )

    async def tag(
        self,
        keys: Names,
        tags: TagValues,
        *,
        expect: Mapping[str, Scalar] | None = None,
        timeout: float | None = DEFAULT_TIMEOUT_S,
    ) -> None:
        """As `dataplane.Partition.tag`."""
        await self._run(changes.tag(self._handle, keys, tags, expect, timeout))

    async def close(
        self, group: Name, n: int, *, timeout: float | None = DEFAULT_TIMEOUT_S
    ) -> None:
        """As `dataplane.Partition.close`."""
        await self._run(core.close_group(self._handle, group, n, timeout))

    async def seal(self, *, timeout: float | None = DEFAULT_TIMEOUT_S) -> None:
        """As `dataplane.Partition.seal`."""
        await self._run(core.seal(self._handle, timeout))

    async def reset(self, stage: str, *, timeout: float | None = DEFAULT_TIMEOUT_S) -> None:
        """As `dataplane.Partition.reset`."""
        await self._run(core.reset(self._handle, stage, timeout))

    async def drop(
        self,
        keys: Names | None = None,
        groups: Names | None = None,
        where: Where | None = None,
        *,
        timeout: float | None = DEFAULT_TIMEOUT_S,
    ) -> Dropped:
        """As `dataplane.Partition.drop`."""
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
        """As `dataplane.Partition.claim`."""
        demand = Demand(rows, groups, budget, min, where, unit)
        operation = claim(self._handle, stage, demand, fields, timeout, lease)
        return Batch(self._run, self._handle, stage, await self._run(operation))

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
    ) -> AsyncStream:
        """As `dataplane.Partition.stream`, with `async for`."""
        return AsyncStream(
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

    async def wait(
        self,
        stage: str,
        *,
        rows: int | None = None,
        groups: int | None = None,
        below: int | None = None,
        unit: str | None = None,
        timeout: float | None = None,
    ) -> None:
        """As `dataplane.Partition.wait`."""
        await self._run(core.wait(self._handle, stage, rows, groups, below, unit, timeout))

    def lost(self, timeout: float | None = None) -> AsyncLost:
        """As `dataplane.Partition.lost`, with `async for`."""
        return AsyncLost(self._run, self._handle, timeout)

    # looking

    async def get(
        self,
        keys: Names | None = None,
        fields: Sequence[str] | None = None,
        where: Where | None = None,
        *,
        timeout: float | None = DEFAULT_TIMEOUT_S,
    ) -> Rows:
        """As `dataplane.Partition.get`."""
        found = await self._run(reads.read(self._handle, keys, where, fields, timeout))
        return Rows(self._run, self._handle, *found)

    async def rows(
        self,
        where: Where | None = None,
        *,
        timeout: float | None = DEFAULT_TIMEOUT_S,
    ) -> Rows:
        """As `dataplane.Partition.rows`."""
        return await self.get(fields=(), where=where, timeout=timeout)

    async def stats(self, *, timeout: float | None = DEFAULT_TIMEOUT_S) -> dict[str, Any]:
        """As `dataplane.Partition.stats`."""
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
