"""A loader: a stage's batches for a training loop, of which the next is claimed while one trains.

Runs in the client. The rule is that of streams: a batch is acked when the loop asks for the next
one; whatever else ends the loop releases it, and what was prefetched. Without I/O: `aio.stream`
has what users iterate over, and the drivers claim ahead.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any, Generic, NoReturn, Protocol, TypeVar

import numpy as np

from dataplane.client import arguments
from dataplane.client.core import Handle, Operation
from dataplane.client.operations.claiming import Claiming, Demand
from dataplane.client.operations.leased import LeasedRows
from dataplane.errors import InvalidCall
from dataplane.wire.messages import Claimed
from dataplane.wire.tables import Name

STATE_VERSION = 1

B = TypeVar("B", bound=LeasedRows)


class Loop(Protocol):
    """One loop over a loader, as the loader sees it."""

    batch: Any
    over: bool


L = TypeVar("L", bound=Loop)


class Loading(Generic[B, L]):
    """What is to be claimed again and again, and how far that has come."""

    _kind = "Loader"

    def __init__(
        self,
        run: Any,
        make: Callable[[Claimed], B],
        handle: Handle,
        stage: str,
        demand: Demand,
        collate: Callable[[B], Any] | None,
        prefetch: int,
        batches: int | None,
        **how: Any,
    ) -> None:
        refuse_workers()
        if collate is not None and not callable(collate):
            raise InvalidCall(f"collate={collate!r:.80}: expected a function that takes a batch")
        self.stage = stage
        self._collate = collate
        self._ahead = arguments.count(prefetch, "prefetch")
        self._batches = None if batches is None else arguments.count(batches, "batches")
        self._run, self._make, self._handle = run, make, handle
        # made here, to be told what is wrong with it, and not in the loop
        claiming = Claiming(handle, stage, demand, ahead=True, **how)
        self._claim, self._limit_s = claiming.claim, claiming.limit_s
        self._given = 0
        self._done: set[Name] = set()
        self._latest: weakref.ref[L] | None = None  # which a `break` ends: nobody holds it then

    @property
    def _loop(self) -> L | None:
        return None if self._latest is None else self._latest()

    @property
    def _wanted(self) -> int | None:
        """Batches that a loop which begins now may give out."""
        return None if self._batches is None else self._batches - self._given

    @property
    def batch(self) -> B | None:
        """The current batch."""
        loop = self._loop
        return None if loop is None else loop.batch

    def state_dict(self) -> dict[str, Any]:
        """Return which rows were handed out, to save with the model and `plane.checkpoint`. The
        current batch counts as done, prefetched ones do not. Plain numbers, texts and lists."""
        batch = self.batch
        held = batch.keys if batch is not None and batch.state == "leased" else []
        return {
            "version": STATE_VERSION,
            "partition": self._handle.name,
            "stage": self.stage,
            "batches": self._given,
            "done": [*held, *self._done.difference(held)],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after a `state_dict`: the rows that it lists are acked when they come, not
        handed out. Raises InvalidCall for the state of another partition or stage."""
        wanted = (STATE_VERSION, self._handle.name, self.stage)
        given = tuple(state.get(name) for name in ("version", "partition", "stage"))
        if given != wanted:
            raise InvalidCall(
                f"this state belongs to (version, partition, stage) {given}, but this loader to "
                f"{wanted}: load it into a loader of the same stage"
            )
        loop = self._loop
        if loop is not None and not loop.over:
            raise InvalidCall("call load_state_dict before the loader's loop starts")
        self._given, self._done = state["batches"], set(state["done"])

    def _fresh(self, batch: B) -> Operation[B | None]:
        """Without rows that were done before; those are acked."""
        if not self._done:
            return batch
        done = np.array([key in self._done for key in batch.keys])
        if not done.any():
            return batch
        self._done.difference_update(batch.keys)
        yield from batch.rows(done)._finish("ack", self._limit_s)
        return None if done.all() else batch.rows(~done)

    def __reduce__(self) -> NoReturn:
        raise InvalidCall(_WHY)

    def __repr__(self) -> str:
        held = "no current batch" if self.batch is None else repr(self.batch)
        return f"<{self._kind} of {self._handle.name!r} for {self.stage!r}: {held}>"


_WHY = (
    "claim batches in the training process: a DataLoader's worker cannot ack a batch when the "
    "training loop is done with it, and the workers would wait for each other's rows. Iterate "
    "over part.loader(…) directly, without a DataLoader: it prefetches, and its collate= replaces "
    "the workers"
)


def refuse_workers() -> None:
    """InvalidCall in a worker of torch's DataLoader."""
    data = sys.modules.get("torch.utils.data")
    if data is not None and data.get_worker_info() is not None:
        raise InvalidCall(_WHY)
