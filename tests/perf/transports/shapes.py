"""The sizes of batches that are pulled."""

from __future__ import annotations

from dataclasses import dataclass

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True)
class Shape:
    """So many rows of one value each."""

    rows: int
    value_bytes: int

    @property
    def name(self) -> str:
        """`256x1MiB`, as in the report."""
        unit, name = (MIB, "MiB") if self.value_bytes >= MIB else (KIB, "KiB")
        return f"{self.rows}x{self.value_bytes // unit}{name}"

    @property
    def nbytes(self) -> int:
        return self.rows * self.value_bytes


SHAPES = (Shape(256, MIB), Shape(4096, 16 * KIB), Shape(8, 128 * MIB))
