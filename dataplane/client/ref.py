"""The results of put and drop: a reference to rows, and the counts of a drop."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from dataplane.metadata.tables.keys import format_minted_many
from dataplane.wire.packed import KEY
from dataplane.wire.tables import Name


class Ref(msgspec.Struct, frozen=True):
    """The rows of one put. `plane.get(ref)` reads them, in any process of the plane.

    A ref does not keep rows alive. Reading freed rows raises RowsGone, or PartitionGone if their
    partition was dropped.

    - `peer`: the address of the peer on which the values were put. They may have moved since.
    - `kept`: how many rows the put left as they were, because they already had these fields or
      had been freed.
    """

    plane: str
    peer: str
    partition: str
    generation: int
    key_column: bytes
    names: tuple[Name, ...] | None
    groups: tuple[Name, ...]
    fields: tuple[str, ...]
    kept: int = 0

    @property
    def keys(self) -> list[Name]:
        """The keys of the rows, in the order in which the rows were put. A generated key is "~"
        followed by 32 hex digits."""
        if self.names is not None:
            return list(self.names)
        return [*format_minted_many(self.key_column)]

    def __len__(self) -> int:
        return len(self.key_column) // KEY.itemsize

    def __repr__(self) -> str:
        return (
            f"<Ref {len(self)} rows of {self.partition!r}, fields {', '.join(self.fields) or '-'}>"
        )


class Dropped(NamedTuple):
    """The result of a drop: the number of dropped rows, and about how many bytes their values took.

    Several rows may be stored in one block. `bytes` counts an equal part of the block for each
    dropped row, but the block's memory is freed only when all of its rows are gone.
    """

    rows: int
    bytes: int
