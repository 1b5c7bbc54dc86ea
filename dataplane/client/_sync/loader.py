"""Loaders: iterate over a stage's batches in a training loop, and claim the next batch ahead.

As in a stream, advancing to the next batch acks the current one. A loop that ends in any other way
releases the current batch and the prefetched ones.


Generated from dataplane/client/_async/loader.py: change that.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np

from dataplane.client import arguments
from dataplane.client._sync.backend import Prefetch
from dataplane.client._sync.batch import Batch
from dataplane.client._sync.calls import UNKNOWN, public
from dataplane.client._sync.claiming import Claiming
from dataplane.client._sync.lease import LEFT, Lease
from dataplane.client.arguments import Deadline, Demand
from dataplane.client.session.session import Handle
from dataplane.client.tracebacks import public_at_once
from dataplane.errors import InvalidCall, StreamEnd
from dataplane.wire.arrays import shown
from dataplane.wire.tables import Name

log = logging.getLogger(__name__)

STATE_VERSION = 1


class Loader:
    """An iterator over batches for a training process. While your loop works on one batch, the
    loader claims the next batch and calls `collate` with it.

    Advancing to the next batch acks the current one. Leaving the loop early (`break`, an exception,
    or leaving the `with` block) releases the current batch. `state_dict()` returns a record of the
    rows handed out, so that a loader on a restored plane can continue after those rows. Raises
    InvalidCall inside a PyTorch DataLoader worker.
    """

    _kind = "Loader"
    _behind: tuple[Prefetch[Batch], list[Lease]] | None = None
    """The last loop that ended. The end of a `with` block releases its leases."""
    _entered = False

    def __init__(
        self,
        handle: Handle,
        stage: str,
        demand: Demand,
        collate: Callable[[Batch], Any] | None,
        prefetch: int,
        batches: int | None,
        **how: Any,
    ) -> None:
        refuse_workers()
        if collate is not None and not callable(collate):
            raise InvalidCall(
                f"collate={shown(collate):.80}: expected a function that takes a batch"
            )
        self.stage = stage
        self._collate = collate
        self._ahead = arguments.count(prefetch, "prefetch")
        self._batches = None if batches is None else arguments.count(batches, "batches")
        self._handle = handle
        # Built here, so that wrong arguments raise here and not in the loop.
        self._claiming = Claiming(handle, stage, demand, ahead=True, **how)
        self._limit_s = self._claiming.limit_s
        self._given = 0
        self._done: set[Name] = set()
        self._latest: weakref.ref[LoaderLoop] | None = None  # weak, so that `break` ends the loop

    @property
    def _loop(self) -> LoaderLoop | None:
        return None if self._latest is None else self._latest()

    @property
    def _wanted(self) -> int | None:
        """How many batches a new loop may return; None for no limit."""
        return None if self._batches is None else self._batches - self._given

    @property
    def batch(self) -> Batch | None:
        """The current batch."""
        loop = self._loop
        return None if loop is None else loop.batch

    def state_dict(self) -> dict[str, Any]:
        """Return a record of the rows handed out so far. Save it together with the model and the
        plane (`plane.checkpoint`). The current batch counts as done; prefetched batches do not. The
        record is a dict of plain numbers, strings and lists."""
        batch = self.batch
        held = batch.keys if batch is not None and batch.state == "leased" else []
        return {
            "version": STATE_VERSION,
            "partition": self._handle.name,
            "stage": self.stage,
            "batches": self._given,
            "done": [*held, *self._done.difference(held)],
        }

    @public_at_once
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a `state_dict`: rows recorded in it are acked instead of being handed out.
        Call this before the loop starts. Raises InvalidCall if the state belongs to another
        partition or stage."""
        wanted = (STATE_VERSION, self._handle.name, self.stage)
        given = tuple(state.get(name) for name in ("version", "partition", "stage"))
        if given != wanted:
            raise InvalidCall(
                f"this state is for (version, partition, stage) {given}, but the loader needs "
                f"{wanted}: pass a state that state_dict() returned for this partition and stage"
            )
        loop = self._loop
        if loop is not None and not loop.over:
            raise InvalidCall(
                "load_state_dict() was called while the loader's loop was running: call it before "
                "the loop starts"
            )
        self._given, self._done = state["batches"], set(state["done"])

    def __iter__(self) -> LoaderLoop:
        refuse_workers()
        if self._loop is not None:
            self._loop.leave()
        loop = LoaderLoop(self)
        self._latest = weakref.ref(loop)
        return loop

    @public
    def close(self) -> None:
        """Release the current batch and all prefetched batches, and end the loop."""
        if self._loop is not None:
            self._loop.leave()
        if self._behind is None:
            return
        (prefetch, held), self._behind = self._behind, None
        deadline = Deadline(self._limit_s)
        prefetch.end(deadline)
        for lease in held + prefetch.left():
            lease.give_back(deadline)

    def __enter__(self) -> Loader:
        self._entered = True
        return self

    def __exit__(self, kind: object, exc: object, trace: object) -> None:
        if not isinstance(exc, UNKNOWN):
            self.close()
        elif self._loop is not None:  # the peer did not reply: do not wait again
            self._loop.leave()

    def _take(self) -> Batch:
        """Claim the next batch, without rows that a loaded state lists; those are acked."""
        while True:
            batch = Batch(self._handle, self.stage, *self._claiming.claim())
            done = np.array([key in self._done for key in batch.keys] if self._done else [], bool)
            if not done.any():
                return batch
            self._done.difference_update(batch.keys)
            batch.rows(done).ack(timeout=self._limit_s)
            if not done.all():
                return batch.rows(~done)

    def __reduce__(self) -> NoReturn:
        raise InvalidCall(_WHY)

    def __repr__(self) -> str:
        held = "no current batch" if self.batch is None else repr(self.batch)
        return f"<{self._kind} of {self._handle.name!r} for {self.stage!r}: {held}>"


