"""The operations of one partition, as its backup replays them.

They say what happened, not what was asked: a claim is the rows that it got, and the end of a lease
is its number, so that the result hangs on nothing but the operations and their order. `dump`
rebuilds a store from the same vocabulary; what only a dump needs has tags from 210 to 218. Blocks
and groups have the same numbers at every copy.
"""

from __future__ import annotations

from typing import Literal, cast

import msgspec

from dataplane.wire.checkpoint import Restore
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
"""Rows in an order: the number of a block, and which of its rows, as bits (little-endian)."""


class Begun(Body, tag=209):
    """A new, empty copy of the partition, as it was declared."""

    definition: Definition


class Leased(Body, tag=201):
    """rows: in the order of the lease; of `groups` all that each has. claim: the number of the one
    that was met."""

    stage: str
    unit: Unit
    lease: int
    rows: Parts
    holder: int
    claim: int


class Returned(Body, tag=202):
    """A holder is gone. Its leases ended without an outcome, rows of the first come first; so did
    plans of which it was a member, and its permits."""

    holder: int


class Joined(Body, tag=220):
    """A process takes part in the plan of a stage, as one of its ranks; `member` is the number that
    it goes by. The first one begins the plan, whose rows have just been leased by `lease`. claim:
    as in `Leased`. In a dump, acked: whether it has; rows, of the first: what all ranks have been
    told to lay the rows out by."""

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
    """A peer is no more; rows with bytes there went, and their groups with them."""

    owner: Owner


class Relocated(Body, tag=206):
    """Chunks moved: what was ranges[i] of `owner` is to_ranges[i] of `to_owner` (RANGE)."""

    owner: Owner
    ranges: bytes
    to_owner: Owner
    to_ranges: bytes


class Declared(Body, tag=219):
    """A stage that was not declared with the partition, and what a row needs before it is ready."""

    stage: str
    fields: list[str]


class Permitted(Body, tag=222):
    """Somebody may open `count` groups, which are begun at a version of the trainer. used, in a
    dump: how many of them are open already."""

    permit: int
    holder: int
    count: int
    version: int
    used: int = 0


class Pacing(Body, tag=223):
    """The trainer's version, by which groups are kept account of from now on; how far producers may
    be ahead, per_version 0: nobody asked yet. trained: a version, and how many groups were finished
    at it."""

    version: int
    max_lag: int
    per_version: int
    trained: list[tuple[int, int]] = []


class Settle(Body, tag=152):
    """The caller stops asking for a change that was not answered. Where the shard has not carried
    it out, it never will, and refuses the change should it still arrive."""

    partition: str
    generation: int
    change: Change


class Ended(Body, tag=208):
    """The partition was dropped: by this change, which took so many rows and bytes. change None:
    nobody asks again."""

    change: Change | None = None
    rows: int = 0
    bytes: int = 0


class OneGroup(msgspec.Struct, array_like=True):
    """expected: rows, -1 unknown. gone: rows it had that are no more. dropped: those of them that
    were dropped. states: a byte a stage, 2 leased, 3 acked, 4 rows of it were taken singly. begun:
    at which version of the trainer, 2^63 - 1 where it is finished; 0 where no account is kept."""

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
    """Sets of rows are bits, little-endian. keys, names: of all the rows it came with. group: the
    key of theirs, empty: none. live: those that are there. acked: by the number of the stage.
    returned: as acked, rows that came
    back from a lease of the stage, which has not acked them since; empty: no rows."""

    number: int
    group: bytes
    keys: bytes
    names: list[Name] | None
    live: bytes
    acked: list[bytes]
    returned: list[bytes] = []


class Groups(Body, tag=210):
    """Groups, without their rows."""

    groups: list[OneGroup]


class Blocks(Body, tag=211):
    """Rows block by block, without their values."""

    blocks: list[OneBlock]


class Given(Body, tag=212):
    """Values of all rows of some blocks (numbers: u8). by: per piece, the stage that added it; ""
    where none did. Empty: none of them was added."""

    numbers: bytes
    values: Values
    by: list[str] = []


class Ready(Body, tag=213):
    """What a stage may take, oldest first; groups: KEY records."""

    stage: str
    rows: Parts = []
    groups: bytes = b""


class Held(Body, tag=214):
    """A lease, which starts anew. parts: as in `Leased`, with those of the rows that are not
    finished. Blocks of which nothing is left may be unknown."""

    stage: str
    lease: int
    parts: list[tuple[int, bytes, bytes]]
    holder: int
    claim: int


class Remembered(Body, tag=216):
    """Oldest first: KEY records of rows and groups that are no more, with a byte each, 0: it was
    dropped; and names of rows that were lost with a peer. missed: such that are forgotten."""

    keys: bytes = b""
    freed: bytes = b""
    lost: list[Name] = []
    missed: int = 0


class Answers(msgspec.Struct, array_like=True):
    """What the changes of one caller were answered, from its floor on; nil: settled before the
    change arrived."""

    caller: Owner
    floor: int
    given: list[tuple[int, PutDone | Dropped | Done | None]]


class Summary(Body, tag=217):
    """numbers: the last that a block or group has got. closed_groups: that closed here, gone ones
    included. short_groups: that the seal dropped. forgotten: of what was to be remembered. fields:
    every field that some row has had. answers: one for each caller whose changes are remembered.
    lost: stage -> rows that went with a peer before it was done with them. acked: stage
    -> rows that it has acked so far. released: stage -> rows that came back from its leases without
    an ack, and how many of them were leased again. put_rows: that were ever put or restored.
    producers: (session, rows) of those that put rows, the least recent first."""

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


Op = (
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
    | Groups
    | Blocks
    | Given
    | Ready
    | Held
    | Remembered
    | Summary
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Op] = msgspec.msgpack.Decoder(Op)


def encode(op: Op) -> bytes:
    """As it stands in a message, which is what bounds it."""
    return _encoder.encode(op)


def encoded(data: bytes) -> Op:
    """For a message: an operation that stands there as `encode` made it, and is nothing else."""
    return cast(Op, msgspec.Raw(data))


def decode(data: bytes | memoryview) -> Op:
    """ProtocolError for what is no operation."""
    return decoded(_decoder, data, "an operation")
