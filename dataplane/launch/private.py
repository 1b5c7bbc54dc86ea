"""Directories that only this user can enter."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from dataplane.errors import InvalidConfig


def private_dir(path: Path, what: str, setting: str, *, parents: bool = False) -> Path:
    """The directory, made if missing. InvalidConfig unless it is private to the user; `what` it is
    for and which `setting` names another are said then."""
    try:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700, parents=parents)
        found = path.lstat()
    except OSError as exc:
        raise InvalidConfig(
            f"the {what} directory {path} cannot be made: {exc.strerror}; set {setting} to a "
            "directory that this user can write",
            path=str(path),
        ) from exc
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise InvalidConfig(
            f"{path} must be a directory of uid {os.getuid()} that nobody else can enter "
            f"(mode 0700, it is {stat.filemode(found.st_mode)} of uid {found.st_uid}): "
            f"remove it, chmod it, or set {setting}",
            path=str(path),
        )
    return path
