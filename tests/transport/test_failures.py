"""Workers that die or stop, reads that are cancelled, engines that stop under load."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from dataplane.errors import DataplaneError, DeadlineExceeded
from dataplane.transport import plane_key
from dataplane.transport.bulk_frames import Configure, encode
from dataplane.transport.engine import BulkEngine
from dataplane.transport.worker import JOBS
from dataplane.wire.tables import Owner

MIB = 1 << 20
StartHost = Callable[..., Awaitable[Any]]  # a Host of conftest


def large(host: Any, count: int = 32) -> np.ndarray:
    copies: np.ndarray = host.place(np.arange(count) * MIB, np.full(count, MIB))
    return copies


def once(act: Callable[[], None]) -> Callable[[], None]:
    """Acts when first called: on the first pin, a transfer is certainly under way."""
    todo = [act]
    return lambda: todo.pop()() if todo else None


async def until(condition: Callable[[], bool]) -> None:
    """Gives the event loop turns until something that is bound to happen has happened."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0)


async def test_a_stopped_owner_ends_the_read_at_its_deadline(start_host: StartHost) -> None:
    a, b = await start_host("a", 32 * MIB), await start_host("b", 32 * MIB)
    a.on_pin = once(lambda: a.signal(signal.SIGSTOP))
    reader = b.pid
    with pytest.raises(
        DeadlineExceeded, match="did not send all requested bytes before the deadline"
    ):
        await b.engine.read(a.remote, large(a), timeout_s=0.3)
    a.signal(signal.SIGCONT)
    assert (await b.engine.read(a.remote, large(a))).nbytes == 32 * MIB
    assert b.pid == reader, "the reader's worker ended the job by itself"
    await until(lambda: not a.held)


async def test_a_read_that_waits_for_a_thread_is_cancelled_without_loss_of_the_worker(
    start_host: StartHost,
) -> None:
    a, b = await start_host("a", MIB), await start_host("b", MIB)
    a.signal(signal.SIGSTOP)
    reader, copies = b.pid, large(a, 1)
    reads = [asyncio.create_task(b.engine.read(a.remote, copies)) for _ in range(JOBS + 4)]
    await until(lambda: b.engine.stats()["jobs_under_way"] == len(reads))
    reads[-1].cancel()
    await asyncio.wait({reads[-1]})
    assert b.pid == reader and b.engine.stats()["jobs_under_way"] == len(reads) - 1
    a.signal(signal.SIGCONT)
    for read in reads[:-1]:
        assert (await read).nbytes == MIB


async def test_an_own_worker_that_is_stopped_is_killed_so_that_the_read_ends(
    start_host: StartHost,
) -> None:
    a, b = await start_host("a", 32 * MIB), await start_host("b", 32 * MIB)
    stopped = b.pid
    b.signal(signal.SIGSTOP)
    with pytest.raises(DeadlineExceeded):
        await b.engine.read(a.remote, large(a), timeout_s=0.1)
    assert not psutil.pid_exists(stopped)
    assert (await b.engine.read(a.remote, large(a))).nbytes == 32 * MIB


async def test_an_owner_that_cannot_pin_says_so(start_host: StartHost) -> None:
    def fail() -> None:
        raise RuntimeError("a bug")

    a, b = await start_host("a", 32 * MIB), await start_host("b", 32 * MIB)
    a.on_pin = fail
    with pytest.raises(DataplaneError, match="could not pin"):
        await b.engine.read(a.remote, large(a))
    a.on_pin = lambda: None
    assert (await b.engine.read(a.remote, large(a))).nbytes == 32 * MIB


async def test_stopping_under_load_leaves_no_process_and_no_descriptor(
    start_host: StartHost,
) -> None:
    me = psutil.Process()
    children, descriptors = set(me.children()), me.num_fds()
    a, b = await start_host("a", 64 * MIB), await start_host("b", 64 * MIB)
    reads = [asyncio.create_task(b.engine.read(a.remote, large(a, 64))) for _ in range(8)]
    await until(lambda: a.pins > 2)
    await asyncio.gather(b.engine.stop(), a.engine.stop())
    for outcome in await asyncio.gather(*reads, return_exceptions=True):
        assert isinstance(outcome, DataplaneError)
    assert set(me.children()) == children
    assert me.num_fds() == descriptors + 4  # the arenas of a and b, and what mmap keeps of them
    assert not a.held


async def test_a_worker_ends_when_its_peer_is_killed(tmp_path: Path) -> None:
    script = """
import asyncio, os
from dataplane.transport.engine import BulkEngine
from dataplane.transport.worker import JOBS
from dataplane.wire.tables import Owner
async def peer():
    fd = os.memfd_create("arena")
    os.ftruncate(fd, 1 << 20)
    who = {"owner": Owner("p", 1), "key": b"k", "pin": None, "unpin": None}
    engine = BulkEngine(fd, 1 << 20, "127.0.0.1", **who)
    await engine.start()
    print(engine.pid, flush=True)
    await asyncio.Event().wait()
asyncio.run(peer())
"""
    peer = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdout=subprocess.PIPE
    )
    assert peer.stdout is not None
    worker = os.pidfd_open(int(await peer.stdout.readline()))
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(worker, ended.set)
    peer.kill()
    async with asyncio.timeout(10):
        await ended.wait()
        await peer.communicate()  # the worker's witness may hold its output a moment longer
    asyncio.get_running_loop().remove_reader(worker)
    os.close(worker)


async def test_a_worker_whose_peer_is_gone_before_it_is_ready_ends_without_a_word() -> None:
    ours, theirs = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        arena = os.memfd_create("arena")
        os.ftruncate(arena, MIB)
        given = {"--control-fd": theirs.fileno(), "--arena-fd": arena}
        given |= {"--listen-fd": listener.fileno(), "--arena-bytes": MIB}
        options = [part for name, value in given.items() for part in (name, str(value))]
        worker = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "dataplane.transport.worker", *options),
            pass_fds=(theirs.fileno(), arena, listener.fileno()),
            stderr=subprocess.PIPE,
        )
        ours.sendall(encode(Configure(Owner("p", 1), b"k")))
        ours.close()
        theirs.close()
        _, said = await worker.communicate()
        os.close(arena)
    assert (worker.returncode, said) == (0, b"")


async def test_an_engine_whose_workers_cannot_start_says_so() -> None:
    broken = os.memfd_create("empty")  # mapping it fails: it has no bytes
    engine = BulkEngine(
        broken,
        MIB,
        "127.0.0.1",
        owner=Owner("p", 1),
        key=plane_key("p", (1, 1)),
        pin=lambda chunks: (0, chunks),
        unpin=lambda pin: None,
    )
    with pytest.raises(DataplaneError, match="bulk worker exited"):
        await engine.start()
    assert engine.pid is None
    os.close(broken)
