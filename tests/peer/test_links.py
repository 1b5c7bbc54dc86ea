"""Connections to other peers that end at awkward moments."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dataplane.errors import Unavailable
from dataplane.peer.gate import Gate
from dataplane.peer.links import Link, LinkBroken
from dataplane.peer.sockets import Context


async def test_a_link_whose_connection_ends_says_so_once() -> None:
    context = Context()
    broke: list[Link] = []
    told = asyncio.Event()

    def tell(link: Link) -> None:
        broke.append(link)
        link.close(LinkBroken("it broke"))
        told.set()

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        link = Link.open(context, f"tcp://127.0.0.1:{port}", Gate(None, "test"), tell)
        accepted, _ = await asyncio.to_thread(server.accept)
        call = asyncio.create_task(link.ask(1, b"a question"))
        accepted.close()
        with pytest.raises(LinkBroken, match="it broke"):
            await asyncio.wait_for(call, 10)
    assert broke == [link] and told.is_set()
    context.destroy()


async def test_a_link_that_was_closed_answers_with_the_reason() -> None:
    context = Context()
    link = Link.open(context, "tcp://127.0.0.1:9", Gate(None, "test"), lambda link: None)
    call = asyncio.create_task(link.ask(1, b"a question"))
    await asyncio.sleep(0)
    link.close(Unavailable("the peer is no member any more"))
    for one in (call, link.ask(2, b"another one")):
        with pytest.raises(Unavailable, match="no member"):
            await asyncio.wait_for(one, 10)
    context.destroy()


@contextmanager
def descriptors(more: int) -> Iterator[None]:
    """This process may open so many and none besides."""
    fd = os.open("/dev/null", os.O_RDONLY)
    os.close(fd)  # the lowest that is free: the limit is on numbers
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (fd + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("few", range(4))
async def test_a_link_for_which_no_descriptor_is_left_can_be_made_later(few: int) -> None:
    context = Context()
    address, gate = "tcp://127.0.0.1:9", Gate(None, "test")
    first = Link.open(context, address, gate, lambda link: None)  # the context has its own now
    made = []
    with descriptors(few):
        for _ in range(4):
            try:
                made.append(Link.open(context, address, gate, lambda link: None))
            except LinkBroken as exc:
                assert "ulimit -n" in exc.message
    assert len(made) < 4
    for link in [first, *made, Link.open(context, address, gate, lambda link: None)]:
        link.close(Unavailable("enough"))
    context.destroy()
