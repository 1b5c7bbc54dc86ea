"""The home of one partition: its definition, its generation, and the phase that all peers agree on.

Sans-I/O. Sealing has two phases: every peer is told to take no new rows and says that it does, then
all are told that the partition is sealed. A generation is larger than any before, also after the
home was started again, so that late messages of a dropped partition cannot enter the new one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import msgspec

from dataplane.errors import (
    LimitExceeded,
    PartitionConflict,
    PartitionGone,
    PartitionUndefined,
    StageUndefined,
)
from dataplane.metadata.groups import MAX_GROUP_ROWS
from dataplane.wire.limits import MAX_NAME_BYTES, MAX_STAGES
from dataplane.wire.tables import Definition

Phase = Literal["open", "sealing", "sealed", "dropped"]
PHASES: tuple[Phase, ...] = ("open", "sealing", "sealed", "dropped")


@dataclass(frozen=True, slots=True)
class Record:
    """What an attaching peer learns."""

    generation: int
    definition: Definition
    phase: Phase


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Every peer that is `silent` brings this phase into force and answers, which is a
    `phase_ack`."""

    phase: Phase
    generation: int


class PartitionHome:
    """One partition's record. `peers` are all that may hold rows of it. `others` are told as well,
    and not waited for: the keeper of the roster may be down for long, and has no rows."""

    def __init__(self, partition: str, peers: Iterable[str], others: Iterable[str] = ()) -> None:
        self.partition = partition
        self._peers = set(peers)
        self._others = set(others)
        self._declared = Definition()
        self._definition = Definition()
        self._generation = 0
        self._phase: Phase = "dropped"
        self._acks: set[str] = set()
        self._closed: dict[str, int] = {}
        self._out: list[Broadcast] = []

    def __repr__(self) -> str:
        return f"<PartitionHome {self.partition!r} {self._phase}, generation {self._generation}>"

    @property
    def record(self) -> Record:
        """The partition as it stands; PartitionUndefined where there is none."""
        if not self.defined:
            raise PartitionUndefined(
                f"partition {self.partition!r} is not defined: one process must declare it, "
                f"plane.partition({self.partition!r}, stages={{...}})",
                partition=self.partition,
            )
        return Record(self._generation, self._definition, self._phase)

    @property
    def defined(self) -> bool:
        """Whether there is something to attach to."""
        return self._phase != "dropped"

    @property
    def is_over(self) -> bool:
        """Dropped, which every peer knows, or never declared: nothing here is needed any more."""
        return not self.defined and (not self._generation or self._peers <= self._acks)

    def is_in(self, generation: int, phase: Phase) -> bool:
        return generation == self._generation and phase == self._phase

    def missing(self, generation: int, phase: Phase) -> set[str]:
        """The peers at which this phase is not in force yet; all of them before it is begun.

        PartitionGone for one that will never be: the partition was dropped meanwhile.
        """
        if phase != "dropped":
            self._check(generation)
        elif generation != self._generation:
            return set()
        return self._peers - self._acks if self._phase == phase else set(self._peers)

    @property
    def silent(self) -> set[str]:
        """All that did not answer yet that the last phase is in force there."""
        return (self._peers | self._others) - self._acks

    @property
    def closed_groups(self) -> int:
        return sum(self._closed.values())

    def instructions(self) -> list[Broadcast]:
        """What to tell the peers since the last call."""
        out, self._out = self._out, []
        return out

    # events

    def define(self, definition: Definition | None, now_ns: int) -> Record:
        """Declare the partition, or attach to it. now_ns: wall clock, the seed of generations.

        Raises PartitionConflict where it was declared otherwise, PartitionUndefined where it was
        not declared and `definition` is None.
        """
        if not self.defined and definition is not None:
            self._open(definition, now_ns)
        record = self.record
        if definition not in (None, self._declared, self._definition):
            difference = _difference(self._declared, definition)
            raise PartitionConflict(
                f"partition {self.partition!r} was declared with {difference}; "
                f"drop it first, or attach with plane.partition({self.partition!r})",
                partition=self.partition,
                declared=msgspec.to_builtins(self._declared),
            )
        return record

    def add_stage(self, generation: int, stage: str, fields: list[str]) -> Record:
        """A stage that was not declared, by its first claim's `fields=`. The same again is fine."""
        self._check(generation)
        known = self._definition.stages.get(stage)
        if known is not None:
            if sorted(known) != sorted(fields):
                raise PartitionConflict(
                    f"stage {stage!r} of partition {self.partition!r} needs the fields {known}, "
                    f"not {fields}: claim without fields= or choose another stage",
                    stage=stage,
                    fields=known,
                )
            return self.record
        self._check_new_stage(stage)
        stages = {**self._definition.stages, stage: list(fields)}
        self._definition = msgspec.structs.replace(self._definition, stages=stages)
        return self.record

    def seal(self, generation: int) -> None:
        """No more rows. Asking again changes nothing."""
        self._check(generation)
        if self._phase == "open":
            self._enter("sealing")

    def tally(self, peer: str, generation: int, closed_groups: int) -> None:
        """How many groups are closed at a peer, dropped ones not counted. Old news is ignored."""
        if generation != self._generation or self._phase != "open":
            return
        self._closed[peer] = closed_groups
        self._seal_if_full()

    def phase_ack(self, peer: str, generation: int, phase: Phase) -> None:
        """The phase is in force at this peer."""
        if generation != self._generation or phase != self._phase:
            return
        self._acks.add(peer)
        self._advance()

    def drop(self, generation: int) -> None:
        """The partition ends; the same name may be declared again, as something new. Asking again
        changes nothing: who asked may not have heard the answer."""
        if generation == self._generation and self._phase == "dropped":
            return
        self._check(generation)
        self._enter("dropped")

    def members(self, peers: Iterable[str], others: Iterable[str] = ()) -> None:
        """From now on `peers` may hold rows; the answers of others are not waited for, and who is
        new hears of the phase."""
        before = self._peers | self._others
        self._peers, self._others = set(peers), set(others)
        after = self._peers | self._others
        if self._generation and self._phase != "open" and not after <= before:
            self._out.append(Broadcast(self._phase, self._generation))
        self._acks &= after
        self._closed = {p: n for p, n in self._closed.items() if p in self._peers}
        self._advance()

    # a home that takes over from one that is gone

    def restate(self, peer: str, record: Record, closed_groups: int) -> None:
        """What a peer knows of the partition. The newest generation and the last phase hold: a peer
        brings one into force only after the home said so."""
        if record.generation < self._generation:
            return
        if record.generation > self._generation:
            self._generation = record.generation
            self._declared = self._definition = record.definition
            self._phase = record.phase
            self._closed.clear()
        if PHASES.index(record.phase) > PHASES.index(self._phase):
            self._phase = record.phase
        if len(record.definition.stages) > len(self._definition.stages):
            self._definition = record.definition
        self._closed[peer] = closed_groups

    def resume(self) -> None:
        """All peers have said what they know: go on where the home before this one stopped."""
        if self._generation and self._phase != "open":
            self._enter(self._phase)
        elif self.defined:
            self._seal_if_full()

    # what follows from them

    def _open(self, definition: Definition, now_ns: int) -> None:
        if not 0 < len(self.partition.encode()) <= MAX_NAME_BYTES:
            raise LimitExceeded(
                f"a partition is named by a text of 1 to {MAX_NAME_BYTES} bytes",
                limit=MAX_NAME_BYTES,
            )
        size = definition.group_size
        if size is not None and not 0 < size <= MAX_GROUP_ROWS:
            raise LimitExceeded(
                f"partition {self.partition!r} asks for groups of {size} rows; a group has 1 to "
                f"{MAX_GROUP_ROWS}",
                limit=MAX_GROUP_ROWS,
            )
        self._generation = max(self._generation + 1, now_ns)
        self._declared = self._definition = definition
        self._phase = "open"
        self._acks.clear()
        self._closed.clear()

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        self._acks.clear()
        self._out.append(Broadcast(phase, self._generation))
        self._advance()

    def _seal_if_full(self) -> None:
        groups = self._definition.groups
        if groups is not None and self.closed_groups >= groups:
            self._enter("sealing")

    def _advance(self) -> None:
        if self._phase == "sealing" and self._peers <= self._acks:
            self._enter("sealed")

    def _check(self, generation: int) -> None:
        if not self.defined or generation != self._generation:
            raise PartitionGone(
                f"partition {self.partition!r} was dropped since this handle was opened: "
                f"open it again with plane.partition({self.partition!r})",
                partition=self.partition,
                generation=generation,
            )

    def _check_new_stage(self, stage: str) -> None:
        if self._definition.free == "acked":
            raise StageUndefined(
                f"partition {self.partition!r} has the stages {sorted(self._definition.stages)} "
                f"and frees rows when they have acked (free='acked'), so stage {stage!r} may have "
                "missed rows: declare it with the partition",
                stage=stage,
            )
        if len(self._definition.stages) >= MAX_STAGES:
            raise LimitExceeded(
                f"partition {self.partition!r} has {MAX_STAGES} stages already, which is the limit",
                limit=MAX_STAGES,
            )


def _difference(declared: Definition, other: Definition | None) -> str:
    """`stages={...} instead of {...}`, for the parts in which the two differ."""
    parts = [
        f"{name}={getattr(declared, name)!r} (now {getattr(other, name)!r})"
        for name in Definition.__struct_fields__
        if other is not None and getattr(declared, name) != getattr(other, name)
    ]
    return ", ".join(parts)
