"""Permits of producers, at the peer of their client."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from dataplane.errors import Unavailable
from dataplane.peer.host import CallContext, call_context
from dataplane.peer.requests.waits import Waits
from dataplane.peer.sessions import HeldPermit
from dataplane.wire.messages import Done, Request, Withdraw


async def test_permits_given_back_while_their_shard_does_not_answer_end_the_call_in_time() -> None:
    """The shard is told all the same, and a repetition has nothing more to say."""
    told: list[tuple[tuple[str, int, int], asyncio.Future[None]]] = []

    def withdraw(*which: Any) -> asyncio.Future[None]:
        told.append((which, asyncio.get_running_loop().create_future()))
        return told[-1][1]

    router: Any = SimpleNamespace(withdraw=withdraw)
    host: Any = SimpleNamespace()
    waits = Waits(host, router, [], None)  # type: ignore[arg-type]
    session: Any = SimpleNamespace(permits={5: HeldPermit("p", 1, 2, 0)})
    body, request = Withdraw("p", 1, [5]), Request(1, 7, 1, 1, 0, Withdraw("p", 1, [5]))
    call_context.set(CallContext(time.monotonic() + 0.02))
    with pytest.raises(Unavailable, match="is not responding"):
        await asyncio.wait_for(waits.withdraw(session, request, body), 60)
    assert told[0][0] == ("p", 1, 5) and not told[0][1].cancelled()
    assert await waits.withdraw(session, request, body) == Done() and len(told) == 1
