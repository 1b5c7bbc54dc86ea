"""Streams: a stage's batches one after the other, until the partition is sealed and drained.

One rule: a batch is acked when the body asks for the next one, or by `ack()`; whatever else ends
the loop releases it. Without I/O: `aio.stream` has what users iterate over.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Generic, NoReturn, TypeVar
from weakref import WeakSet

from dataplane.client import arguments
from dataplane.client.core import Handle, Operation
from dataplane.client.deadline import Deadline
from dataplane.client.operations.claiming import Claiming, Demand
from dataplane.client.operations.lease import LEFT, Lease
from dataplane.client.operations.leased import LeasedRows
from dataplane.client.operations.loader import refuse_workers
from dataplane.errors import DataplaneError, StreamEnd
from dataplane.wire.messages import Claimed

log = logging.getLogger(__name__)

B = TypeVar("B", bound=LeasedRows)


class Streaming(Generic[B]):
    """What is to be claimed again and again, and what loops over it have in hand."""

    _kind = "Stream"

    def __init__(
        self,
        run: Any,
        make: Callable[[Claimed], B],
        handle: Handle,
        stage: str,
        demand: Demand,
        batches: int | None = None,
        **how: Any,
    ) -> None:
        self.batches = None if batches is None else arguments.count(batches, "batches")
        self._run = run
        self._make = make
        # made here, to be told what is wrong with it, and not in the loop
        self._claiming = Claiming(handle, stage, demand, **how)
        self._what = f"{handle.name!r} for {stage!r}"
        self._loops: WeakSet[Looping[B]] = WeakSet()
        self._left: list[Lease] = []
        """what loops that are over had in hand, inside a `with`: its end sees that it is back"""
        self._entered = False
        self._closed = False

    def _release(self) -> Operation[None]:
        """What loops have, or had, in hand is back when this returns; they are over."""
        self._closed = True
        held = [loop.lease for loop in list(self._loops) if loop.lease is not None]
        yield from self._settle(held)

    def _settle(self, held: list[Lease]) -> Operation[None]:
        held, self._left = self._left + held, []
        deadline = Deadline(self._claiming.limit_s)
        try:
            while held:
                yield from held[0].give_back(deadline)
                del held[0]
        except BaseException:
            for lease in held:
                lease.abandon()
            raise

    def _failed(self, failure: DataplaneError, exc: object) -> None:
        """At the end of a `with`: the body's own exception is the one to see."""
        if exc is None:
            raise failure
        log.warning("%r: could not release a batch: %s", self, failure)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be sent to another process: send the "
            f"partition, and call its {type(self).__name__.lower()}(…) there"
        )

    def __repr__(self) -> str:
        held = [loop.lease for loop in list(self._loops) if loop.lease is not None]
        rows = ", ".join(f"{lease.open_rows} rows" for lease in held) or "no batch"
        state = "ended" if self._closed else f"holds {rows}"
        return f"<{self._kind} of {self._what}: {state}>"


def tell_what_is_left(end: StreamEnd) -> None:
    """A loop ends without a word, also where its filter left rows out that nobody may ask for."""
    if end.details.get("remaining"):
        log.warning("stream ended: %s", end.message)


class Looping(Generic[B]):
    """One loop over a stream, and the lease of the batch that its body has in hand."""

    def __init__(self, stream: Streaming[B]) -> None:
        self.lease: Lease | None = None
        refuse_workers()
        self._stream = stream
        self._given = 0
        self._over = False
        stream._loops.add(self)

    def _advance(self) -> Operation[B]:
        """Ack, and claim the next, in one piece. StreamEnd where there is none."""
        stream, lease, call = self._stream, self.lease, None
        try:
            if lease is not None and lease.state == "leased" and not stream._closed:
                if not self._is_over:
                    call = stream._claiming.call(after=lease.id)
                deadline = Deadline(stream._claiming.limit_s)
                yield from lease.finish("ack", deadline, then=call)
            lease = self.lease = None
            yield from stream._settle([])
            if self._is_over:
                raise StreamEnd("this loop has already ended")
            claims = stream._claiming
            if call is not None and call.sent is not None:  # it went along
                claimed = yield from claims.claimed(call)
            else:
                claimed = yield from claims.claim()
        except StreamEnd as exc:
            if not self._is_over:
                self._over = True
                tell_what_is_left(exc)
            raise
        finally:
            if call is not None:  # its answer is nobody's, unless it was waited for
                call.leave()
        batch = stream._make(claimed)
        self.lease, self._given = batch.lease, self._given + 1
        if stream._closed:  # meanwhile, by another thread or task
            self.lease = None
            yield from batch.lease.give_back(Deadline(stream._claiming.limit_s))
            raise StreamEnd("the stream was closed")
        return batch

    @property
    def _is_over(self) -> bool:
        return self._over or self._stream._closed or self._given == self._stream.batches

    def __del__(self) -> None:
        # Left by break, return or an exception. The caller may still hold the batch, so that its
        # own end cannot be waited for; and nothing may be waited for in here.
        lease = self.lease
        if lease is not None and lease.state == "leased":
            lease.abandon(None if self._stream._entered else LEFT)  # a `with` releases on purpose
            if self._stream._entered:
                self._stream._left.append(lease)
