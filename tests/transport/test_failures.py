"""Workers that die or stop, reads that are cancelled, engines that stop under load."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from dataplane.errors import DataplaneError, DeadlineExceeded, TransferFailed
from dataplane.transport import plane_key
from dataplane.transport.engine import BulkEngine
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


def kill(host: Any, number: signal.Signals = signal.SIGKILL) -> None:
    for pid in host.engine.pids:
        os.kill(pid, number)


async def until(condition: Callable[[], bool]) -> None:
    """Gives the event loop turns until something that is bound to happen has happened."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0)


@pytest.mark.parametrize("victim", ["reader", "owner"])
async def test_a_worker_killed_in_mid_transfer_fails_its_job_and_is_replaced(
    start_host: StartHost, victim: str
) -> None:
    a, b = await start_host("a", 32 * MIB), await start_host("b", 32 * MIB)
    a.fill()
    dying = b if victim == "reader" else a
    before = dying.engine.pids
    a.on_pin = once(lambda: kill(dying))
    with pytest.raises(TransferFailed, match="retried"):
        await b.engine.read(a.remote, large(a))
    outcome = await b.engine.read(a.remote, large(a))
    assert outcome.nbytes == 32 * MIB and np.array_equal(a.bytes, b.bytes)
    assert dying.engine.pids != before and dying.engine.stats()["restarts"] == 1
    await until(lambda: not a.held)


async def test_a_crash_leaves_the_other_worker_alone(start_host: StartHost) -> None:
    a, b = await start_host("a", 32 * MIB), await start_host("b", 32 * MIB, workers=2)
    survivor, victim = b.engine.pids
    os.kill(victim, signal.SIGKILL)
    await until(lambda: b.engine.stats()["workers"] == 1)
    assert (await b.engine.read(a.remote, large(a))).nbytes == 32 * MIB
    assert survivor in b.engine.pids


async def test_a_stopped_owner_ends_the_read_at_its_deadline(start_host: StartHost) -> None:
    a, b = await start_host("a", 32 * MIB), await start_host("b", 32 * MIB)
    a.on_pin = once(lambda: kill(a, signal.SIGSTOP))
    reader = b.engine.pids
    with pytest.raises(DeadlineExceeded, match="did not send all bytes in time"):
        await b.engine.read(a.remote, large(a), timeout_s=0.3)
    kill(a, signal.SIGCONT)
    assert (await b.engine.read(a.remote, large(a))).nbytes == 32 * MIB
    assert b.engine.pids == reader, "the reader's worker ended the job by itself"
    await until(lambda: not a.held)


async def test_an_own_worker_that_is_stopped_is_killed_so_that_the_read_ends(
    start_host: StartHost,
) -> None:
    a, b = await start_host("a", 32 * MIB), await start_host("b", 32 * MIB)
    stopped = b.engine.pids
    kill(b, signal.SIGSTOP)
    with pytest.raises(DeadlineExceeded):
        await b.engine.read(a.remote, large(a), timeout_s=0.1)
    assert not psutil.pid_exists(stopped[0])
    assert (await b.engine.read(a.remote, large(a))).nbytes == 32 * MIB


async def test_a_cancelled_read_writes_nothing_afterwards(start_host: StartHost) -> None:
    a, b = await start_host("a", 64 * MIB), await start_host("b", 64 * MIB)
    a.fill()
    task = asyncio.create_task(b.engine.read(a.remote, large(a, 64)))
    a.on_pin = once(task.cancel)
    with pytest.raises(asyncio.CancelledError):
        await task
    b.bytes[:] = 0  # as if the space had been given to somebody else
    assert (await b.engine.read(a.remote, large(a, 1))).nbytes == MIB
    assert not b.bytes[MIB:].any()
    await until(lambda: not a.held)
    assert b.engine.stats()["bytes_under_way"] == 0


async def test_a_small_read_does_not_wait_for_a_large_one(start_host: StartHost) -> None:
    a, b = await start_host("a", 512 * MIB), await start_host("b", 512 * MIB)
    copies = large(a, 512)
    big = asyncio.create_task(b.engine.read(a.remote, copies))
    await until(lambda: a.pins > 0)
    small = copies[:1].copy()
    small["nbytes"] = 4096
    await b.engine.read(a.remote, small)
    assert not big.done()
    assert (await big).nbytes == 512 * MIB


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
    a, b = await start_host("a", 64 * MIB), await start_host("b", 64 * MIB, workers=2)
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
from dataplane.wire.tables import Owner
async def peer():
    fd = os.memfd_create("arena")
    os.ftruncate(fd, 1 << 20)
    who = {"owner": Owner("p", 1), "key": b"k", "pin": None, "unpin": None}
    engine = BulkEngine(fd, 1 << 20, "127.0.0.1", **who)
    await engine.start()
    print(*engine.pids, flush=True)
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
    await peer.wait()
    asyncio.get_running_loop().remove_reader(worker)
    os.close(worker)


async def test_an_engine_whose_workers_cannot_start_says_so() -> None:
    broken = os.memfd_create("empty")  # mapping it fails: it has no bytes
    engine = BulkEngine(
        broken,
        MIB,
        "127.0.0.1",
        owner=Owner("p", 1),
        key=plane_key("p", (1, 1)),
        pin=lambda ranges: (0, ranges),
        unpin=lambda pin: None,
    )
    with pytest.raises(DataplaneError, match="did not start"):
        await engine.start()
    assert not engine.pids
    os.close(broken)
