"""What follows from a command at a shard for others than its caller: values that nobody names any
more go back to their owners, and calls that wait are met.

Effects run after the command was applied and recorded, outside its error handling: the command
stands, whatever becomes of them. An effect that fails is logged and tried again within a second
(`retries`). An effect that frees values is tried only once more: bytes that stay too long are a
smaller harm than bytes that are freed twice. Telling another owner is no part of that effect: the
owner is told until it confirms, or is no member any more (`references`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from dataplane.metadata.tables.references import Array
from dataplane.peer.host import Entry
from dataplane.peer.room.admission import Room
from dataplane.peer.shards.references import References
from dataplane.peer.shards.replication import Copying
from dataplane.peer.shards.retries import Retries
from dataplane.peer.shards.waiting_calls import WaitingCalls
from dataplane.wire.tables import Owner

Effect = Callable[..., object]


class Effects:
    def __init__(
        self,
        references: References,
        copying: Copying,
        room: Room,
        calls: WaitingCalls,
        retries: Retries,
    ) -> None:
        self.references = references
        self.copying = copying
        self.room = room
        self.calls = calls
        self.retries = retries

    def after(self, entry: Entry) -> None:
        """A command has changed this partition. Never raises."""
        self._run(entry, self._free, entry)
        self._run(entry, self._meet, entry)

    def _free(self, entry: Entry) -> None:
        for owner, ranges, counts in entry.store.freed():
            self._run(entry, self._let_go, entry, owner, ranges, counts)
            self._run(entry, self.copying.freed, entry, owner, ranges, counts)

    def _let_go(self, entry: Entry, owner: Owner, ranges: Array, counts: Array) -> None:
        if self.references.let_go(owner, ranges, counts):
            self._run(entry, self.room.pump)

    def _meet(self, entry: Entry) -> None:
        stages = entry.store.dirty()
        self._run(entry, self.references.host.meter, entry, stages)
        self.calls.changed(entry, stages)

    def _run(self, entry: Entry, effect: Effect, *given: Any) -> None:
        try:
            effect(*given)
        except Exception:
            what = f"partition {entry.name!r}: {getattr(effect, '__qualname__', effect)}"
            self.retries.failed(what, partial(effect, *given))
