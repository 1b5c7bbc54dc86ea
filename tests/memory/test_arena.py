"""The memory file: sealed, sparse, and how much memory it may take by default."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from dataplane.memory.arena import Arena, default_arena_bytes

MIB = 1 << 20


def resident_bytes(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def test_an_arena_cannot_change_its_size_and_readers_cannot_write() -> None:
    arena = Arena.create(MIB - 1, "test")
    assert arena.size_bytes == MIB
    with pytest.raises(PermissionError):
        os.ftruncate(arena.rw_fd, 2 * MIB)
    with pytest.raises(PermissionError):
        mmap.mmap(arena.ro_fd, MIB, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(OSError):
        os.pwrite(arena.ro_fd, b"x", 0)
    arena.view[5:8] = b"abc"
    assert os.pread(arena.ro_fd, 3, 5) == b"abc"
    assert not os.get_inheritable(arena.rw_fd)
    arena.close()
    arena.close()
    assert "closed" in repr(arena)


def test_prefault_brings_in_what_was_asked_and_no_more() -> None:
    arena = Arena.create(64 * MIB, "test")
    assert resident_bytes(arena.rw_fd) == 0
    if arena.prefault(MIB, 2 * MIB):
        assert resident_bytes(arena.rw_fd) == 2 * MIB
        assert arena.prefault(63 * MIB, 5 * MIB)
        assert resident_bytes(arena.rw_fd) == 3 * MIB
    arena.close()


def test_closing_under_a_view_leaves_the_view_readable() -> None:
    arena = Arena.create(MIB, "test")
    arena.view[:3] = b"abc"
    part = arena.view[:3]
    arena.close()
    assert bytes(part) == b"abc"


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/", {}, 4 * MIB),
        ("0::/job", {"job/memory.max": "8388608"}, 2 * MIB),
        ("0::/job/step", {"job/memory.max": "4194304", "job/step/memory.max": "max"}, MIB),
        ("4:memory:/job", {"memory/job/memory.limit_in_bytes": "8388608"}, 2 * MIB),
        ("4:memory:/job", {"memory/memory.limit_in_bytes": "8388608"}, 2 * MIB),
        ("4:memory:/", {"memory/memory.limit_in_bytes": "9223372036854771712"}, 4 * MIB),
        ("3:cpu,cpuacct:/job", {"job/memory.max": "5"}, 4 * MIB),
    ],
)
def test_the_default_is_a_quarter_of_what_host_and_cgroup_allow(
    tmp_path: Path, cgroup: str, files: dict[str, str], expected: int
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal:   16384 kB\nMemFree:  1 kB\n")
    (tmp_path / "proc/self/cgroup").write_text(cgroup + "\n")
    for name, text in files.items():
        (tmp_path / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cgroup" / name).write_text(text + "\n")
    assert default_arena_bytes(tmp_path / "proc", tmp_path / "cgroup") == expected


def test_this_machine_has_a_default() -> None:
    assert default_arena_bytes() > 0
