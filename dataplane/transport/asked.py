"""What a reader may ask of an owner: pieces of ranges, checked before anything is pinned or moved.

Runs in the owner's bulk worker. Addresses behind these checks are raw, so nothing here trusts a
reader's column or a peer's answer.
"""

from __future__ import annotations

import numpy as np

from dataplane.errors import InternalError, LimitExceeded, ProtocolError, VersionMismatch
from dataplane.transport.bulk_frames import (
    GONE,
    MAX_HOLD_BYTES,
    MAX_PULL_BYTES,
    MAX_PULL_ITEMS,
    PIECE,
    Hold,
    Pull,
)
from dataplane.transport.seam import Offsets, Records, Region
from dataplane.wire.limits import PROTOCOL_VERSION, PROTOCOL_VERSION_MIN
from dataplane.wire.records import column


def check_version(version: int) -> None:
    """VersionMismatch unless this peer speaks it."""
    if not PROTOCOL_VERSION_MIN <= version <= PROTOCOL_VERSION:
        raise VersionMismatch(
            f"bulk protocol {version} is asked for, this peer speaks "
            f"{PROTOCOL_VERSION_MIN} to {PROTOCOL_VERSION}",
            version=version,
        )


def checked_pieces(asked: Pull | Hold) -> Records:
    """The PIECE records of a request. LimitExceeded, ProtocolError, VersionMismatch."""
    check_version(asked.version)
    what, most = ("pull", MAX_PULL_BYTES) if isinstance(asked, Pull) else ("hold", MAX_HOLD_BYTES)
    pieces: Records = column(asked.pieces, PIECE)
    if len(pieces) > MAX_PULL_ITEMS:
        raise LimitExceeded(
            f"{len(pieces)} pieces in one {what}, the limit is {MAX_PULL_ITEMS}",
            size=len(pieces),
            limit=MAX_PULL_ITEMS,
        )
    # Piece by piece first: a sum of huge claims could wrap around.
    largest = int(pieces["nbytes"].max(initial=0))
    nbytes = largest if largest > most else int(pieces["nbytes"].sum())
    if nbytes > most:
        raise LimitExceeded(
            f"one {what} asks for {nbytes} bytes, the limit is {most}", size=nbytes, limit=most
        )
    if nbytes != asked.nbytes:
        raise ProtocolError(f"a {what} announces {asked.nbytes} bytes, its pieces have {nbytes}")
    return pieces


def check_inside(region: Region, pieces: Records, places: Records) -> None:
    """Neither a reader's piece nor a peer's answer may reach outside."""
    start, nbytes, length = pieces["start"], pieces["nbytes"], places["length"]
    if ((start > length) | (nbytes > length - np.minimum(start, length))).any():
        raise ProtocolError("a pull asks for bytes beyond the end of a range")
    size = np.uint64(region.nbytes)
    if ((places["offset"] > size) | (length > size - np.minimum(places["offset"], size))).any():
        raise InternalError("the peer answered with a place outside its arena")


def sources_of(region: Region, pieces: Records, places: Records) -> Offsets:
    """Where each piece begins in the region; GONE where its range is."""
    sources: Offsets = np.full(len(pieces), GONE, np.uint64)
    there = places["offset"] != GONE
    check_inside(region, pieces[there], places[there])
    sources[there] = places["offset"][there] + pieces["start"][there]
    return sources
