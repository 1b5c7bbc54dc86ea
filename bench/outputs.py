"""The files that commands write. They are tested before anything starts, so that an hour of
measuring never ends with a path that cannot be written."""

from __future__ import annotations

import json
import os
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

PAGE = ".html"
_ROOM_BYTES = 64 * 1024  # of a small report: on a full disk files can be made, and stay empty


class NotWritten(RuntimeError):
    """A report can no longer be written, for example because the disk is full."""


def add_reporting(commands: Any, name: str, what: str) -> ArgumentParser:
    """Add a command that writes a report and its page."""
    told = f"{what.capitalize()}. Prints a table; --json also writes a report and an HTML page."
    parser: ArgumentParser = commands.add_parser(name, help=what, description=told)
    what = "write a JSON report to this file, and an HTML page next to it"
    parser.add_argument("--json", type=report, help=what)
    return parser


def output(text: str) -> Path:
    """A file that can be written, also in a folder that does not exist yet."""
    path = Path(text)
    _try(path)
    return path


def report(text: str) -> Path:
    """A JSON file. Its page, with the same name, can be written too."""
    if Path(text).suffix == PAGE:
        raise ArgumentTypeError(
            f"{text!r} is the name of the page: name the JSON file, such as report.json"
        )
    path = output(text)
    _try(path.with_suffix(PAGE))
    return path


def write_json(path: Path, told: dict[str, Any]) -> None:
    """Write a report. Raises NotWritten."""
    write(path, json.dumps(told, indent=2) + "\n")


def write(path: Path, text: str) -> None:
    """Write a whole file. An interrupted write leaves the previous file. Raises NotWritten."""
    with replacing(path) as partial:
        partial.write_text(text)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write, which replaces `path` when the body ends, in a folder that is created if
    missing. A body that raises leaves no file behind. Raises NotWritten."""
    special = _special(path)
    # Of this process: two that write the same report do not mix.
    partial = path if special else path.resolve().with_name(f"{path.name}.{os.getpid()}.part")
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        if not special:
            partial.replace(path.resolve())  # a link stays a link
    except OSError as exc:
        raise NotWritten(
            f"cannot write {path}: {exc.strerror or exc}. Choose another file"
        ) from exc
    finally:
        if not special:
            partial.unlink(missing_ok=True)


def _special(path: Path) -> bool:
    """Whether this is a pipe or a device, which cannot be replaced."""
    return path.exists() and not path.is_file()


def _try(path: Path) -> None:
    """Check that the file can be written, and remove everything that the check creates."""
    missing = [folder for folder in path.parents if not folder.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        there = path.exists()
        with path.open("ab"):
            pass
        if not there:
            path.unlink()
        if not _special(path):
            with TemporaryFile(dir=path.resolve().parent) as file:
                file.write(bytes(_ROOM_BYTES))
                file.flush()
    except FileExistsError:
        raise ArgumentTypeError(
            f"cannot write {str(path)!r}, because {str(path.parent)!r} is not a directory: choose "
            "another file"
        ) from None
    except OSError as exc:
        raise ArgumentTypeError(
            f"cannot write {str(path)!r}: {exc.strerror}. Choose another file"
        ) from None
    finally:
        for folder in missing:
            with suppress(OSError):  # what lies above was missing too, or nothing was created
                folder.rmdir()
