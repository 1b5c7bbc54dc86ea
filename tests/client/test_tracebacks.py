"""Where a call went wrong is the user's line: the frames inside dataplane are hidden."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Callable
from typing import Any

import pytest

import dataplane
from dataplane import aio
from dataplane.client._sync.backend import _warn_of_loop
from dataplane.client.tracebacks import shorten
from dataplane.wire.messages import Put
from tests.client.scripted_peer import ScriptedPeer

Part = Any


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATAPLANE_TRACEBACKS", "short")


def frames(error: BaseException | None) -> list[str]:
    """The functions of a traceback, outermost first."""
    assert error is not None
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


class Odd:
    def __array__(self, *_: Any, **__: Any) -> Any:
        raise KeyError("boom")


def call(part: Part, value: object) -> Exception:
    with pytest.raises(dataplane.DataplaneError) as caught:
        part.put({"a": [value]})
    error: Exception = caught.value
    return error


def test_a_traceback_ends_at_the_public_call(part: Part) -> None:
    assert frames(call(part, object())) == ["call"]
    with pytest.raises(dataplane.PeerNotFound) as caught:
        dataplane.connect("nobody")
    assert frames(caught.value) == ["test_a_traceback_ends_at_the_public_call"]


def test_so_does_that_of_a_call_that_asks_no_peer(part: Part, peer: ScriptedPeer) -> None:
    part.put({"a": [1, 2, 3, 4]}, key=["k", "l", "m", "n"])
    peer.serve_put(peer.bodies(Put)[0])
    batch = part.claim("s", rows=4)
    calls: list[Callable[[], object]] = [
        lambda: part.admit(0, per_version=1),
        lambda: part.producing(5),
        lambda: part.stream("s", rows=0),
        lambda: part.loader("s", rows=1, groups=1),
        lambda: part.loader("s", rows=1).load_state_dict({}),
        lambda: batch["nix"],
        lambda: batch.rows([99]),
        lambda: batch[:1][4],
    ]
    for at, one in enumerate(calls):
        with pytest.raises(dataplane.DataplaneError) as caught:
            one()
        own = "test_so_does_that_of_a_call_that_asks_no_peer"
        assert frames(caught.value) == [own, "<lambda>"], at


def test_the_users_own_code_that_failed_stays_in_sight(part: Part) -> None:
    error = call(part, Odd())
    assert frames(error) == ["call"]
    cause = error.__cause__
    while not isinstance(cause, KeyError):
        assert cause is not None and frames(cause) in ([], ["__array__"])
        cause = cause.__cause__
    assert frames(cause) == ["__array__"]


def test_what_the_user_was_handling_is_left_as_it_was(part: Part) -> None:
    try:
        int("x")
    except ValueError as handled:
        error = call(part, object())
        assert error.__context__ is handled or error.__context__ is None
        assert frames(handled) == ["test_what_the_user_was_handling_is_left_as_it_was"]


def test_a_setting_shows_all_of_it(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATAPLANE_TRACEBACKS", "full")
    assert len(frames(call(part, object()))) > 4
    monkeypatch.setenv("DATAPLANE_TRACEBACKS", "long")
    with pytest.raises(dataplane.InvalidConfig, match="use short or full"):
        dataplane.connect()


def test_a_bug_of_ours_keeps_its_traceback() -> None:
    def fails() -> None:
        raise dataplane.InternalError("odd")

    with pytest.raises(dataplane.InternalError) as caught:
        fails()
    shorten(caught.value)
    assert frames(caught.value)[-1] == "fails"


async def test_a_traceback_of_an_awaited_call_ends_there_too(peer: ScriptedPeer) -> None:
    async with aio.Plane(peer.keeper()) as plane:
        part = await plane.partition("x", stages={"s": ["a"]})
        with pytest.raises(dataplane.InvalidValue) as caught:
            await part.put({"a": [object()]})
        (here,) = frames(caught.value)
        assert here == "test_a_traceback_of_an_awaited_call_ends_there_too"


def test_a_blocking_call_inside_an_event_loop_is_told_once(
    part: Part, caplog: pytest.LogCaptureFixture
) -> None:
    _warn_of_loop.cache_clear()

    async def blocks() -> None:
        await asyncio.to_thread(part.put, {"a": [0]})
        assert not caplog.records
        part.put({"a": [1]})  # here
        part.put({"a": [2]})

    with caplog.at_level(logging.WARNING, "dataplane"):
        part.put({"a": [3]})
        asyncio.run(blocks())
    (told,) = caplog.messages
    assert 'part.put({"a": [1]})  # here' in told and "use dataplane.aio" in told
