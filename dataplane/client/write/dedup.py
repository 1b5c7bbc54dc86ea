"""Finding equal values inside one put, and naming the others so that the peer can find theirs.

Runs in the client. The same memory is hashed once; different memory is the same value only where
every byte is equal. Only values of at least 4 KiB of the fields named for it are looked at.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import xxhash

from dataplane.client.write.parcel import LaidColumn, LaidStrip, Layout
from dataplane.client.write.values import Buffer
from dataplane.wire.limits import PACK_LIMIT_BYTES
from dataplane.wire.records import DIGEST


class _Place(NamedTuple):
    strip: LaidStrip
    row: int

    @property
    def range(self) -> int:
        return int(self.strip.records["range"][self.row])


class _First(NamedTuple):
    """The first value of a parcel with these bytes."""

    digest: bytes
    parcel: int
    place: _Place
    source: Buffer


@dataclass(slots=True)
class Copies:
    """What `find_copies` found. Values that are copies have no range until `settle`."""

    firsts: list[_First] = field(default_factory=list)
    copies: list[tuple[_Place, _Place]] = field(default_factory=list)

    def settle(self, layout: Layout) -> None:
        """Point copies at the range of their first, and note the digests in the layout."""
        for copy, first in self.copies:
            copy.strip.records["range"][copy.row] = first.range
        if not self.firsts:
            return
        ranges = np.array([first.place.range for first in self.firsts], np.int64)
        order = np.argsort(ranges, kind="stable").tolist()
        firsts = [self.firsts[index] for index in order]
        layout.digest_ranges = ranges[order]
        layout.digest_sources = [first.source for first in firsts]
        layout.digests = np.zeros(len(firsts), DIGEST)
        layout.digests["hash"] = np.frombuffer(b"".join(f.digest for f in firsts), "V16")
        layout.digests["nbytes"] = layout.sizes[layout.digest_ranges]
        # ranges ascend through the parcels, so the first in this order is the one that comes first
        earliest = {f.digest: f.parcel for f in reversed(firsts)}
        layout.repeated = np.array([f.parcel > earliest[f.digest] for f in firsts])


def find_copies(columns: list[LaidColumn]) -> Copies:
    """Look through the fields that are to be deduplicated; marks copies in `skip`."""
    search = _Search()
    for column in columns:
        if column.dedup:
            for strip in (column.values, column.leaves):
                if strip is not None:
                    search.look_through(strip)
    return search.found


class _Search:
    def __init__(self) -> None:
        self.found = Copies()
        self._hashed: dict[tuple[int, int], bytes] = {}
        self._sources: dict[bytes, Buffer] = {}
        self._firsts: dict[tuple[int, bytes], _Place] = {}

    def look_through(self, strip: LaidStrip) -> None:
        large = np.flatnonzero(strip.records["nbytes"] >= PACK_LIMIT_BYTES)
        parcels = np.searchsorted(np.asarray(strip.bounds), large, "right") - 1
        for index, parcel in zip(large.tolist(), parcels.tolist(), strict=True):
            source = strip.source[index]
            digest = self._digest(source)
            if digest is None:
                continue
            place = _Place(strip, index)
            first = self._firsts.setdefault((parcel, digest), place)
            if first is place:
                self.found.firsts.append(_First(digest, parcel, place, source))
                continue
            if strip.skip is None:
                strip.skip = np.zeros(len(strip.records), bool)
            strip.skip[index] = True
            self.found.copies.append((place, first))

    def _digest(self, source: Buffer) -> bytes | None:
        """The name of these bytes; None where other bytes of this put have the same one."""
        memory = _memory(source)
        digest = self._hashed.get(memory)
        if digest is None:
            digest = self._hashed[memory] = xxhash.xxh3_128_digest(source)
            if not _equal(self._sources.setdefault(digest, source), source):
                del self._hashed[memory]
                return None
        return digest


def _memory(source: Buffer) -> tuple[int, int]:
    if isinstance(source, bytes):
        return id(source), len(source)
    return source.__array_interface__["data"][0], source.nbytes


def _equal(one: Buffer, other: Buffer) -> bool:
    if one is other:
        return True
    return np.array_equal(np.frombuffer(one, np.uint8), np.frombuffer(other, np.uint8))
