"""A checkpoint's directory: when it is there, and what is taken for one."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dataplane.client.checkpoint.archive import (
    FORMAT,
    MANIFEST,
    Archive,
    Manifest,
    PartitionNote,
    verified,
)
from dataplane.client.checkpoint.records import RecordReader
from dataplane.errors import CheckpointCorrupt, CheckpointFailed
from dataplane.progress import Bar
from dataplane.wire.checkpoint import Progress, Restore
from dataplane.wire.tables import Chunk, Rows, Values


def test_it_gets_its_name_when_all_of_it_is_on_the_disk_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    rename, fsync = os.rename, os.fsync

    def synced(descriptor: int) -> None:
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def renamed(source: Any, target: Any) -> None:
        done.append("renamed")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    archive = Archive(tmp_path / "c")
    archive.begin()
    file = archive.file(0)
    file.write([b"values"])
    note = file.finish()
    partial = archive.partial.name
    assert os.listdir(tmp_path) == [partial] and partial.startswith(".")
    assert archive.partial.stat().st_mode & 0o777 == 0o700
    archive.commit("p", [PartitionNote("x", {}, None, None, "drop", 1, False, note)])
    assert done == ["0000", MANIFEST, partial, "renamed", tmp_path.name]
    assert os.listdir(tmp_path) == ["c"]


@pytest.mark.parametrize(("format_", "version"), [(FORMAT, 2), ("another", 1)])
def test_a_manifest_of_something_else_is_refused(
    tmp_path: Path, format_: str, version: int
) -> None:
    manifest = Manifest(format_, version, "p", "now", [])
    (tmp_path / MANIFEST).write_bytes(manifest.signed().text())
    with pytest.raises(CheckpointFailed, match=f"has format {format_} {version}"):
        verified(tmp_path, Bar("restore"))


def test_a_manifest_that_somebody_edited_is_refused(tmp_path: Path) -> None:
    text = Manifest(FORMAT, 1, "mine", "now", []).signed().text()
    (tmp_path / MANIFEST).write_bytes(text)
    assert verified(tmp_path, Bar("restore")).plane == "mine"
    (tmp_path / MANIFEST).write_bytes(text.replace(b"mine", b"your"))
    with pytest.raises(CheckpointCorrupt, match="its checksum does not match"):
        verified(tmp_path, Bar("restore"))


@pytest.mark.parametrize("made", [Path.touch, lambda path: (path / "x").mkdir(parents=True)])
def test_what_came_to_its_name_meanwhile_stays(tmp_path: Path, made: Any) -> None:
    archive = Archive(tmp_path / "c")
    archive.begin()
    made(tmp_path / "c")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointFailed, match="already exists"):
        archive.commit("p", [])
    archive.discard()
    assert sorted(tmp_path.rglob("*")) == [path for path in before if path != archive.partial]


def test_files_that_cannot_be_read_are_not_reported_as_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointFailed, match="could not read the checkpoint .*try again"):
        RecordReader(tmp_path / "0000")


RECORD = Restore("p", 0, Rows(b""), Values(chunks=[Chunk(0, 0, 1, 65, 0)]), {}, Progress())
MESSAGE = msgspec.msgpack.encode(RECORD)
LENGTH = len(MESSAGE).to_bytes(4, "little")


@pytest.mark.parametrize(
    "data",
    [
        b"\0",
        b"\1\0\0\0\xc1",
        b"\xff\xff\xff\xff\0",
        LENGTH + MESSAGE[:-1],
        LENGTH + MESSAGE,
        LENGTH + MESSAGE + bytes(127),
    ],
    ids=["half a length", "no message", "too long", "half a message", "no bytes", "too few bytes"],
)
def test_a_record_that_does_not_fit_its_file_is_refused(tmp_path: Path, data: bytes) -> None:
    whole = LENGTH + MESSAGE + bytes(128)
    (tmp_path / "0000").write_bytes(whole + data)
    with closing(RecordReader(tmp_path / "0000")) as reader:
        records = reader.records()
        record, chunks, at = next(records)
        assert (record, [one.space for one in chunks], at) == (RECORD, [128], len(whole) - 128)
        with pytest.raises(CheckpointCorrupt, match="0000: "):
            next(records)
