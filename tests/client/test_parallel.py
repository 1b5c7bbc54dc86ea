"""Large copies shared among threads: the same bytes, whoever copies them."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from dataplane.client.write.copying import MAX_THREADS, Copy, carry_out, populate
from dataplane.memory.arena import WriteMaps

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


def _copies() -> list[Copy]:
    """A long run, rows at a distance, one row of many dimensions, and nothing at all."""
    numbers = np.random.default_rng(0)
    run = numbers.integers(0, 255, 40 * MIB + 3, np.uint8)
    rows = numbers.integers(0, 255, (9, MIB // 8), np.int64)
    one = numbers.integers(0, 255, (1, 1, 5, 4 * MIB), np.uint8)
    spaced = np.zeros((9, MIB // 4), np.int64)[:, : MIB // 8]
    nothing = np.zeros(0, np.uint8)
    return [
        (np.zeros_like(run), run),
        (spaced, rows),
        (np.zeros_like(one), one),
        (nothing.copy(), nothing),
    ]


def _nbytes(copies: list[Copy]) -> int:
    return sum(target.nbytes for target, _ in copies)


def _all_there(copies: list[Copy]) -> bool:
    return all(np.array_equal(target, source) for target, source in copies)


def test_all_bytes_arrive_and_no_thread_stays() -> None:
    copies, before = _copies(), threading.active_count()
    carry_out(iter(copies), _nbytes(copies))
    assert _all_there(copies)
    assert threading.active_count() == before


def test_as_many_threads_as_pay_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    real = ThreadPoolExecutor.__init__

    def counted(pool: ThreadPoolExecutor, count: int, name: str) -> None:
        started.append(count + 1)
        real(pool, count, name)

    monkeypatch.setattr(ThreadPoolExecutor, "__init__", counted)
    for nbytes in (31 * MIB, 32 * MIB, 48 * MIB, 512 * MIB):
        carry_out([], nbytes)
    assert started == [2, 3, MAX_THREADS]


def test_without_another_thread_the_caller_copies_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(ThreadPoolExecutor, "submit", none_left)
    copies = _copies()
    carry_out(copies, _nbytes(copies))
    assert _all_there(copies)


def test_what_fails_in_any_thread_is_raised() -> None:
    wrong: list[Copy] = [(np.zeros(2 * MIB, np.uint8), np.zeros(3, np.uint8))] * 64
    with pytest.raises(ValueError, match="broadcast"):
        carry_out(wrong, 128 * MIB)


def test_pages_are_brought_in_as_far_as_they_are_needed() -> None:
    fd = os.memfd_create("pages")
    try:
        os.ftruncate(fd, 128 * MIB)
        writes = WriteMaps(fd)
        populate(writes, [(4096, 70 * MIB), (100 * MIB, 4096)], 70 * MIB + 4096)
        assert os.fstat(fd).st_blocks * 512 == 70 * MIB + 4096
        writes.close()
    finally:
        os.close(fd)


def test_a_few_pages_come_in_as_they_are_written() -> None:
    fd = os.memfd_create("pages")
    try:
        os.ftruncate(fd, MIB)
        writes = WriteMaps(fd)
        populate(writes, [(0, 4096)], 4096)
        assert os.fstat(fd).st_blocks == 0
        writes.close()
    finally:
        os.close(fd)
