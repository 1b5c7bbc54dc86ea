"""What happened at a peer, as its ring keeps it and as peers and clients are told it.

One record per call and group, never per row. A record has a fixed number of fields. `Kind` says
what happened, `Reason` why something waited or how it ended: the same words in records, errors,
stats, metrics and traces.
"""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

from dataplane.wire.tables import Body, Name

MAX_RECORDS_PER_MESSAGE = 4_096


class Kind(enum.StrEnum):
    """What a record is about.

    Of something that took a while, the record is made when it ends, and `seconds` says how long it
    took.
    """

    PUT = "put"
    """`worker` put `rows` rows of `nbytes` bytes, or added fields to them. `version`: the trainer's
    when the group was begun."""
    READY = "ready"
    """`rows` rows became ready for `stage`. `field` came last, written by `worker`; `by` is the
    stage that added it, "" for a put. No field: the group was closed."""
    CLAIM_WAIT = "claim_wait"
    """A claim of `worker` for `stage` waited for `seconds`, for `reason`."""
    ROOM_WAIT = "room_wait"
    """`worker` waited for room, for `reason` (the class). `by` holds most of the room."""
    ADMIT_WAIT = "admit_wait"
    """A call of `admit` waited."""
    PULL = "pull"
    """`nbytes` came from the peer `by` over `transport`, for `stage`."""
    LEASE_BEGIN = "lease_begin"
    """`worker` leased `rows` rows for `stage`. A plan has a lease without a worker, and one without
    rows for each rank that joined."""
    LEASE_END = "lease_end"
    """The rows of a lease left it, `seconds` after it began. `reason` says how."""
    SEAL = "seal"
    """The partition takes no new rows."""
    DROP = "drop"
    """Rows, or the partition, were dropped."""
    LOST = "lost"
    """`rows` rows were lost with the peer `by`."""
    ADVANCE = "advance"
    """The trainer is at `version`."""
    STALL = "stall"
    """The peer did not run for `seconds`: it got no processor time, or was stopped."""
    BACKUP = "backup"
    """For `seconds`, answers of the peer waited for the peer `by`, its backup, to confirm."""
    ARENA = "arena"
    """`nbytes` of the peer's arena are in use from now on, give or take a percent of it."""
    MISSING = "missing"
    """Records of `peer` are missing: it did not answer, or those before `at` are overwritten."""


class Reason(enum.StrEnum):
    """Why something waited, or how a lease ended."""

    NONE = ""
    NO_ROWS = "no_rows"
    """The stage has had every row that is there."""
    FIELD = "field"
    """Rows are there and lack a field of the stage."""
    OPEN_GROUP = "open_group"
    """Groups are there and are not complete."""
    TOO_FEW = "too_few"
    """Rows are ready, fewer than were asked for, and the partition is not sealed."""
    FILTER = "filter"
    """Rows are ready, and the claim's filter excludes them."""
    LEASED = "leased"
    """The partition is sealed, and what is left of it is leased."""
    BEHIND = "behind"
    """Older claims wait for the same rows."""
    PLAN = "plan"
    """The stage's plan waits for rows or ranks."""
    LAG = "lag"
    """`admit`: rollout is as far ahead of the trainer as it may be."""
    OPEN = "open"
    """No room in the arena for new groups."""
    CONTINUE = "continue"
    """No room in the arena for groups that have begun."""
    PULL = "pull"
    """No room in the arena for values of other hosts."""
    METADATA = "metadata"
    """No room at the shard for rows' keys, tags and small values."""
    ACK = "ack"
    RELEASE = "release"
    DROP = "drop"
    DIED = "died"
    """The holder ended while it held the lease."""
    EXPIRED = "expired"
    """The lease lasted longer than the claim's `lease=` seconds."""
    OVERWRITTEN = "overwritten"
    """The ring of the peer was full."""
    RESTARTED = "restarted"
    """The peer restarted: its last records before that are lost."""
    SILENT = "silent"
    """The peer did not answer."""


Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]


class Record(msgspec.Struct, array_like=True, gc=False):
    """at: when it happened, or ended, on the peer's monotonic clock. worker: the client's session,
    0: none."""

    kind: Kind
    at: float = 0.0
    reason: Reason = Reason.NONE
    partition: str = ""
    generation: int = 0
    stage: str = ""
    group: Name = ""
    rows: Count = 0
    nbytes: Count = 0
    seconds: Seconds = 0.0
    worker: int = 0
    lease: int = 0
    field: str = ""
    by: str = ""
    transport: str = ""
    version: int = 0


Records = Annotated[list[Record], msgspec.Meta(max_length=MAX_RECORDS_PER_MESSAGE)]


class Events(Body, tag=57):
    """What happened at a peer. address: which peer, "" the one that is asked. since: only what
    happened after that, on the clock of the peer that a client asks. after: only records with a
    higher number. limit: how many at most."""

    address: str = ""
    since: float = 0.0
    after: int = 0
    limit: int = MAX_RECORDS_PER_MESSAGE


class EventsDone(Body, tag=58):
    """records have the numbers `first`, `first` + 1 and so on. Those below `kept` are overwritten.
    last: the number of the newest record. going_on: waits, leases and a time under a backup that
    have not ended, with `seconds` so far; only where records goes up to `last`.

    now: the peer's clock as it answered. offset: by how much it is ahead of the clock of the peer
    that the client asked, give or take `uncertain`. workers: what people call the clients.
    members: the peers of the plane."""

    address: str
    name: str
    incarnation: int
    now: float
    kept: int
    first: int
    last: int
    records: Records
    going_on: Records
    workers: dict[int, str]
    members: list[str]
    offset: float = 0.0
    uncertain: float = 0.0
