"""Ref: what rows are, as a small value that may be pickled and sent to another process."""

from __future__ import annotations

import msgspec

from dataplane.metadata.tables.names import format_minted_many
from dataplane.wire.records import KEY
from dataplane.wire.tables import Name


class Ref(msgspec.Struct, frozen=True):
    """Rows of one put: `plane.get(ref)` reads them, here or in another process of the plane.

    A ref does not pin: reading rows that were freed raises RowsGone, and PartitionGone once their
    partition was dropped. `peer` is where the bytes were put: a hint, nothing more. `kept`: how
    many of the rows the put passed over, because they were there before: with the same fields, or
    consumed and freed since.
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
        """The rows' keys, given or minted ("~" and 32 hex digits), in the order of the put."""
        if self.names is not None:
            return list(self.names)
        return [*format_minted_many(self.key_column)]

    def __len__(self) -> int:
        return len(self.key_column) // KEY.itemsize

    def __repr__(self) -> str:
        return (
            f"<Ref {len(self)} rows of {self.partition!r}, fields {', '.join(self.fields) or '-'}>"
        )
