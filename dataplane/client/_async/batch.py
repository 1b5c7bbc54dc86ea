"""Rows and batches: read and convert their fields, add fields, ack, release and drop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dataplane.client import arguments
from dataplane.client._async.backend import Fetching, convert_off_loop
from dataplane.client._async.calls import DEFAULT_TIMEOUT_S, UNKNOWN, public
from dataplane.client._async.lease import ENDED, Lease, Outcome, dropped
from dataplane.client._async.reads import read_rows
from dataplane.client.arguments import Deadline
from dataplane.client.read import convert
from dataplane.client.read.ragged import Padding, Side
from dataplane.client.read.selection import Selection
from dataplane.client.read.table import TableReader, reader_of
from dataplane.client.read.tensors import Each, Layout, TensorDictForm, to_tensordict
from dataplane.client.session.session import Handle
from dataplane.client.write.columns import named_once
from dataplane.client.write.rows import Names, TagValues
from dataplane.errors import DataplaneError, LeaseExpired, NotFetched, counted

if TYPE_CHECKING:
    import pyarrow
    from tensordict import TensorDict

log = logging.getLogger(__name__)


class Converting(Fetching):
    """Rows that can be converted for a trainer. A conversion first fetches missing fields."""

    @public
    async def fetch(self, *fields: str, timeout: float | None = DEFAULT_TIMEOUT_S) -> None:
        """Fetch more fields of the rows.

        In the blocking client, `batch["field"]` fetches a missing field automatically. In
        `dataplane.aio`, `batch["field"]` raises NotFetched, so fetch the field first. Raises
        RowsGone if the rows have no lease and have been freed.
        """
        await self._more(arguments.texts(fields, "fields"), timeout)

    async def _more(self, fields: Sequence[str], timeout: float | None) -> None:
        raise NotImplementedError

    @public
    async def numpy(self, field: str, view: bool = False) -> npt.NDArray[Any] | list[Any]:
        """Return a field as a private, writable array `[n, …]`, or as a list of arrays if the
        shapes differ. `view=True` returns read-only views instead. They share the arena's memory if
        the rows are adjacent there."""
        name = arguments.text(field, "the field")
        if view and name in self and (dense := self[name].dense()) is not None:
            return dense
        made: npt.NDArray[Any] | list[Any] = await self._converted(
            [name], "cpu", lambda device: convert.to_numpy(self[name], view)
        )
        return made

    @public
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
        """Return a field as a torch tensor, which is a private, writable copy.

        - `layout`: "dense"; "padded" with `padding`; "jagged" (a nested tensor); or "list". "auto"
          is dense if all rows have the same shape, else a list. Jagged fields with equal row
          lengths share their offsets.
        - `padding`: the value that fills padded rows. In a float dtype, a float is rounded to the
          precision of that dtype. Raises InvalidValue if the dtype cannot represent the value.
        - `side`, `length`, `multiple`: rows are padded on the "right" or "left", up to the length
          of the longest row, to `length`, or to the next multiple of `multiple`.
        - `mask=True`: return the pair (tensor, mask). The mask is a bool tensor [n, length] that is
          True at values and False at padding.
        - `view=True`: return tensors over the shared, read-only memory. Writing to such a tensor
          crashes the process.
        - `device`: the device of the tensor. Copies to a GPU go through pinned memory, on torch's
          current stream. A blocking call may return before the copy has finished. In
          `dataplane.aio`, the call returns after the copy has finished.
        """
        name, shape = arguments.text(field, "the field"), Padding(padding, side, length, multiple)
        return await self._converted(
            [name],
            device,
            lambda where: self._tensors(self[name], layout, shape, view, where, mask),
        )

    @public
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
        """Return the fields (default: all fetched ones) as a TensorDict of batch_size [n], in
        private memory. Needs `dataplane-rl[torch]`.

        - `layout`: "auto" returns each field as it was put. An array or tensor [n, …] is dense.
          Nested tensors, lists of arrays and lists of numbers become jagged nested tensors; those
          with equal row lengths share their offsets. Numbers become a tensor [n], and anything else
          becomes a NonTensorStack. "padded" and "jagged" change only fields whose rows may differ
          in length. "dense" and "list" apply to every field; they raise InvalidValue if
          the rows do not fit the layout.
        - `padding`, `side`, `length`, `multiple`: as in `torch`. A single `padding` value does not
          apply to bool fields, which are padded with False.
        - `mask`: the name of a bool tensor [n, length] to add, which is True at the values of
          padded fields. If the fields differ in length, pass a mapping from field to name.
        - `device`: as in `torch`.

        Each of these arguments except `device` may also be a mapping from field to value. A field
        "a.b" becomes "b" in a nested TensorDict "a". If the arrays of a field differ in dtype or
        rank, they cannot form a tensor: the field becomes a NonTensorStack, and a warning is
        logged.
        """
        names = self.fields if fields is None else arguments.texts(fields, "fields")
        form = TensorDictForm(layout, padding, side, length, multiple, mask)
        direct = self._handle.session.direct

        def work(where: str) -> TensorDict:
            columns = {name: self[name] for name in names}
            return to_tensordict(columns, len(self), form, where, direct, self._offsets)

        return await self._converted(names, device, work)

    @public
    async def arrow(self, fields: Sequence[str] | None = None) -> pyarrow.Table:
        """Return the fields (default: all fetched ones), keys and tags as a pyarrow table. Raises
        InvalidValue, which names the row, if Arrow cannot represent a value, key or tag exactly."""
        names = self.fields if fields is None else arguments.texts(fields, "fields")

        def table(device: str) -> pyarrow.Table:
            return convert.to_arrow({n: self[n] for n in names}, keys=self.keys, tags=self.tags)

        return await self._converted(names, "cpu", table)

    async def _converted(self, fields: list[str], device: str, work: Callable[[str], Any]) -> Any:
        missing = [field for field in fields if field not in self]
        if missing:
            await self.fetch(*missing)
        return await convert_off_loop(work, device, sum(map(self.nbytes, fields)))


class Rows(Converting):
    """Rows that were read without a lease. Fields that were not read can be fetched later."""

    async def _more(self, fields: Sequence[str], timeout: float | None) -> None:
        """Raises RowsGone if the rows have been freed."""
        self._admit(await read_rows(self._handle, self._rows, fields, timeout))


class LeasedRows(Converting):
    """Rows under a lease: a batch, or a micro-batch of a plan."""

    def __init__(self, handle: Handle, stage: str, lease: int, reader: TableReader) -> None:
        super().__init__(handle, reader)
        self.lease = Lease(handle, stage, lease, len(self), self._rows.group_index)
        self._of: LeasedRows | None = None
        """the rows that these rows are a part of"""
        self._where: npt.NDArray[np.intp] | None = None
        """positions of these rows in `_of`"""
        self._at: npt.NDArray[np.intp] | None = None
        self._outcome = ""

    @property
    def stage(self) -> str:
        """The stage that leased the rows."""
        return self.lease.stage

    @property
    def state(self) -> str:
        """The state of the batch: `leased`, `acked`, `released`, `dropped`, `expired` or
        `finished` (its rows ended in different ways). For a part of a batch, the state of its rows.
        """
        if self._at is None:
            return self.lease.state
        if self.lease.open_among(self._at):
            return "leased"
        if not len(self._at):  # an empty part has the state of its batch until it is finished
            return self._outcome or self.lease.state
        return self._outcome or self.lease.state.replace("leased", "finished")

    def _become_part(self, of: Selection, at: npt.NDArray[np.intp]) -> None:
        super()._become_part(of, at)
        assert isinstance(of, LeasedRows)
        self._of, self._where, self._outcome = of, at, ""
        self._at = at if of._at is None else of._at[at]

    def _unused(self) -> None:
        """Note that no caller will get this prefetched batch. Its rows return to the stage."""
        self.lease.abandon()


class Batch(LeasedRows):
    """Rows leased by a stage. When the lease ends, rows that were neither acked nor dropped return
    to the stage.

    Used as a context manager, a batch is acked when the body ends, and released if the body raises.
    Fetched values stay readable afterwards. `batch[0:16]` and `batch.rows([…])` return parts of
    the batch, which have the same methods. If a part has been acked, released or dropped, `ack` on
    the batch applies to the remaining rows. Use a batch in only one thread or task at a time.
    """

    @public
    async def add(
        self,
        columns: Mapping[str, Any] | None = None,
        /,
        *,
        timeout: float | None = DEFAULT_TIMEOUT_S,
        **named: Any,
    ) -> None:
        """Add fields to the rows, one value per row. Pass the fields as keyword arguments, a
        mapping or a TensorDict.

        The call copies the values. The ack stores them and makes them visible to other stages.

        Raises FieldExists if a field was already added, and LeaseExpired if the lease has ended or
        some of the rows are already acked or released.
        """
        await self.lease.add(named_once(columns, named), Deadline(timeout), self._at)

    @public
    async def ack(self, *, timeout: float | None = DEFAULT_TIMEOUT_S) -> None:
        """Ack the rows: the stage is done with them.

        The ack and the added values are stored together, or neither is stored. You can safely
        repeat an ack that failed: the retry sends the same values. Raises FieldExists if another
        writer has set one of the added fields. In that case, add the values under another name, or
        release the rows.
        """
        await self._finish("ack", timeout)

    @public
    async def release(
        self,
        tags: TagValues | None = None,
        *,
        values: Mapping[str, Any] | None = None,
        timeout: float | None = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Return the rows to their stage as they were when claimed. Added fields are discarded.

        - `tags`: tags to set on the rows, for example to count attempts.
        - `values`: progress for the next worker, one value per row, stored together with the
          release. After `batch.release(values={"so_far": tokens})`, the stage's next claim of these
          rows includes `batch["so_far"]`, even if `fields=` does not name it.
          `batch.get("so_far")` is None for rows without progress. Only this stage sees the
          progress, and no stage can require it as a field. The next release replaces the progress,
          and the stage's ack removes it.

        Raises LeaseExpired if there are tags or values to store but the lease has ended. Raises
        FieldExists if a row already has a field that `values` names.
        """
        await self._finish("release", timeout, tags, values)

    @public
    async def drop(
        self,
        groups: Names | None = None,
        rows: Sequence[int] | None = None,
        *,
        timeout: float | None = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Drop rows for every stage and free them. Pass `groups`, or `rows` (positions in the
        batch), or neither for the whole batch. The other rows stay leased."""
        self.lease.check()
        if rows is None and groups is None:
            await self._finish("drop", timeout)
            return
        at = dropped(rows, groups, self._table, len(self))
        if self._at is not None:
            at = self._at[at]
        if self.lease.open_among(at):
            await self.lease.finish("drop", Deadline(timeout), at)

    async def __aenter__(self) -> Batch:
        return self

    async def __aexit__(self, kind: object, exc: object, trace: object) -> None:
        if self.state != "leased":
            return
        if kind is None:
            await self.ack()
            return
        if isinstance(exc, UNKNOWN) and self._at is None:
            self.lease.abandon()  # the peer did not reply: do not wait again
            return
        try:
            await self.release()
        except DataplaneError as failure:
            # Show the exception of the body instead.
            log.warning(
                "partition %r, stage %r: could not release a batch of %d rows: %s. The rows return "
                "to the stage when the session ends",
                self.partition,
                self.stage,
                len(self),
                failure,
            )

    async def _finish(
        self,
        outcome: Outcome,
        timeout: float | None,
        tags: TagValues | None = None,
        values: Mapping[str, Any] | None = None,
    ) -> None:
        self._check()
        given = None if values is None else named_once(values, {})
        await self.lease.finish(outcome, Deadline(timeout), self._at, tags, given)
        self._outcome = ENDED[outcome]

    def _check(self) -> None:
        """Raise LeaseExpired if these rows are finished. An empty part never is."""
        if self._at is None or not len(self._at):
            return
        if self.lease.state == "leased" and self.state != "leased":
            raise LeaseExpired(
                f"the rows of this part of the batch are already {self.state}, so they can no "
                "longer be changed: claim a new batch",
                stage=self.stage,
            )

    async def _more(self, fields: Sequence[str], timeout: float | None) -> None:
        """Fetch under the lease, or by key after the lease has ended."""
        if self.state == "leased":
            added = set(fields) & set(self.lease.added)
            if added:
                raise NotFetched(
                    f"cannot read {', '.join(map(repr, sorted(added)))} from this batch yet: "
                    "values added to a batch become readable when the batch is acked. Ack the "
                    "batch first",
                    fields=sorted(added),
                )
            if self._of is not None and self._where is not None:  # one request for all fields
                missing = [name for name in fields if name not in self._of]
                if missing:
                    await self._of._more(missing, timeout)
                self._share(self._of, fields, self._where)
                return
            done = await self.lease.fetch(fields, Deadline(timeout))
            self._admit(reader_of(self._handle.session, done))
        else:
            self._admit(await read_rows(self._handle, self._rows, fields, timeout))

    def __repr__(self) -> str:
        lease, state = self.lease, self.state
        left = lease.open_among(self._at).bit_count()
        if state == "leased" and left < len(self):
            state = f"leased, {left} left"
        added = f", added {', '.join(lease.added)}" if lease.added else ""
        return (
            f"<Batch {counted(len(self), 'row')} of {self.partition!r} for {self.stage!r}, "
            f"{state}: {self._described_fields()}{added}>"
        )
