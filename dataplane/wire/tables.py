"""The parts that messages share: definitions, chunks, pieces and tables of rows.

Keys, groups and extents are raw columns (see `records`). Values are described per chunk, never per
row.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from dataplane.errors import counted, mixed_releases
from dataplane.wire.limits import MAX_FIELDS, MAX_NAME_BYTES
from dataplane.wire.packed import KEY

Scalar = bool | int | float | str | None
"""A tag."""
Name = str | int
"""A key or group id as the user passed it. It keeps its type."""
Where = list[Any]
"""A filter over tags as nested lists: ["ge", tag, scalar], ["and", w, w], ["in", tag, [...]] …"""


FormText = Annotated[str, msgspec.Meta(max_length=MAX_NAME_BYTES)]
"""The form of a field's values, such as "int64[*]"; see `client/write/schema.py`."""


class Body(msgspec.Struct, array_like=True):
    """Base of all message bodies; the tag is the first element of the array."""


class Definition(msgspec.Struct, array_like=True, frozen=True):
    """The definition of a partition. Every declaration of a partition must have the same one."""

    stages: dict[str, list[str]] = {}
    group_size: int | None = None
    groups: int | None = None
    free: Literal["acked", "drop"] = "drop"
    replicas: Literal[1, 2] = 1
    fields: Annotated[dict[str, FormText], msgspec.Meta(max_length=MAX_FIELDS)] = {}


class Shape(msgspec.Struct, array_like=True, frozen=True):
    """The arguments of a plan, which are equal on all ranks.

    minibatches: optimiser steps per epoch. budget: the largest sum of `budget_tag` in a
    micro-batch, unless it is a single row; budget_tag None: one micro-batch per mini-batch.
    balance: the tag whose sums are balanced between ranks; None: the number of rows. remainder:
    how to treat rows beyond a multiple of ranks × minibatches. unit: what is never split between
    ranks or mini-batches."""

    ranks: int
    minibatches: int = 1
    budget_tag: str | None = None
    budget: float = 0.0
    balance: str | None = None
    epochs: int = 1
    seed: int = 0
    remainder: Literal["pad", "drop"] = "pad"
    unit: Literal["rows", "groups"] = "rows"

    @property
    def tags(self) -> list[str]:
        """The tags that weigh rows."""
        return [tag for tag in dict.fromkeys((self.balance, self.budget_tag)) if tag is not None]


class PlanRows(msgspec.Struct, array_like=True):
    """The rows of a plan at its start. Every rank computes the same layout from them.

    groups: if units are groups, u4 per row: equal for rows of one group, NO_GROUP for a row without
    a group. weights: tag → f8 per row."""

    rows: int
    groups: bytes = b""
    weights: dict[str, bytes] = {}


class Owner(msgspec.Struct, array_like=True, frozen=True):
    """A peer and its incarnation. A chunk number is meaningful only together with its owner."""

    peer: str
    incarnation: int

    @property
    def first_session(self) -> int:
        """The number below the first session of this peer. It makes session numbers identify their
        peer."""
        return self.incarnation % _LIVES * SESSIONS

    def has_session(self, number: int) -> bool:
        return number - number % SESSIONS == self.first_session


_LIVES, SESSIONS = 1 << 40, 1 << 23


class Change(msgspec.Struct, array_like=True, frozen=True):
    """The identity of a change. A retry carries the same one.

    caller: the peer that sends the change. number: increases with each change of the caller. floor:
    the caller's lowest unanswered number for this partition. The caller sends nothing below its
    floor, so the shard forgets lower numbers.
    """

    caller: Owner
    number: int
    floor: int


INLINE = Owner("", 0)
"""The owner of inline chunks, which are stored in the shard. Their bytes are in the message."""


class PoolHandle(msgspec.Struct, array_like=True, frozen=True):
    """The handle with which another process of this host opens a pool, memory of a peer beside its
    arena.

    kind: the kind of device. device: its name, which is the same in all processes. raw: the
    driver's handle of the whole allocation. The pool has `nbytes` bytes and starts at `offset` in
    the allocation.
    """

    kind: str
    device: str
    raw: bytes
    offset: int
    nbytes: int


class Takeover(msgspec.Struct, array_like=True, frozen=True):
    """From the roster with this number, `successor` serves the shards of `owner`. in_sync: it has
    their data; otherwise they start empty. ended: the process of `owner` is proven to have ended,
    so it does not answer."""

    owner: Owner
    successor: Owner
    number: int
    in_sync: bool = True
    ended: bool = False