class LoaderLoop(Iterator[Any]):
    """One loop over a loader. When the loop ends, it releases the batches that it still holds."""

    def __init__(self, loader: Loader) -> None:
        self.batch: Batch | None = None
        self.over = False
        self._loader = loader
        self._prefetch = Prefetch(
            loader._take, loader._collate, loader._ahead, loader._wanted, loader._handle.session
        )

    @public
    def __next__(self) -> Any:
        batch, self.batch = self.batch, None
        if batch is not None and batch.state == "leased":
            try:
                batch.ack(timeout=self._loader._limit_s)
            except BaseException:
                self.batch = batch
                raise
        if self.over:
            raise StopIteration
        try:
            self.batch, made = self._prefetch.next()
        except StreamEnd as exc:
            self.over = True
            log_remaining(exc)
            raise StopIteration from None
        except UNKNOWN:
            self.leave()
            raise
        except Exception:
            self._loader.close()
            raise
        self._loader._given += 1
        self._loader._handle.session.leases.hand_over(self.batch.lease.id)
        return made

    def leave(self, forgotten: tuple[str, str] | None = None) -> None:
        """End the loop: release the current batch and the prefetched ones, without waiting. Only
        the end of the loader's `with` block waits for these releases. forgotten: as in
        `Abandoned`, for the current batch."""
        if self.over:
            return
        self.over = True
        batch, self.batch = self.batch, None
        self._prefetch.stop()
        if batch is not None:
            batch.lease.abandon(forgotten)
        held = self._prefetch.left() + ([] if batch is None else [batch.lease])
        for lease in held:
            lease.abandon()
        self._loader._behind = self._prefetch, held

    def __del__(self) -> None:
        # Left by break, return or an exception.
        if hasattr(self, "_prefetch"):
            self.leave(None if self._loader._entered else LEFT)


def log_remaining(end: StreamEnd) -> None:
    """Log that a loop has ended, if rows remain that its filter leaves out."""
    if end.details.get("remaining"):
        log.warning("stream ended: %s", end.message)


_WHY = (
    "batches cannot be claimed in a DataLoader worker: a worker cannot ack a batch when the "
    "training loop is done with it, and workers would wait for each other's rows. Iterate over "
    "part.loader(…) in the training process, without a DataLoader. It prefetches batches, and its "
    "collate= replaces the workers"
)


def refuse_workers() -> None:
    """Raise InvalidCall in a worker of torch's DataLoader."""
    data = sys.modules.get("torch.utils.data")
    if data is not None and data.get_worker_info() is not None:
        raise InvalidCall(_WHY)
