"""The changes that this peer asks shards for: their numbers, and the floor below which all have
ended.

All attempts of a change have one number, wherever its shard is then. A change ends when the
shard has answered it, or has confirmed that it will never apply it (`Doubts`). Each partition
has its own floor, so that an unreachable shard does not block changes of others.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import OrderedDict, defaultdict

from dataplane.errors import Unavailable
from dataplane.wire.limits import MAX_CHANGES_ABOVE_FLOOR
from dataplane.wire.messages import OVERDUE
from dataplane.wire.tables import Change, Owner

Partition = tuple[str, int]
"""Name and generation."""


class OutgoingChanges:
    def __init__(self, caller: Owner) -> None:
        self._caller = caller
        self._numbers = itertools.count(1)
        self._pending = defaultdict[Partition, OrderedDict[int, bool]](OrderedDict)
        """by partition, the numbers from the floor on, and whether each is over"""
        self._room: dict[Partition, asyncio.Future[None]] = {}
        """of partitions with too many: done when the floor has risen"""

    def __len__(self) -> int:
        """The changes that are not over."""
        return sum([not over for pending in self._pending.values() for over in pending.values()])

    def __repr__(self) -> str:
        return f"<OutgoingChanges {len(self)} pending, of {len(self._pending)} partitions>"

    async def begin(self, partition: str, generation: int, until: float) -> Change:
        """Start a change. Wait while the partition has MAX_CHANGES_ABOVE_FLOOR changes above the
        floor, and raise Unavailable at `until` (monotonic)."""
        of = partition, generation
        while len(self._pending.get(of, ())) >= MAX_CHANGES_ABOVE_FLOOR:
            if of not in self._room:
                self._room[of] = asyncio.get_running_loop().create_future()
            left_s = max(0.0, until - time.monotonic())
            if not (await asyncio.wait([self._room[of]], timeout=left_s))[0]:
                raise Unavailable(
                    f"partition {partition!r}: {MAX_CHANGES_ABOVE_FLOOR} changes from this host "
                    "are pending, and the shard has not confirmed the oldest one: check the peers "
                    "(dataplane status), then repeat the call",
                    partition=partition,
                    **{OVERDUE: True},
                )
        number = next(self._numbers)
        pending = self._pending[of]
        pending[number] = False
        return Change(self._caller, number, next(iter(pending)))

    def end(self, partition: str, generation: int, change: Change) -> None:
        """End a change, whose outcome is now known."""
        of = partition, generation
        pending = self._pending.get(of, OrderedDict())
        if change.number not in pending:
            return
        pending[change.number] = True
        if change.number != next(iter(pending)):
            return
        while pending and pending[next(iter(pending))]:
            pending.popitem(last=False)
        if not pending:
            del self._pending[of]
        if of in self._room:
            self._room.pop(of).set_result(None)
