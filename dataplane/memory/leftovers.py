"""Arenas of dead peers that somebody still maps: memory that the next peer must not use again.

A view outlives its peer, and with it the pages of the whole arena. Read when a peer starts.
"""

from __future__ import annotations

import logging
import re
import time
from pathlib import Path

from dataplane.memory.arena import Arena

log = logging.getLogger(__name__)

LETTING_GO_S = 3.0
"""Clients look once a second whether their peer is there, and then drop what nobody views."""
_LOOK_S = 0.2
_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ [0-9a-f]+ (\S+ \d+) *(.*)$")
"""Memory of no file has no name, and ends the figures of the file before it all the same."""
_RESIDENT = re.compile(r"^Rss: +(\d+) kB$")


def arena_beside(size_bytes: int, name: str, least_bytes: int) -> Arena:
    """A new arena, smaller by what is still mapped of those of this name before it, whose peers
    crashed; at least `least_bytes`. Waits a moment for those who are about to let go."""
    deadline = time.monotonic() + LETTING_GO_S
    while (mapped := still_mapped_bytes(name)) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    if mapped:
        log.warning("%d bytes of a dead peer's arena are still in view: this one has less", mapped)
    return Arena.create(max(least_bytes, size_bytes - mapped), name)


def still_mapped_bytes(name: str, proc: Path = Path("/proc")) -> int:
    """Bytes in memory of memory files of this name that living processes map. A file that several
    map counts once, with what the one of them that reached most of it has seen; pages that none of
    them has touched are not visible from outside."""
    marks = f"/memfd:{name} (deleted)"
    resident: dict[str, int] = {}
    for process in proc.iterdir():
        if process.name.isdigit():
            for file, nbytes in _mapped(process, marks).items():
                resident[file] = max(nbytes, resident.get(file, 0))
    return sum(resident.values())


def _mapped(process: Path, marks: str) -> dict[str, int]:
    """Device and inode -> bytes that one process has in memory, of files with this mark."""
    try:
        if marks not in (process / "maps").read_text():
            return {}
        lines = (process / "smaps").read_text().splitlines()
    except OSError:
        return {}  # another user's, or gone meanwhile
    found: dict[str, int] = {}
    file: str | None = None
    for line in lines:
        if mapping := _MAPPING.match(line):
            file = mapping[1] if mapping[2] == marks else None
        elif file is not None and (size := _RESIDENT.match(line)):
            found[file] = found.get(file, 0) + 1024 * int(size[1])
    return found
