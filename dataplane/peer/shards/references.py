"""References of shards to values in arenas: bytes live while a shard names them.

Shards here name values of this peer and of others, and say when that ends; shards elsewhere name
values here (`lent`), and one that goes without a word is spoken for by its heir. Who took over from
whom, and what a peer may have taken that did not answer, is settled before anything is let go.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections import OrderedDict
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.errors import DataplaneError, StaleEpoch, Unavailable
from dataplane.memory.lent import Lent
from dataplane.metadata.roster.roster import Roster
from dataplane.metadata.shard.second_copies import named_by
from dataplane.metadata.tables.references import ids_of, ranges_of
from dataplane.peer import rows as rowset
from dataplane.peer.host import Caller, Entry, Host, call_deadline
from dataplane.peer.net.mesh import CALL_S, Mesh
from dataplane.peer.net.router import Router
from dataplane.peer.room.admission import Room
from dataplane.wire.checkpoint import Restore
from dataplane.wire.messages import Body, Done, Finish, Put, PutDone
from dataplane.wire.peering import Inherited, Release, Void
from dataplane.wire.records import RANGE, U4, column
from dataplane.wire.tables import Owner

log = logging.getLogger(__name__)

MAX_VOID = 16_384
"""Changes that were given up before they came, and are known by number."""
MOST_RANGES = 1 << 20
"""that one message says to be free, or taken over"""
AGAIN_S = 2.0
"""After so long an owner that refused to let go of values is told again."""

Ranges = npt.NDArray[Any]
"""RANGE, or the u4 counts beside them"""


class References:
    def __init__(self, host: Host, mesh: Mesh, router: Router, room: Room) -> None:
        self.host = host
        self.mesh = mesh
        self.router = router
        self.room = room
        self.lent = host.lent
        self.doubts = Doubts(host, mesh, self.lent)
        self._freed: dict[Owner, list[tuple[bytes, bytes]]] = {}
        """references to values of others that ended here and were not told yet: RANGE, u4 counts"""
        self._telling: dict[Owner, set[asyncio.Task[Any]]] = {}
        """owners that have yet to answer what this peer took over of theirs"""
        self._releases = itertools.count(1)
        self._heard: dict[Owner, int] = {}
        """the last of what each peer let go of here"""
        self._void: OrderedDict[int, None] = OrderedDict()
        mesh.handlers |= {Release: self._release_here, Void: self._void_here}

    # at the peer that carries values to their shards

    def arrived(self, ranges: Ranges, counts: Ranges, number: int) -> None:
        """Values stayed while they were carried to their shards, which took references of their
        own; what none took is free."""
        if not len(ranges):
            return
        self.doubts.settle(number)
        self.room.release(ranges, counts)

    async def hand_over(
        self, body: Put | Finish | Restore, carried: Ranges, caller: Caller
    ) -> PutDone:
        """Carry values of this peer on to the shard that keeps their rows, wherever that is then.
        What it refuses is let go; what it may have taken, should it not answer, is in doubt.
        carried: all ranges that the message names, once each."""
        end = min(self.host.now() + CALL_S, call_deadline.get())
        return await self.router.reach(
            lambda roster, _: self._hand_over(roster, body, carried, caller), end
        )

    async def _hand_over(
        self, roster: Roster, body: Put | Finish | Restore, carried: Ranges, caller: Caller
    ) -> PutDone:
        home = roster.home(body.partition)
        ranges = _named(body) if len(carried) else carried
        if len(ranges) and home != self.host.address:
            to = Owner(home, (await self.mesh.hello(home)).incarnation)
            return await self.doubts.lend(to, body, ranges, caller, roster.epoch)
        self.host.space.hold(ranges)
        try:
            done: PutDone = await self.router.at(roster, body, caller)
        except BaseException:
            self.host.space.release(ranges)
            raise
        return done

    # at the peer of the shards: of values anywhere

    def answered(self, entry: Entry, body: Put | Finish | Restore) -> Body | None:
        """What was answered, where this was carried out before; `Done` where it was given up. Where
        another peer did so, the values were lent to that one, and have been to this one since."""
        if body.number in self._void:
            return Done()
        answer = entry.store.answer_to(body.number)
        if answer is not None and body.number in entry.inherited:
            entry.inherited.discard(body.number)
            for owner, ranges, counts, _ in named_by(body):
                self.let_go(owner, ranges, counts)
        return answer

    def _void_here(self, caller: Caller, body: Void) -> Body:
        """StaleEpoch where the shard may have moved: whoever has it then says what it holds."""
        entry = self.host.entry(body.partition, body.generation)
        if entry is None and self.host.address in self.host.roster.leaving:
            raise StaleEpoch(f"{self.host.address} leaves, and may have handed it over")
        answer = entry.store.answer_to(body.number) if entry is not None else None
        if answer is None:
            self._void[body.number] = None
            if len(self._void) > MAX_VOID:
                self._void.popitem(last=False)
        return answer or Done()

    def let_go(self, owner: Owner, ranges: Ranges, counts: Ranges) -> bool:
        """Values that a shard here no longer holds; their bytes may be another peer's. Whether any
        came free here."""
        if owner == self.host.owner:
            return bool(self.host.space.release(ranges, counts))
        freed = ranges.tobytes(), np.asarray(counts, "<u4").tobytes()
        if owner in self._freed:
            self._freed[owner].append(freed)
        else:
            self._freed[owner] = [freed]
            self.mesh.spawn(self._release_there(owner))
        return False

    async def _release_there(self, owner: Owner) -> None:
        """What comes free while one message is on its way goes with the next."""
        while self._freed[owner]:
            try:
                await self._release_once(owner)
            except DataplaneError as exc:  # it let go of nothing
                log.warning("%s is told again of values that nobody names: %s", owner.peer, exc)
                await self.host.another_roster(self.host.roster, self.host.now() + AGAIN_S)
        del self._freed[owner]

    async def _release_once(self, owner: Owner) -> None:
        """Not before the owner has answered what was taken over. Until then these references are
        the lost peer's there, nothing is released, and what was taken over names them still: they
        would be lent for ever. Messages that wait for the backup, or are repeated, keep no order.
        """
        progress = self.host.progress
        while (telling := self._telling.get(owner)) or not progress.is_settled:
            # More may be taken over, and let go of, in each of these waits.
            await (asyncio.wait(telling) if telling else progress.reached(math.inf))
        ranges, counts = (b"".join(columns) for columns in zip(*self._freed[owner], strict=True))
        most = MOST_RANGES * RANGE.itemsize, MOST_RANGES * U4.itemsize
        rest = ranges[most[0] :], counts[most[1] :]
        self._freed[owner] = [rest] if rest[0] else []
        # An owner is told of one at a time, so that it need know of no other.
        body = Release(ranges[: most[0]], counts[: most[1]], next(self._releases))
        try:
            await self.mesh.tell(owner, body)
        except DataplaneError:
            self._freed[owner].insert(0, (body.ranges, body.counts))
            raise

    def took_over(self, owner: Owner, body: Inherited) -> None:
        """Tell an owner of values what a lost peer's shards hold there, which are this peer's now.
        What is let go of that from here on is told after it."""
        task = self.mesh.spawn(self._tell_what_was_taken_over(owner, body))
        self._telling.setdefault(owner, set()).add(task)
        task.add_done_callback(lambda _: self._told(owner, task))

    async def _tell_what_was_taken_over(self, owner: Owner, body: Inherited) -> None:
        ranges = np.frombuffer(body.ranges, RANGE)
        ids, at = np.unique(ids_of(ranges), return_inverse=True)
        counts = np.zeros(len(ids), U4)
        np.add.at(counts, at, np.frombuffer(body.counts, U4))
        for first in range(0, max(1, len(ids)), MOST_RANGES):
            behind = first + MOST_RANGES
            part = ranges_of(ids[first:behind]).tobytes(), counts[first:behind].tobytes()
            more = behind < len(ids)
            await self.mesh.tell(owner, Inherited(body.origin, *part, body.began, more))

    def _told(self, owner: Owner, task: asyncio.Task[Any]) -> None:
        self._telling[owner].discard(task)
        if not self._telling[owner]:
            del self._telling[owner]

    # at the owner of the values

    def _release_here(self, caller: Caller, body: Release) -> Body:
        """A shard lets go. No more than it has: it may have been taken for lost meanwhile."""
        ranges = column(body.ranges, RANGE)
        counts = column(body.counts, U4, len(ranges))
        if body.number > self._heard.get(caller.owner, 0):
            self._heard[caller.owner] = body.number
            self.room.release(ranges, self.lent.returned(caller.owner, ranges, counts))
        return Done()

    def gone(self, owner: Owner) -> None:
        """A process is no member any more. Where it had no shards nobody speaks for it: what it was
        being handed, under a roster that gave its address some, it cannot have taken."""
        self._heard.pop(owner, None)
        if self.host.heirs.heir(owner) == owner:
            self.room.release(*self.lent.lost(owner))

    def inherited(self, caller: Caller, body: Inherited) -> Body:
        """A peer took over a lost one's shards and says what those hold here, or that it was given
        them empty; the rest is free."""
        ranges = column(body.ranges, RANGE)
        counts = column(body.counts, U4, len(ranges))
        heir = None if caller.owner == self.host.owner else caller.owner
        origins = [o for o in self.lent.peers if self._is_about(body, caller.owner, o)]
        self.room.release(*self.lent.inherited(origins, heir, ranges, counts, body.more))
        return Done()

    def _is_about(self, body: Inherited, sender: Owner, owner: Owner) -> bool:
        """Did `origin` have what this one had, or take over from it before it was lost as well? Or
        was the sender given that by a roster which is no later than its first one?"""
        if owner == body.origin:
            return True
        # The roster may have given shards to who was yet to come, by its address alone.
        about = (body.origin, sender) if body.began else (body.origin,)
        for given_at, heir in self.host.heirs.after(owner):
            if heir in about:
                return not body.began or given_at <= body.began
        return False


def _named(body: Put | Finish | Restore) -> Ranges:
    """The RANGE of every value and leaf, as often as one names it; of those that lie at peers."""
    flat = rowset.flat_values(body.columns)
    return ranges_of(ids_of(flat[rowset.in_ranges(flat, body.owners)]))


Doubt = tuple[Owner, int]
"""A change, by its number, at one life of a peer: carried out there once or never."""


class Doubts:
    """Values that another peer may have taken: it was asked to, and did not answer.

    Until it is known, they are lent to that peer. When the client's call is over it is asked what
    became of it, until it says so or is no member any more: what it carried out holds the values;
    what it did not it never will, and they are let go.
    """

    def __init__(self, host: Host, mesh: Mesh, lent: Lent) -> None:
        self.host = host
        self.mesh = mesh
        self.lent = lent
        self._open: dict[Doubt, tuple[Void, Ranges]] = {}

    def __len__(self) -> int:
        return len(self._open)

    async def lend(
        self,
        to: Owner,
        body: Put | Finish | Restore,
        ranges: Ranges,
        caller: Caller,
        epoch: tuple[int, int],
    ) -> PutDone:
        """Hand over what names these ranges of this host, once for each value. What is refused is
        let go, what was not answered is in doubt. Unavailable for what was given up before."""
        doubt = to, body.number
        again = doubt in self._open
        if not again:
            self.host.space.hold(ranges)
            self.lent.lend(to, ranges)
            self._open[doubt] = Void(body.partition, body.generation, body.number), ranges
        try:
            done: Done | PutDone = await self.mesh.call(
                to.peer, body, caller=caller, to=to.incarnation, epoch=epoch
            )
        except DataplaneError as exc:
            # What was in doubt before may be on its way still, whatever was said now.
            if not again and not isinstance(exc, Unavailable):
                self._take_back(doubt)
            raise
        if isinstance(done, PutDone):
            self._open.pop(doubt, None)
            return done
        self._take_back(doubt)
        raise Unavailable(
            f"this call was given up, and the peer at {to.peer} was told so: call again",
            address=to.peer,
        )

    def settle(self, number: int) -> None:
        """The client's call is over: what is in doubt of it is found out."""
        for doubt in [one for one in self._open if one[1] == number]:
            self.mesh.spawn(self._find_out(doubt, *self._open[doubt]))

    async def _find_out(self, doubt: Doubt, asked: Void, ranges: Ranges) -> None:
        to = doubt[0]
        try:
            said = await self.mesh.tell(to, asked)
        except DataplaneError as exc:
            nbytes = int(self.host.space.ranges.extents(ranges)["length"].sum())
            log.error("%d bytes stay lent to %s: %s", nbytes, to.peer, exc)
        else:
            if isinstance(said, Done):
                self._take_back(doubt)
        if not self.host.roster.has(to) and self.host.heirs.heir(to) == to:
            self._take_back(doubt)  # it had no shards
        self._open.pop(doubt, None)  # what a lost peer had, its heir says

    def _take_back(self, doubt: Doubt) -> None:
        """It was not taken: no more than is lent, the peer may have been lost meanwhile."""
        if doubt in self._open:
            _, ranges = self._open.pop(doubt)
            counts = self.lent.returned(doubt[0], ranges, np.ones(len(ranges), U4))
            self.host.space.release(ranges, counts)
