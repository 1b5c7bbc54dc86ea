"""What a peer counts of its clients' calls."""

from __future__ import annotations

import asyncio
import gc
import socket
import struct
from typing import Any

import uvloop

from dataplane.peer.watch.metrics import Meters, Metrics
from dataplane.wire.messages import Failed, Put
from dataplane.wire.tables import Rows


def test_a_put_whose_small_values_the_shard_does_not_take_is_no_failure_yet() -> None:
    meters, put = Meters(), Put("p", 1, Rows(b""))
    meters.observe(put, Failed("ShardFull", "no room", {"values": True}), 0.0)
    assert not meters.failures.sums
    meters.observe(put, Failed("ShardFull", "no room"), 0.0)
    assert meters.failures.sums == {"ShardFull": 1}


class Patient(Metrics):
    """Makes a page until who asked for it has hung up."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = asyncio.Event()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        await super()._answer(reader, writer)

    async def _page(self, path: str) -> tuple[str, str, bytes]:
        self.asked.set()
        while not self._writer.is_closing():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)
        return "200 OK", "text/plain", b"page"


def test_who_hangs_up_while_their_page_is_made_leaves_no_traceback() -> None:
    told = list[dict[str, Any]]()

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))
        metrics = Patient()
        await metrics.open("127.0.0.1", 0)
        assert metrics._server is not None
        _, writer = await asyncio.open_connection(*metrics._server.sockets[0].getsockname())
        writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
        await asyncio.wait_for(metrics.asked.wait(), 10)
        at_once = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
        writer.transport.abort()
        while metrics._under_way:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0)
        gc.collect()
        metrics._server.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as peers have
        runner.run(main())
    assert not told
