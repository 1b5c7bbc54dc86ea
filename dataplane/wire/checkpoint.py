"""Messages for checkpoints: list the partitions and groups, read whole groups, restore them.

A client sends them to the peer of its host, which forwards them to the peer that serves the
partition.
"""

from __future__ import annotations

import msgspec

from dataplane.wire.tables import Body, Change, Rows, Scalar, Table, Values


class Progress(msgspec.Struct, array_like=True):
    """The state of groups and stages, for the rows of a checkpoint.

    sizes: for each group of `rows.group_keys`: its expected number of rows (-1: unknown), the
    number of its freed rows, how many of these were dropped, and whether it is closed. acked: stage
    → one byte per row. split: stage → one byte per group of which the stage took single rows.
    tagged: tag → one byte per row, for tags that not all rows have.
    """

    sizes: list[tuple[int, int, int, bool]] = []
    acked: dict[str, bytes] = {}
    split: dict[str, bytes] = {}
    tagged: dict[str, bytes] = {}


class Census(Body, tag=70):
    """List all partitions. Between peers: list those that the receiver serves."""


class CensusDone(Body, tag=71):
    """The reply to `Census`. partitions: name → generation, without those being restored."""

    partitions: dict[str, int]


class Survey(Body, tag=72):
    """List the groups, and the rows without a group. cursor: of the last reply, to continue
    there."""

    partition: str
    generation: int
    cursor: int = 0


class SurveyDone(Body, tag=73):
    """The reply to `Survey`. groups, rows: KEY records. cursor 0: the list is complete.
    closed_groups: the number of groups that closed and were freed. lost: as in `SaveDone`."""

    groups: bytes
    rows: bytes
    closed_groups: int
    cursor: int = 0
    lost: int = 0


class Save(Body, tag=74):
    """Read these groups, then these rows without a group (KEY records), up to `nbytes` bytes."""

    partition: str
    generation: int
    groups: bytes
    rows: bytes
    nbytes: int


class SaveDone(Body, tag=75):
    """The reply to `Save`: the first `units` of the requested groups and rows, without freed ones.
    The rows of each group are adjacent, in the order of the groups; rows without a group follow.

    ended_groups: how many of the requested groups have closed and been freed, unless rows were lost
    since the survey. lost: the number of rows that were ever lost with a peer.
    """

    table: Table
    progress: Progress
    units: int
    ended_groups: int = 0
    pin: int = 0
    lost: int = 0


class Restore(Body, tag=76):
    """Restore rows and groups with their state. Ready rows can be claimed at once.

    closed_groups: the number of groups that closed and were freed before the checkpoint. change: as
    in `Put`.
    """

    partition: str
    generation: int
    rows: Rows
    values: Values
    tags: dict[str, list[Scalar]]
    progress: Progress
    closed_groups: int = 0
    change: Change | None = None


class Restored(Body, tag=77):
    """The restore of a partition is complete. others, from a client: the other partitions of the
    restore, name → generation. The client's peer resends the message to all their shards until they
    confirm, even if the client ends."""

    partition: str
    generation: int
    others: dict[str, int] = {}


Asked = Census | Survey | Save | Restore | Restored
Answered = CensusDone | SurveyDone | SaveDone
