"""NIXL over its CPU paths, in real bulk workers. `make test-nixl` installs it and runs this."""

from __future__ import annotations

import asyncio
import signal
import time

import numpy as np
import pytest

from dataplane.errors import DeadlineExceeded
from dataplane.testing import TransportConformance, hosts
from dataplane.transport import registry
from dataplane_twin import TwinDevice

pytestmark = pytest.mark.skipif(bool(registry.missing("nixl")), reason=registry.missing("nixl"))

MIB = 1 << 20
SECOND_THREAD = "nixl-second: ready to transfer values"


class TestNixl(TransportConformance):
    transport = "nixl"


class TestNixlBetweenDevices(TransportConformance):
    """Device arenas of the twin, which NIXL takes for what they are: host memory."""

    transport = "nixl"
    device = TwinDevice


async def test_two_threads_share_large_reads_on_one_host_and_stop_together(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async with hosts("nixl") as start:
        owner, reader = await start("owner", 64 * MIB), await start("reader", 64 * MIB)
        owner.fill()
        copies = owner.place(np.arange(64) * MIB, np.full(64, MIB))[::-1].copy()
        last, said, end = copies[:1], "", time.monotonic() + 30
        while SECOND_THREAD not in said:
            assert time.monotonic() < end, "the second thread does not start"
            await reader.read(owner, copies)
            said += capfd.readouterr().err
        reader.bytes[:] = 0
        assert (await reader.read(owner, copies)).nbytes == 64 * MIB
        assert np.array_equal(reader.bytes, owner.bytes)
        for moment_s in np.arange(8) * 0.003:
            task = asyncio.create_task(reader.read(owner, copies))
            await asyncio.sleep(moment_s)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            reader.bytes[:] = 0  # as if the space had been given to somebody else
            assert (await reader.read_with_retries(owner, last)).nbytes == MIB
            assert not reader.bytes[: 63 * MIB].any()


async def test_over_ucx_tcp_a_stopped_owner_is_noticed_and_one_started_anew_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    async with hosts("nixl") as start:
        a, b = await start("a", 32 * MIB), await start("b", 32 * MIB)
        a.fill()
        copies = a.place(np.arange(32) * MIB, np.full(32, MIB))
        assert (await b.read(a, copies)).nbytes == 32 * MIB
        assert np.array_equal(a.bytes, b.bytes)
        a.signal(signal.SIGSTOP)
        with pytest.raises(DeadlineExceeded):
            await b.read(a, copies, timeout_s=0.5)
        a.signal(signal.SIGKILL)
        b.bytes[:] = 0
        await b.read_with_retries(a, copies)
        assert np.array_equal(a.bytes, b.bytes)


async def test_a_worker_whose_ucx_finds_no_lane_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "self")
    async with hosts("nixl") as start:
        a = await start("a")
        assert a.engine.transport == "tcp" and "nixl failed to start" in a.engine.missing
