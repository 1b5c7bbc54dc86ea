"""Small values that ride in a grant, so that rows of short texts and numbers need no bulk read,
and so that a few rows of middling ones need none either: that costs more than to carry them.

The supplying peer copies them out of its arena, the claim's peer into a block of its own. They lie
in the packs as ranges lie in extents: the layout is `memory.placement`'s.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from dataplane.errors import ProtocolError
from dataplane.memory.arena import Arena
from dataplane.memory.extents import padded
from dataplane.memory.placement import fitting, place
from dataplane.memory.space import Space
from dataplane.peer import rows as rowset
from dataplane.wire.limits import (
    INLINE,
    MAX_GRANT_PACKS,
    PACK_BLOCK_BYTES,
    PACK_LIMIT_BYTES,
)
from dataplane.wire.records import EXTENT, RANGE, U8
from dataplane.wire.tables import Owner, Table

_RIDING_BYTES = 32 << 10
"""Larger values do not ride: they are read in bulk, and kept for the next reader."""
_BLOCKS = np.zeros(MAX_GRANT_PACKS, EXTENT)
_BLOCKS["offset"] = np.arange(MAX_GRANT_PACKS) * PACK_BLOCK_BYTES
_BLOCKS["length"] = PACK_BLOCK_BYTES


def inlined(table: Table, here: Owner, space: Space, arena: Arena) -> tuple[Table, list[bytes]]:
    """The table with this peer's values in packs, where none is large and all fit, else only the
    small ones; as it was where those are too many."""
    if here not in table.owners:
        return table, []
    flat = rowset.flat_values(table.columns).copy()
    mine = flat["owner"] == table.owners.index(here)
    mine[mine] = ~space.away(rowset.ranges_of(flat[mine]))  # those are read in bulk
    if not mine.any():
        return table, []
    if int(flat["nbytes"][mine].max()) <= _RIDING_BYTES:
        packed = _packed(table, flat, mine, space, arena)
        if packed is not None:
            return packed
    small = mine & (flat["nbytes"] < PACK_LIMIT_BYTES)
    packed = _packed(table, flat, small, space, arena) if small.any() else None
    return packed or (table, [])


def _packed(
    table: Table, flat: npt.NDArray[Any], which: npt.NDArray[np.bool_], space: Space, arena: Arena
) -> tuple[Table, list[bytes]] | None:
    """The table with these of its values in packs. None where they do not fit."""
    values = flat[which]
    at = space.locate(rowset.ranges_of(values)) + values["delta"]
    starts, index = np.unique(at, return_inverse=True)
    sizes = np.zeros(len(starts), U8)
    np.maximum.at(sizes, index, values["nbytes"])
    if fitting(sizes, _BLOCKS) < len(sizes):
        return None
    dest = place(sizes, _BLOCKS)
    values["range"], values["generation"] = (dest // PACK_BLOCK_BYTES)[index], 0
    values["delta"] = (dest % PACK_BLOCK_BYTES)[index]
    values["owner"] = INLINE
    flat[which] = values
    blocks = _copied(arena, starts, sizes, dest)
    columns = rowset.with_values(table.columns, flat)
    return msgspec.structs.replace(table, columns=columns), blocks


def _copied(
    arena: Arena,
    starts: npt.NDArray[np.uint64],
    sizes: npt.NDArray[np.uint64],
    dest: npt.NDArray[np.uint64],
) -> list[bytes]:
    """The blocks that these stretches of the arena make."""
    ends = dest + padded(sizes)
    images = bytearray(int(ends.max()))
    for start, size, to in zip(starts.tolist(), sizes.tolist(), dest.tolist(), strict=True):
        images[to : to + size] = arena.view[start : start + size]
    count = -(-len(images) // PACK_BLOCK_BYTES)
    used = [int(ends[dest // PACK_BLOCK_BYTES == block].max()) for block in range(count)]
    return [bytes(images[block * PACK_BLOCK_BYTES : used[block]]) for block in range(count)]


def check(table: Table, packs: list[bytes]) -> None:
    """ProtocolError unless every inline value lies inside its pack, and packs are few and small."""
    if len(packs) > MAX_GRANT_PACKS or any(not 0 < len(p) <= PACK_BLOCK_BYTES for p in packs):
        raise ProtocolError(
            f"{len(packs)} packs of {[len(p) for p in packs]} bytes: a grant has at most "
            f"{MAX_GRANT_PACKS} of 1 to {PACK_BLOCK_BYTES} bytes",
            packs=len(packs),
        )
    flat = rowset.flat_values(table.columns)
    values = flat[flat["owner"] == INLINE]
    if not len(values):
        return
    lengths = np.array([*map(len, packs), 0], U8)
    length = lengths[np.minimum(values["range"], len(packs))]
    if np.any((values["delta"] > length) | (values["nbytes"] > length - values["delta"])):
        raise ProtocolError("a value of a grant reaches beyond the end of its pack")


def landed(table: Table, ranges: npt.NDArray[np.void], here: Owner) -> Table:
    """The table with its inline values in these ranges of this peer, one for each pack."""
    owners = table.owners if here in table.owners else [*table.owners, here]
    flat = rowset.flat_values(table.columns).copy()
    inline = flat["owner"] == INLINE
    of = np.asarray(ranges, RANGE)[flat["range"][inline]]
    flat["range"][inline], flat["generation"][inline] = of["range"], of["generation"]
    flat["owner"][inline] = owners.index(here)
    columns = rowset.with_values(table.columns, flat)
    return msgspec.structs.replace(table, columns=columns, owners=owners)
