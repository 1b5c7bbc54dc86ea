"""The pipeline of a request through a door, for clients of this host and for other peers.

    decode → admit → once → handle → hold → encode

The doors decode and encode. `Call.serve` runs the steps in between. A door begins it in the
callback that read the request, so a request that never waits is answered there, without a task.
A request that waits continues in a task (`tasks.begin`).
"""

from __future__ import annotations

import math
from collections.abc import Awaitable

import msgspec

from dataplane.peer.failures import failed
from dataplane.peer.host import CALL_S, Host
from dataplane.peer.operations import Operation
from dataplane.peer.tasks import result_of
from dataplane.wire.messages import Body

MARGIN_S = 0.1
"""A peer answers another one at most this long before the deadline of the call."""


class Call(msgspec.Struct, eq=False):
    """One request at a door. Each door has its own kind of call.

    until: when the call must be answered (monotonic). held: see `Operation`.
    """

    host: Host
    operation: Operation
    until: float
    held: bool

    # what each door implements

    def is_admitted(self) -> bool:
        """Whether the request may run now. Raises an error if it never may."""
        raise NotImplementedError

    async def admission(self) -> None:
        """Wait until the request may run. Raises an error at the deadline."""
        raise NotImplementedError

    def handle(self) -> Body | Awaitable[Body]:
        """Run the request. Return the reply, or an awaitable of it."""
        raise NotImplementedError

    def may_leave(self, reply: Body) -> bool:
        """Whether the reply can leave now."""
        raise NotImplementedError

    def is_served_here(self) -> bool:
        """Whether the reply comes from a shard of this peer."""
        return self.held

    def take_back(self, reply: Body) -> None:
        """Take back what a reply grants, because no client receives it."""

    def answer(self, reply: Body) -> None:
        """Encode and send the reply."""
        raise NotImplementedError

    # what both doors share

    async def serve(self) -> None:
        """Serve the request, from its admission to its reply."""
        try:
            if not self.is_admitted():
                await self.admission()
            outcome = self.handle()
            reply = outcome if isinstance(outcome, Body) else await result_of(outcome)
        except Exception as exc:
            reply = failed(exc)
        if self.may_leave(reply):
            self.answer(reply)
        else:
            await self._answer_once_confirmed(reply)

    async def _answer_once_confirmed(self, reply: Body) -> None:
        """Reply once the reply may leave. At the deadline, take back what the reply grants."""
        host = self.host
        until = host.now() + CALL_S if self.until == math.inf else self.until
        try:
            if not host.progress.is_settled:
                await host.progress.reached(until)
            if self.is_served_here():
                await host.serving.until_sure(until)
        except BaseException as exc:
            self.take_back(reply)
            if not isinstance(exc, Exception):
                raise
            reply = failed(exc)
        self.answer(reply)
