"""The parts of bulk transfer that need no worker: slices, iovecs, the byte limiter."""

from __future__ import annotations

import asyncio
import socket
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.errors import ProtocolError
from dataplane.transport.bulk_frames import COPY
from dataplane.transport.control import ControlChannel
from dataplane.transport.limiter import ResourceLimiter
from dataplane.transport.slices import cut
from dataplane.transport.stream import BulkStream, iovecs, split_address


@given(st.lists(st.integers(0, 40), max_size=60), st.integers(1, 32), st.integers(1, 8))
@settings(max_examples=150)
def test_slices_cover_every_byte_once_within_their_bounds(
    lengths: list[int], max_bytes: int, max_items: int
) -> None:
    copies = np.zeros(len(lengths), COPY)
    copies["nbytes"] = lengths
    copies["dest"] = np.cumsum([0, *lengths])[:-1]
    copies["chunk"] = np.arange(len(lengths))
    written = np.zeros(sum(lengths), int)
    seen: set[int] = set()
    for part in cut(copies, max_bytes, max_items):
        assert part.nbytes == part.copies["nbytes"].sum() <= max_bytes
        assert 1 <= len(part.copies) <= max_items
        for index, copy in zip(part.index, part.copies, strict=True):
            assert copy["chunk"] == index
            assert copy["dest"] - copies["dest"][index] == copy["start"]
            written[int(copy["dest"]) : int(copy["dest"] + copy["nbytes"])] += 1
            seen.add(int(index))
    assert (written == 1).all() and seen == set(range(len(lengths)))


def test_iovecs_join_neighbours_and_leave_out_what_is_empty() -> None:
    bases = np.array([100, 110, 110, 500, 505, 90], np.uint64)
    lengths = np.array([10, 0, 5, 5, 1, 10], np.uint64)
    assert iovecs(bases, lengths).tolist() == [(100, 15), (500, 6), (90, 10)]
    assert len(iovecs(bases[:0], lengths[:0])) == 0


def test_scattered_bytes_survive_partial_sends_and_receives() -> None:
    ours, theirs = _tcp_pair()
    rng = np.random.default_rng(0)
    source = rng.integers(0, 256, 12 << 20, np.uint8)
    target = np.zeros_like(source)
    cuts = np.unique(rng.integers(0, len(source), 5_000)).astype(np.uint64)
    starts, ends = cuts[:-1:2], cuts[1::2]
    lengths, deadline = ends - starts[: len(ends)], time.monotonic() + 20
    starts = starts[: len(ends)]
    sending = iovecs(np.uint64(source.ctypes.data) + starts, lengths)
    receiving = iovecs(np.uint64(target.ctypes.data) + starts, lengths)
    sender = threading.Thread(target=ours.send_from, args=(sending, deadline))
    sender.start()
    theirs.receive_into(receiving, deadline)
    sender.join()
    inside = np.zeros(len(source), bool)
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        inside[start : start + length] = True
    assert np.array_equal(target[inside], source[inside]) and not target[~inside].any()
    ours.close()
    theirs.close()


def test_a_stream_ends_at_its_deadline_and_when_aborted() -> None:
    ours, theirs = _tcp_pair()
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        ours.receive(100, began + 0.05)
    assert 0.05 <= time.monotonic() - began < 5
    with pytest.raises(TimeoutError):
        theirs.send(bytes(64 << 20), time.monotonic() + 0.05)
    waiter = threading.Thread(target=lambda: outcomes.append(ours_2.receive(100, began + 60)))
    outcomes: list[bytes | None] = []
    ours_2, theirs_2 = _tcp_pair()
    waiter.start()
    ours_2.abort()
    waiter.join(20)
    assert outcomes == [None]
    for stream in (ours, theirs, ours_2, theirs_2):
        stream.close()


def test_addresses_are_host_and_port() -> None:
    assert split_address("127.0.0.1:80") == ("127.0.0.1", 80)
    assert split_address("[::1]:8000") == ("::1", 8000)
    for wrong in ("", "host", ":80", "host:", "host:x", "host:99999"):
        with pytest.raises(ProtocolError):
            split_address(wrong)


async def test_the_limiter_admits_in_order_of_arrival() -> None:
    limiter, order = ResourceLimiter(100), list[str]()

    async def take(name: str, nbytes: int, hold: asyncio.Event) -> None:
        await limiter.acquire(nbytes)
        order.append(name)
        await hold.wait()
        limiter.release(nbytes)

    hold = asyncio.Event()
    tasks = [
        asyncio.create_task(take(name, nbytes, hold))
        for name, nbytes in [("a", 60), ("b", 60), ("c", 10), ("too large", 500)]
    ]
    await asyncio.sleep(0)
    assert order == ["a"] and limiter.used_bytes == 60
    tasks[1].cancel()
    await asyncio.gather(tasks[1], return_exceptions=True)
    await asyncio.sleep(0)
    assert order == ["a", "c"]
    hold.set()
    await asyncio.gather(tasks[0], *tasks[2:])
    assert order[-1] == "too large" and limiter.used_bytes == 0


def _tcp_pair() -> tuple[BulkStream, BulkStream]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    return BulkStream(ours), BulkStream(theirs)


def test_a_peer_that_died_with_something_unread_has_ended_for_its_worker() -> None:
    """The kernel says reset then, not end of file."""
    peer, worker = socket.socketpair()
    control = ControlChannel(worker)
    worker.sendall(b"an answer that nobody read")
    peer.close()
    assert control.receive() is None
    worker.close()
