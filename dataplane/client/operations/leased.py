"""Rows under a lease, as both shells have them: their state, and what finishes it, without I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.client.core import Handle, Operation
from dataplane.client.deadline import Deadline
from dataplane.client.operations.lease import Lease, Outcome, positions
from dataplane.client.operations.reads import read_rows
from dataplane.client.read.selection import Selection
from dataplane.client.write.rows import Names, TagValues
from dataplane.client.write.values import by_name
from dataplane.errors import LeaseExpired, NotFetched
from dataplane.wire.messages import Claimed, Fetched


class LeasedRows(Selection):
    """What a batch is without its methods that wait."""

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

    def _add(
        self, given: Mapping[str, Any] | None, named: dict[str, Any], timeout: float | None
    ) -> Operation[None]:
        columns = {} if given is None else dict(by_name(given))
        yield from self.lease.add({**columns, **named}, Deadline(timeout), self._at)

    def _finish(
        self,
        outcome: Outcome,
        timeout: float | None,
        tags: TagValues | None = None,
        values: Mapping[str, Any] | None = None,
    ) -> Operation[None]:
        self._check()
        given = None if values is None else by_name(values)
        yield from self.lease.finish(outcome, Deadline(timeout), self._at, tags, given)
        self._outcome = {"ack": "acked", "release": "released", "drop": "dropped"}[outcome]

    def _check(self) -> None:
        """LeaseExpired where these rows are finished."""
        if self._at is not None and self.lease.state == "leased" and self.state != "leased":
            raise LeaseExpired(
                f"the rows of this part of the batch were already {self.state}, so they can no "
                "longer be changed; claim again",
                stage=self.stage,
            )

    def _more(self, fields: Sequence[str], timeout: float | None) -> Operation[None]:
        """More fields: under the lease, and once that has ended by the rows' keys."""
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
                    yield from self._of._more(missing, timeout)
                for name in fields:
                    self._admit(*self._of._found(name))
                return
            done: Fetched = yield from self.lease.fetch(fields, Deadline(timeout))
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
            yield from self.lease.finish("drop", Deadline(timeout), at)

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
