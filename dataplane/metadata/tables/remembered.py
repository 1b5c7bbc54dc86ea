"""What a partition remembers of rows and groups that no longer exist, and of clients that put rows,
within limits.

Sans-I/O.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from dataplane.latest import Latest
from dataplane.wire.limits import MAX_LOST_PER_MESSAGE
from dataplane.wire.tables import Name

MAX_TOMBSTONES = 1_000_000
MAX_LOST = 65_536
MAX_PRODUCERS = 64
"""Sessions that a partition remembers for having put rows; the least recent are forgotten."""
BYTES_EACH = 143
"""Memory per key, measured with a million keys."""
PART_KEYS = 512
Part = dict[bytes, bool]
"""Keys, the oldest first, each with whether it was freed; False: it was dropped."""
_FLIPPED = bytes(range(255, -1, -1))


def of_group(key: bytes) -> bytes:
    """The key of a group in these tables. A row may have the same name."""
    return key.translate(_FLIPPED)


class Tombstones:
    """Keys of rows and groups that no longer exist, so that a late or repeated put does not
    recreate them.

    They are dropped ones, and freed ones with names from the user, which every stage has acked.
    The oldest are forgotten first and counted. Keys are stored in parts of at most PART_KEYS, so
    that a snapshot can reference a million of them at once and send them part by part. `on_change`,
    if set, gets each part before it changes.
    """

    def __init__(self, limit: int = MAX_TOMBSTONES) -> None:
        self._limit = limit
        self._part_of: dict[bytes, Part] = {}
        self._parts: OrderedDict[int, Part] = OrderedDict()
        """oldest first, by their id"""
        self._last: Part = {}
        """the part that new keys enter"""
        self.forgotten = 0
        self.on_change: Callable[[Part], None] | None = None

    def __len__(self) -> int:
        return len(self._part_of)

    @property
    def nbytes(self) -> int:
        return BYTES_EACH * len(self._part_of)

    def add(self, keys: Iterable[bytes], freed: bool = False) -> None:
        """Add keys. Known ones keep their age, and dropped ones stay dropped."""
        for key in keys:
            part = self._part_of.get(key)
            if part is None:
                part = self._part_of[key] = self._room()
            if self.on_change is not None:
                self.on_change(part)
            part[key] = freed and part.get(key, True)
        while len(self._part_of) > self._limit:
            self._take(next(iter(next(iter(self._parts.values())))))
            self.forgotten += 1

    def remove(self, keys: Iterable[bytes]) -> None:
        """Forget keys whose names are used again."""
        for key in keys:
            if key in self._part_of:
                self._take(key)

    def parts(self) -> list[Part]:
        """All keys, the oldest part first."""
        return list(self._parts.values())

    def has_any(self, keys: Iterable[bytes]) -> bool:
        return not self._part_of.keys().isdisjoint(keys)

    def dropped(self, key: bytes) -> bool:
        part = self._part_of.get(key)
        return part is not None and not part[key]

    def freed(self, key: bytes) -> bool:
        """Whether a name from the user was freed because every stage had acked it."""
        part = self._part_of.get(key)
        return part is not None and part[key]

    def _room(self) -> Part:
        if len(self._last) >= PART_KEYS or id(self._last) not in self._parts:
            self._last = {}
            self._parts[id(self._last)] = self._last
        return self._last

    def _take(self, key: bytes) -> None:
        part = self._part_of.pop(key)
        if self.on_change is not None:
            self.on_change(part)
        del part[key]
        if not part:
            del self._parts[id(part)]


class LostNames:
    """Names of rows that were lost with a peer, numbered by their shard, for producers that put
    such rows again.

    The oldest names are forgotten first. A caller that asks for them gets their number. `total`:
    how many rows were lost.
    """

    def __init__(self, max_kept: int = MAX_LOST) -> None:
        self.total = 0
        self._names: deque[Name] = deque(maxlen=max_kept)

    def note(self, names: Sequence[Name]) -> None:
        self.total += len(names)
        self._names.extend(names)

    def after(self, number: int) -> tuple[list[Name], int, int]:
        """The names after the first `number` rows, at most one message full.

        Return (names, the number to ask with next, how many names were forgotten in between).
        """
        first = self.total - len(self._names)
        start = min(max(number, first), self.total)
        names = list(islice(self._names, start - first, start - first + MAX_LOST_PER_MESSAGE))
        return names, start + len(names), max(0, start - number)

    def latest(self) -> list[Name]:
        """The most recently lost names that fit into one message."""
        return self.after(self.total - MAX_LOST_PER_MESSAGE)[0]

    def __repr__(self) -> str:
        return f"<LostNames {self.total} rows, {len(self._names)} kept>"


class Producers:
    """How many rows a partition ever got, and from which sessions. A copy made from a snapshot has
    no times."""

    def __init__(self) -> None:
        self.rows = 0
        self._of = Latest[int, tuple[int, float | None]](MAX_PRODUCERS)

    def note(self, session: int, rows: int, now: float | None) -> None:
        """Note that a session put new rows."""
        self.rows += rows
        before, _ = self._of.get(session, (0, None))
        self._of[session] = before + rows, now

    def add(self, rows: int) -> None:
        """Note rows from a checkpoint, or from sessions that are forgotten."""
        self.rows += rows

    def latest(self, now: float) -> list[tuple[int, int, float | None]]:
        """(session, rows, seconds since its last put), the most recent first."""
        return [
            (session, rows, None if at is None else max(0.0, now - at))
            for session, (rows, at) in reversed(self._of.items())
        ]

    def __repr__(self) -> str:
        return f"<Producers {self.rows} rows, {len(self._of)} sessions>"
