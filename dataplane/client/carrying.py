"""Small values that ride in the message that commits them, so that no room is asked for first.

The peer writes them into its arena. Where it has no room at once it does nothing and says so with
BackPressure; they then take the way of all others, which waits for room. Without I/O.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from dataplane.client.core import Deadline, Handle, Operation, ask
from dataplane.client.filling import fill
from dataplane.client.parcel import Parcel
from dataplane.client.written import Written, written_of
from dataplane.memory.extents import padded
from dataplane.memory.placement import place, remainder
from dataplane.wire.limits import CARRIED
from dataplane.wire.messages import Reserve, Reserved
from dataplane.wire.records import EXTENT, U8, column


def carries(handle: Handle, nbytes: int) -> bool:
    """Whether so much rides."""
    return 0 < nbytes <= handle.session.carry_bytes


def riding(parcel: Parcel) -> Written:
    """A parcel as the parts of a message that has the values in it; nothing of it is shared."""
    image, room = np.zeros(parcel.nbytes, np.uint8), padded(parcel.sizes)
    fill(parcel, np.cumsum(room, dtype=U8) - room, lambda at, length: image[at : at + length])
    ranges = np.empty(len(room), EXTENT)
    ranges["offset"], ranges["length"] = CARRIED, parcel.sizes
    return replace(written_of(parcel, ranges), carried=image.tobytes())


def landed(
    handle: Handle,
    generation: int,
    written: Written,
    continuing: Callable[[], bool],
    deadline: Deadline,
) -> Operation[Written]:
    """The same with all of it in the arena, once there is room."""
    session = handle.session
    riding = written.ranges["offset"] == CARRIED
    sizes = written.ranges["length"][riding]
    body = Reserve(handle.name, generation, [sizes.astype(U8).tobytes()], continuing())
    reserved = yield from ask(body, Reserved, deadline, "waiting for room in the arena")
    extents = column(reserved.extents, EXTENT)
    offsets = place(sizes, extents)
    for offset, (_, part) in zip(offsets.tolist(), written.riding(), strict=True):
        session.writes.view(offset, len(part))[:] = np.frombuffer(part, np.uint8)
    session.keep(remainder(sizes, offsets, extents))
    ranges = written.ranges.copy()
    ranges["offset"][riding] = offsets
    return replace(written, ranges=ranges, carried=b"")
