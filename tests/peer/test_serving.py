"""Whoever waits until this peer may answer for its shards."""

from __future__ import annotations

import asyncio
import math
import time
from types import SimpleNamespace
from typing import Any

import pytest

from dataplane.errors import Unavailable
from dataplane.peer.host import POLL_S, Serving


class Unsure(Serving):
    """Until the test says so."""

    sure = False

    def is_sure(self) -> bool:
        return self.sure


def unsure() -> Unsure:
    host: Any = SimpleNamespace(now=time.monotonic)
    return Unsure(host)


async def test_who_waits_goes_on_in_the_order_in_which_they_came() -> None:
    """A client gives its part in a plan back, and asks for the next one: in this order."""
    serving, went = unsure(), list[int]()

    async def wait(number: int) -> None:
        await serving.until_sure(math.inf)
        went.append(number)

    waiting = []
    for number in range(5):
        waiting.append(asyncio.create_task(wait(number)))
        await asyncio.sleep(POLL_S / 3)
    serving.sure = True
    for number in range(5, 10):  # who comes now overtakes nobody, sure as this peer is
        waiting.append(asyncio.create_task(wait(number)))
        await asyncio.sleep(POLL_S / 3)
    await asyncio.wait_for(asyncio.gather(*waiting), 10)
    assert went == list(range(len(waiting))) and not serving.waiting
    await serving.until_sure(0.0)


async def test_a_wait_that_is_in_vain_ends_in_time_and_holds_up_nobody() -> None:
    serving = unsure()
    patient = asyncio.create_task(serving.until_sure(math.inf))
    with pytest.raises(Unavailable, match="no backup in sync"):
        await serving.until_sure(time.monotonic() + 0.01)
    given_up = asyncio.create_task(serving.until_sure(math.inf))
    await asyncio.sleep(0)
    given_up.cancel()
    serving.sure = True
    await asyncio.wait_for(patient, 10)
    assert given_up.cancelled() and not serving.waiting
