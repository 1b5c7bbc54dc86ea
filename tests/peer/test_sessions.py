"""Whose session a connection may join."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace
from typing import Any

import pytest

from dataplane.errors import ClientClosed
from dataplane.peer.sessions import Sessions
from dataplane.wire.tables import Owner


async def test_only_the_process_that_began_a_session_joins_it() -> None:
    nothing = lambda *_: None  # noqa: E731
    host: Any = SimpleNamespace(
        now=lambda: 0.0,
        name="a",
        label=nothing,
        reads_in_place=nothing,
        owner=Owner("a", 3 << 40 | 5),
    )
    sessions = Sessions(host, nothing)
    mine = sessions.open(os.getpid(), "mine")
    try:
        assert host.owner.has_session(mine.id) and not Owner("b", 6).has_session(mine.id)
        assert sessions.join(mine.id, os.getpid()) is mine
        for session_id, pid in ((mine.id, os.getppid()), (mine.id + 2, os.getpid())):
            with pytest.raises(ClientClosed, match="connect again"):
                sessions.join(session_id, pid)
    finally:
        asyncio.get_running_loop().remove_reader(mine.pidfd)
        os.close(mine.pidfd)
