"""Whose session a connection may join."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from dataplane.errors import ClientClosed
from dataplane.peer.sessions import Sessions
from dataplane.wire.messages import Hello
from dataplane.wire.tables import Owner


@pytest.fixture
async def sessions() -> AsyncIterator[Sessions]:
    nothing = lambda *_: None  # noqa: E731
    host: Any = SimpleNamespace(
        now=lambda: 0.0,
        name="a",
        label=nothing,
        reads_in_place=nothing,
        owner=Owner("a", 3 << 40 | 5),
    )
    sessions = Sessions(host, nothing)
    yield sessions
    for session in sessions:
        if session.pidfd >= 0:
            asyncio.get_running_loop().remove_reader(session.pidfd)
            os.close(session.pidfd)


async def test_only_the_process_that_began_a_session_joins_it(sessions: Sessions) -> None:
    pid = os.getpid()
    mine = sessions.open(pid, Hello(1, pid=pid))
    assert Owner("a", 3 << 40 | 5).has_session(mine.id) and not Owner("b", 6).has_session(mine.id)
    assert sessions.join(mine.id, pid, pid) is mine
    for session_id, other in ((mine.id, os.getppid()), (mine.id + 2, pid)):
        with pytest.raises(ClientClosed, match="call dataplane.connect"):
            sessions.join(session_id, other, other)


async def test_clients_of_other_pid_namespaces_are_told_apart(sessions: Sessions) -> None:
    """The kernel shows the pid of each as 0, and two containers may use one pid."""
    one, other = (sessions.open(0, Hello(1, pid=7, command="python train.py")) for _ in range(2))
    assert one.label != other.label and not one.is_of(other) and one.is_of(one)
    assert one.label == "pid 7 in another container on host a (client 1)"
    assert sessions.join(one.id, 0, 7) is one
    with pytest.raises(ClientClosed, match="call dataplane.connect"):
        sessions.join(one.id, 0, 8)


async def test_sessions_of_one_process_are_known_to_be(sessions: Sessions) -> None:
    pid = os.getpid()
    one, other = (sessions.open(pid, Hello(1, pid=pid)) for _ in range(2))
    assert one.label == other.label == f"pid {pid} on host a" and one.is_of(other)
