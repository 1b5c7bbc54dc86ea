"""The weights of rows for `budget=`: a tag that must be a finite, non-negative number.

Sums are exact: a sum from which rows were removed equals a new one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from fractions import Fraction

from dataplane.errors import InvalidRows, counted
from dataplane.metadata.shard.blocks import Block, Group
from dataplane.metadata.tables.bits import rows_of
from dataplane.metadata.tables.tags import MISSING

Unit = Block | Group
Part = tuple[Block, int]
"""Rows of a block, as bits."""
SHOWN = 8
"""Rows, and tags, that an error names."""


def weight(block: Block, row: int, tag: str) -> int | Fraction | None:
    """The weight of a row; None if its tag is missing or not a finite, non-negative number."""
    value = None if block.tags is None else block.tags.get(tag, row)
    if type(value) is int:
        return value if value >= 0 else None
    if type(value) is float and 0 <= value < math.inf:
        return int(value) if value.is_integer() else Fraction(value)
    return None


def weight_of(unit: Unit, bits: int, tag: str) -> int | Fraction | None:
    """The total weight of rows of a unit, or None if one of them has none."""
    total: int | Fraction = 0
    for block, rows in parts_of(unit, bits):
        for row in rows_of(rows):
            one = weight(block, row, tag)
            if one is None:
                return None
            total += one
    return total


def parts_of(unit: Unit, bits: int) -> list[Part]:
    """These rows of a block, or all rows of a group."""
    if isinstance(unit, Block):
        return [(unit, bits)]
    return [(block, block.live) for block in unit.blocks]


def weightless(parts: Iterable[Part], tag: str) -> list[tuple[Block, int]]:
    """The rows that have no weight."""
    return [
        (block, row)
        for block, bits in parts
        for row in rows_of(bits)
        if weight(block, row, tag) is None
    ]


def check(parts: Iterable[Part], tag: str, what: str, tags: Iterable[str]) -> None:
    """Raise InvalidRows if a row has no weight. what: the argument that weighs rows by the tag.
    tags: all tags of the partition's rows."""
    rows = weightless(parts, tag)
    if not rows:
        return
    block, row = rows[0]
    value = MISSING if block.tags is None else block.tags.get(tag, row)
    name = block.name(row)
    if value is MISSING:
        found = f"row {name!r} has no tag {tag!r}"
    else:
        found = f"tag {tag!r} of row {name!r} is {value!r:.80}"
    others = sorted(set(tags) - {tag})[:SHOWN]
    known = f". Other tags of this partition: {', '.join(map(repr, others))}" if others else ""
    raise InvalidRows(
        f"{found}, but {what} needs a finite, non-negative number in this tag. "
        f"{counted(len(rows), 'row has', 'rows have')} no valid number: set the tag with "
        f"part.tag(…), or drop the rows{known}",
        tag=tag,
        rows=len(rows),
        keys=[block.name(row) for block, row in rows[:SHOWN]],
    )


def fits(total: int | Fraction, budget: float) -> bool:
    """Whether a sum is within a budget, to the accuracy of a float: ten times 0.1 fits 1.0."""
    return total <= budget or total <= Fraction(budget) + Fraction(math.ulp(budget)) / 2


class Short:
    """The state in which all units of a queue cannot fill a claim's budget: they weigh less, and
    one grant can hold them all.

    tag, budget: the claim's. grant: what the claim's peer can be granted at once. share: the
    part of such a grant that a unit takes, or more. free: the part that the units now in the
    queue leave. While this holds, the claim need not look at the queue again.
    """

    def __init__(
        self,
        tag: str,
        budget: float,
        grant: object,
        share: Callable[[Unit], float],
        free: float,
        units: Iterable[tuple[Unit, int]],
    ) -> None:
        self.tag, self.budget, self.grant = tag, budget, grant
        self._share, self._free = share, free
        self._total: int | Fraction = 0
        self._of: dict[Unit, int | Fraction] = {}
        self._lacks = False
        for unit, bits in units:
            self._weigh(unit, bits)

    @property
    def holds(self) -> bool:
        return not self._lacks and self._total < self.budget and self._free >= 0

    def came(self, unit: Unit, bits: int) -> bool:
        """Note that rows of a unit entered the queue or changed: it now has these. Return whether
        the state still holds."""
        self._weigh(unit, bits)
        self._free -= self._share(unit)
        return self.holds

    def note_left(self, unit: Unit, bits: int) -> bool:
        """Note that rows of a unit left: the queue now has these. Return whether the state still
        holds."""
        self._total -= self._of.pop(unit, 0)
        if bits:
            self._weigh(unit, bits)
        return self.holds

    def _weigh(self, unit: Unit, bits: int) -> None:
        weight = weight_of(unit, bits, self.tag)
        if weight is None:
            self._lacks = True
        else:
            self._total += weight - self._of.get(unit, 0)
            self._of[unit] = weight
