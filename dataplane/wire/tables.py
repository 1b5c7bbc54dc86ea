"""The parts that messages share: definitions, specs, columns and tables of rows.

Everything that is per row is a raw column (see `records`), so that neither side loops over values.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from dataplane.wire.limits import MAX_FIELDS, MAX_NAME_BYTES, MAX_SPECS_PER_MESSAGE

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


class Spec(msgspec.Struct, array_like=True, frozen=True):
    """How the bytes of a value are read.

    `array`: `dtype` is numpy's or ml_dtypes' name; `shape` may have one -1, which the value's bytes
    decide. `object`: one MessagePack value, whose array leaves are ext values that index the row's
    leaves; `dtype` and `shape` are empty. loose: rows were given one by one, so that a TensorDict
    has them as a nested tensor, ragged where the -1 is; objects, as data that are no tensor.
    """

    kind: Literal["array", "object"]
    dtype: str = ""
    shape: tuple[int, ...] = ()
    loose: bool = False


Specs = Annotated[list[Spec], msgspec.Meta(max_length=MAX_SPECS_PER_MESSAGE)]
"""As they come in with values."""


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
"""The shard itself: values that live in it lie in the message, from the byte `range` of what is
called `inline` there."""


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


class Column(msgspec.Struct, array_like=True):
    """One field of the rows of a message.

    values: VALUE (between peers, and in a put) or PLACE (to a client) records, one a row.
    leaf_counts: u4 a row, or empty when no row has array leaves.
    leaves: records of the array leaves, row by row.
    """

    field: str
    values: bytes
    leaf_counts: bytes = b""
    leaves: bytes = b""


_WORD, _RECORD_WORDS = np.dtype("<u8"), 3
"""of records of both kinds, VALUE and PLACE: the second are the bytes"""
_FEW_BYTES = 24 * 64
"""below which numpy costs more than it saves"""


def volume(columns: Iterable[Column]) -> int:
    """Bytes of all values of these columns, objects and their leaves."""
    raw = b"".join([part for column in columns for part in (column.values, column.leaves)])
    if len(raw) < _FEW_BYTES:
        return sum(memoryview(raw).cast("Q")[1::_RECORD_WORDS])
    return int(np.add.reduce(np.frombuffer(raw, _WORD)[1::_RECORD_WORDS]))


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
    """Rows with their columns and tags, as grants and reads return them.

    inline: the bytes of values that live in the shard."""

    rows: Rows
    columns: list[Column] = []
    specs: list[Spec] = []
    owners: list[Owner] = []
    tags: dict[str, list[Scalar]] = {}
    inline: bytes = b""
