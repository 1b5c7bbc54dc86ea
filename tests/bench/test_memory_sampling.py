"""Memory is counted once, and where it belongs."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bench.memory import ARENA, Sampler, memfds, process_bytes

MIB = 1 << 20


@pytest.fixture
def memfd() -> Iterator[int]:
    descriptor = os.memfd_create("test-arena")
    os.ftruncate(descriptor, 64 * MIB)
    yield descriptor
    os.close(descriptor)


def test_private_memory_counts_for_its_process() -> None:
    before = process_bytes(os.getpid())
    block = np.ones(64 * MIB, np.uint8)
    grown = process_bytes(os.getpid()) - before
    assert 60 * MIB < grown < 80 * MIB
    assert block.all()


def test_an_arena_counts_its_touched_pages_once_and_not_for_processes(memfd: int) -> None:
    def pids() -> dict[str, int]:
        return {"one": os.getpid(), "two": os.getpid()}

    sampler = Sampler(pids)
    sampler.sample()
    before = sampler.peak_bytes["one"]
    with mmap.mmap(memfd, 64 * MIB) as arena:
        arena[: 16 * MIB] = bytes(16 * MIB)
        sampler.sample()
    assert sampler.peak_bytes[ARENA] == 16 * MIB
    assert sampler.peak_bytes["one"] - before < 32 * MIB  # the bytes object alone
    inode = Path(f"/proc/self/fd/{memfd}").stat().st_ino
    assert [size for (_, number), size in memfds(os.getpid()).items() if number == inode] == [
        16 * MIB
    ]


def test_a_process_that_is_gone_weighs_nothing() -> None:
    unused = int(Path("/proc/sys/kernel/pid_max").read_text())
    assert process_bytes(unused) == 0
    assert memfds(unused) == {}


def test_the_sampler_looks_at_least_once_and_stops() -> None:
    with Sampler(lambda: {"me": os.getpid()}) as sampler:
        pass
    assert sampler.samples >= 1
    assert sampler.peak_bytes["me"] > 0
    assert sampler.peak_total_bytes >= sampler.peak_bytes["me"]
