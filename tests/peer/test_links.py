"""Connections to other peers that end at awkward moments."""

from __future__ import annotations

import asyncio

import zmq.asyncio

from dataplane.errors import Unavailable
from dataplane.peer.gate import Gate
from dataplane.peer.links import Link


async def test_a_link_that_is_closed_before_it_is_watched_has_ended() -> None:
    context = zmq.asyncio.Context()
    link = Link.open(context, "tcp://127.0.0.1:9", Gate(None, "test"))
    watching = asyncio.create_task(link.broken())
    link.close(Unavailable("the peer is no member any more"))
    async with asyncio.timeout(10):
        await watching
    context.destroy(linger=0)
