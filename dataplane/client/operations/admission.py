"""Permits to open groups: what a producer asks for, and gives back what it did not use of. Without
I/O.

Groups that a session opens use its permits, whichever came first. So at the end of one `with` the
shard leaves to those that are open what was used of theirs in its place, and takes the rest.
"""

from __future__ import annotations

from dataplane.client import arguments
from dataplane.client.core import (
    DEFAULT_TIMEOUT_S,
    Deadline,
    Handle,
    Operation,
    ask,
    milliseconds,
    wait_for,
)
from dataplane.errors import InvalidCall, counted
from dataplane.wire.messages import Admit, Admitted, Advance, Done, Unadmit


class Admitting:
    """What an admission is without its methods that wait. `version`: the trainer's, when it was
    granted: what is begun under it samples from these weights, or newer ones."""

    def __init__(
        self, handle: Handle, n: int, max_lag: int, per_version: int, timeout: float | None
    ) -> None:
        self.n = arguments.count(n, "n")
        self.version = 0
        self._handle = handle
        self._max_lag = arguments.whole(max_lag, "max_lag")
        self._per_version = arguments.count(per_version, "per_version")
        self._timeout = arguments.seconds(timeout, "timeout")
        self._held: Unadmit | None = None
        """what is to be said at the end"""

    def _admit(self) -> Operation[None]:
        if self._held is not None:
            raise InvalidCall("these permits are in use: call admit(…) for each `with`")
        generation = yield from self._handle.attach_to_wait(self._timeout)
        name, limit_ms = self._handle.name, milliseconds(self._timeout)
        permits = self._handle.session.permits
        body = Admit(
            name,
            generation,
            self.n,
            self._max_lag,
            self._per_version,
            limit_ms,
            own=permits.mine(name),
        )
        admitted = yield from wait_for(body, Admitted, self._timeout)
        self.version = admitted.version
        permits.add(admitted.permit, name)
        self._held = Unadmit(name, generation, [admitted.permit])

    def _give_back(self) -> Operation[None]:
        held, self._held = self._held, None
        assert held is not None
        self._handle.session.permits.discard(held.permits[0])
        yield from ask(held, Done, Deadline(DEFAULT_TIMEOUT_S))

    def __repr__(self) -> str:
        state = "not admitted" if self._held is None else f"begun at version {self.version}"
        return f"<Permits for {counted(self.n, 'group')} of {self._handle.name!r}: {state}>"


def advance(handle: Handle, version: int, timeout: float | None) -> Operation[None]:
    deadline, version = Deadline(timeout), arguments.whole(version, "version")
    generation = yield from handle.attach(deadline)
    yield from ask(Advance(handle.name, generation, version), Done, deadline)
