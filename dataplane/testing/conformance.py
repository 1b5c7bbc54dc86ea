"""The tests that every transport must pass, with real bulk workers: subclass
`TransportConformance`.

The variable TRANSPORT_CONFORMANCE_MIB sets the largest read, 64 by default.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import pytest_asyncio

from dataplane.errors import (
    DataplaneError,
    DeadlineExceeded,
    ProtocolError,
    TicketRefused,
    TransferFailed,
)
from dataplane.gpu.device import Device
from dataplane.testing.hosts import Host, Records, StartHost, hosts, until
from dataplane.transport import COPY, plane_key
from dataplane.wire.tables import Owner

MIB = 1 << 20
LARGEST_MIB = int(os.environ.get("TRANSPORT_CONFORMANCE_MIB", "64"))
SIZES = (0, 1, 63, 64, 4095, 4096, 4097, 65_537, MIB, 8 * MIB + 1, LARGEST_MIB * MIB)
STEPS = 24
"""Reads that are cancelled, after 0, 1, … turns of the event loop."""


def mebibytes(host: Host, count: int) -> Records:
    return host.place(np.arange(count) * MIB, np.full(count, MIB))


def _open_in_workers(*peers: Host) -> int:
    """Return the number of descriptors and threads of these workers."""
    return sum(
        len(os.listdir(f"/proc/{host.pid}/{kind}")) for host in peers for kind in ("fd", "task")
    )


def once(act: Callable[[], None]) -> Callable[[], None]:
    """Return a function that runs `act` only the first time it is called. Set it as `on_pin` to
    run `act` at a moment when a transfer is guaranteed to be in flight."""
    todo = [act]
    return lambda: todo.pop()() if todo else None


@pytest.mark.asyncio
class TransportConformance:
    """The tests that every transport must pass. Subclass this class and set `transport` to the
    name of your transport.

    `tls`: test with `--bulk-tls` (TCP only). `device`: transfer between arenas on devices of this
    kind. This process must be able to read and write the memory of these devices.
    """

    transport: ClassVar[str] = "tcp"
    tls: ClassVar[bool] = False
    device: ClassVar[type[Device] | None] = None

    @pytest_asyncio.fixture
    async def start(self) -> AsyncIterator[StartHost]:
        async with hosts(self.transport, self.tls, self.device) as start:
            yield start

    async def test_the_workers_run_it(self, start: StartHost) -> None:
        a = await start("a")
        assert (a.engine.transport, a.engine.missing) == (self.transport, "")

    async def test_every_size_arrives_equal_and_nothing_beside_it(self, start: StartHost) -> None:
        room = max(SIZES) + 2 * MIB
        a, b = await start("a", room), await start("b", room)
        a.fill()
        for size in SIZES:
            copies = a.place(np.array([MIB + 8]), np.array([size]))
            copies["dest"] = MIB - 5
            outcome = await b.read(a, copies)
            assert outcome.nbytes == size and not outcome.gone.any()
            begin, end = MIB - 5, MIB - 5 + size
            assert np.array_equal(b.bytes[begin:end], a.bytes[MIB + 8 : MIB + 8 + size]), size
            assert not b.bytes[:begin].any() and not b.bytes[end:].any(), size
            b.bytes[begin:end] = 0

    async def test_many_thousands_of_small_ranges_arrive_scattered(self, start: StartHost) -> None:
        count = 20_000
        a, b = await start("a", 4 * MIB), await start("b", 4 * MIB)
        a.fill()
        rng = np.random.default_rng(1)
        lengths = rng.integers(1, 100, count)
        slots = rng.permutation(count) * 128
        copies = a.place(np.arange(count) * 128, lengths)
        copies["dest"] = slots
        outcome = await b.read(a, copies)
        assert outcome.nbytes == lengths.sum() and not outcome.gone.any()
        inside = np.arange(128) < lengths[:, None]
        sent = a.bytes[: count * 128].reshape(count, 128)
        got = b.bytes[: count * 128].reshape(count, 128)[slots // 128]
        assert np.array_equal(got[inside], sent[inside])
        assert not got[~inside].any(), "bytes outside a destination were overwritten"

    async def test_parts_of_ranges_can_be_read_and_nothing_beyond(self, start: StartHost) -> None:
        a, b = await start("a"), await start("b")
        a.fill()
        copies = a.place(np.array([0, 4096, 8192]), np.array([4096, 4096, 4096]))
        copies["start"], copies["nbytes"] = [100, 0, 4096], [50, 0, 0]
        copies["dest"] = [0, 1 << 20, 7]
        assert (await b.read(a, copies)).nbytes == 50
        assert np.array_equal(b.bytes[:50], a.bytes[100:150]) and not b.bytes[50:].any()
        copies["start"], copies["nbytes"] = [0, 0, 2], [1, 1, 4095]
        copies["dest"] = 0
        with pytest.raises(ProtocolError, match="of its chunk, which is only"):
            await b.read(a, copies)
        assert (await b.read(a, np.zeros(0, COPY))).nbytes == 0

    async def test_overlapping_transfers_in_both_directions(self, start: StartHost) -> None:
        a, b = await start("a", 32 * MIB), await start("b", 32 * MIB)
        a.fill(1)
        b.fill(2)
        ab, ba = mebibytes(a, 16), mebibytes(b, 16)
        ab["dest"] += np.uint64(16 * MIB)
        ba["dest"] += np.uint64(16 * MIB)
        reads = [b.read(a, ab[i : i + 2]) for i in range(15)]
        reads += [a.read(b, ba[i : i + 2]) for i in range(15)]
        assert sum(done.nbytes for done in await asyncio.gather(*reads)) == 60 * MIB
        assert np.array_equal(b.bytes[16 * MIB :], a.bytes[: 16 * MIB])
        assert np.array_equal(a.bytes[16 * MIB :], b.bytes[: 16 * MIB])

    async def test_stale_generations_are_marked_and_the_others_arrive(
        self, start: StartHost
    ) -> None:
        a, b = await start("a", 32 * MIB), await start("b", 32 * MIB)
        a.fill()
        copies = mebibytes(a, 30)
        a.numbers[[3, 17]] = 0
        outcome = await b.read(a, copies)
        assert np.flatnonzero(outcome.gone).tolist() == [3, 17] and outcome.nbytes == 28 * MIB
        rows, sent = (x.bytes[: 30 * MIB].reshape(30, MIB) for x in (b, a))
        assert not rows[outcome.gone].any()
        assert np.array_equal(rows[~outcome.gone], sent[~outcome.gone])
        a.numbers[:30] = 0
        assert (await b.read(a, copies)).gone.all()

    async def test_a_wrong_ticket_is_refused(self, start: StartHost) -> None:
        a, c = await start("a"), await start("c")
        b = await start("b", key=plane_key("another plane", (1, 1)))
        copies = a.place(np.array([0]), np.array([4096]))
        with pytest.raises(TicketRefused, match="belong to different runs"):
            await b.read(a, copies)
        earlier = replace(a.remote, owner=Owner("a", 6))
        with pytest.raises(TicketRefused, match="incarnation 7 of peer"):
            await c.engine.read(earlier, copies, transport=self.transport)
        assert a.pins == 0
        assert (await c.read(a, copies)).nbytes == 4096

    async def test_a_ticket_that_ran_out_at_the_owner_ends_the_read(self, start: StartHost) -> None:
        a, b = await start("a"), await start("b")
        a.fill()
        copies = a.place(np.array([64]), np.array([500_000]))

        def expire() -> None:
            raise DeadlineExceeded("the ticket expired")

        a.on_pin = once(expire)
        with pytest.raises(DeadlineExceeded):
            await b.read(a, copies)
        assert (await b.read(a, copies)).nbytes == 500_000
        assert np.array_equal(b.bytes[64:500_064], a.bytes[64:500_064])

    async def test_a_read_cancelled_at_any_await_writes_nothing_afterwards(
        self, start: StartHost
    ) -> None:
        a, b = await start("a", 16 * MIB), await start("b", 16 * MIB)
        a.fill()
        copies = mebibytes(a, 16)
        for turns in range(STEPS):
            task = asyncio.create_task(b.read(a, copies))
            if turns:
                for _ in range(turns):
                    await asyncio.sleep(turns % 3 * 0.0005)
                task.cancel()
            else:
                a.on_pin = once(lambda task=task: task.cancel() and None)  # type: ignore[misc]
            (outcome,) = await asyncio.gather(task, return_exceptions=True)
            assert turns or isinstance(outcome, asyncio.CancelledError)
            b.bytes[:] = 0  # as if the space belonged to another holder
            assert (await b.read_with_retries(a, copies[:1])).nbytes == MIB
            assert not b.bytes[MIB:].any()
        await until(lambda: not a.held)
        assert b.engine.stats()["bytes_under_way"] == 0

    async def test_a_first_read_that_is_cancelled_costs_no_worker(self, start: StartHost) -> None:
        a, b = await start("a", 16 * MIB), await start("b", 16 * MIB)
        before = a.pid, b.pid
        read = asyncio.create_task(b.read(a, mebibytes(a, 16)))
        await until(lambda: bool(a.held) or read.done())
        read.cancel()
        await asyncio.gather(read, return_exceptions=True)
        assert (await b.read_with_retries(a, mebibytes(a, 1))).nbytes == MIB
        assert (a.pid, b.pid) == before

    @pytest.mark.parametrize("victim", ["reader", "owner"])
    async def test_a_worker_killed_in_mid_transfer_is_replaced_and_the_read_may_be_repeated(
        self, start: StartHost, victim: str
    ) -> None:
        a, b = await start("a", 32 * MIB), await start("b", 32 * MIB)
        a.fill()
        dying = b if victim == "reader" else a
        assert (await b.read(a, mebibytes(a, 1))).nbytes == MIB
        before = dying.pid
        a.on_pin = once(lambda: dying.signal(signal.SIGKILL))
        (first,) = await asyncio.gather(b.read(a, mebibytes(a, 32)), return_exceptions=True)
        if isinstance(first, BaseException):  # otherwise the new worker has served it
            assert isinstance(first, TransferFailed) and "repeat the call" in str(first)
        outcome = await b.read_with_retries(a, mebibytes(a, 32))
        assert outcome.nbytes == 32 * MIB and np.array_equal(a.bytes, b.bytes)
        await until(lambda: dying.engine.stats()["works"])
        assert dying.pid != before
        assert dying.engine.transport == self.transport
        await until(lambda: not a.held)

    @pytest.mark.parametrize("when", ["before the pin", "while bytes move"])
    async def test_a_stopped_owner_ends_the_read_at_its_deadline(
        self, start: StartHost, when: str
    ) -> None:
        a, b = await start("a", 64 * MIB), await start("b", 64 * MIB)
        a.fill()
        await b.read(a, mebibytes(a, 1))
        if when == "before the pin":
            a.signal(signal.SIGSTOP)
        read = asyncio.create_task(b.read(a, mebibytes(a, 64), timeout_s=1.0))
        if when == "while bytes move":
            await until(lambda: bool(a.held) or read.done())
            a.signal(signal.SIGSTOP)
        (outcome,) = await asyncio.gather(read, return_exceptions=True)
        a.signal(signal.SIGCONT)
        if isinstance(outcome, BaseException):
            assert isinstance(outcome, DeadlineExceeded), outcome
        else:  # it was done before the owner stopped
            assert when == "while bytes move" and np.array_equal(a.bytes, b.bytes)
        await b.read_with_retries(a, mebibytes(a, 64))
        assert np.array_equal(a.bytes, b.bytes)
        await until(lambda: not a.held)

    async def test_an_owner_whose_worker_was_started_anew_is_read_again(
        self, start: StartHost
    ) -> None:
        a, b = await start("a", 4 * MIB), await start("b", 4 * MIB)
        for life in (1, 2):
            a.fill(life)
            outcome = await b.read_with_retries(a, mebibytes(a, 4))
            assert outcome.nbytes == 4 * MIB and np.array_equal(a.bytes, b.bytes)
            a.signal(signal.SIGKILL)
            await until(lambda life=life: a.engine.stats()["restarts"] == life)  # type: ignore[misc]
            await until(lambda: a.engine.stats()["works"])
            b.engine.forget(a.owner)

    async def test_reads_leave_no_descriptor_and_no_thread_open(self, start: StartHost) -> None:
        a, b = await start("a", 4 * MIB), await start("b", 4 * MIB)
        for _ in range(5):
            await b.read(a, mebibytes(a, 2))
        before = _open_in_workers(a, b)
        for _ in range(40):
            await b.read(a, mebibytes(a, 2))
        await until(lambda: _open_in_workers(a, b) < before + 20)

    async def test_stopping_under_load_ends_every_read_with_a_typed_error(
        self, start: StartHost
    ) -> None:
        a, b = await start("a", 64 * MIB), await start("b", 64 * MIB)
        reads = [asyncio.create_task(b.read(a, mebibytes(a, 64))) for _ in range(8)]
        await until(lambda: a.pins > 2)
        pids = {a.pid, b.pid}
        await asyncio.gather(b.engine.stop(), a.engine.stop())
        for outcome in await asyncio.gather(*reads, return_exceptions=True):
            assert isinstance(outcome, DataplaneError) or not isinstance(outcome, BaseException)
        assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
        assert not a.held
