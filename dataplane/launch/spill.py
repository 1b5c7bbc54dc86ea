"""Where a peer puts values that its arena has no room for: `DIR[:SIZE]`, off unless given.

In DIR, which exists, the peers of one user share a directory of mode 0700, `dataplane-spill-<uid>`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dataplane.errors import InvalidConfig
from dataplane.launch.config import parse_size
from dataplane.launch.private import private_dir

ARENAS = 4
"""Without a SIZE: this many times the arena."""
MIN_SPILL_BYTES = 1 << 20
_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Spill:
    """base: the DIR that was given. size_bytes: the most of its disk that one peer takes."""

    base: Path
    size_bytes: int

    @property
    def setting(self) -> str:
        """As `--spill` takes it."""
        return f"{self.base}:{self.size_bytes}"

    def folder(self) -> Path:
        """Where the peer's file goes; made if missing. InvalidConfig unless it is private."""
        path = self.base / f"dataplane-spill-{os.getuid()}"
        return private_dir(path, "spill", "--spill or DATAPLANE_SPILL")


def parse_spill(text: str, arena_bytes: int) -> Spill:
    """`/scratch`, `/scratch:500GiB`. InvalidConfig where no file can be made there."""
    given, colon, size = text.rpartition(":")
    size_bytes = parse_size(size) if colon else ARENAS * arena_bytes
    base = Path(given if colon else text).absolute()
    if not base.is_dir():
        raise InvalidConfig(
            f"{base} is no directory to spill to: make it, or give another (--spill DIR[:SIZE] or "
            "DATAPLANE_SPILL)",
            path=str(base),
        )
    if size_bytes < MIN_SPILL_BYTES:
        raise InvalidConfig(
            f"{size_bytes} bytes are too few to spill to: give at least {MIN_SPILL_BYTES >> 20}MiB "
            "(--spill DIR:SIZE or DATAPLANE_SPILL)",
            size_bytes=size_bytes,
            minimum=MIN_SPILL_BYTES,
        )
    spill = Spill(base, size_bytes // _PAGE_BYTES * _PAGE_BYTES)
    spill.folder()
    return spill


def find_spill(arena_bytes: int, environ: Mapping[str, str] = os.environ) -> Spill | None:
    """What DATAPLANE_SPILL says; None where it is not set."""
    given = environ.get("DATAPLANE_SPILL")
    return parse_spill(given, arena_bytes) if given else None
