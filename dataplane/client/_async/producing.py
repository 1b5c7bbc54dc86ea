"""Producers: permits for new groups, and a loop that ends without an error.

Groups that a session opens use its permits, oldest first. At the end of a `with` block, the shard
takes back the permits that no open group uses.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable
from typing import TypeVar

from dataplane.client import arguments
from dataplane.client._async.calls import (
    ask,
    attach_to_wait,
    background_timeout_s,
    comes_too_late,
    milliseconds,
    public,
    takes_rows,
    wait_for,
)
from dataplane.client.arguments import Deadline
from dataplane.client.session.session import Handle, caller
from dataplane.errors import (
    DataplaneError,
    InvalidCall,
    PartitionGone,
    PartitionSealed,
    counted,
)
from dataplane.wire.arrays import shown
from dataplane.wire.messages import Admit, Admitted, Done, Withdraw

log = logging.getLogger(__name__)

T = TypeVar("T")


class Admission:
    """The context manager that `part.admit(…)` returns. It waits for permits when the `with` block
    starts, and returns any unused ones when the block ends.

    `n` is the number of groups that may start. `version` is the trainer's version when the shard
    granted the permits. Groups that start now sample from weights of that version or a
    newer one.
    """

    def __init__(
        self, handle: Handle, n: int, max_lag: int, per_version: int, timeout: float | None
    ) -> None:
        self.n = arguments.count(n, "n")
        self.version = 0
        self._handle = handle
        self._max_lag = arguments.whole(max_lag, "max_lag")
        self._per_version = arguments.count(per_version, "per_version")
        self._timeout = arguments.seconds(timeout, "timeout")
        self._held: Withdraw | None = None
        """The message that returns the permits."""

    @public
    async def __aenter__(self) -> Admission:
        if self._held is not None:
            raise InvalidCall(
                "this admit(…) is already in use in another `with` block: use a separate "
                "admit(…) call for each block"
            )
        try:
            await self._admit()
        except (PartitionSealed, PartitionGone) as exc:
            if not await comes_too_late(self._handle, exc):
                raise
            self.n = 0  # the loop over `producing` ends when its body does
        return self

    async def __aexit__(self, kind: object, exc: object, trace: object) -> None:
        held, self._held = self._held, None
        if held is None:
            return
        session = self._handle.session
        session.permits.discard(held.numbers[0])
        try:
            await ask(session, held, Done, Deadline(background_timeout_s(self._timeout)))
        except DataplaneError as failure:
            # The peer frees them with the session, if it has not received this.
            log.warning(
                "%r: could not return the permits: %s. The peer frees them when the session ends",
                self,
                failure,
            )

    async def _admit(self) -> None:
        generation = await attach_to_wait(self._handle, self._timeout)
        name, session = self._handle.name, self._handle.session
        body = Admit(
            name,
            generation,
            self.n,
            self._max_lag,
            self._per_version,
            milliseconds(self._timeout),
            own=session.permits.mine(name),
        )
        admitted = await wait_for(session, body, Admitted, self._timeout)
        self.version = admitted.version
        session.permits.add(admitted.permit, name)
        self._held = Withdraw(name, generation, [admitted.permit])

    def __repr__(self) -> str:
        state = "not admitted" if self._held is None else f"started at version {self.version}"
        return f"<Permits for {counted(self.n, 'group')} of {self._handle.name!r}: {state}>"


class Producer(AsyncIterator[T]):
    """An iterator over the items of `part.producing(…)`. It ends when the partition accepts no new
    rows."""

    def __init__(self, handle: Handle, items: Iterable[T]) -> None:
        self._caller: tuple[str, int] | None = None
        """The partition, and the thread or task that works on an item."""
        if not isinstance(items, Iterable):
            raise InvalidCall(
                f"producing({shown(items):.80}): expected an iterable, such as a list of prompts"
            )
        self._handle = handle
        self._items = iter(items)
        self._over = False

    @public
    async def __anext__(self) -> T:
        self._leave()
        if not self._over and await takes_rows(self._handle):
            for item in self._items:
                self._caller = (self._handle.name, caller())
                self._handle.session.producers.add(self._caller)
                return item
        self._over = True
        raise StopAsyncIteration

    def _leave(self) -> None:
        if self._caller is not None:
            self._handle.session.producers.discard(self._caller)
            self._caller = None

    def __del__(self) -> None:
        self._leave()  # left by break, return or an exception

    def __repr__(self) -> str:
        state = "ended" if self._over else "running"
        return f"<Producing for {self._handle.name!r}: {state}>"