class RosterTable(msgspec.Struct, array_like=True, frozen=True):
    """A roster: see `metadata.roster.roster`.

    incarnations: one per member; 0: not known yet. epoch: (keeper's incarnation, number).
    primaries, backups: u2 per shard, the index of a member; 0xFFFF: no backup. in_sync: one bit per
    shard, the first shard in the highest bit. leaving: members that drain. takeovers: the most
    recent ones, for peers that missed a roster. lost: u1 per shard, how many times both copies of
    it were lost, modulo 256; empty: no shard was ever lost. ancestors: for each earlier keeper,
    oldest first, the epoch of its last roster that the next keeper continued from.
    """

    members: list[str]
    incarnations: list[int]
    epoch: tuple[int, int]
    primaries: bytes
    backups: bytes
    in_sync: bytes
    leaving: list[str] = []
    takeovers: list[Takeover] = []
    lost: bytes = b""
    ancestors: list[tuple[int, int]] = []


class Chunk(msgspec.Struct, array_like=True, frozen=True):
    """A chunk that a message names: the values of some rows, column after column.

    owner: index into the owners of the message. number: its name at the owner; 0 for a chunk whose
    bytes are in the message (`inline`) and whose owner is INLINE. layout: index into the layouts of
    the message; see `layouts`. inline: for a chunk in a pool, the lengths of its rows.

    From a client to its peer, number 0 is also that of a chunk that the client has written at
    `offset` in its reserved space, and which the peer is to name. digest: the hash by which later
    puts may find the chunk (dedup).
    """

    owner: int
    number: int
    rows: int
    nbytes: int
    layout: int
    inline: bytes = b""
    offset: int = 0
    digest: bytes = b""


class Piece(msgspec.Struct, array_like=True, frozen=True):
    """Rows of a message whose values are in one chunk.

    fields: for each column of the chunk, an index into the fields of the message, or -1 for a
    column that these rows do not use. given: a bit mask of rows, little-endian, from row `base`.
    The values of the n-th of these rows are in the chunk's row `first` + n, or, if `at` (u4) is not
    empty, in the row at[n].
    """

    chunk: int
    fields: tuple[int, ...]
    base: int
    given: bytes
    first: int = 0
    at: bytes = b""


class Values(msgspec.Struct, array_like=True, frozen=True):
    """The values of a message. Only clients read layouts and the bytes of chunks."""

    fields: list[str] = []
    owners: list[Owner] = []
    layouts: list[bytes] = []
    chunks: list[Chunk] = []
    pieces: list[Piece] = []

    def layout_of(self, chunk: Chunk) -> bytes:
        """Return the layout of a chunk. Raise ProtocolError for an invalid index."""
        if not 0 <= chunk.layout < len(self.layouts):
            raise mixed_releases(
                f"invalid layout index {chunk.layout} for a chunk: the table has "
                f"{counted(len(self.layouts), 'layout')}"
            )
        return self.layouts[chunk.layout]

    @property
    def nbytes(self) -> int:
        """The size of all chunks."""
        return sum([chunk.nbytes for chunk in self.chunks])

    @property
    def inline_bytes(self) -> int:
        """The size of the inline chunks."""
        return sum([len(chunk.inline) for chunk in self.chunks if not chunk.number])


class Rows(msgspec.Struct, array_like=True):
    """Rows by their keys and groups.

    keys: KEY records. names: the user's keys; None: all keys are generated. group_index: u4 per
    row, an index into group_keys, or NO_GROUP; empty: no row has a group. group_names: the user's
    group ids; None: all are generated.
    """

    keys: bytes
    names: list[Name] | None = None
    group_index: bytes = b""
    group_keys: bytes = b""
    group_names: list[Name] | None = None

    @property
    def count(self) -> int:
        """The number of rows. Raises ProtocolError if the key column ends within a key."""
        count, rest = divmod(len(self.keys), KEY.itemsize)
        if rest:
            raise mixed_releases(
                f"the key column is {len(self.keys)} bytes long, which is not a multiple of "
                f"{KEY.itemsize}"
            )
        return count


class Table(msgspec.Struct, array_like=True):
    """Rows with their values and tags, as claims and reads return them.

    places: for a client, the EXTENT of each chunk in the host's arenas; zeros for an inline chunk.
    """

    rows: Rows
    values: Values = Values()
    tags: dict[str, list[Scalar]] = {}
    places: bytes = b""
