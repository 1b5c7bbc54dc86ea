"""The files that commands write: looked at before anything starts, so that an hour of measuring
never ends in a path that cannot be written.
"""

from __future__ import annotations

import json
from argparse import ArgumentTypeError
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PAGE = ".html"


class NotWritten(RuntimeError):
    """A report that could be written when the command began, and cannot now: the disk is full."""


def output(text: str) -> Path:
    """A file that can be written, in a folder that is made where it is missing."""
    path = Path(text)
    _try(path)
    return path


def report(text: str) -> Path:
    """A JSON file; the page beside it, of the same name, can be written too."""
    path = Path(text)
    if path.suffix == PAGE:
        raise ArgumentTypeError(f"{text!r} is where the page would go: name the JSON report.json")
    _try(path)
    _try(path.with_suffix(PAGE))
    return path


def write_json(path: Path, told: dict[str, Any]) -> None:
    """Write a report. Raises NotWritten."""
    write(path, json.dumps(told, indent=2) + "\n")


def write(path: Path, text: str) -> None:
    """Write a file. Raises NotWritten."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as exc:
        raise NotWritten(f"{path} cannot be written: {exc.strerror}") from exc


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write, which takes the place of `path` when the body is done. A body that breaks
    off leaves nothing behind. Raises NotWritten."""
    special = path.exists() and not path.is_file()  # a pipe or a device has no place to take
    partial = path if special else path.with_name(f"{path.name}.part")
    try:
        yield partial
        if not special:
            partial.replace(path)
    except OSError as exc:
        raise NotWritten(f"{path} cannot be written: {exc.strerror or exc}") from exc
    finally:
        if not special:
            partial.unlink(missing_ok=True)


def _try(path: Path) -> None:
    """Open it for writing. What was not there before is not there afterwards."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        there = path.exists()
        with path.open("ab"):
            pass
        if not there:
            path.unlink()
    except FileExistsError:
        raise ArgumentTypeError(f"{str(path)!r}: {str(path.parent)!r} is no folder") from None
    except OSError as exc:
        raise ArgumentTypeError(f"{str(path)!r} cannot be written: {exc.strerror}") from None
