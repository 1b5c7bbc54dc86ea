"""A checkpoint directory: written under a temporary name, synced, and renamed when complete.

`manifest.json` lists the partitions, the size and xxh3-128 checksum of every file, and its own
checksum. No path is ever read from it: the number of partitions determines the names of the files.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from xxhash import xxh3_128

from dataplane.errors import CheckpointCorrupt, CheckpointFailed
from dataplane.progress import Bar
from dataplane.wire.tables import Definition

FORMAT, VERSION = "dataplane-checkpoint", 1
MANIFEST = "manifest.json"
FILES = ("groups.arrow", "rows.arrow", "chunks.arrow", "pieces.arrow", "bytes.bin")
"""The files of each partition, in a directory with its number."""
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)
_MAX_MANIFEST_BYTES = 64 << 20
_READ_BYTES = 4 << 20


class FileNote(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    bytes: int
    xxh3_128: str


class PartitionNote(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A partition as it was declared. closed_groups: the number of groups that closed and were
    freed before the checkpoint."""

    name: str
    stages: dict[str, list[str]]
    group_size: int | None
    groups: int | None
    free: str
    replicas: int
    sealed: bool
    closed_groups: int
    fields: dict[str, str] = {}

    @property
    def definition(self) -> Definition:
        fields = {f: getattr(self, f) for f in Definition.__struct_fields__}
        return Definition(**fields)


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of `manifest.json`. checksum: xxh3-128 of this file with an empty checksum."""

    format: str
    version: int
    plane: str
    written: str
    partitions: list[PartitionNote]
    files: dict[str, FileNote]
    checksum: str = ""

    def text(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"

    def signed(self) -> Manifest:
        blank = msgspec.structs.replace(self, checksum="")
        return msgspec.structs.replace(self, checksum=xxh3_128(blank.text()).hexdigest())


class SummedFile:
    """A new file that computes the checksum of its contents. pyarrow can write to it."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115
        self._sum = xxh3_128()
        self.nbytes = 0
        self.closed = False

    def write(self, data: bytes | memoryview) -> int:
        rest = memoryview(data).cast("B")
        self._sum.update(rest)
        count = len(rest)
        while rest:
            rest = rest[self._file.write(rest) or 0 :]
        self.nbytes += count
        return count

    def flush(self) -> None:
        """Do nothing: the file has no buffer."""

    def close(self) -> None:
        self.closed = True
        self._file.close()

    def finish(self) -> FileNote:
        """Sync and close the file, and return its size and checksum."""
        os.fsync(self._file.fileno())
        self.close()
        return FileNote(self.nbytes, self._sum.hexdigest())


