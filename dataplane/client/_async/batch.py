"""Rows and batches in the hands of a caller, and what may be done with them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dataplane.client import arguments
from dataplane.client._async.backend import Fetching, convert_off_loop
from dataplane.client._async.calls import DEFAULT_TIMEOUT_S, public
from dataplane.client._async.lease import Lease, Outcome, positions
from dataplane.client._async.reads import read_rows
from dataplane.client.deadline import Deadline
from dataplane.client.handle import Handle
from dataplane.client.read import convert
from dataplane.client.read.ragged import Padding, Side
from dataplane.client.read.selection import Selection
from dataplane.client.read.tensors import Each, Form, Layout
from dataplane.client.write.rows import Names, TagValues
from dataplane.client.write.values import by_name
from dataplane.errors import DataplaneError, LeaseExpired, NotFetched
from dataplane.wire.messages import Claimed

if TYPE_CHECKING:
    import pyarrow
    from tensordict import TensorDict

log = logging.getLogger(__name__)


class Converting(Fetching):
    """Conversions for trainers. Fields that have not been fetched are fetched first."""

    @public
    async def fetch(self, *fields: str, timeout: float | None = DEFAULT_TIMEOUT_S) -> None:
        """Fetch more fields. A blocking `batch["field"]` does this by itself; in `dataplane.aio` it
        raises NotFetched. Raises RowsGone if rows without a lease have been freed."""
        await self._more(fields, timeout)

    async def _more(self, fields: Sequence[str], timeout: float | None) -> None:
        raise NotImplementedError

    @public
    async def numpy(self, field: str, view: bool = False) -> npt.NDArray[Any] | list[Any]:
        """Return a private, writable array `[n, …]`, or a list of arrays if shapes differ.
        `view=True`: read-only views, without a copy if the rows are adjacent."""
        if view and field in self and (dense := convert.as_it_lies(self[field])) is not None:
            return dense
        made: npt.NDArray[Any] | list[Any] = await self._converted(
            [field], "cpu", lambda device: convert.to_numpy(self[field], view)
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

    @public
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
        return await convert_off_loop(work, device, sum(map(self.nbytes, fields)))


class Rows(Converting):
    """Rows that were read without a lease. Fields that were not read can be fetched later."""

    async def _more(self, fields: Sequence[str], timeout: float | None) -> None:
        """Raises RowsGone if the rows have been freed."""
        self._admit(*await read_rows(self._handle, self._rows, fields, timeout))


class LeasedRows(Converting):
    """Rows under a lease: what a batch and a micro-batch of a plan have in common."""

    def __init__(self, handle: Handle, stage: str, claimed: Claimed) -> None:
        super().__init__(handle, claimed.table, handle.session.pinned(claimed.pin))
        self.lease = Lease(handle, stage, claimed)
        self._of: LeasedRows | None = None
        self._at: npt.NDArray[np.intp] | None = None
        self._outcome = ""

    @property
    def stage(self) -> str:
        """The stage that leased the rows."""
        return self.lease.stage

    @property
    def state(self) -> str:
        """`leased`, `acked`, `released`, `dropped`, `expired` or `finished`. For a part: the state
        of its rows."""
        if self._at is None:
            return self.lease.state
        if len(self.lease.open_among(self._at)):
            return "leased"
        return self._outcome or self.lease.state.replace("leased", "finished")

    def _become_part(self, of: Selection, at: npt.NDArray[np.intp]) -> None:
        super()._become_part(of, at)
        assert isinstance(of, LeasedRows)
        self._of, self._at, self._outcome = of, at if of._at is None else of._at[at], ""


class Batch(LeasedRows):
    """Rows leased by a stage. They return to the stage unless the batch is acked or dropped.

    As a context manager, a batch acks at the end of the body, and releases if the body raises.
    Fetched values stay readable after either. `batch[0:16]` and `batch.rows([…])` are parts with
    the same methods; the batch then acks the other rows. Use a batch in one thread or task at a
    time.
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
        """Add fields, one value per row: by name, as a mapping, or as a TensorDict.

        The call copies the values. The ack stores them.

        Raises FieldExists for a field that was added before, and LeaseExpired once the lease has
        ended.
        """
        given = {} if columns is None else dict(by_name(columns))
        await self.lease.add({**given, **named}, Deadline(timeout), self._at)

    @public
    async def ack(self, *, timeout: float | None = DEFAULT_TIMEOUT_S) -> None:
        """Ack: the stage is done with these rows.

        Added values and the ack are stored together, or neither is. Safe to repeat after a failure:
        the retry sends the same values. Raises FieldExists if another writer has set one of the
        fields: add the value under another name, or release the rows.
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
        await self._finish("release", timeout, tags, values)

    @public
    async def drop(
        self,
        groups: Names | None = None,
        rows: Sequence[int] | None = None,
        *,
        timeout: float | None = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Drop rows for every stage, and free them: the rows of `groups`, the rows at the
        positions `rows` in the batch, or all rows. The lease of the other rows continues."""
        self.lease.check()
        if rows is None and groups is None:
            await self._finish("drop", timeout)
            return
        at = positions(rows, groups, self._table, len(self))
        if self._at is not None:
            at = self._at[at]
        if len(at := self.lease.open_among(at)):
            await self.lease.finish("drop", Deadline(timeout), at)

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

    async def _finish(
        self,
        outcome: Outcome,
        timeout: float | None,
        tags: TagValues | None = None,
        values: Mapping[str, Any] | None = None,
    ) -> None:
        self._check()
        given = None if values is None else by_name(values)
        await self.lease.finish(outcome, Deadline(timeout), self._at, tags, given)
        self._outcome = {"ack": "acked", "release": "released", "drop": "dropped"}[outcome]

    def _check(self) -> None:
        """LeaseExpired where these rows are finished."""
        if self._at is not None and self.lease.state == "leased" and self.state != "leased":
            raise LeaseExpired(
                f"the rows of this part of the batch were already {self.state}, so they can no "
                "longer be changed; claim again",
                stage=self.stage,
            )

    async def _more(self, fields: Sequence[str], timeout: float | None) -> None:
        """Fetch under the lease; once that has ended, read by key."""
        if self.state == "leased":
            added = set(fields) & set(self.lease.added)
            if added:
                raise NotFetched(
                    f"field {', '.join(sorted(added))} was added to this batch and can only "
                    "be read after the ack",
                    fields=sorted(added),
                )
            if self._of is not None:  # for all of them at once
                missing = [name for name in fields if name not in self._of]
                if missing:
                    await self._of._more(missing, timeout)
                for name in fields:
                    self._admit(*self._of._found(name))
                return
            done = await self.lease.fetch(fields, Deadline(timeout))
            self._admit(done.table, self._handle.session.pinned(done.pin))
        else:
            self._admit(*await read_rows(self._handle, self._rows, fields, timeout))

    def __repr__(self) -> str:
        lease, state = self.lease, self.state
        left = len(lease.open_among(self._at))
        if state == "leased" and left < len(self):
            state = f"leased, {left} left"
        added = f", added {', '.join(lease.added)}" if lease.added else ""
        return (
            f"<Batch {len(self)} rows of {self.partition!r} for {self.stage!r}, {state}: "
            f"{self._described_fields()}{added}>"
        )
