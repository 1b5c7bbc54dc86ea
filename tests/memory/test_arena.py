"""The memory file: sealed and sparse."""

from __future__ import annotations

import mmap
import os

import pytest

from dataplane.memory.arena import Arena

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


def test_prefault_allocates_what_was_asked_in_another_process_and_keeps_what_was_written() -> None:
    arena = Arena.create(64 * MIB, "test")
    arena.view[MIB : MIB + 3] = b"abc"
    mapped = os.sysconf("SC_PAGE_SIZE")
    assert resident_bytes(arena.rw_fd) == mapped
    assert arena.prefault(MIB, 2 * MIB).wait() == 0
    allocated = resident_bytes(arena.rw_fd)
    if allocated > mapped:  # the kernel can (Linux 5.14)
        assert allocated == 2 * MIB
        assert arena.prefault(63 * MIB, 5 * MIB).wait() == 0
        assert resident_bytes(arena.rw_fd) == 3 * MIB
    assert bytes(arena.view[MIB : MIB + 3]) == b"abc"
    arena.close()


def test_closing_under_a_view_leaves_the_view_readable() -> None:
    arena = Arena.create(MIB, "test")
    arena.view[:3] = b"abc"
    part = arena.view[:3]
    arena.close()
    assert bytes(part) == b"abc"
