"""Pages of the arena are allocated ahead of use, and never by the peer's own process: the kernel
would hold the lock of its address space while it finds memory, and the peer's threads would wait.
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from tests.end_to_end.conftest import Cluster, until

MIB = 1 << 20

KERNEL = tuple(int(part) for part in os.uname().release.split(".")[:2])


@pytest.mark.skipif(KERNEL < (5, 14), reason="the kernel has no MADV_POPULATE_WRITE")
def test_the_arena_is_prefaulted_and_the_peer_has_touched_none_of_it(cluster: Cluster) -> None:
    cluster.start("a")  # an arena of 256 MiB, a quarter of which is kept allocated ahead
    pid = cluster.peers["a"].pid
    opened = list(Path(f"/proc/{pid}/fd").iterdir())
    arena = next(one for one in opened if "memfd:" in os.readlink(one))
    until(lambda: os.stat(arena).st_blocks * 512 >= 64 * MIB, "a quarter is allocated", 60)
    assert psutil.Process(pid).memory_info().shared < 64 * MIB
