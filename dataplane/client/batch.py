"""Batch: leased rows in the hands of a sync caller, and what it may do with them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from dataplane.client import arguments, convert
from dataplane.client.core import DEFAULT_TIMEOUT_S, Handle, Operation
from dataplane.client.lease import Lease, Outcome, positions
from dataplane.client.ragged import Padding, Side
from dataplane.client.reads import read_rows
from dataplane.client.rows import Names, TagValues
from dataplane.client.selection import Selection
from dataplane.client.tensors import Each, Form, Layout
from dataplane.client.values import by_name
from dataplane.errors import DataplaneError, LeaseExpired, NotFetched
from dataplane.memory.mapping import Pin
from dataplane.wire.messages import Claimed, Fetched
from dataplane.wire.tables import Table

if TYPE_CHECKING:
    import pyarrow
    from tensordict import TensorDict

log = logging.getLogger(__name__)

T = TypeVar("T")


class Run(Protocol):
    """How operations are carried out: `Plane.run`."""

    def __call__(self, operation: Operation[T], /) -> T: ...


class Converting(Selection):
    """What trainers ask for. Fields that are not here are brought first."""

    def numpy(self, field: str, view: bool = False) -> npt.NDArray[Any] | list[Any]:
        """A private, writable array [n, …] where all rows have one shape, else a list of arrays.
        `view=True`: read-only views, without a copy where the rows lie side by side."""
        return convert.to_numpy(self[field], view)

    def torch(
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
        that says where values are. jagged: those of equal lengths share their offsets.
        `view=True`: tensors over the shared read-only memory; writing into them crashes the
        process. On a GPU the copy may still be under way when this returns: it is asked of torch's
        current stream, from pinned memory."""
        shape = Padding(padding, side, length, multiple)
        return self._tensors(self[field], layout, shape, view, device, mask)

    def tensordict(
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
        batch_size [n], in private memory; needs `dataplane[torch]`.

        layout: "auto" gives each field back as it was put: an array or tensor [n, …] dense; nested
        tensors, lists of arrays and lists of numbers as nested jagged tensors, ragged where they
        were, of which fields of equal lengths share their offsets and so can be used together;
        numbers as a tensor [n]; everything else as a NonTensorStack. "padded" (or "jagged") is for
        the fields of rows with a length of their own, and leaves others dense; "dense" and "list"
        are what they say, InvalidValue where rows make no dense tensor. padding, side ("right" or
        "left"), length, multiple: as of `torch`. Each of these may be a mapping by field. mask: the
        name of a bool tensor [n, length] that says where padded fields have values; a mapping by
        field where their rows differ in length. device: "cuda" copies from pinned memory on torch's
        current stream, without waiting. A field "a.b" is "b" in a nested TensorDict "a".
        """
        names = self.fields if fields is None else arguments.texts(fields, "fields")
        form = Form(layout, padding, side, length, multiple, mask)
        return self._tensordict({name: self[name] for name in names}, form, device)

    def arrow(self, fields: Sequence[str] | None = None) -> pyarrow.Table:
        """The fields (default: those fetched) with keys and tags as a pyarrow table."""
        names = self.fields if fields is None else arguments.texts(fields, "fields")
        return convert.to_arrow({n: self[n] for n in names}, keys=self.keys, tags=self.tags)


class Rows(Converting):
    """Rows that were read without a lease. Fields that are not here are read on first access."""

    def __init__(self, run: Run, handle: Handle, table: Table, pin: Pin) -> None:
        super().__init__(handle, table, pin)
        self._run = run

    def fetch(self, *fields: str, timeout: float | None = DEFAULT_TIMEOUT_S) -> None:
        """Read more fields of these rows. RowsGone where they were freed since."""
        self._admit(*self._run(read_rows(self._handle, self._rows, fields, timeout)))

    def _bring(self, field: str) -> None:
        self.fetch(field)


class LeasedRows(Selection):
    """The part of a batch that both shells share: the lease's state, without I/O."""

    def __init__(self, handle: Handle, stage: str, claimed: Claimed) -> None:
        super().__init__(handle, claimed.table, handle.session.pinned(claimed.pin))
        self.lease = Lease(handle, stage, claimed)
        self._of: LeasedRows | None = None
        self._at: npt.NDArray[np.intp] | None = None
        self._outcome = ""

    @property
    def stage(self) -> str:
        return self.lease.stage

    @property
    def state(self) -> str:
        """`leased`, `acked`, `released`, `dropped`, `expired` or `finished`; of a part, what became
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

    def _add(
        self, given: Mapping[str, Any] | None, named: dict[str, Any], timeout: float | None
    ) -> Operation[None]:
        columns = {} if given is None else dict(by_name(given))
        yield from self.lease.add({**columns, **named}, timeout, self._at)

    def _finish(
        self, outcome: Outcome, timeout: float | None, tags: TagValues | None = None
    ) -> Operation[None]:
        self._check()
        yield from self.lease.finish(outcome, self._at, tags, timeout)
        self._outcome = {"ack": "acked", "release": "released", "drop": "dropped"}[outcome]

    def _check(self) -> None:
        """LeaseExpired where these rows are finished."""
        if self._at is not None and self.lease.state == "leased" and self.state != "leased":
            raise LeaseExpired(f"the rows of this part were {self.state}", stage=self.stage)

    def _more(self, fields: Sequence[str], timeout: float | None) -> Operation[None]:
        """More fields: under the lease, and once that has ended by the rows' keys."""
        if self.state == "leased":
            added = set(fields) & set(self.lease.added)
            if added:
                raise NotFetched(
                    f"{', '.join(sorted(added))} was added to this batch and can be read once it "
                    "is acked",
                    fields=sorted(added),
                )
            if self._of is not None:  # for all of them at once
                missing = [name for name in fields if name not in self._of]
                if missing:
                    yield from self._of._more(missing, timeout)
                for name in fields:
                    self._admit(*self._of._found(name))
                return
            done: Fetched = yield from self.lease.fetch(fields, timeout)
            self._admit(done.table, self._handle.session.pinned(done.pin))
        else:
            self._admit(*(yield from read_rows(self._handle, self._rows, fields, timeout)))

    def _drop(
        self, rows: Sequence[int] | None, groups: Names | None, timeout: float | None
    ) -> Operation[None]:
        self.lease.check()
        if rows is None and groups is None:
            yield from self._finish("drop", timeout)
            return
        at = positions(rows, groups, self._table, len(self))
        if self._at is not None:
            at = self._at[at]
        if len(at := self.lease.open_among(at)):
            yield from self.lease.finish("drop", at, timeout=timeout)

    def __repr__(self) -> str:
        lease, state = self.lease, self.state
        left = len(lease.open_among(self._at))
        if state == "leased" and left < len(self):
            state = f"leased, {left} left"
        added = f", added {', '.join(lease.added)}" if lease.added else ""
        fields = ", ".join(self.fields) or "no fields"
        return (
            f"<Batch {len(self)} rows of {self.partition!r} for {self.stage!r}, {state}: "
            f"{fields}{added}>"
        )


class Batch(LeasedRows, Converting):
    """Rows that a stage leased. They go back unless the batch is acked or dropped.

    As a context manager it acks at the end of the body and releases when the body raised. What was
    fetched stays readable after either. `batch[0:16]` and `batch.rows([…])` are parts, with the
    same methods for their rows; the batch itself then acks what is left. Not for several threads
    at once.
    """

    def __init__(self, run: Run, handle: Handle, stage: str, claimed: Claimed) -> None:
        super().__init__(handle, stage, claimed)
        self._run = run

    def fetch(self, *fields: str, timeout: float | None = DEFAULT_TIMEOUT_S) -> None:
        """Bring more fields here; `batch["field"]` does so by itself."""
        self._run(self._more(fields, timeout))

    def _bring(self, field: str) -> None:
        self.fetch(field)

    def add(
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
        self._run(self._add(columns, named, timeout))

    def ack(self, *, timeout: float | None = DEFAULT_TIMEOUT_S) -> None:
        """The stage is done with these rows; what was added is stored with it, or nothing is."""
        self._run(self._finish("ack", timeout))

    def release(
        self, tags: TagValues | None = None, *, timeout: float | None = DEFAULT_TIMEOUT_S
    ) -> None:
        """Give the rows back to their stage, as they were claimed; what was added is forgotten.

        tags: set on the rows, for example to count attempts.
        """
        self._run(self._finish("release", timeout, tags))

    def drop(
        self,
        groups: Names | None = None,
        rows: Sequence[int] | None = None,
        *,
        timeout: float | None = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Drop rows for every stage, and free them: those of these groups, those at these
        positions in the batch, or all. The lease goes on for the others."""
        self._run(self._drop(rows, groups, timeout))

    def __enter__(self) -> Batch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.state != "leased":
            return
        if kind is None:
            self.ack()
            return
        try:
            self.release()
        except DataplaneError as failure:
            # The body's own exception is the one to see; the rows come back with the session.
            log.warning("%r was not released: %s", self, failure)
