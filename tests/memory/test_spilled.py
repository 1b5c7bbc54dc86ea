"""Spilling: which chunks move to the file, their positions in it, and how they are read back."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dataplane.memory.admission import Admission
from dataplane.memory.extents import placed
from dataplane.memory.space import Space
from dataplane.memory.spill import DISK, Move, Spilled, SpillFile
from dataplane.wire.packed import EXTENT, U8

PAGE = 4096
WRITER, READER = 1, 2
Name = int


def spilling(pages: int = 64, spill_pages: int = 64) -> Space:
    space = Space(pages * PAGE)
    space.spill = Spilled(spill_pages * PAGE, space.chunks)
    return space


def put(space: Space, *sizes: int, admission: Admission = Admission.OPEN) -> np.ndarray:
    """Return as many chunks of these sizes as there is space for."""
    count, extents = space.reserve(WRITER, admission, [np.array([size], U8) for size in sizes])
    offsets, left = placed(list(sizes[:count]), extents.tolist())
    chunks = space.commit(WRITER, list(zip(offsets, sizes[:count], strict=True)), admission)
    space.give_back(WRITER, np.array(left, EXTENT))
    return chunks


def spill(space: Space, nbytes: int) -> int:
    move = space.choose_spill(nbytes)
    return 0 if move is None else space.settle_spill(move)


def test_the_oldest_go_first_and_none_that_is_read() -> None:
    space = spilling()
    first, second, third = (put(space, 2 * PAGE) for _ in range(3))
    pin = space.pin(READER, first)
    assert spill(space, PAGE) == 2 * PAGE
    chunks = np.concatenate([first, second, third])
    assert space.spilled(chunks).tolist() == [False, True, False]
    space.unpin(READER, [pin])
    assert spill(space, PAGE) == 2 * PAGE
    assert space.spilled(chunks).tolist() == [True, True, False]
    stats = space.stats()
    assert stats["used_bytes"] == 2 * PAGE and stats["spilled_bytes"] == 4 * PAGE
    assert space.alive(chunks).all()


def test_what_is_read_or_freed_on_its_way_does_not_go() -> None:
    space = spilling()
    read, freed, other = (put(space, PAGE) for _ in range(3))
    move = space.choose_spill(3 * PAGE)
    assert move is not None and len(move.chunks) == 3
    space.pin(READER, read)
    space.release(freed)
    assert space.settle_spill(move) == PAGE
    assert space.spilled(np.concatenate([read, freed, other])).tolist() == [False, False, True]
    spill_file = space.spill
    assert spill_file is not None and spill_file.spilled_bytes == PAGE
    starts, ends = spill_file.take_left()
    assert int((ends - starts).sum()) == 2 * PAGE


def test_copies_do_not_go_and_those_of_dead_chunks_are_dropped() -> None:
    space = spilling()
    chunks = put(space, PAGE)
    copy = put(space, PAGE, admission=Admission.PULL)
    assert spill(space, 10 * PAGE) == PAGE
    space.copies.insert(DISK, chunks, copy)
    assert space.choose_spill(10 * PAGE) is None
    assert space.copies.drop_dead(DISK) == 0
    space.release(chunks)
    assert space.copies.drop_dead(DISK) == PAGE
    assert space.stats()["used_bytes"] == space.stats()["spilled_bytes"] == 0


def test_a_full_file_takes_what_fits_and_then_nothing() -> None:
    space = spilling(spill_pages=3)
    for _ in range(4):
        put(space, 2 * PAGE)
    assert spill(space, 8 * PAGE) == 2 * PAGE
    assert spill(space, 8 * PAGE) == 0


def test_room_in_the_file_is_used_again_once_it_was_cleared() -> None:
    space = spilling(spill_pages=2)
    first, _ = put(space, 2 * PAGE), put(space, 2 * PAGE)
    assert spill(space, 2 * PAGE) == 2 * PAGE
    space.release(first)
    assert spill(space, 2 * PAGE) == 0
    assert space.spill is not None
    space.spill.cleared(*space.spill.take_left())
    assert spill(space, 2 * PAGE) == 2 * PAGE


class SpillMachine(RuleBasedStateMachine):
    """Bytes in an arena and a file, against a model: no two living chunks share bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.space = spilling(24, 16)
        self.arena, self.file = bytearray(24 * PAGE), bytearray(16 * PAGE)
        self.content: dict[Name, bytes] = {}
        self.pins: dict[int, list[Name]] = {}
        self.move: Move | None = None
        self.count = 0

    @property
    def spill(self) -> Spilled:
        assert self.space.spill is not None
        return self.space.spill

    def column(self, names: list[Name]) -> np.ndarray:
        return np.array(names, U8)

    @rule(sizes=st.lists(st.integers(1, 3 * PAGE), min_size=1, max_size=5))
    def put(self, sizes: list[int]) -> None:
        chunks = put(self.space, *sizes)
        for name, start in zip(
            chunks.tolist(), self.space.chunks.extents(chunks)["offset"].tolist(), strict=True
        ):
            self.count += 1
            size = sizes[chunks.tolist().index(name)]
            self.content[name] = bytes([self.count % 255 + 1]) * size
            self.arena[start : start + size] = self.content[name]

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        pinned = {name for names in self.pins.values() for name in names}
        free = sorted(set(self.content) - pinned)
        if free:
            names = data.draw(st.lists(st.sampled_from(free), min_size=1, unique=True))
            self.space.release(self.column(names))
            for name in names:
                del self.content[name]

    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        names = sorted(self.content)
        names = [n for n in names if not self.space.spilled(self.column([n]))[0]]
        if names:
            chosen = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
            self.pins[self.space.pin(READER, self.column(chosen))] = chosen

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        if self.pins:
            number = data.draw(st.sampled_from(sorted(self.pins)))
            del self.pins[number]
            self.space.unpin(READER, [number])

    @precondition(lambda self: self.move is None)
    @rule(nbytes=st.integers(1, 8 * PAGE))
    def begin(self, nbytes: int) -> None:
        self.move = self.space.choose_spill(nbytes)

    @precondition(lambda self: self.move is not None)
    @rule(fails=st.booleans())
    def end(self, fails: bool) -> None:
        """Written only now: what was freed meanwhile may be somebody else's bytes by then."""
        move, self.move = self.move, None
        assert move is not None
        columns = (move.sources.tolist(), move.places.tolist(), move.lengths.tolist())
        for source, at, length in zip(*columns, strict=True):
            self.file[at : at + length] = self.arena[source : source + length]
        if fails:
            self.spill.give_up(move)
        else:
            self.space.settle_spill(move)

    @precondition(lambda self: self.move is None and self.spill.has_left)
    @rule()
    def clear(self) -> None:
        starts, ends = self.spill.take_left()
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            self.file[start:end] = bytes(end - start)
        self.spill.cleared(starts, ends)

    @invariant()
    def every_range_has_its_bytes(self) -> None:
        chunks = self.column(sorted(self.content))
        out, extents = self.space.spilled(chunks), self.space.chunks.extents(chunks)
        for name, spilled, start in zip(
            sorted(self.content), out.tolist(), extents["offset"].tolist(), strict=True
        ):
            where = self.file if spilled else self.arena
            assert where[start : start + len(self.content[name])] == self.content[name]

    @invariant()
    def every_byte_is_counted(self) -> None:
        stats = self.space.stats()
        chunks = self.column(sorted(self.content))
        lengths = self.space.chunks.extents(chunks)["length"]
        out = self.space.spilled(chunks)
        assert stats["spilled_bytes"] == int(lengths[out].sum()) <= 16 * PAGE
        assert stats["used_bytes"] == int(lengths[~out].sum())
        assert stats["used_bytes"] + stats["free_bytes"] == 24 * PAGE


