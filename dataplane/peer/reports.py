"""What this peer tells the homes of stages that sit at other peers: figures that changed, gathered.

Each report replaces those before it, so they go one at a time, and many changes make one. What a
claim may wait for goes soon; that rows were taken or acked can wait a little longer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from operator import attrgetter
from weakref import WeakValueDictionary

from dataplane.errors import DataplaneError
from dataplane.metadata.counts import Counts
from dataplane.peer.host import Entry, Host
from dataplane.peer.mesh import Mesh
from dataplane.wire.peering import Counted, Report
from dataplane.wire.tables import Where

REPORT_DELAY_S = 0.002
"""How long changes of a stage are gathered before its home is told."""
LESS_DELAY_S = 0.02
"""The same where rows only became fewer: no claim waits to hear of that."""
RETRY_S = 1.0

SeatKey = tuple[str, int, str]
_figures = attrgetter(*Counted.__struct_fields__)


class Reports:
    """anew: `Seats.anew`, for what could not be told: the home may be another meanwhile."""

    def __init__(self, host: Host, mesh: Mesh, anew: Callable[[Entry, set[str]], None]) -> None:
        self.host = host
        self.mesh = mesh
        self.watched: dict[SeatKey, list[Where]] = {}
        """filters of which the figures are told as well"""
        self._anew = anew
        self._seen: dict[SeatKey, Counts] = {}
        """the figures at the last change"""
        self._due: dict[tuple[SeatKey, str], asyncio.TimerHandle] = {}
        """what is to be reported to which home"""
        self._turns: WeakValueDictionary[tuple[SeatKey, str], asyncio.Lock] = WeakValueDictionary()

    def changed(self, home: str, entry: Entry, stage: str) -> None:
        """Figures of a stage changed here: its home is told of this and all that follows soon."""
        news = self._is_news((entry.name, entry.generation, stage), entry)
        self._tell_within(REPORT_DELAY_S if news else LESS_DELAY_S, home, entry, stage)

    def anew(self, home: str, entry: Entry, stage: str) -> None:
        """The home knows nothing of this stage here, or asks."""
        self._seen.pop((entry.name, entry.generation, stage), None)
        self._tell_within(REPORT_DELAY_S, home, entry, stage)

    def _tell_within(self, delay_s: float, home: str, entry: Entry, stage: str) -> None:
        key, loop = (entry.name, entry.generation, stage), asyncio.get_running_loop()
        due = self._due.get((key, home))
        if due is not None:
            if due.when() <= loop.time() + delay_s:
                return
            due.cancel()
        self._due[key, home] = loop.call_later(delay_s, self._send, home, entry, stage)

    def _is_news(self, key: SeatKey, entry: Entry) -> bool:
        """Whether somebody may wait for what changed: for rows, or for the end."""
        store, before = entry.store, self._seen.get(key)
        now = self._seen[key] = store.counts(key[2])
        return (
            before is None
            or store.sealing
            or bool(self.watched.get(key))
            or now.ready_rows > before.ready_rows
            or now.ready_groups > before.ready_groups
            or now.lost_rows > before.lost_rows
        )

    def _send(self, home: str, entry: Entry, stage: str) -> None:
        self.mesh.spawn(self.tell(home, entry, stage))

    async def tell(self, home: str, entry: Entry, stage: str) -> None:
        """Report a stage now. One report at a time: none may overtake another. A home that cannot
        be reached is told later."""
        key = (entry.name, entry.generation, stage)
        turn = self._turns.setdefault((key, home), asyncio.Lock())
        async with turn:
            due = self._due.pop((key, home), None)
            if due is not None:
                due.cancel()
            if self.host.entries.get(entry.name) is not entry:
                return
            roster = self.host.roster
            if roster.stage_home(entry.name, stage) != home:
                return
            for where in [None, *self.watched.get(key, [])]:
                counts = Counted(*_figures(entry.store.counts(stage, where)))
                sealing = entry.store.sealing
                body = Report(entry.name, entry.generation, stage, counts, sealing, where)
                try:  # under another roster this peer may have more rows than it counted here
                    await self.mesh.call(home, body, epoch=roster.epoch)
                except DataplaneError:
                    asyncio.get_running_loop().call_later(RETRY_S, self._anew, entry, {stage})
                    return

    def watch(self, entry: Entry, stage: str, where: Where, on: bool) -> None:
        """The home wants to hear of this filter too, or no longer."""
        watched = self.watched.setdefault((entry.name, entry.generation, stage), [])
        if on and where not in watched:
            watched.append(where)
        elif not on and where in watched:
            watched.remove(where)

    def forget(self, entry: Entry) -> None:
        """The partition is gone."""
        for kept in (self.watched, self._seen):
            for key in [k for k in kept if k[:2] == entry.key]:
                del kept[key]
