"""Log records of one partition, which its backup replays.

If the primary had a choice, the record has its decision: the rows that a claim got, or the number
of a lease. A put, an ack or a drop is recorded as the request itself, which the backup applies as
the primary did. So the result depends only on the records and their order. A snapshot consists of
the same records; those that only a snapshot has use the tags 210 to 217. Blocks and groups have the
same numbers in every copy.
"""

from __future__ import annotations

from typing import Literal, cast

import msgspec

from dataplane.wire.checkpoint import Restore, Restored
from dataplane.wire.frames import decoded
from dataplane.wire.messages import (
    Advance,
    Body,
    Close,
    Done,
    Drop,
    Dropped,
    Finish,
    Put,
    PutDone,
    Reset,
    Seal,
    Tag,
    Withdraw,
)
from dataplane.wire.tables import (
    Change,
    Definition,
    Name,
    Owner,
    PlanRows,
    Shape,
    Values,
)

Unit = Literal["rows", "groups"]
Parts = list[tuple[int, bytes]]
"""Rows in order: the number of a block, and a bit mask of its rows (little-endian)."""


class Begun(Body, tag=209):
    """The partition was declared. Starts a new, empty copy. restorer: the session that restores it;
    0: none does."""

    definition: Definition
    restorer: int = 0


class Leased(Body, tag=201):
    """A stage leased rows. rows: in the order of the lease; with the unit "groups", all rows of
    each group. claim: the number of the claim."""

    stage: str
    unit: Unit
    lease: int
    rows: Parts
    holder: int
    claim: int


class Returned(Body, tag=202):
    """A holder ended. Its leases ended and their rows were returned. Its plans and permits ended,
    too."""

    holder: int


class Joined(Body, tag=220):
    """A process joined the plan of a stage as one rank; `member` is its number in the plan. The
    first member starts the plan, whose rows `lease` has just leased. claim: as in `Leased`. In a
    snapshot, acked: whether the rank has acked; rows, for the first member: the rows of the plan,
    from which all ranks compute the layout."""

    stage: str
    lease: int
    shape: Shape
    member: int
    rank: int
    holder: int
    claim: int
    rows: PlanRows | None = None
    acked: bool = False


class Lost(Body, tag=205):
    """A peer was lost, with the rows whose bytes it had and with their groups."""

    owner: Owner


class Relocated(Body, tag=206):
    """Chunks moved from chunks[i] of `owner` to to_chunks[i] of `to_owner` (chunk numbers)."""

    owner: Owner
    chunks: bytes
    to_owner: Owner
    to_chunks: bytes


class Declared(Body, tag=219):
    """A stage was declared after the partition. fields: what a row needs to be ready for it."""

    stage: str
    fields: list[str]


class Permitted(Body, tag=222):
    """A holder may open `count` groups, which start at this version of the trainer. used, in a
    snapshot: how many of them are open already."""

    permit: int
    holder: int
    count: int
    version: int
    used: int = 0


class Pacing(Body, tag=223):
    """The trainer's version, and how far producers may run ahead; per_version 0: no call of `admit`
    yet. trained: pairs of a version and the number of groups that were finished at it."""

    version: int
    max_lag: int
    per_version: int
    trained: list[tuple[int, int]] = []


class Settle(Body, tag=152):
    """The caller stops retrying an unanswered change. If the shard has not applied it, it never
    will, and refuses the change if it arrives later."""

    partition: str
    generation: int
    change: Change


class Ended(Body, tag=208):
    """The partition was dropped by this change, with this number of rows and bytes. change None: no
    caller retries it."""

    change: Change | None = None
    rows: int = 0
    bytes: int = 0


class OneGroup(msgspec.Struct, array_like=True):
    """The state of one group. expected: its number of rows; -1: unknown. gone: the number of its
    freed rows. dropped: how many of these were dropped. states: one byte per stage: 2 leased, 3
    acked, 4: the stage took single rows. begun: the trainer's version at its start; 2^63 - 1:
    finished; 0: the partition does not use `admit`."""

    number: int
    key: bytes
    name: Name | None
    expected: int
    gone: int
    dropped: int
    closed: bool
    states: bytes
    begun: int = 0


