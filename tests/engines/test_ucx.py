"""UCX against the suite that every transport must pass, in real bulk workers. `make test-ucx`
installs what it needs and runs this."""

from __future__ import annotations

import re
import signal

import numpy as np
import pytest

from dataplane.errors import DeadlineExceeded, Unavailable
from dataplane.testing import TransportConformance, hosts
from dataplane.transport import registry
from dataplane_twin import TwinDevice
from tests.end_to_end.hosts import running

pytestmark = pytest.mark.skipif(bool(registry.missing("ucx")), reason=registry.missing("ucx"))

MIB = 1 << 20


class TestUcx(TransportConformance):
    transport = "ucx"


class TestUcxBetweenDevices(TransportConformance):
    """Device arenas of the twin, which UCX takes for what they are: host memory."""

    transport = "ucx"
    device = TwinDevice


def test_peers_that_require_it_carry_values_over_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATAPLANE_TRANSPORT", "required:ucx")
    values = [np.random.default_rng(seed).integers(0, 256, MIB, np.uint8) for seed in range(8)]
    with (
        running("a", "b", arena="64MiB") as cluster,
        cluster.connect("a") as here,
        cluster.connect("b") as there,
    ):
        here.partition("p", stages={"s": ["x"]}, free="acked").put({"x": values})
        with there.partition("p").claim("s", rows=8, timeout=30) as batch:
            assert all(map(np.array_equal, batch["x"], values))
        assert there.stats()["bulk"]["bytes_in_over"]["ucx"] >= 8 * MIB
        # With error handling on UCX would leave it out, silently, unless it is told otherwise.
        assert re.search(r"ucx: reading from peer '.*' over .*\bposix/memory", cluster.log("b"))


async def test_over_its_tcp_a_stopped_owner_is_noticed_and_one_started_anew_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    async with hosts("ucx") as start:
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
        await b.read_in_the_end(a, copies)
        assert np.array_equal(a.bytes, b.bytes)


async def test_without_a_lane_between_the_hosts_the_read_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_TLS", "self")
    async with hosts("ucx") as start:
        a, b = await start("a"), await start("b")
        copies = a.place(np.array([0]), np.array([4096]))
        with pytest.raises(Unavailable, match="UCX cannot connect"):
            await b.read(a, copies)
