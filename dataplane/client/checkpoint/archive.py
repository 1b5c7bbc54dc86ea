"""A checkpoint directory: written under a temporary name, synced, and renamed when complete.

`manifest.json` lists the partitions, each with the size and xxh3-128 checksum of its file, and has
its own checksum. No path is ever read from it: the number of a partition is the name of its file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from xxhash import xxh3_128

from dataplane.errors import CheckpointCorrupt, CheckpointFailed
from dataplane.progress import Bar
from dataplane.wire.objects import Buffer
from dataplane.wire.tables import Definition

FORMAT, VERSION = "dataplane-checkpoint", 1
MANIFEST = "manifest.json"
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)
_MAX_MANIFEST_BYTES = 64 << 20
_READ_BYTES = 4 << 20
_WRITE_BYTES = 1 << 20


class FileNote(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    bytes: int
    xxh3_128: str


class PartitionNote(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A partition as it was declared, and its file."""

    name: str
    stages: dict[str, list[str]]
    group_size: int | None
    groups: int | None
    free: str
    replicas: int
    sealed: bool
    file: FileNote
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
    checksum: str = ""

    def text(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"

    def signed(self) -> Manifest:
        blank = msgspec.structs.replace(self, checksum="")
        return msgspec.structs.replace(self, checksum=xxh3_128(blank.text()).hexdigest())


class SummedFile:
    """A new file that computes the checksum of its contents. target: the checkpoint."""

    def __init__(self, path: Path, target: Path) -> None:
        self.target = target
        with failing(target):
            self._file = open(path, "xb", buffering=_WRITE_BYTES)  # noqa: SIM115
        self._sum = xxh3_128()

    def clear(self) -> None:
        """Remove the contents."""
        with failing(self.target):
            self._file.seek(0)
            self._file.truncate()
        self._sum.reset()

    def write(self, parts: Iterable[Buffer]) -> None:
        with failing(self.target):
            for part in parts:
                self._sum.update(part)
                self._file.write(part)

    def close(self) -> None:
        """Close the file, which need not be complete."""
        with contextlib.suppress(OSError):
            self._file.close()

    def finish(self) -> FileNote:
        """Sync and close the file, and return its size and checksum."""
        with failing(self.target):
            self._file.flush()
            os.fsync(self._file.fileno())
            note = FileNote(self._file.tell(), self._sum.hexdigest())
            self._file.close()
        return note


class Archive:
    """A checkpoint that is being written, under a temporary name until `commit`."""

    def __init__(self, target: Path) -> None:
        self.target = target
        mark = secrets.token_hex(4)
        self.partial = target.parent / f".{target.name}.partial-{mark}"

    def begin(self) -> None:
        with failing(self.target):
            if self.target.exists() and (not self.target.is_dir() or any(self.target.iterdir())):
                raise _already_exists(self.target)
            self.partial.mkdir(mode=0o700)

    def file(self, number: int) -> SummedFile:
        """Create and return the file of a partition."""
        return SummedFile(self.partial / file_name(number), self.target)

    def abandon(self, number: int) -> None:
        """Remove the file of a partition that was dropped during the checkpoint."""
        with failing(self.target):
            (self.partial / file_name(number)).unlink()

    def commit(self, plane: str, partitions: list[PartitionNote]) -> None:
        """Write the manifest, and give the directory its final name in one step."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        manifest = Manifest(FORMAT, VERSION, plane, now, partitions).signed()
        with failing(self.target):
            file = SummedFile(self.partial / MANIFEST, self.target)
            file.write([manifest.text()])
            file.finish()
            _sync(self.partial)
            try:
                os.rename(self.partial, self.target)
            except OSError as exc:
                if exc.errno in _TAKEN:
                    raise _already_exists(self.target) from None
                raise
            _sync(self.target.parent)

    def discard(self) -> None:
        """Remove the directory. A file that cannot be removed keeps its temporary name."""
        shutil.rmtree(self.partial, ignore_errors=True)


def verified(directory: Path, bar: Bar, reads: int = 1) -> Manifest:
    """Verify every file of a checkpoint, and return its manifest.

    Raises CheckpointCorrupt, which names the first changed file, and CheckpointFailed if there is
    no checkpoint. reads: how often the caller then reads each file; `bar` expects these bytes too.
    """
    manifest = _manifest(directory)
    bar.expect((1 + reads) * sum(note.file.bytes for note in manifest.partitions))
    for number, note in enumerate(manifest.partitions):
        path = directory / file_name(number)
        found = _summed(path, bar)
        if found != note.file:
            raise corrupt(
                path,
                f"it has {found.bytes} bytes with checksum {found.xxh3_128}, but the manifest "
                f"says {note.file.bytes} bytes with {note.file.xxh3_128}",
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


def file_name(number: int) -> str:
    return f"{number:04}"


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


def _already_exists(path: Path) -> CheckpointFailed:
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
