"""Rows and batches in the hands of a caller, and what may be done with them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from dataplane.client import arguments
from dataplane.client.aio.driver import Fetching, Run, conversion
from dataplane.client.core import DEFAULT_TIMEOUT_S, Handle, Operation
from dataplane.client.operations.leased import LeasedRows
from dataplane.client.operations.reads import read_rows
from dataplane.client.read import convert
from dataplane.client.read.ragged import Padding, Side
from dataplane.client.read.tensors import Each, Form, Layout
from dataplane.client.write.rows import Names, TagValues
from dataplane.errors import DataplaneError
from dataplane.memory.mapping import Pin
from dataplane.wire.messages import Claimed
from dataplane.wire.tables import Table

if TYPE_CHECKING:
    import pyarrow
    from tensordict import TensorDict

log = logging.getLogger(__name__)


class Converting(Fetching):
    """Conversions for trainers. Fields that have not been fetched are fetched first."""

    _run: Run

    async def fetch(self, *fields: str, timeout: float | None = DEFAULT_TIMEOUT_S) -> None:
        """Fetch more fields. A blocking `batch["field"]` does this by itself; in `dataplane.aio` it
        raises NotFetched. Raises RowsGone if rows without a lease have been freed."""
        await self._run(self._more(fields, timeout))

    def _more(self, fields: Sequence[str], timeout: float | None) -> Operation[None]:
        raise NotImplementedError

    async def numpy(self, field: str, view: bool = False) -> npt.NDArray[Any] | list[Any]:
        """Return a private, writable array `[n, …]`, or a list of arrays if shapes differ.
        `view=True`: read-only views, without a copy if the rows are adjacent."""
        if view and field in self and (dense := convert.as_it_lies(self[field])) is not None:
            return dense
        made: npt.NDArray[Any] | list[Any] = await self._converted(
            [field], "cpu", lambda device: convert.to_numpy(self[field], view)
        )
        return made

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
        """Return a private, writable copy as a torch tensor.

        - `layout`: "dense"; "padded" with `padding`; "jagged" (a nested tensor); or "list". "auto"
          is dense if all rows have one shape, else a list. Jagged fields of equal lengths share
          their offsets.
        - `padding`, `side`, `length`, `multiple`: padded rows are filled at the "right" or "left",
          to the longest row, to `length`, or to the next multiple of `multiple`. The dtype must be
          able to hold `padding`, else InvalidValue; a float is rounded.
        - `mask=True`: return a pair, the tensor and a bool tensor [n, length] that is True where
          values are.
        - `view=True`: tensors over the shared read-only memory. Writing to them crashes the
          process.
        - `device`: copies to a GPU go through pinned memory, on torch's current stream. A blocking
          call may return before the copy is done; in `dataplane.aio` the copy is done.
        """
        shape = Padding(padding, side, length, multiple)
        return await self._converted(
            [field],
            device,
            lambda where: self._tensors(self[field], layout, shape, view, where, mask),
        )

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
        """Return the fields (default: those fetched) as a TensorDict of batch_size [n], in private
        memory. Needs `dataplane-rl[torch]`.

        - `layout`: "auto" returns each field as it was put. An array or tensor [n, …] is dense.
          Nested tensors, lists of arrays and lists of numbers are nested jagged tensors; those of
          equal lengths share their offsets. Numbers are a tensor [n], anything else is a
          NonTensorStack. "padded" and "jagged" change only fields whose rows have lengths of their
          own. "dense" and "list" are what they say; InvalidValue if rows do not fit.
        - `padding`, `side`, `length`, `multiple`: as in `torch`. One padding for all fields fills
          bool fields with False.
        - `mask`: the name of a bool tensor [n, length] that is True where padded fields have
          values; a mapping by field if lengths differ.
        - `device`: as in `torch`.

        Each of these may be a mapping by field. A field "a.b" is "b" in a nested TensorDict "a". If
        arrays of a field cannot form a tensor, because dtypes or ranks differ, the log says so.
        """
        names = self.fields if fields is None else arguments.texts(fields, "fields")
        form = Form(layout, padding, side, length, multiple, mask)
        return await self._converted(
            names,
            device,
            lambda where: self._tensordict({name: self[name] for name in names}, form, where),
        )

    async def arrow(self, fields: Sequence[str] | None = None) -> pyarrow.Table:
        """Return the fields (default: those fetched), keys and tags as a pyarrow table. Raises
        InvalidValue for a field, key or tag, with its row, that Arrow cannot represent exactly."""
        names = self.fields if fields is None else arguments.texts(fields, "fields")

        def table(device: str) -> pyarrow.Table:
            return convert.to_arrow({n: self[n] for n in names}, keys=self.keys, tags=self.tags)

        return await self._converted(names, "cpu", table)

    async def _converted(self, fields: list[str], device: str, work: Callable[[str], Any]) -> Any:
        missing = [field for field in fields if field not in self]
        if missing:
            await self.fetch(*missing)
        return await self._run(conversion(work, device, sum(map(self.nbytes, fields))))


class Rows(Converting):
    """Rows that were read without a lease. Fields that were not read can be fetched later."""

    def __init__(self, run: Run, handle: Handle, table: Table, pin: Pin) -> None:
        super().__init__(handle, table, pin)
        self._run = run

    def _more(self, fields: Sequence[str], timeout: float | None) -> Operation[None]:
        """RowsGone where the rows were freed since."""
        self._admit(*(yield from read_rows(self._handle, self._rows, fields, timeout)))


class Batch(LeasedRows, Converting):
    """Rows leased by a stage. They return to the stage unless the batch is acked or dropped.

    As a context manager, a batch acks at the end of the body, and releases if the body raises.
    Fetched values stay readable after either. `batch[0:16]` and `batch.rows([…])` are parts with
    the same methods; the batch then acks the other rows. Use a batch in one thread or task at a
    time.
    """

    def __init__(self, run: Run, handle: Handle, stage: str, claimed: Claimed) -> None:
        super().__init__(handle, stage, claimed)
        self._run = run

    async def add(
        self,
        columns: Mapping[str, Any] | None = None,
        /,
        *,
        timeout: float | None = DEFAULT_TIMEOUT_S,
        **named: Any,
    ) -> None:
        """Add fields, one value per row: by name, as a mapping, or as a TensorDict.

        The call copies the values. The ack stores them.

        Raises FieldExists for a field that was added before, and LeaseExpired once the lease has
        ended.
        """
        await self._run(self._add(columns, named, timeout))

    async def ack(self, *, timeout: float | None = DEFAULT_TIMEOUT_S) -> None:
        """Ack: the stage is done with these rows.

        Added values and the ack are stored together, or neither is. Safe to repeat after a failure:
        the retry sends the same values. Raises FieldExists if another writer has set one of the
        fields: add the value under another name, or release the rows.
        """
        await self._run(self._finish("ack", timeout))

    async def release(
        self,
        tags: TagValues | None = None,
        *,
        values: Mapping[str, Any] | None = None,
        timeout: float | None = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Return the rows to their stage as they were claimed. Added fields are discarded.

        - `tags`: set on the rows, for example to count attempts.
        - `values`: progress for the next worker, one value per row, stored together with the
          release. After `batch.release(values={"so_far": tokens})`, the next claim of these rows by
          this stage reads `batch["so_far"]`, whatever its `fields=`. `batch.get("so_far")` has None
          for rows without progress. Other stages and `plane.get` do not see progress, and it makes
          no row ready. The next release replaces it. The stage's ack removes it.

        Raises LeaseExpired if there is something to store and the lease has ended, and FieldExists
        if a row already has a field of that name.
        """
        await self._run(self._finish("release", timeout, tags, values))

    async def drop(
        self,
        groups: Names | None = None,
        rows: Sequence[int] | None = None,
        *,
        timeout: float | None = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Drop rows for every stage, and free them: the rows of `groups`, the rows at the
        positions `rows` in the batch, or all rows. The lease of the other rows continues."""
        await self._run(self._drop(rows, groups, timeout))

    async def __aenter__(self) -> Batch:
        return self

    async def __aexit__(self, kind: object, exc: object, trace: object) -> None:
        if self.state != "leased":
            return
        if kind is None:
            await self.ack()
            return
        try:
            await self.release()
        except DataplaneError as failure:
            # The body's own exception is the one to see.
            log.warning(
                "partition %r, stage %r: could not release a batch of %d rows, which return to "
                "the stage when the session ends: %s",
                self.partition,
                self.stage,
                len(self),
                failure,
            )
