"""Rows and batches on an event loop.

`batch["field"]` never waits: what was not fetched is `await batch.fetch("field")`, or comes with
`await batch.numpy("field")` and its like.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy.typing as npt

from dataplane.client import arguments, convert
from dataplane.client.batch import LeasedRows
from dataplane.client.core import DEFAULT_TIMEOUT_S, Handle, Offload, Operation
from dataplane.client.ragged import Padding, Side
from dataplane.client.reads import read_rows
from dataplane.client.rows import Names, TagValues
from dataplane.client.selection import Selection
from dataplane.client.tensors import Each, Form, Layout, place_named, settled
from dataplane.errors import DataplaneError
from dataplane.memory.mapping import Pin
from dataplane.wire.messages import Claimed
from dataplane.wire.tables import Table

if TYPE_CHECKING:
    import pyarrow
    from tensordict import TensorDict

log = logging.getLogger(__name__)

T = TypeVar("T")


class Run(Protocol):
    """How operations are carried out: `Plane.run`."""

    def __call__(self, operation: Operation[T], /) -> Awaitable[T]: ...


class Converting(Selection):
    """What trainers ask for. Fields that are not here are fetched; big copies leave the loop."""

    _run: Run

    async def fetch(self, *fields: str, timeout: float | None = DEFAULT_TIMEOUT_S) -> None:
        """Bring more fields here."""
        raise NotImplementedError

    async def numpy(self, field: str, view: bool = False) -> npt.NDArray[Any] | list[Any]:
        """As `dataplane.Batch.numpy`."""
        array: npt.NDArray[Any] | list[Any] = await self._converted(
            [field], lambda: convert.to_numpy(self[field], view)
        )
        return array

    async def torch(
        self,
        field: str,
        layout: Layout = "auto",
        padding: float = 0,
        view: bool = False,
        device: str = "cpu",
        *,
        side: Side = "right",
        length: int | None = None,
        multiple: int | None = None,
        mask: bool = False,
    ) -> Any:
        """As `dataplane.Batch.torch`; on a GPU the copy is done when this returns."""
        where, shape = place_named(device), Padding(padding, side, length, multiple)

        def work() -> Any:
            return self._tensors(self[field], layout, shape, view, where, mask)

        return await self._converted([field], lambda: settled(where, work))

    async def tensordict(
        self,
        fields: Sequence[str] | None = None,
        *,
        layout: Each[Layout] = "auto",
        padding: Each[float] = 0,
        side: Each[Side] = "right",
        length: Each[int | None] = None,
        multiple: Each[int | None] = None,
        mask: str | Mapping[str, str] | None = None,
        device: str = "cpu",
    ) -> TensorDict:
        """As `dataplane.Batch.tensordict`; on a GPU the copies are done when this returns."""
        names = self.fields if fields is None else arguments.texts(fields, "fields")
        where, form = place_named(device), Form(layout, padding, side, length, multiple, mask)

        def work() -> Any:
            return self._tensordict({name: self[name] for name in names}, form, where)

        return await self._converted(names, lambda: settled(where, work))

    async def arrow(self, fields: Sequence[str] | None = None) -> pyarrow.Table:
        """As `dataplane.Batch.arrow`."""
        names = self.fields if fields is None else arguments.texts(fields, "fields")
        return await self._converted(
            names,
            lambda: convert.to_arrow({n: self[n] for n in names}, keys=self.keys, tags=self.tags),
        )

    async def _converted(self, fields: list[str], work: Callable[[], Any]) -> Any:
        missing = [field for field in fields if field not in self]
        if missing:
            await self.fetch(*missing)
        return await self._run(_offloaded(work, sum(map(self.nbytes, fields))))


def _offloaded(work: Callable[[], Any], nbytes: int) -> Operation[Any]:
    return (yield Offload(work, nbytes))


class Rows(Converting):
    """Rows that were read without a lease."""

    def __init__(self, run: Run, handle: Handle, table: Table, pin: Pin) -> None:
        super().__init__(handle, table, pin)
        self._run = run

    async def fetch(self, *fields: str, timeout: float | None = DEFAULT_TIMEOUT_S) -> None:
        """Read more fields of these rows. RowsGone where they were freed since."""
        self._admit(*await self._run(read_rows(self._handle, self._rows, fields, timeout)))


class Batch(LeasedRows, Converting):
    """Rows that a stage leased; as `dataplane.Batch`, and an async context manager."""

    def __init__(self, run: Run, handle: Handle, stage: str, claimed: Claimed) -> None:
        super().__init__(handle, stage, claimed)
        self._run = run

    async def fetch(self, *fields: str, timeout: float | None = DEFAULT_TIMEOUT_S) -> None:
        """Bring more fields here."""
        await self._run(self._more(fields, timeout))

    async def add(
        self,
        columns: Mapping[str, Any] | None = None,
        /,
        *,
        timeout: float | None = DEFAULT_TIMEOUT_S,
        **named: Any,
    ) -> None:
        """As `dataplane.Batch.add`. Copied at once; stored together with the ack."""
        await self._run(self._add(columns, named, timeout))

    async def ack(self, *, timeout: float | None = DEFAULT_TIMEOUT_S) -> None:
        """The stage is done with these rows; what was added is stored with it, or nothing is."""
        await self._run(self._finish("ack", timeout))

    async def release(
        self, tags: TagValues | None = None, *, timeout: float | None = DEFAULT_TIMEOUT_S
    ) -> None:
        """Give the rows back to their stage, as they were claimed."""
        await self._run(self._finish("release", timeout, tags))

    async def drop(
        self,
        groups: Names | None = None,
        rows: Sequence[int] | None = None,
        *,
        timeout: float | None = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Drop rows for every stage: those of these groups, at these positions, or all."""
        await self._run(self._drop(rows, groups, timeout))

    async def __aenter__(self) -> Batch:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.state != "leased":
            return
        if kind is None:
            await self.ack()
            return
        try:
            await self.release()
        except DataplaneError as failure:
            # The body's own exception is the one to see; the rows come back with the session.
            log.warning("%r was not released: %s", self, failure)
