"""`plane.checkpoint`: write all rows of a plane, group by group, to a directory.

This host pulls values that are on other hosts. The client has at most one reply of the peer in
memory, whatever the size of the plane.


Generated from dataplane/client/_async/save.py: change that.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from msgspec.structs import replace

from dataplane import progress
from dataplane.client._sync.backend import offload
from dataplane.client._sync.calls import DEFAULT_TIMEOUT_S, ask
from dataplane.client.arguments import Deadline
from dataplane.client.checkpoint import records
from dataplane.client.checkpoint.archive import Archive, FileNote, PartitionNote, SummedFile
from dataplane.client.session.session import Handle, Session
from dataplane.errors import InvalidCall, PartitionGone, RowsGone
from dataplane.metadata.tables.keys import keys_in
from dataplane.progress import Bar
from dataplane.wire.arrays import shown
from dataplane.wire.checkpoint import Census, CensusDone, Save, SaveDone, Survey, SurveyDone
from dataplane.wire.messages import Define, Defined
from dataplane.wire.packed import KEY

T = TypeVar("T")

SAVE_BYTES = 8 << 20
"""Bytes of values per request, at most a quarter of the quota for pulls. A restore reserves as many
at once, perhaps in a smaller arena (docs/checkpoint.md)."""
MAX_UNITS = 4096
"""Groups, or rows without a group, per request."""
_FILE_WORK = 1 << 62
"""More bytes than any copy has, so that the work runs in a thread."""
_TRIES = 16


def path_of(directory: Any) -> Path:
    """Return the absolute path of `directory`."""
    given = os.fspath(directory) if isinstance(directory, str | os.PathLike) else None
    try:
        names_one = isinstance(given, str) and b"\0" not in os.fsencode(given)
    except UnicodeEncodeError:
        names_one = False
    if not isinstance(given, str) or not names_one:
        raise InvalidCall(
            f"directory={shown(directory):.80}: expected a path, as a str or a pathlib.Path"
        )
    return Path(os.path.abspath(given))


def filing(work: Callable[[], T]) -> T:
    """Do work on files in a thread, outside the event loop."""
    return offload(work, _FILE_WORK)


def within(deadline: Deadline, doing: str) -> Deadline:
    """Return the deadline of one request: `deadline`, but at most the default timeout from now."""
    left = deadline.left(doing)
    return Deadline(DEFAULT_TIMEOUT_S if left is None else min(left, DEFAULT_TIMEOUT_S))


def checkpoint(session: Session, directory: Any, timeout: float | None) -> None:
    with progress.bar("checkpoint") as bar:
        work = _Checkpoint(session, Archive(path_of(directory)), Deadline(timeout), bar)
        try:
            filing(work.archive.begin)
            work.write()
        except BaseException:
            work.archive.discard()
            raise


class _Checkpoint:
    """One checkpoint under way."""

    def __init__(self, session: Session, archive: Archive, deadline: Deadline, bar: Bar) -> None:
        self.session = session
        self.archive = archive
        self.deadline = deadline
        self.bar = bar
        self.notes: list[PartitionNote] = []
        self.number = 0
        """the index of the partition that is being written"""

    def write(self) -> None:
        census = ask(self.session, Census(), CensusDone, self._limit())
        self.bar.expect(len(census.partitions))
        for number, (name, generation) in enumerate(sorted(census.partitions.items())):
            self.number = number
            self._partition(name, generation)
        filing(lambda: self.archive.commit(self.session.plane, self.notes))

    def _limit(self) -> Deadline:
        return within(self.deadline, "the checkpoint")

    def _partition(self, name: str, generation: int) -> None:
        """Save a partition. A partition that has been dropped is left out."""
        archive, handle, number = self.archive, Handle(self.session, name), len(self.notes)
        with ExitStack() as opened:  # closes the file even if opening it is cancelled
            file: SummedFile = filing(lambda: opened.enter_context(closing(archive.file(number))))
            try:
                body = Define(name, None, generation=generation)
                handle.defined = ask(self.session, body, Defined, self._limit())
                self._rows(handle, file)
            except PartitionGone:
                opened.close()
                filing(lambda: archive.abandon(number))
                return
            note: FileNote = filing(file.finish)
        self.notes.append(_note(handle, note))

    def _rows(self, handle: Handle, file: SummedFile) -> None:
        before = self._survey(handle)
        groups, rows = _each_once([before.groups, before.rows])
        width, total = KEY.itemsize, len(groups) + len(rows)
        closed, many, tries, at = before.closed_groups, MAX_UNITS, 0, 0
        nbytes = min(SAVE_BYTES, self.session.quota_bytes[2] // 4)
        while at < total or closed:
            some = groups[at : at + many * width]
            first = max(0, at - len(groups))
            others = rows[first : first + many * width - len(some)]
            body = Save(handle.name, handle.generation, some, others, nbytes)
            try:
                found = ask(self.session, body, SaveDone, self._limit())
            except RowsGone:  # rows were freed between survey and read
                many, tries = max(1, many // 4), tries + 1
                if tries > _TRIES:
                    raise
                continue
            if found.lost != before.lost:  # the counts may include lost groups: start over
                filing(file.clear)
                return self._rows(handle, file)
            self._write(handle, file, found, closed + found.ended_groups)
            at += found.units * width
            many, tries, closed = MAX_UNITS, 0, 0
            self.bar.at(self.number + at / max(1, total), f"partition {handle.name!r}")

    def _survey(self, handle: Handle) -> SurveyDone:
        """Return all pages of the survey as one, with the counts of the first page."""
        cursor = 0
        pages: list[SurveyDone] = []
        while cursor or not pages:
            body = Survey(handle.name, handle.generation, cursor)
            pages.append(ask(self.session, body, SurveyDone, self._limit()))
            cursor = pages[-1].cursor
        return replace(
            pages[0],
            groups=b"".join([page.groups for page in pages]),
            rows=b"".join([page.rows for page in pages]),
        )

    def _write(self, handle: Handle, file: SummedFile, found: SaveDone, closed_groups: int) -> None:
        arena = np.asarray(self.session.pinned(found.pin))
        filing(lambda: records.write(file, handle.name, found, closed_groups, arena))


def _each_once(columns: list[bytes]) -> list[bytes]:
    """Keep the last entry of each key. A key that was freed and put again during the survey occurs
    twice."""
    told = [dict.fromkeys(keys_in(column)) for column in columns]
    last = {key: number for number, keys in enumerate(told) for key in keys}
    return [
        b"".join([key for key in keys if last[key] == number]) for number, keys in enumerate(told)
    ]


def _note(handle: Handle, file: FileNote) -> PartitionNote:
    assert handle.defined is not None
    given = {f: getattr(handle.definition, f) for f in handle.definition.__struct_fields__}
    return PartitionNote(handle.name, **given, sealed=handle.defined.phase != "open", file=file)
