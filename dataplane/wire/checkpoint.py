"""Messages of a checkpoint: what there is, whole groups as they stand at one moment, and back.

Clients send them to the peer of their host, which forwards them to the peer that has the rows.
"""

from __future__ import annotations

import msgspec

from dataplane.wire.tables import Body, Change, Rows, Scalar, Table, Values


class Progress(msgspec.Struct, array_like=True):
    """Beside rows: how far their groups and stages are.

    Per group of `rows.group_keys`: expected, u4, 0xFFFFFFFF unknown; gone, u4, rows it had that are
    no more; dropped, u4, those of them that were dropped; closed, a byte. acked: stage → a byte a
    row. split: stage → a byte a group of which it took rows singly. tagged: tag → a byte a row that
    has it, where not all have.
    """

    expected: bytes = b""
    gone: bytes = b""
    dropped: bytes = b""
    closed: bytes = b""
    acked: dict[str, bytes] = {}
    split: dict[str, bytes] = {}
    tagged: dict[str, bytes] = {}


class Census(Body, tag=70):
    """Which partitions there are. Between peers: those that the receiver serves."""


class CensusDone(Body, tag=71):
    """placement: while it is the same, rows stay where they are."""

    partitions: list[str]
    placement: int


class Survey(Body, tag=72):
    """Which groups, and rows without a group, there are. cursor: of the last answer, to go on
    behind it."""

    partition: str
    generation: int
    cursor: int = 0


class SurveyDone(Body, tag=73):
    """groups, rows: KEY records. cursor 0: that was all. closed_groups: closed and gone by now."""

    groups: bytes
    rows: bytes
    closed_groups: int
    cursor: int = 0


class Save(Body, tag=74):
    """These groups, then these rows without a group (KEY records), as far as `nbytes` goes."""

    partition: str
    generation: int
    groups: bytes
    rows: bytes
    nbytes: int


class SaveDone(Body, tag=75):
    """The first `units` of what was asked for, without those that are gone. The rows of each group
    stand together, in the order of the groups, and before rows without one.

    ended_groups: of those that are gone, groups that no drop took: they closed and were freed.
    """

    table: Table
    progress: Progress
    units: int
    ended_groups: int = 0
    pin: int = 0


class Restore(Body, tag=76):
    """New rows and groups as they stood. Ready ones are claimable at once, acked ones are done.

    closed_groups: that closed and went before. ranges, change: as in `Put`.
    """

    partition: str
    generation: int
    rows: Rows
    values: Values
    tags: dict[str, list[Scalar]]
    progress: Progress
    closed_groups: int = 0
    ranges: bytes = b""
    change: Change | None = None


Asked = Census | Survey | Save | Restore
Answered = CensusDone | SurveyDone | SaveDone
