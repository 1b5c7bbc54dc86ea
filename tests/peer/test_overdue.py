"""Calls of clients whose time is up while their handlers still work."""

from __future__ import annotations

import asyncio
import time

import pytest

from dataplane.errors import ClaimTimeout, DataplaneError, DeadlineExceeded
from dataplane.peer.door.overdue import AFTER_S, LATE_S, Overdue, limit_s
from dataplane.wire.messages import Body, Claim, Request, Stats, Want


def request(body: Body, deadline_ms: int = 0) -> Request:
    return Request(7, 1, 7, 7, (0, 0), deadline_ms, body)  # type: ignore[arg-type]


def claim(timeout_ms: int) -> Request:
    return request(Claim("p", 1, "s", Want("rows", 1, 1), timeout_ms=timeout_ms))


@pytest.mark.parametrize(
    ("late", "kind"),
    [(request(Stats(), 1), DeadlineExceeded), (claim(0), ClaimTimeout)],
    ids=["a call", "one that waits for rows"],
)
async def test_a_call_that_does_not_end_is_answered_after_its_deadline(
    late: Request, kind: type[DataplaneError]
) -> None:
    told: asyncio.Future[tuple[int, DataplaneError]] = asyncio.get_running_loop().create_future()
    overdue = Overdue("a", lambda rid, failure: told.set_result((rid, failure)))
    overdue.began(late)
    rid, failure = await asyncio.wait_for(told, 20)
    assert rid == 7 and type(failure) is kind and "'a'" in failure.message
    assert overdue.ended(late)  # so what its handler brings is taken back
    assert not overdue.ended(late)


async def test_a_call_that_ends_in_time_is_answered_once() -> None:
    overdue = Overdue("a", lambda rid, failure: pytest.fail(str(failure)))
    overdue.began(request(Stats(), 60_000))
    assert not overdue.ended(request(Stats(), 60_000))


async def test_a_call_that_is_late_with_its_whole_peer_still_says_itself_why() -> None:
    overdue = Overdue("a", lambda rid, failure: pytest.fail(str(failure)))
    late, why = request(Stats(), 1), asyncio.get_running_loop().create_future()
    overdue.began(late)
    asyncio.get_running_loop().call_later(LATE_S / 2, why.set_result, None)
    time.sleep(2 * LATE_S)  # as where others have the processor: now all of it is due at once
    await why
    assert not overdue.ended(late)


def test_calls_that_wait_for_rows_say_themselves_how_long() -> None:
    assert limit_s(request(Stats(), 1500)) == 1.5
    assert limit_s(claim(1000)) == 1 + AFTER_S
    assert limit_s(claim(-1)) == limit_s(request(Stats())) == float("inf")
