"""Small values that go with the message itself, to live in the shard: which they are.

What one row brings of them is bounded; its other values go to the arena. Where the shard has no
room for them the message is refused, and they go there as well: `landed`.


Generated from dataplane/client/_async/inlining.py: change that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from dataplane.client._sync.calls import ask
from dataplane.client.deadline import Deadline
from dataplane.client.handle import Handle
from dataplane.client.write.layout import BLOCK_STEP_BYTES
from dataplane.client.write.written import Written
from dataplane.errors import ShardFull
from dataplane.memory.placement import place, remainder
from dataplane.wire.messages import Reserve, Reserved
from dataplane.wire.records import EXTENT, RANGE, U4, U8, column

Records = npt.NDArray[Any]


def landed(
    handle: Handle,
    generation: int,
    written: Written,
    continuing: Callable[[], bool],
    deadline: Deadline,
    full: ShardFull | None = None,
) -> Written:
    """The same with all of it in the arena, in blocks, once there is room.

    full: the message was refused with this, and its other values are ranges by now, also those
    that were shared; it names them."""
    found = [r for c in written.cells for r in (c.values, c.leaves)]
    inline = [r[r["owner"] == 1] for r in found]
    starts = np.concatenate([r["range"] for r in inline]).astype(np.int64)
    ends = starts + np.concatenate([r["nbytes"] for r in inline]).astype(np.int64)
    piece = starts // BLOCK_STEP_BYTES
    _, block = np.unique(piece, return_inverse=True)
    count = int(block.max()) + 1
    firsts, lasts = np.full(count, len(written.inline)), np.zeros(count, np.int64)
    np.minimum.at(firsts, block, starts)
    np.maximum.at(lasts, block, ends)
    sizes = (lasts - firsts).astype(U8)
    body = Reserve(handle.name, generation, [sizes.tobytes()], continuing())
    reserved = ask(handle.session, body, Reserved, deadline, "waiting for space in the arena")
    extents = column(reserved.extents, EXTENT)
    try:
        offsets = place(sizes, extents)
        for offset, first, last in zip(
            offsets.tolist(), firsts.tolist(), lasts.tolist(), strict=True
        ):
            part = np.frombuffer(written.inline, np.uint8)[first:last]
            handle.session.writes.view(offset, max(1, len(part)))[: len(part)] = part
    except BaseException:
        handle.session.keep(extents)
        raise
    handle.session.keep(remainder(sizes, offsets, extents))
    ranges = np.zeros(count, EXTENT)
    ranges["offset"], ranges["length"] = offsets, sizes
    own, shared, pin = written.ranges, written.shared, written.pin
    if full is not None and "ranges" in full.details:
        own, shared, pin = own[:0], column(full.details["ranges"], RANGE), 0
    others = np.arange(len(own) + len(shared))
    renumber = np.where(others < len(own), others, count + others).astype(U4)
    ranges = np.concatenate([own, ranges])
    taken = 0

    def move(records: Records) -> Records:
        nonlocal taken
        moved = records.copy()
        mine = records["owner"] == 1
        moved["range"][~mine] = renumber[records["range"][~mine]]
        at = slice(taken, taken := taken + int(mine.sum()))
        moved["range"][mine] = len(own) + block[at]
        moved["delta"][mine] = starts[at] - firsts[block[at]]
        moved["owner"] = 0
        return moved

    return msgspec.structs.replace(
        written,
        columns=[cells.mapped(move).wire() for cells in written.cells],
        ranges=ranges,
        shared=shared,
        pin=pin,
        digest_index=renumber[written.digest_index],
        inline=b"",
    )