TestSpillMachine = SpillMachine.TestCase
TestSpillMachine.settings = settings(max_examples=60, stateful_step_count=40)


# the file


def test_bytes_come_back_from_the_file_and_its_disk_is_given_back(tmp_path: Path) -> None:
    arena = memoryview(bytearray(np.arange(16 * PAGE, dtype=np.uint16).tobytes()))
    wanted = bytes(arena)
    file = SpillFile(tmp_path, "../plane/x", arena)
    assert file.path.parent == tmp_path and "x" not in file.path.name
    sources, lengths = np.array([PAGE, 4 * PAGE], U8), np.array([2 * PAGE, 64], U8)
    file.write(5 * PAGE, 2 * PAGE + 64, sources, lengths)
    arena[:] = bytes(len(arena))
    file.read(np.array([7 * PAGE, 5 * PAGE], U8), lengths[::-1], np.array([64, 8 * PAGE], U8))
    assert arena[64:128] == wanted[4 * PAGE : 4 * PAGE + 64]
    assert arena[8 * PAGE : 10 * PAGE] == wanted[PAGE : 3 * PAGE]
    assert file.path.stat().st_mode & 0o777 == 0o600
    taken = file.path.stat().st_blocks
    file.clear(np.array([5 * PAGE], U8), np.array([7 * PAGE], U8))
    assert file.path.stat().st_blocks < taken
    file.empty()
    assert file.path.stat().st_blocks == 0
    with pytest.raises(OSError, match="ends before"):
        file.read(np.array([0], U8), np.array([64], U8), np.array([0], U8))
    file.close()
    assert not list(tmp_path.iterdir())


def test_the_system_is_asked_to_keep_no_page_of_it_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it does is its own affair: a page that something else holds for a moment stays."""
    advised: list[tuple[int, int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, *advice: advised.append(advice))
    file = SpillFile(tmp_path, "x", memoryview(bytearray(4 * PAGE)))
    file.write(PAGE, 2 * PAGE, np.array([PAGE], U8), np.array([2 * PAGE], U8))
    file.read(np.array([2 * PAGE], U8), np.array([PAGE], U8), np.array([0], U8))
    file.close()
    drop = os.POSIX_FADV_DONTNEED
    assert advised == [(PAGE, 2 * PAGE, drop), (2 * PAGE, PAGE, drop)]


def test_room_on_the_disk_is_allocated_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*stretch: int) -> None:
        raise OSError(28, "No space left on device")

    file = SpillFile(tmp_path, "x", memoryview(bytearray(4 * PAGE)))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        file.write(0, PAGE, np.array([PAGE], U8), np.array([PAGE], U8))
    assert file.path.stat().st_size == 0
    file.close()


def test_only_files_of_the_dead_are_removed(tmp_path: Path) -> None:
    living = SpillFile(tmp_path, "living", memoryview(bytearray(PAGE)))
    dead, other = tmp_path / "dead.spill", tmp_path / "notes.txt"
    dead.write_bytes(b"x")
    other.write_bytes(b"x")
    following = SpillFile(tmp_path, "following", memoryview(bytearray(PAGE)))
    assert sorted(tmp_path.iterdir()) == sorted([living.path, following.path, other])
    following.close()
    with open(living.path, "rb") as seen, pytest.raises(BlockingIOError):
        fcntl.flock(seen, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert os.path.samestat(living.path.stat(), os.fstat(living._fd))
    living.close()
