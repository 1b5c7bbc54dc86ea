"""The keys of several rows: each of them, or a run.

Keys that a client mints for one put differ only in their last byte, which counts up. Such keys are
a run, and three small values stand for all of them. Nobody says which keys are a run: the keys do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import msgspec

from dataplane.metadata.tables.names import KEY_BYTES, RUN_KEYS
from dataplane.wire.packed import KEY, column

PREFIX_BYTES = KEY_BYTES - 1
_LAST_BYTES = [bytes([last]) for last in range(RUN_KEYS)]


class KeyRun(msgspec.Struct, frozen=True, gc=False):
    """`count` keys of one prefix, whose last bytes count up from `start`."""

    prefix: bytes
    start: int
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int) -> bytes:
        if not 0 <= row < self.count:
            raise IndexError(row)
        return self.prefix + _LAST_BYTES[self.start + row]

    def __iter__(self) -> Iterator[bytes]:
        last = islice(_LAST_BYTES, self.start, self.start + self.count)
        return map(self.prefix.__add__, last)

    def index(self, key: bytes) -> int:
        """The place of a key that is one of these."""
        return key[PREFIX_BYTES] - self.start

    def records(self, first: int, end: int) -> bytes:
        """KEY records of the keys from place `first` up to `end`."""
        return self.prefix.join([b"", *_LAST_BYTES[self.start + first : self.start + end]])


Keys = KeyRun | Sequence[bytes]
"""A run, or each key."""


def keys_in(raw: bytes | memoryview) -> list[bytes]:
    """The keys of a KEY column one by one."""
    if len(raw) % KEY_BYTES:
        column(raw, KEY)
    raw = bytes(raw)
    return [raw[at : at + KEY_BYTES] for at in range(0, len(raw), KEY_BYTES)]


def run_in(raw: bytes) -> KeyRun | None:
    """The run that a KEY column is; None for any other column."""
    count, prefix = len(raw) // KEY_BYTES, raw[:PREFIX_BYTES]
    if raw[-KEY_BYTES:-1] == prefix and 0 < count <= RUN_KEYS and len(raw) == count * KEY_BYTES:
        run = KeyRun(prefix, raw[PREFIX_BYTES], count)
        if count == 1 or run.start + count <= RUN_KEYS and run.records(0, count) == raw:
            return run
    return None


def some_of(keys: Keys, places: Sequence[int]) -> Keys:
    """The keys at these places: a run where they follow each other in a run."""
    if isinstance(keys, KeyRun) and isinstance(places, range):
        return KeyRun(keys.prefix, keys.start + places[0], len(places))
    return [keys[place] for place in places]


def records_of(keys: Keys, first: int, end: int) -> bytes:
    """KEY records of the keys from place `first` up to `end`."""
    if isinstance(keys, KeyRun):
        return keys.records(first, end)
    return b"".join(keys[first:end])