class OneBlock(msgspec.Struct, array_like=True):
    """The state of one block. Sets of rows are bit masks, little-endian. keys, names: of all rows
    that the block was created with. group: the key of their group; empty: none. live: the rows that
    exist. acked: one mask per stage, by its number. returned: one mask per stage: rows that were
    returned by a lease and not acked since; empty: no rows."""

    number: int
    group: bytes
    keys: bytes
    names: list[Name] | None
    live: bytes
    acked: list[bytes]
    returned: list[bytes] = []


class Groups(Body, tag=210):
    """The states of groups, without their rows."""

    groups: list[OneGroup]


class Blocks(Body, tag=211):
    """The states of blocks, without their values."""

    blocks: list[OneBlock]


class Given(Body, tag=212):
    """The values of all rows of some blocks (numbers: u8). by: for each piece, the stage that added
    it, or ""; empty: no stage added any."""

    numbers: bytes
    values: Values
    by: list[str] = []


class Ready(Body, tag=213):
    """The rows, or the groups, that are ready for a stage, oldest first. groups: KEY records.
    returned: the number of entries, counted from the first, that leases returned."""

    stage: str
    rows: Parts = []
    groups: bytes = b""
    returned: int = 0


class Held(Body, tag=214):
    """An active lease, whose time starts again. parts: as in `Leased`, each with a mask of
    unfinished rows. Blocks without rows may be unknown."""

    stage: str
    lease: int
    parts: list[tuple[int, bytes, bytes]]
    holder: int
    claim: int


class Remembered(Body, tag=216):
    """Remembered keys, oldest first: KEY records of freed rows and groups, with one byte each (0:
    it was dropped). lost: keys of rows that were lost with a peer. missed: how many such keys the
    shard has forgotten."""

    keys: bytes = b""
    freed: bytes = b""
    lost: list[Name] = []
    missed: int = 0


class Answers(msgspec.Struct, array_like=True):
    """The replies to one caller's changes, from its floor; nil: `Settle` arrived before the
    change."""

    caller: Owner
    floor: int
    given: list[tuple[int, PutDone | Dropped | Done | None]]


class Summary(Body, tag=217):
    """The counters of a partition. numbers: the last number of a block or group. closed_groups: how
    many groups have closed, including freed ones. short_groups: how many the seal dropped.
    forgotten: how many remembered keys were forgotten. fields: every field that a row has ever had.
    answers: one entry per caller whose changes are remembered. lost: stage -> rows that were lost
    with a peer before the stage acked them. acked: stage -> rows that it has acked. released: stage
    -> rows that were returned without an ack, and how many of these were leased again. put_rows:
    rows that were ever put or restored. producers: (session, rows), least recent first. done: U8
    per call that ended rows of a lease, see `finishes.retry_key`, the oldest first."""

    sealed: bool
    numbers: int
    closed_groups: int
    short_groups: int
    forgotten: int
    fields: list[str]
    answers: list[Answers] = []
    lost: dict[str, int] = {}
    acked: dict[str, int] = {}
    released: dict[str, tuple[int, int]] = {}
    put_rows: int = 0
    producers: list[tuple[int, int]] = []
    done: bytes = b""


LogRecord = (
    Begun
    | Put
    | Leased
    | Returned
    | Joined
    | Finish
    | Tag
    | Drop
    | Close
    | Reset
    | Declared
    | Seal
    | Settle
    | Ended
    | Permitted
    | Withdraw
    | Advance
    | Pacing
    | Lost
    | Relocated
    | Restore
    | Restored
    | Groups
    | Blocks
    | Given
    | Ready
    | Held
    | Remembered
    | Summary
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[LogRecord] = msgspec.msgpack.Decoder(LogRecord)


def encode(record: LogRecord) -> bytes:
    """Return the bytes of a record, as in a message."""
    return _encoder.encode(record)


def encoded(data: bytes) -> LogRecord:
    """Return a record for a message from the bytes that `encode` returned."""
    return cast(LogRecord, msgspec.Raw(data))


def decode(data: bytes | memoryview) -> LogRecord:
    """Decode a record. Raise ProtocolError for invalid bytes."""
    return decoded(_decoder, data, "a log record")
