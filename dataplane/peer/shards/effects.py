"""Effects of a shard's command beyond its caller: values that no row references any more are freed
at their owners, and waiting calls are answered.

Effects run after the command was applied and recorded, outside its error handling: the command
stands, whatever happens to them. A failed effect is logged and retried within a second
(`retries`). An effect that frees values is retried only once: bytes that stay too long do less
harm than bytes that are freed twice. Notifying another owner is not part of that effect. This
peer resends to the owner until the owner confirms or is no longer a member (`references`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from dataplane.peer.host import Entry
from dataplane.peer.room.admission import Room
from dataplane.peer.shards.references import References
from dataplane.peer.shards.retries import Retries
from dataplane.peer.shards.value_replicas import ValueReplicas
from dataplane.wire.packed import Array
from dataplane.wire.tables import Owner

Effect = Callable[..., object]


class Effects:
    def __init__(
        self,
        references: References,
        value_replicas: ValueReplicas,
        room: Room,
        retries: Retries,
    ) -> None:
        self.references = references
        self.value_replicas = value_replicas
        self.room = room
        self.retries = retries
        self.on_changed: Callable[[Entry, set[str]], None] = lambda entry, stages: None
        """called with the stages that a command has changed"""

    def run(self, entry: Entry) -> None:
        """Run the effects of a command that has changed this partition. Never raises."""
        entry.is_metered = False
        if entry.store.released:
            self._run(entry, self._free, entry)
        self._run(entry, self.on_changed, entry, entry.store.dirty())
        if (note := self.references.host.on_first_rows) is not None and len(entry.store):
            self._run(entry, note)

    def _free(self, entry: Entry) -> None:
        for owner, chunks, counts in entry.store.freed():
            self._run(entry, self._let_go, entry, owner, chunks, counts)
            if entry.replicas is not None:
                self._run(entry, self.value_replicas.freed, entry, owner, chunks, counts)

    def _let_go(self, entry: Entry, owner: Owner, chunks: Array, counts: Array) -> None:
        if self.references.let_go(owner, chunks, counts):
            self._run(entry, self.room.pump)

    def _run(self, entry: Entry, effect: Effect, *given: Any) -> None:
        try:
            effect(*given)
        except Exception:
            what = f"partition {entry.name!r}: {getattr(effect, '__qualname__', effect)}"
            self.retries.failed(what, partial(effect, *given))
