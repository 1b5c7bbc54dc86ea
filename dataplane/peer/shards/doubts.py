"""Values that another peer may have taken: it was asked to, and did not answer.

At the values' owner. Until it is known, they are lent to that peer. When the client's call is over
it is asked what became of it, until it says so or is no member any more: what it carried out holds
the values; what it did not it never will, and they are let go.
"""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.errors import DataplaneError, StaleEpoch, Unavailable
from dataplane.memory.lent import Lent
from dataplane.peer.host import Caller, Host
from dataplane.peer.net.mesh import Mesh
from dataplane.peer.net.once import part_of
from dataplane.wire.checkpoint import Restore
from dataplane.wire.messages import Done, Finish, Put, PutDone
from dataplane.wire.peering import Void
from dataplane.wire.records import U4
from dataplane.wire.tables import Owner

log = logging.getLogger(__name__)

RETRY_S = 0.5

Ranges = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class _Doubt:
    """One part of a client's operation, at one life of a peer: carried out there once or never."""

    to: Owner
    session: int
    op: int
    part: int


class Doubts:
    def __init__(self, host: Host, mesh: Mesh, lent: Lent) -> None:
        self.host = host
        self.mesh = mesh
        self.lent = lent
        self._open: dict[_Doubt, tuple[Caller, Ranges]] = {}
        self._unnumbered = itertools.count()

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
        part = part_of(body) if caller.op else next(self._unnumbered)
        doubt = _Doubt(to, caller.session, caller.op, part)
        again = doubt in self._open
        if not again:
            self.host.space.hold(ranges)
            self.lent.lend(to, ranges)
            self._note(doubt, caller, ranges)
        try:
            done: Done | PutDone = await self.mesh.call(
                to.peer, body, caller=caller, to=to.incarnation, epoch=epoch
            )
        except DataplaneError as exc:
            # What was in doubt before may be on its way still, whatever was said now.
            if not again and not isinstance(exc, Unavailable):
                self._take_back(doubt)
            elif not caller.op:
                self._forget(doubt)  # nobody can ask about it: lent until that peer is lost
            raise
        if isinstance(done, PutDone):
            self._forget(doubt)
            return done
        self._take_back(doubt)
        raise Unavailable(
            f"this call was given up, and the peer at {to.peer} was told so: call again",
            address=to.peer,
        )

    def settle(self, caller: Caller) -> None:
        """The client's call is over: what is in doubt of it is found out."""
        for doubt in list(self._open):
            if (doubt.session, doubt.op) == (caller.session, caller.op) and caller.op:
                self.mesh.spawn(self._find_out(doubt))

    async def _find_out(self, doubt: _Doubt) -> None:
        to = doubt.to
        while doubt in self._open and self.host.roster.has(to):
            caller, _ = self._open[doubt]
            roster = self.host.roster
            try:
                said = await self.mesh.call(
                    to.peer, Void(doubt.part), caller=caller, to=to.incarnation, epoch=roster.epoch
                )
            except (StaleEpoch, Unavailable):
                await self.host.another_roster(roster, self.host.now() + RETRY_S)
                continue
            except DataplaneError as exc:
                log.error("%d bytes stay lent to %s: %s", self._nbytes(doubt), to.peer, exc)
                break
            if not isinstance(said, PutDone):
                self._take_back(doubt)
            break
        if not self.host.roster.has(to) and self.host.heirs.heir(to) == to:
            self._take_back(doubt)  # it had no shards
        self._forget(doubt)  # what a lost peer had, its heir says

    def _nbytes(self, doubt: _Doubt) -> int:
        return int(self.host.space.ranges.extents(self._open[doubt][1])["length"].sum())

    def _note(self, doubt: _Doubt, caller: Caller, ranges: Ranges) -> None:
        self._open[doubt] = caller, ranges
        self.host.unanswered.setdefault(doubt.session, []).append(doubt.op)

    def _forget(self, doubt: _Doubt) -> None:
        if self._open.pop(doubt, None) is None:
            return
        ops = self.host.unanswered[doubt.session]
        ops.remove(doubt.op)
        if not ops:
            del self.host.unanswered[doubt.session]

    def _take_back(self, doubt: _Doubt) -> None:
        """It was not taken: no more than is lent, the peer may have been lost meanwhile."""
        found = self._open.get(doubt)
        if found is not None:
            counts = self.lent.returned(doubt.to, found[1], np.ones(len(found[1]), U4))
            self.host.space.release(found[1], counts)
            self._forget(doubt)
