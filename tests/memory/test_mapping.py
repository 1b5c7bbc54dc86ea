"""A client's mappings: views that keep their pin, and what only writers have."""

from __future__ import annotations

import os
import resource
import threading
import warnings
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

from dataplane.errors import PeerLost, ProtocolError
from dataplane.memory import arena as arena_module
from dataplane.memory.arena import Arena, ReadMap, WriteMaps

PAGE = 4096


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(64 * PAGE, "test")
    yield arena
    arena.close()


def view(base: np.ndarray, offset: int, count: int) -> np.ndarray:
    return np.ndarray((count,), np.float32, buffer=base, offset=offset)


def mapped_bytes(access: str = "") -> int:
    """Address space under memory files named as the arena's; of this access only, as the kernel
    writes it."""
    total = 0
    with open("/proc/self/maps") as maps:
        for line in maps:
            if "memfd:test" in line and line.split()[1].startswith(access):
                low, high = (int(part, 16) for part in line.split()[0].split("-"))
                total += high - low
    return total


def test_a_pin_goes_exactly_when_its_last_view_dies(arena: Arena) -> None:
    reads = ReadMap(arena.ro_fd, arena.size_bytes)
    pin = reads.pin(5)
    gone: list[int] = []
    weakref.finalize(pin, gone.append, 5)
    base = np.asarray(pin)
    assert base.base is pin  # type: ignore[comparison-overlap]
    assert repr(pin) == "<Pin 5>"
    del pin
    views = [view(base, n * 64, 8) for n in range(4)]
    del base
    derived = views[0][2:].reshape(2, 3).T.view(np.int32)
    views.clear()
    assert gone == []
    del derived
    assert gone == [5]


def test_views_show_the_arena_and_can_never_be_written(arena: Arena) -> None:
    arena.view[64:72] = np.array([1.5, 2.5], np.float32).tobytes()
    reads = ReadMap(arena.ro_fd, arena.size_bytes)
    base = np.asarray(reads.pin(1))
    seen = view(base, 64, 2)
    assert seen.tolist() == [1.5, 2.5]
    for array in (base, seen, seen[:1], seen.view(np.int32)):
        assert not array.flags.writeable
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.setflags(write=True)
    with pytest.raises(TypeError, match="read-only"):
        seen.data[0] = 1


def test_views_outlive_the_map_they_came_from(arena: Arena) -> None:
    arena.view[0:4] = b"abcd"
    before = mapped_bytes()
    reads = ReadMap(arena.ro_fd, arena.size_bytes)
    seen = np.asarray(reads.pin(1))[:4]
    assert mapped_bytes() == before + arena.size_bytes
    del reads
    assert seen.tobytes() == b"abcd"
    del seen
    assert mapped_bytes() == before


def test_what_is_written_through_a_view_is_in_the_arena(arena: Arena) -> None:
    writes = WriteMaps(arena.rw_fd)
    writes.view(PAGE + 64, 5)[:] = list(b"hello")
    assert bytes(arena.view[PAGE + 64 : PAGE + 69]) == b"hello"
    assert len(writes) == 1
    assert len(writes.view(PAGE, 0)) == 0


def test_only_the_pages_of_granted_extents_can_be_touched(arena: Arena) -> None:
    before, can = mapped_bytes(), mapped_bytes("rw")
    writes = WriteMaps(arena.rw_fd)
    writes.view(8 * PAGE + 64, PAGE)
    assert mapped_bytes("rw") == can + 2 * PAGE
    assert mapped_bytes("---") == arena.size_bytes - 2 * PAGE
    for offset, length in ((63 * PAGE, 2 * PAGE), (-1, 5), (0, 65 * PAGE)):
        with pytest.raises(ProtocolError, match="outside the arena"):
            writes.view(offset, length)
    writes.close()
    assert mapped_bytes() == before
    with pytest.raises(PeerLost):
        writes.view(8 * PAGE, PAGE)


def test_runs_of_pages_that_touch_are_one(arena: Arena) -> None:
    can, writes = mapped_bytes("rw"), WriteMaps(arena.rw_fd)
    for first, count, runs in (
        *((4, 4, 1), (5, 1, 1), (8, 1, 1), (2, 2, 1)),
        *((20, 1, 2), (22, 1, 3), (0, 1, 4), (0, 24, 1), (63, 1, 2)),
    ):
        writes.view(first * PAGE, count * PAGE)
        assert len(writes) == runs
    assert repr(writes) == f"<WriteMaps 2 runs, {25 * PAGE} B>"
    assert mapped_bytes("rw") == can + 25 * PAGE


def test_a_page_that_was_written_costs_no_fault_when_others_are_opened(arena: Arena) -> None:
    writes = WriteMaps(arena.rw_fd)
    views = [writes.view(at * PAGE, PAGE) for at in range(1, 63, 2)]
    for one in views:
        one[:] = 1
    for at in range(0, 64, 2):
        writes.view(at * PAGE, PAGE)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for at in range(1, 63, 2):
        writes.view(at * PAGE, PAGE)[:] = 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < len(views)


def test_too_many_runs_begin_a_new_mapping_but_not_under_an_array(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena_module, "MAX_OPEN_RUNS", 2)
    before = mapped_bytes()
    writes = WriteMaps(arena.rw_fd)
    held = writes.view(0, 4)
    writes.view(10 * PAGE, PAGE)
    writes.view(0, 4)
    assert mapped_bytes() == before + arena.size_bytes
    writes.view(20 * PAGE, PAGE)
    assert len(writes) == 1
    held[:] = list(b"abcd")
    assert bytes(arena.view[:4]) == b"abcd"
    assert mapped_bytes() == before + 2 * arena.size_bytes
    del held
    assert mapped_bytes() == before + arena.size_bytes


def test_a_fork_has_no_writable_mapping(arena: Arena) -> None:
    writes = WriteMaps(arena.rw_fd)
    before = mapped_bytes()
    writes.view(0, PAGE)
    with warnings.catch_warnings():
        # Python 3.12 warns of threads, which other tests may have left; this child needs no locks
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        lost = mapped_bytes() == before
        writes.close()  # must not unmap what the child may have there
        os._exit(0 if lost else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_pages_may_be_brought_in_by_another_thread(arena: Arena) -> None:
    writes = WriteMaps(arena.rw_fd)
    told: list[bool] = []
    thread = threading.Thread(target=lambda: told.append(writes.populate(4 * PAGE + 64, PAGE)))
    thread.start()
    thread.join()
    assert told in ([True], [False])
    if told == [True]:
        assert os.fstat(arena.rw_fd).st_blocks * 512 == 2 * PAGE


def test_every_mapping_asks_for_huge_pages(arena: Arena) -> None:
    if not os.path.exists("/sys/kernel/mm/transparent_hugepage"):
        pytest.skip("this kernel has no transparent huge pages")
    reads, writes = ReadMap(arena.ro_fd, arena.size_bytes), WriteMaps(arena.rw_fd)
    held = np.asarray(reads.pin(1)), writes.view(0, PAGE)
    flags, of_arena = [], False
    with open("/proc/self/smaps") as maps:
        for line in maps:
            if "-" in line.split()[0]:
                of_arena = "memfd:test" in line
            elif of_arena and line.startswith("VmFlags:"):
                flags.append("hg" in line.split())
    # the peer's own, the reader's, and the writer's, of which a part is open
    assert held and flags == [True, True, True, True]
