"""Sends changes to the shards of their partitions, wherever the shards are.

A change gets a number, and each attempt to send it carries that number. The peer that gets the
change also gets references to the values that the change names.

A peer that did not reply may have applied the change. After the call, this peer asks it until it
replies or is no longer a member. Values of an applied change stay referenced. A change that was not
applied never will be, so its values are released. A change ends when no such peer is left. The
partition's floor then rises to its lowest change that has not ended.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import OrderedDict, defaultdict
from typing import Any

import numpy as np

from dataplane.errors import (
    ChangeExpired,
    DataplaneError,
    InternalError,
    LimitExceeded,
    Unavailable,
)
from dataplane.metadata.roster.roster import Roster
from dataplane.peer.host import Caller, Host, call_end
from dataplane.peer.net.mesh import Mesh
from dataplane.peer.net.router import Router
from dataplane.wire.journal import Settle
from dataplane.wire.limits import MAX_CHANGES_ABOVE_FLOOR
from dataplane.wire.messages import OVERDUE
from dataplane.wire.packed import U4, U8, Array
from dataplane.wire.peering import Settled
from dataplane.wire.tables import Change, Owner

log = logging.getLogger(__name__)

Partition = tuple[str, int]
"""Name and generation."""
NO_CHUNKS = np.zeros(0, U8)


class OutgoingChanges:
    def __init__(self, host: Host, mesh: Mesh, router: Router) -> None:
        self.host = host
        self.mesh = mesh
        self.router = router
        self.numbers = ChangeNumbers(host.owner)
        self._asked: dict[int, dict[Owner, Array]] = {}
        """by number of a change: the peers that may have applied it, and the chunks of each"""

    def __len__(self) -> int:
        """The number of changes that have not ended."""
        return len(self.numbers)

    def __repr__(self) -> str:
        return f"<OutgoingChanges {self.numbers}>"

    async def send(self, body: Any, caller: Caller, carried: Array = NO_CHUNKS) -> Any:
        """Send a change to its shard, under one number, and return the reply. Repeat it under the
        next roster if the shard has moved or its peer is unreachable, until the call's deadline.

        carried: the chunks of this host that the message names. A shard that applies the change
        has references of its own to them.
        """
        end = call_end(self.host.now())
        body.change = await self.numbers.begin(body.partition, body.generation, end)
        try:
            return await self.router.reach(
                lambda roster, left_s: self._attempt(roster, body, caller, carried), end
            )
        finally:
            self._conclude(Settle(body.partition, body.generation, body.change))

    async def _attempt(self, roster: Roster, body: Any, caller: Caller, carried: Array) -> Any:
        """Send the change once. Release values that the shard rejects. If another peer does not
        reply, it keeps its references."""
        home, space = roster.home(body.partition), self.host.space
        if home == self.host.address:
            was_applied = self._is_applied(body)
            space.hold(carried)
            try:
                return await self.mesh.call(home, body, caller=caller, epoch=roster.epoch)
            except BaseException:
                if was_applied or not self._is_applied(body):
                    space.release(carried)
                raise
        # A peer that cannot be reached gets nothing, so it has no references.
        hello = self.mesh.linked(home) or await self.mesh.hello(home)
        to, number = Owner(home, hello.incarnation), body.change.number
        was_asked = to in self._asked.get(number, ())
        if not was_asked:
            if len(carried):
                space.hold(carried)
                self.host.remote_references.add(to, carried)
            self._asked.setdefault(number, {})[to] = carried
        try:
            done = await self.mesh.call(
                home, body, caller=caller, to=to.incarnation, epoch=roster.epoch
            )
        except DataplaneError as exc:
            # An earlier attempt may still be in flight, whatever the reply to this one. A peer that
            # answers InternalError may have applied the change before it failed.
            if not was_asked and not isinstance(exc, (Unavailable, InternalError)):
                self._resolve(number, to, applied=False)
            raise
        self._resolve(number, to, applied=True)
        return done

    def _is_applied(self, body: Any) -> bool:
        """Whether the shard of this peer has applied the change."""
        entry = self.host.entry(body.partition, body.generation)
        try:
            return entry is not None and entry.store.answers.to(body.change) is not None
        except (ChangeExpired, LimitExceeded):
            return False

    def _conclude(self, asked: Settle) -> None:
        """Ask each peer that did not reply whether it applied the change. The change ends when none
        is left."""
        for to in list(self._asked.get(asked.change.number, ())):
            self.mesh.spawn(self._find_out(to, asked))
        self._end(asked)

    async def _find_out(self, to: Owner, asked: Settle) -> None:
        number = asked.change.number
        try:
            said = await self.mesh.tell(to, asked)
        except DataplaneError as exc:
            chunks = self._asked.get(number, {}).get(to, NO_CHUNKS)
            nbytes = int(self.host.space.chunks.extents(chunks)["length"].sum())
            log.error(
                "partition %r: peer %s did not apply change %d (%s), so %d bytes stay allocated "
                "there",
                *(asked.partition, to.peer, number, exc, nbytes),
            )
        else:
            if isinstance(said, Settled) and not said.carried_out:
                self._resolve(number, to, applied=False)
        # The successor of a lost peer reports what its shards reference. Without shards it has no
        # successor, and references nothing.
        gone = not self.host.roster.has(to) and self.host.successors.current(to) == to
        self._resolve(number, to, applied=not gone)
        self._end(asked)

    def _end(self, asked: Settle) -> None:
        if asked.change.number not in self._asked:
            self.numbers.end(asked.partition, asked.generation, asked.change)

    def _resolve(self, number: int, to: Owner, applied: bool) -> None:
        """Note whether a peer applied a change. If not, release its values, but only those that the
        peer still references: it may have been lost."""
        chunks = self._asked.get(number, {}).pop(to, None)
        if chunks is None:
            return
        if not self._asked[number]:
            del self._asked[number]
        if not applied and len(chunks):
            counts = self.host.remote_references.release(to, chunks, np.ones(len(chunks), U4))
            self.host.space.release(chunks, counts)


class ChangeNumbers:
    """The numbers of a peer's changes, and the floor of each partition: its lowest change that has
    not ended. An unreachable shard does not hold up changes of other partitions."""

    def __init__(self, caller: Owner) -> None:
        self._caller = caller
        self._numbers = itertools.count(1)
        self._pending = defaultdict[Partition, OrderedDict[int, bool]](OrderedDict)
        """by partition, the numbers from the floor on, and whether each is over"""
        self._room: dict[Partition, asyncio.Future[None]] = {}
        """by partition with too many changes: a future that is done once the floor has risen"""

    def __len__(self) -> int:
        """The number of changes that are not over."""
        return sum([not over for pending in self._pending.values() for over in pending.values()])

    def __repr__(self) -> str:
        return f"<ChangeNumbers {len(self)} pending, of {len(self._pending)} partitions>"

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
                    "are pending (the maximum), and the shard has not confirmed the oldest one: "
                    "check the peers with `dataplane status`, then repeat the call",
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
