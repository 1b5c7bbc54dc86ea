"""What follows from a command at a shard for others than its caller: values that nobody names any
more go back to their owners, and calls that wait are met.

Effects run after the command was applied and recorded, outside its error handling: the command
stands, whatever becomes of them. An effect that fails is logged and tried again within a second.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from dataplane.metadata.tables.references import Array
from dataplane.peer.host import Entry
from dataplane.peer.room.admission import Room
from dataplane.peer.shards.references import References
from dataplane.peer.shards.replication import Copying
from dataplane.peer.shards.waiting_calls import SWEEP_S, WaitingCalls
from dataplane.wire.tables import Owner

log = logging.getLogger(__name__)

Effect = Callable[..., object]


class Effects:
    def __init__(
        self, references: References, copying: Copying, room: Room, calls: WaitingCalls
    ) -> None:
        self.references = references
        self.copying = copying
        self.room = room
        self.calls = calls
        self._failed: list[tuple[Effect, tuple[Any, ...]]] = []

    def after(self, entry: Entry) -> None:
        """A command has changed this partition. Never raises."""
        self._run(self._free, entry)
        self._run(self._meet, entry)

    def _free(self, entry: Entry) -> None:
        for owner, ranges, counts in entry.store.freed():
            self._run(self._let_go, owner, ranges, counts)
            self._run(self.copying.freed, entry, owner, ranges, counts)

    def _let_go(self, owner: Owner, ranges: Array, counts: Array) -> None:
        if self.references.let_go(owner, ranges, counts):
            self._run(self.room.pump)

    def _meet(self, entry: Entry) -> None:
        stages = entry.store.dirty()
        self._run(self.references.host.meter, entry, stages)
        self.calls.changed(entry, stages)

    def _run(self, effect: Effect, *given: Any) -> None:
        try:
            effect(*given)
        except Exception:
            log.exception("%s failed after a command, retrying in %g s", _name(effect), SWEEP_S)
            if not self._failed:
                asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)
            self._failed.append((effect, given))

    def _sweep(self) -> None:
        """Once more what failed. What fails again is left: the next command has its own effects."""
        failed, self._failed = self._failed, []
        for effect, given in failed:
            try:
                effect(*given)
            except Exception:
                log.exception("%s failed again, giving up", _name(effect))


def _name(effect: Effect) -> str:
    return getattr(effect, "__qualname__", repr(effect))
