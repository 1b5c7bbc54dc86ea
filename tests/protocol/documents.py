"""Reads the tables of protocol/*.md, so that tests and vectors follow what is written there.

Imports nothing of `dataplane`: what the documents say must be enough to make and to read frames.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

PROTOCOL = Path(__file__).resolve().parents[2] / "protocol"
VECTORS = PROTOCOL / "vectors"
DOCUMENTS = {
    "local": "messages.md",
    "peers": "peers.md",
    "journal": "journal.md",
    "bulk": "bulk.md",
    "worker": "worker.md",
}
"""Channel: its document. Structures that channels share are in messages.md."""

REQUIRED = object()
_TAG = re.compile(r"^Tag (\d+)\.", re.M)
_CELL = re.compile(r"(?<!\\)\|")
_CONSTANTS: dict[str, object] = {
    "nil": None,
    "true": True,
    "false": False,
    "[]": [],
    "{}": {},
    '""': "",
    "h''": b"",
    "empty": {},
}


@dataclass
class Field:
    """One row of a message's table."""

    name: str
    kind: str
    default: Any


@dataclass
class Structure:
    """One `###` section: a message, where it has a tag, or a part of messages."""

    name: str
    tag: int | None = None
    fields: list[Field] = field(default_factory=list)


@dataclass
class Operation:
    """One row of a table of operations."""

    tag: int
    name: str
    sender: str
    answer: str


def text_of(channel: str) -> str:
    return (PROTOCOL / DOCUMENTS[channel]).read_text()


def sections(text: str) -> list[tuple[str, str]]:
    """(title, body) of every `###` section."""
    parts = re.split(r"^### (.+)$", text, flags=re.M)
    bodies = (re.split(r"^## ", body, flags=re.M)[0] for body in parts[2::2])
    return list(zip(parts[1::2], bodies, strict=True))


@cache
def structures(channel: str) -> dict[str, Structure]:
    """The structures that a channel's document describes, by name."""
    found = {}
    for name, body in sections(text_of(channel)):
        tag = _TAG.search(body)
        structure = Structure(name, int(tag[1]) if tag else None)
        for cells in _rows(body, "#"):
            number, field_name, kind, default = cells[:4]
            expected = len(structure.fields) + (tag is not None)
            assert int(number) == expected, f"{name}.{field_name} is numbered {number}"
            structure.fields.append(Field(_plain(field_name), _kind(kind), _default(default)))
        found[name] = structure
    return found


def operations(channel: str) -> dict[str, Operation]:
    """The rows of a document's tables of operations, by message."""
    found = {}
    for tag, name, sender, answer, _ in _rows(text_of(channel), "tag"):
        name, answer = _link(name), _link(answer)
        found[name] = Operation(int(tag), name, sender, answer)
    return found


def forwarded() -> list[str]:
    """The messages of the local door that peers forward, and the answers, by name."""
    return [_link(cells[0]) for cells in _rows(text_of("peers"), "forwarded")]


def _rows(text: str, first: str) -> list[list[str]]:
    rows, inside = [], False
    for line in text.splitlines():
        cells = [cell.strip() for cell in _CELL.split(line)[1:-1]]
        if cells and cells[0] == first:
            inside = True
        elif not line.startswith("|"):
            inside = False
        elif inside and not set(cells[0]) <= set("-: "):
            rows.append(cells)
    return rows


def _plain(cell: str) -> str:
    return cell.strip("`").replace("\\|", "|")


def _link(cell: str) -> str:
    return re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", cell)


def _kind(cell: str) -> str:
    """The type without what a column of bytes holds."""
    return re.sub(r"\bbin of [A-Z0-9]+( or [A-Z0-9]+)?", "bin", _plain(_link(cell)))


def _default(cell: str) -> Any:
    text = _plain(cell)
    if not text:
        return REQUIRED
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    return text[1:-1] if text.startswith('"') else (float(text) if "." in text else int(text))