class Archive:
    """A checkpoint that is being written, under a temporary name until `commit`."""

    def __init__(self, target: Path) -> None:
        self.target = target
        mark = secrets.token_hex(4)
        self.partial = target.parent / f".{target.name}.partial-{mark}"
        self.files: dict[str, FileNote] = {}

    def begin(self) -> None:
        with failing(self.target):
            if self.target.exists() and (not self.target.is_dir() or any(self.target.iterdir())):
                raise _there(self.target)
            self.partial.mkdir(mode=0o700)

    def directory(self, number: int) -> Path:
        """Create and return the directory for the files of a partition."""
        path = self.partial / directory_name(number)
        with failing(self.target):
            path.mkdir(mode=0o700)
        return path

    def abandon(self, number: int) -> None:
        """Remove the files of a partition that was dropped meanwhile."""
        with failing(self.target):
            shutil.rmtree(self.partial / directory_name(number))

    def clear(self) -> None:
        """Remove all files, to start again."""
        self.files = {}
        with failing(self.target):
            shutil.rmtree(self.partial)
            self.partial.mkdir(mode=0o700)

    def commit(self, plane: str, partitions: list[PartitionNote]) -> None:
        """Write the manifest, and give the directory its final name in one step."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        manifest = Manifest(FORMAT, VERSION, plane, now, partitions, self.files).signed()
        with failing(self.target):
            file = SummedFile(self.partial / MANIFEST)
            file.write(manifest.text())
            file.finish()
            for number in range(len(partitions)):
                _sync(self.partial / directory_name(number))
            _sync(self.partial)
            try:
                os.rename(self.partial, self.target)
            except OSError as exc:
                if exc.errno in _TAKEN:
                    raise _there(self.target) from None
                raise
            _sync(self.target.parent)

    def discard(self) -> None:
        """Remove the directory. A file that cannot be removed keeps its temporary name."""
        shutil.rmtree(self.partial, ignore_errors=True)


def verified(directory: Path, bar: Bar, reads: int = 1) -> Manifest:
    """Verify every file of a checkpoint, and return its manifest.

    Raises CheckpointCorrupt, which names the first changed file, and CheckpointFailed if there is
    no checkpoint. bar: expects each byte once more for each time that the caller then reads it.
    """
    manifest = _manifest(directory)
    names = [MANIFEST, *_names(len(manifest.partitions))]
    if set(manifest.files) != set(names[1:]):
        raise corrupt(directory / MANIFEST, "the files it lists do not match its partitions")
    bar.expect((1 + reads) * sum(note.bytes for note in manifest.files.values()))
    for name in names[1:]:
        note = manifest.files[name]
        found = _summed(directory / name, bar)
        if found != note:
            raise corrupt(
                directory / name,
                f"it has {found.bytes} bytes with checksum {found.xxh3_128}, but the manifest "
                f"says {note.bytes} bytes with {note.xxh3_128}",
            )
    return manifest


def corrupt(path: Path, why: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        f"the checkpoint is damaged ({path}: {why}). Use another checkpoint",
        file=str(path),
    )


@contextlib.contextmanager
def failing(path: Path, reading: bool = False, what: str = "the checkpoint ") -> Iterator[None]:
    """Raise CheckpointFailed for an error of the file system. what: is at `path`, for messages."""
    try:
        yield
    except OSError as exc:
        why = exc.strerror or exc
        raise CheckpointFailed(
            f"could not read the checkpoint {path}: {why}. Check the disk, then try again"
            if reading
            else f"could not write {what}{path}: {why}. The files written so far were "
            "removed; check the disk, or choose another directory",
            path=str(path),
        ) from exc


def directory_name(number: int) -> str:
    return f"{number:04}"


def _names(partitions: int) -> list[str]:
    return [f"{directory_name(number)}/{file}" for number in range(partitions) for file in FILES]


def _manifest(directory: Path) -> Manifest:
    path = directory / MANIFEST
    if not os.path.isdir(directory):  # `Path.is_dir` raises for a name that is too long
        raise CheckpointFailed(
            f"found no checkpoint in {directory}: pass a directory that plane.checkpoint(…) wrote",
            path=str(directory),
        )
    try:
        with open(path, "rb") as file:
            text = file.read(_MAX_MANIFEST_BYTES + 1)
        manifest = msgspec.json.decode(text, type=Manifest)
    except FileNotFoundError:
        raise corrupt(path, "it is missing") from None
    except OSError as exc:
        raise corrupt(path, f"it cannot be read: {exc.strerror or exc}") from exc
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise corrupt(path, str(exc)) from exc
    if manifest.signed().text() != text:
        raise corrupt(path, "its checksum does not match")
    if (manifest.format, manifest.version) != (FORMAT, VERSION):
        raise CheckpointFailed(
            f"{directory} has format {manifest.format} {manifest.version}, but this release reads "
            f"{FORMAT} {VERSION}: use the release that wrote the checkpoint",
            path=str(directory),
        )
    return manifest


def _summed(path: Path, bar: Bar) -> FileNote:
    total, count = xxh3_128(), 0
    try:
        with open(path, "rb", buffering=0) as file:
            while data := file.read(_READ_BYTES):
                total.update(data)
                count += len(data)
                bar.advance(len(data), "verifying")
    except FileNotFoundError:
        raise corrupt(path, "it is missing") from None
    except OSError as exc:
        raise corrupt(path, f"it cannot be read: {exc.strerror or exc}") from exc
    return FileNote(count, total.hexdigest())


def _there(path: Path) -> CheckpointFailed:
    return CheckpointFailed(
        f"{path} already exists, and a checkpoint is never overwritten: choose another name",
        path=str(path),
    )


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
