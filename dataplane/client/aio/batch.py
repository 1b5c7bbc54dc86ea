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
    """What trainers ask for. Fields that are not here are brought first."""

    _run: Run

    async def fetch(self, *fields: str, timeout: float | None = DEFAULT_TIMEOUT_S) -> None:
        """Bring more fields here. `batch["field"]` does so by itself where nothing is awaited; of
        an aio batch it raises NotFetched. RowsGone where rows without a lease were freed since."""
        await self._run(self._more(fields, timeout))

    def _more(self, fields: Sequence[str], timeout: float | None) -> Operation[None]:
        raise NotImplementedError

    async def numpy(self, field: str, view: bool = False) -> npt.NDArray[Any] | list[Any]:
        """A private, writable array [n, …] where all rows have one shape, else a list of arrays.
        `view=True`: read-only views, without a copy where the rows lie side by side."""
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
        """A private, writable, packed copy as torch tensor: dense, padded with `padding`, jagged
        (a nested tensor) or a list; "auto" is dense where all rows have one shape, else a list.

        padded: at the `side` "right" or "left", to the longest row, to `length`, or to the next
        multiple of `multiple`; mask=True gives a pair, of the tensor and a bool tensor [n, length]
        that says where values are. The field's dtype must hold `padding` (InvalidValue otherwise);
        a float is rounded to its digits. jagged: those of equal lengths share their offsets.
        `view=True`: tensors over the shared read-only memory; writing into them crashes the
        process. device: a GPU is copied to from pinned memory, on torch's current stream; without
        `await` the copy may still be under way when this returns, with it it is done."""
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
        """The fields (default: those fetched) as a TensorDict with
        batch_size [n], in private memory; needs `dataplane-rl[torch]`.

        layout: "auto" gives each field back as it was put: an array or tensor [n, …] dense; nested
        tensors, lists of arrays and lists of numbers as nested jagged tensors, ragged where they
        were, of which fields of equal lengths share their offsets and so can be used together;
        numbers as a tensor [n]; everything else as a NonTensorStack. "padded" (or "jagged") is for
        the fields of rows with a length of their own, and leaves others dense; "dense" and "list"
        are what they say, InvalidValue where rows make no dense tensor. padding, side ("right" or
        "left"), length, multiple: as of `torch`. Each of these may be a mapping by field. One
        padding for all fields fills bools up with False. Where "auto" finds no tensor for arrays,
        because their dtypes or ranks differ, the log says so. mask: the name of a bool tensor
        [n, length] that says where padded fields have values; a mapping by field where their rows
        differ in length. device: as of `torch`. A field "a.b" is "b" in a nested TensorDict "a".
        """
        names = self.fields if fields is None else arguments.texts(fields, "fields")
        form = Form(layout, padding, side, length, multiple, mask)
        return await self._converted(
            names,
            device,
            lambda where: self._tensordict({name: self[name] for name in names}, form, where),
        )

    async def arrow(self, fields: Sequence[str] | None = None) -> pyarrow.Table:
        """The fields (default: those fetched) with keys and tags as a pyarrow table. InvalidValue
        names a field, a key or a tag, and the row, that Arrow has no exact form for."""
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
    """Rows that were read without a lease. Fields that are not here can be read later."""

    def __init__(self, run: Run, handle: Handle, table: Table, pin: Pin) -> None:
        super().__init__(handle, table, pin)
        self._run = run

    def _more(self, fields: Sequence[str], timeout: float | None) -> Operation[None]:
        """RowsGone where the rows were freed since."""
        self._admit(*(yield from read_rows(self._handle, self._rows, fields, timeout)))


class Batch(LeasedRows, Converting):
    """Rows that a stage leased. They go back unless the batch is acked or dropped.

    As a context manager it acks at the end of the body and releases when the body raised. What was
    fetched stays readable after either. `batch[0:16]` and `batch.rows([…])` are parts, with the
    same methods for their rows; the batch itself then acks what is left. Not for several threads
    or tasks at once.
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
        """Add fields, one value a row: by name, as a mapping, or as a TensorDict. Copied at once;
        stored together with the ack.

        FieldExists for a field that was added before; LeaseExpired once the lease has ended.
        """
        await self._run(self._add(columns, named, timeout))

    async def ack(self, *, timeout: float | None = DEFAULT_TIMEOUT_S) -> None:
        """Ack: the stage is done with these rows. Added values and the ack are stored together, or
        neither is.

        After a failure, call it again: it carries the same values. Raises FieldExists if another
        writer has set one of the fields: add the value under another name, or release the rows.
        """
        await self._run(self._finish("ack", timeout))

    async def release(
        self,
        tags: TagValues | None = None,
        *,
        values: Mapping[str, Any] | None = None,
        timeout: float | None = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Give the rows back to their stage, as they were claimed; what was added is forgotten.

        tags: set on the rows, for example to count attempts. values: progress, one value a row,
        which goes back with the rows or not at all: who claims them next for this stage has it in
        his batch whatever its fields=, as `batch["so_far"]` or `batch.get("so_far")`. No other
        stage and no `get` of the partition sees it, and nothing is ready by it. The next release of
        the field replaces it, and it ends with the stage's ack, or with the row.

        LeaseExpired once the lease has ended, where there is anything to store; FieldExists for
        progress under the name of a field that the rows have.
        """
        await self._run(self._finish("release", timeout, tags, values))

    async def drop(
        self,
        groups: Names | None = None,
        rows: Sequence[int] | None = None,
        *,
        timeout: float | None = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Drop rows for every stage, and free them: those of these groups, those at these
        positions in the batch, or all. The lease goes on for the others."""
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
                "partition %r, stage %r: a batch of %d rows was not released; they come back with "
                "the session: %s",
                self.partition,
                self.stage,
                len(self),
                failure,
            )
