"""A checkpoint's directory: when it is there, and what is taken for one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from dataplane.client.checkpoint.archive import (
    FORMAT,
    MANIFEST,
    Archive,
    FileNote,
    Manifest,
    PartitionNote,
    SummedFile,
    verified,
)
from dataplane.client.checkpoint.arrow_in import PartReader
from dataplane.errors import CheckpointCorrupt, CheckpointFailed
from dataplane.progress import Bar


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
    file = SummedFile(archive.directory(0) / "bytes.bin")
    file.write(b"values")
    file.finish()
    partial = archive.partial.name
    assert os.listdir(tmp_path) == [partial] and partial.startswith(".")
    assert archive.partial.stat().st_mode & 0o777 == 0o700
    archive.commit("p", [PartitionNote("x", {}, None, None, "drop", 1, False, 0)])
    assert done == ["bytes.bin", MANIFEST, "0000", partial, "renamed", tmp_path.name]
    assert os.listdir(tmp_path) == ["c"]


@pytest.mark.parametrize(
    ("manifest", "error", "says"),
    [
        (Manifest(FORMAT, 2, "p", "now", [], {}), CheckpointFailed, f"has format {FORMAT} 2"),
        (Manifest("another", 1, "p", "now", [], {}), CheckpointFailed, "has format another 1"),
        (
            Manifest(FORMAT, 1, "p", "now", [], {"../secret": FileNote(0, "")}),
            CheckpointCorrupt,
            "do not match its partitions",
        ),
    ],
)
def test_a_manifest_of_something_else_is_refused(
    tmp_path: Path, manifest: Manifest, error: type[Exception], says: str
) -> None:
    (tmp_path / MANIFEST).write_bytes(manifest.signed().text())
    with pytest.raises(error, match=says):
        verified(tmp_path, Bar("restore"))


def test_a_manifest_that_somebody_edited_is_refused(tmp_path: Path) -> None:
    text = Manifest(FORMAT, 1, "mine", "now", [], {}).signed().text()
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
        PartReader(tmp_path)
