"""The parts that messages share: definitions, chunks, pieces and tables of rows.

Keys, groups and places are raw columns (see `records`). Values are told by chunk, never by row.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from dataplane.wire.limits import MAX_FIELDS, MAX_NAME_BYTES

Scalar = bool | int | float | str | None
"""A tag."""
Name = str | int
"""A key or group id as the user gave it; its type comes back as it was."""
Where = list[Any]
"""A filter over tags as nested lists: ["ge", tag, scalar], ["and", w, w], ["in", tag, [...]] …"""


Form = Annotated[str, msgspec.Meta(max_length=MAX_NAME_BYTES)]
"""What the values of a field are: "int64[*]"; see `client/write/schema.py`."""


class Body(msgspec.Struct, array_like=True):
    """Base of all message bodies; the tag is the first element of the array."""


class Definition(msgspec.Struct, array_like=True, frozen=True):
    """What a partition was declared as. Declaring it again must give the same."""

    stages: dict[str, list[str]] = {}
    group_size: int | None = None
    groups: int | None = None
    free: Literal["acked", "drop"] = "drop"
    replicas: Literal[1, 2] = 1
    fields: Annotated[dict[str, Form], msgspec.Meta(max_length=MAX_FIELDS)] = {}


class Shape(msgspec.Struct, array_like=True, frozen=True):
    """What all ranks of a trainer's plan agree on.

    minibatches: optimiser steps an epoch. budget: the most that `budget_tag` of a micro-batch comes
    to, a single heavier row apart; budget_tag None: one micro-batch a mini-batch. balance: the tag
    by which parts are made even; None: by their rows. remainder: what becomes of rows that are no
    multiple of ranks × minibatches. unit: what stays at one rank, and in one mini-batch."""

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
        """Those that rows are weighed by."""
        return [tag for tag in dict.fromkeys((self.balance, self.budget_tag)) if tag is not None]


class Laid(msgspec.Struct, array_like=True):
    """The rows of a plan as they were when it began, by which every rank lays it out alike.

    groups: where units are groups, u4 a row: equal for rows of one group, NO_GROUP for a row
    without. weights: tag → f8 a row."""

    rows: int
    groups: bytes = b""
    weights: dict[str, bytes] = {}


class Owner(msgspec.Struct, array_like=True, frozen=True):
    """A peer in one life of its process: ranges are only meaningful together with this."""

    peer: str
    incarnation: int

    @property
    def first_session(self) -> int:
        """Its clients' sessions have the numbers behind this one, so that whoever knows of one
        knows whose it is."""
        return self.incarnation % _LIVES * SESSIONS

    def has_session(self, number: int) -> bool:
        return number - number % SESSIONS == self.first_session


_LIVES, SESSIONS = 1 << 40, 1 << 23


class Change(msgspec.Struct, array_like=True, frozen=True):
    """Which change a message asks a shard for; a retry carries the same one.

    caller: the peer that asks, in this life of its process. number: grows from one change of the
    caller to its next. floor: the caller's lowest number for this partition that is not over. The
    caller sends nothing below its floor any more, so the shard forgets what is below.
    """

    caller: Owner
    number: int
    floor: int


INLINE = Owner("", 0)
"""The shard itself: chunks that live in it have their bytes in the message."""


class PoolHandle(msgspec.Struct, array_like=True, frozen=True):
    """What another process of this host needs to open a device arena.

    kind, device: of which driver, and which of its devices, by a name that is the same in all
    processes. raw: the driver's own handle, of the whole allocation; the pool begins `offset` bytes
    behind that allocation's start and is `nbytes` long.
    """

    kind: str
    device: str
    raw: bytes
    offset: int
    nbytes: int


class Takeover(msgspec.Struct, array_like=True, frozen=True):
    """From the roster with this number on, `heir` serves the shards of `owner`. in_sync: with what
    they held; or else they begin empty there. ended: the process of `owner` is proven to have
    ended, so it answers nobody."""

    owner: Owner
    heir: Owner
    number: int
    in_sync: bool = True
    ended: bool = False


class RosterTable(msgspec.Struct, array_like=True, frozen=True):
    """A roster: see `metadata.roster.roster`.

    incarnations: one a member, 0 where none was seen. epoch: (authority's incarnation, number).
    primaries, backups: u2 a shard, index of a member; 0xFFFF: no backup. in_sync: one bit a shard,
    the first shard in the highest bit. leaving: members that hand over what they have.
    takeovers: the last ones, for whoever missed the roster of one. lost: u1 a shard, how often
    both copies of it were lost, modulo 256; empty: never, of any. ancestors: of each authority
    before, oldest first, the epoch of the roster from which the next one went on.
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
    bytes are in the message (`inline`), whose owner is INLINE. layout: index into the layouts of
    the message; see `layouts`. inline: of a chunk in device memory, the lengths of its rows.
    """

    owner: int
    number: int
    rows: int
    nbytes: int
    layout: int
    inline: bytes = b""


class Piece(msgspec.Struct, array_like=True, frozen=True):
    """Which rows of a message have their values in a chunk.

    fields: per column of the chunk, an index into the fields of the message, or -1 for a column
    that these rows do not use. given: bits of rows, little-endian, counted from the row `base`. The
    values of the n-th of these rows are in the chunk row `first` + n, or in the n-th row of `at`
    (u4), where there is one.
    """

    chunk: int
    fields: list[int]
    base: int
    given: bytes
    first: int = 0
    at: bytes = b""


class Values(msgspec.Struct, array_like=True, frozen=True):
    """The values that a message brings. Only clients read layouts and the bytes of chunks."""

    fields: list[str] = []
    owners: list[Owner] = []
    layouts: list[bytes] = []
    chunks: list[Chunk] = []
    pieces: list[Piece] = []

    @property
    def nbytes(self) -> int:
        """Of its chunks."""
        return sum([chunk.nbytes for chunk in self.chunks])

    @property
    def inline_bytes(self) -> int:
        """Of its inline chunks. They have no number."""
        return sum([len(chunk.inline) for chunk in self.chunks if not chunk.number])


class Rows(msgspec.Struct, array_like=True):
    """Which rows: keys and groups.

    keys: KEY records. names: the user's keys, or None where all keys are minted.
    group_index: u4 a row into group_keys, NO_GROUP for a row without group; empty: no groups.
    group_names: the user's group ids, or None where all are minted.
    """

    keys: bytes
    names: list[Name] | None = None
    group_index: bytes = b""
    group_keys: bytes = b""
    group_names: list[Name] | None = None


class Table(msgspec.Struct, array_like=True):
    """Rows with their values and tags, as grants and reads return them.

    places: to a client, EXTENT of each chunk in the host's arenas; zeros for an inline one."""

    rows: Rows
    values: Values = Values()
    tags: dict[str, list[Scalar]] = {}
    places: bytes = b""
