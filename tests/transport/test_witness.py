"""What the host of a peer says of its process, to other peers of the plane."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from dataplane.transport.tickets import plane_key
from dataplane.transport.witness import Look, Process, watch
from dataplane.wire.tables import Owner

OWNER, KEY = Owner("tcp://127.0.0.1:9", 7), plane_key("plane", (1, 1))
PEER = """
    import asyncio, os
    from dataplane.transport.engine import BulkEngine
    from dataplane.transport.tickets import new_identity, plane_key
    from dataplane.wire.tables import Owner

    async def main():
        arena = os.memfd_create("arena")
        os.ftruncate(arena, 1 << 20)
        identity = new_identity() if {tls} else None
        engine = BulkEngine(
            arena, 1 << 20, "127.0.0.1", owner=Owner("tcp://127.0.0.1:9", 7),
            key=plane_key("plane", (1, 1)), pin=None, unpin=None, identity=identity,
        )
        await engine.start()
        print(engine.address, engine.fingerprint, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, input)
        await engine.stop(witnessed={witnessed})

    asyncio.run(main())
"""


class Peer:
    """As much of a peer's process as its bulk worker needs."""

    def __init__(self, tls: bool = False, witnessed: bool = True) -> None:
        code = textwrap.dedent(PEER).format(tls=tls, witnessed=witnessed)
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        bulk, _, fingerprint = self.process.stdout.readline().strip().partition(" ")
        self.watched = Process(OWNER, bulk, fingerprint, ())
        self.below = psutil.Process(self.process.pid).children(recursive=True)

    def end(self) -> None:
        for process in self.below:
            if process.is_running():
                process.kill()
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def started() -> Iterator[Callable[..., Peer]]:
    peers: list[Peer] = []

    def start(**how: bool) -> Peer:
        peers.append(Peer(**how))
        return peers[-1]

    yield start
    for peer in peers:
        peer.end()


async def looks(peer: Peer, until: Look, key: bytes = KEY, seconds: float = 20.0) -> list[Look]:
    """What is seen, look after look, until one of this kind."""
    seen: list[Look] = []
    end = time.monotonic() + seconds
    while until not in seen and time.monotonic() < end:
        watching = watch(peer.watched, key, lambda look, since: seen.append(look), None)
        try:
            await asyncio.wait_for(watching, 0.5)
        except TimeoutError:
            continue  # the connection stays while the process lives
        await asyncio.sleep(0.05)
    return seen


@pytest.mark.parametrize("tls", [False, True])
async def test_the_end_of_a_process_is_told_at_once(
    started: Callable[..., Peer], tls: bool
) -> None:
    peer = started(tls=tls)
    assert set(await looks(peer, Look.ENDED, seconds=1.0)) == {Look.ANSWERED}
    peer.process.kill()
    assert (await looks(peer, Look.ENDED))[-1] is Look.ENDED


async def test_the_end_of_the_worker_alone_is_none(started: Callable[..., Peer]) -> None:
    peer = started()
    worker = next(one for one in peer.below if one.ppid() == peer.process.pid)
    worker.kill()
    assert set(await looks(peer, Look.ENDED, seconds=3.0)) == {Look.ANSWERED}
    peer.below += psutil.Process(peer.process.pid).children(recursive=True)


async def test_where_no_process_is_left_the_host_refuses(started: Callable[..., Peer]) -> None:
    peer = started()
    for process in (*peer.below, psutil.Process(peer.process.pid)):
        process.suspend()
    for process in (*peer.below, psutil.Process(peer.process.pid)):
        process.kill()
    assert (await looks(peer, Look.REFUSED))[-1] is Look.REFUSED


async def test_a_stranger_is_told_nothing(started: Callable[..., Peer]) -> None:
    peer = started()
    peer.process.kill()
    key = plane_key("another", (1, 1))
    assert Look.ENDED not in await looks(peer, Look.ENDED, key, seconds=2.0)


async def test_a_peer_that_nobody_misses_leaves_no_witness(started: Callable[..., Peer]) -> None:
    peer = started(witnessed=False)
    peer.process.communicate("\n")
    _, alive = psutil.wait_procs(peer.below, timeout=5)
    assert not alive
