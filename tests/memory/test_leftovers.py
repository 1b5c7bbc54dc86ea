"""What is still mapped of arenas whose peer is dead."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import threading

import numpy as np

from dataplane.memory.arena import Arena, create_arena, still_mapped_bytes
from tests.processes import all_ending

MIB = 1 << 20
MAP = """
import mmap, os, sys
mapped = mmap.mmap(int(sys.argv[1]), 0, prot=mmap.PROT_READ)
seen = sum(mapped[at] for at in range(0, int(sys.argv[2]), 4096))
print("mapped", flush=True)
sys.stdin.read()
"""
MAP_FIXED = 0x10


def reader_of(arena: Arena, seen: int) -> subprocess.Popen[bytes]:
    """A process that maps the arena and has looked at so many bytes; it ends with its input."""
    reader = subprocess.Popen(
        [sys.executable, "-c", MAP, str(arena.ro_fd), str(seen)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[arena.ro_fd],
    )
    assert reader.stdout is not None and reader.stdout.readline() == b"mapped\n"
    return reader


def test_pages_that_somebody_maps_count_once_and_only_while_they_are_mapped() -> None:
    name = f"dataplane-test-{os.getpid()}"
    assert still_mapped_bytes(name) == 0
    arena = Arena.create(8 * MIB, name)
    arena.view[: 4 * MIB] = b"x" * 4 * MIB
    with all_ending([reader_of(arena, seen) for seen in (MIB, 2 * MIB)]):
        assert still_mapped_bytes(name) >= 4 * MIB  # this process wrote so much
        arena.close()
        assert 2 * MIB <= still_mapped_bytes(name) <= 8 * MIB
    assert still_mapped_bytes(name) == 0
    assert still_mapped_bytes("dataplane") == 0


def test_memory_of_no_file_that_lies_behind_the_arena_does_not_count() -> None:
    name = f"dataplane-test-{os.getpid()}-beside"
    arena = Arena.create(4 * MIB, name)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    memory = mmap.mmap(-1, 16 * MIB, flags=mmap.MAP_PRIVATE)
    whole = np.frombuffer(memory, np.uint8)
    whole[4 * MIB :] = 1
    address, flags = whole.ctypes.data, mmap.MAP_SHARED | MAP_FIXED
    # What was there before is replaced, so the arena's pages end where the others begin.
    assert libc.mmap(address, 4 * MIB, mmap.PROT_READ, flags, arena.ro_fd, 0) == address
    assert whole[: 4 * MIB : 4096].sum() == 0
    seen = still_mapped_bytes(name)
    del whole
    memory.close()
    arena.close()
    assert 0 < seen <= 4 * MIB
    assert still_mapped_bytes(name) == 0


def test_a_new_arena_waits_for_those_who_are_about_to_let_the_old_one_go() -> None:
    name = f"dataplane-test-{os.getpid()}-again"
    arena = Arena.create(8 * MIB, name)
    reader = reader_of(arena, 4 * MIB)
    arena.close()
    soon = threading.Timer(0.3, reader.communicate)
    soon.start()
    anew = create_arena(8 * MIB, name, MIB)
    assert anew.size_bytes == 8 * MIB
    soon.join()
    anew.close()


def test_a_new_arena_is_smaller_by_what_stays_in_view() -> None:
    name = f"dataplane-test-{os.getpid()}-kept"
    arena = Arena.create(8 * MIB, name)
    reader = reader_of(arena, 2 * MIB)
    arena.close()
    anew = create_arena(8 * MIB, name, MIB)
    assert MIB <= anew.size_bytes <= 6 * MIB
    reader.communicate()
    anew.close()
