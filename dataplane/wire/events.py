"""Records of what happened at a peer, as its ring keeps them and as messages carry them.

There is one record per call and group, never per row. A record has a fixed number of fields. `Kind`
says what happened, and `Reason` says why something waited or how it ended. Records, errors,
statistics, metrics and traces use the same words.
"""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

from dataplane.wire.tables import Body, Name, Owner

MAX_RECORDS_PER_MESSAGE = 4_096
MAX_FORMER = 64
"""The most ended peers that a page names, the latest first."""


class Kind(enum.StrEnum):
    """What happened. If it took time, the record is made at its end, and `seconds` is its
    duration."""

    PUT = "put"
    """`worker` put `rows` rows of `nbytes` bytes, or added fields to them. `version` is the
    trainer's version when the group started."""
    READY = "ready"
    """`rows` rows became ready for `stage`, because `worker` wrote `field`. `by` is the stage that
    added it, "" for a put. Without a field, the group was closed."""
    CLAIM_WAIT = "claim_wait"
    """A claim of `worker` for `stage` waited for `seconds`, for `reason`."""
    ROOM_WAIT = "room_wait"
    """`worker` waited for space in the arena. `reason` is the admission class, and `by` holds most
    of the space."""
    ADMIT_WAIT = "admit_wait"
    """A call of `admit` by `worker` waited."""
    PULL = "pull"
    """This peer copied `nbytes` from the peer `by` over `transport`, for `stage`."""
    LEASE_BEGIN = "lease_begin"
    """`worker` leased `rows` rows for `stage`. A plan has one lease without a worker, and one lease
    without rows for each rank that joined."""
    LEASE_END = "lease_end"
    """A lease ended, or some of its rows did, after `seconds`. `reason` says how."""
    SEAL = "seal"
    """The partition was sealed."""
    DROP = "drop"
    """Rows, or the partition, were dropped."""
    LOST = "lost"
    """`rows` rows of a group were lost with the peer `by`."""
    ADVANCE = "advance"
    """The trainer advanced to `version`."""
    STALL = "stall"
    """The peer did not run for `seconds`, because it got no processor time or was stopped."""
    BACKUP = "backup"
    """Replies of this peer waited for `seconds` until its backup, the peer `by`, confirmed."""
    ARENA = "arena"
    """About `nbytes` of the peer's arena are now in use, to within a percent of its size."""
    MISSING = "missing"
    """Records of `peer` are missing: it did not answer, or it has overwritten those before `at`."""


class Reason(enum.StrEnum):
    """Why something waited, or how a lease ended."""

    NONE = ""
    NO_ROWS = "no_rows"
    """The stage has received every row of the partition."""
    FIELD = "field"
    """Rows exist, but lack a field that the stage needs."""
    OPEN_GROUP = "open_group"
    """Groups exist, but are not complete."""
    TOO_FEW = "too_few"
    """Fewer rows are ready than the claim needs, and the partition is not sealed."""
    FILTER = "filter"
    """Rows are ready, but the claim's filter excludes them."""
    LEASED = "leased"
    """The partition is sealed, and all remaining rows are leased."""
    BEHIND = "behind"
    """Ready rows are kept for an older claim that has waited for over 1 s."""
    PLAN = "plan"
    """The stage's plan waits for rows or ranks."""
    LAG = "lag"
    """`admit`: rollout is as far ahead of the trainer as `max_lag` allows."""
    OPEN = "open"
    """The arena has no space for new groups."""
    CONTINUE = "continue"
    """The arena has no space for groups that have started."""
    PULL = "pull"
    """The arena has no space for values of other hosts."""
    METADATA = "metadata"
    """The shard has no space for keys, tags and small values."""
    ACK = "ack"
    RELEASE = "release"
    DROP = "drop"
    DIED = "died"
    """The holder ended while it held the lease."""
    EXPIRED = "expired"
    """The lease lasted longer than the claim's `lease=` seconds."""
    OVERWRITTEN = "overwritten"
    """The peer overwrote old records, because its ring was full."""
    RESTARTED = "restarted"
    """The peer restarted, and the last records before that are lost."""
    SILENT = "silent"
    """The peer did not answer."""


Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]


class EventRecord(msgspec.Struct, array_like=True, gc=False):
    """One event of a peer. at: the time at which it happened, or ended, on the peer's monotonic
    clock. worker: the session of the client; 0: none. client_s: of a `put`, the seconds that its
    call had taken when the client sent it; of a `lease_end`, those for which the client worked with
    the rows. 0: unknown."""

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
    client_s: Seconds = 0.0


EventRecords = Annotated[list[EventRecord], msgspec.Meta(max_length=MAX_RECORDS_PER_MESSAGE)]


Former = Annotated[dict[str, Owner], msgspec.Meta(max_length=MAX_FORMER)]


class Events(Body, tag=57):
    """What happened at a peer. address: which peer; "": the receiver. since: only events after this
    time, on the clock of the peer that a client asks. after: only records with a higher number.
    limit: the most records."""

    address: str = ""
    since: float = 0.0
    after: int = 0
    limit: int = MAX_RECORDS_PER_MESSAGE


class EventsDone(Body, tag=58):
    """records have the numbers `first`, `first` + 1 and so on. Those below `kept` are overwritten.
    last: the number of the newest record. going_on: waits, leases and a wait for the backup that
    have not ended, with `seconds` so far; empty unless the records reach `last`.

    now: the peer's clock at its reply. offset: how far it is ahead of the clock of the peer that
    the client asked, within `uncertain`. workers: the clients' names for people.
    members: the peers of the plane. former: the last incarnation of peers that ended, by name."""

    address: str
    name: str
    incarnation: int
    now: float
    kept: int
    first: int
    last: int
    records: EventRecords
    going_on: EventRecords
    workers: dict[int, str]
    members: list[str]
    offset: float = 0.0
    uncertain: float = 0.0
    former: Former = {}
