"""Messages between a client and the peer of its host, some of which peers forward to each other.

A frame is one envelope: `Request` or `Reply`. The envelope carries the ids that make retries safe:
the session, the operation id, and `floor`, the lowest operation id of the session that the client
may still retry. The peer forgets replies to lower ids. Requests that need no reply have `rid` 0.
The peer sends the first message, `Welcome`.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from dataplane.wire.checkpoint import Answered, Asked
from dataplane.wire.events import Events, EventsDone, Seconds
from dataplane.wire.tables import (
    Body as Body,
)
from dataplane.wire.tables import (
    Change,
    Definition,
    Name,
    PlanRows,
    PoolHandle,
    Rows,
    Scalar,
    Shape,
    Table,
    Values,
    Where,
)

UNHEARD = "unheard"
"""Detail of a `Failed`: the peer did not read the request, and the sender still owns its chunks."""
OVERDUE = "overdue"
"""Detail of an `Unavailable`: the peer that did not answer may only be slow. A client whose
deadline has passed gets DeadlineExceeded instead."""

# handshake


class Welcome(Body, tag=1):
    """The peer's first frame, sent together with the arena's file descriptors (read-only,
    read-write).

    pools: the peer's memories beside its arena. Their addresses follow those of the arena, in
    this order. log: the path of the peer's log; "" if the log is not a file. alone: the run has
    only this peer. address: where other peers reach this peer; "" if there are none. The address
    and the incarnation identify the owner of the client's chunks."""

    versions: tuple[int, int]
    plane: str
    peer: str
    incarnation: int
    arena_bytes: int
    max_frame_bytes: int
    max_rows: int
    pools: list[PoolHandle] = []
    log: str = ""
    alone: bool = False
    address: str = ""


class Hello(Body, tag=2):
    """The client's first frame. `session` 0 opens a session; otherwise this connection joins it.

    pools: those that the session reads in place, from 1. pid, command: the client's
    process in its own pid namespace. rank: the rank that the client's launcher set; -1: none."""

    version: int
    session: int = 0
    label: str = ""
    pools: list[int] = []
    pid: int = 0
    command: str = ""
    rank: int = -1


class HelloDone(Body, tag=3):
    """The reply to `Hello`. quota_bytes: the largest unit of each admission class (new groups,
    continuing, pulls).

    clients: the number of other sessions of this peer. If there are none: rows: the number of rows
    of the peer; left_by, left_ms: the command of the last client, and the time since it left."""

    session: int
    quota_bytes: tuple[int, int, int]
    clients: int = 0
    rows: int = 0
    left_by: str = ""
    left_ms: int = 0


# partitions


class Define(Body, tag=10):
    """Declare a partition. If `definition` is None, attach to it, and wait up to `wait_ms` for it.

    generation: of a partition to which the client has attached. The peer replies with its phase at
    once, or with PartitionGone if that generation has ended. restores: the client restores the
    partition, which must not exist yet. If the client ends before `Restored`, the shard drops
    it."""

    partition: str
    definition: Definition | None
    wait_ms: int = 0
    generation: int = 0
    restores: bool = False


class Defined(Body, tag=11):
    generation: int
    definition: Definition
    phase: Literal["open", "sealed"]


class Seal(Body, tag=12):
    """Seal a partition: it accepts no new rows. keep_short: close groups with fewer rows than
    `group_size` instead of dropping them. change: as in `Tag`."""

    partition: str
    generation: int
    keep_short: bool = False
    change: Change | None = None


class Close(Body, tag=13):
    """Close a group when it has n rows. change: as in `Tag`."""

    partition: str
    generation: int
    group: Name
    n: int
    change: Change | None = None


class Reset(Body, tag=14):
    """Make all rows claimable by a stage again, also acked ones. change: as in `Tag`."""

    partition: str
    generation: int
    stage: str
    change: Change | None = None


# memory


class Reserve(Body, tag=20):
    """Reserve space for units (the values of one row or one group), each completely or not at all.

    units: for each unit, the u8 column of the sizes of its chunks.
    continuing: whether the values belong to groups or keys that this client put or leased before.
    digests: a DIGEST record for each candidate for dedup. pool: the number of a pool; 0: the
    arena, which the peer also uses if the pool is full."""

    partition: str
    generation: int
    units: list[bytes]
    continuing: bool = False
    digests: bytes = b""
    pool: int = 0


class Reserved(Body, tag=21):
    """The reply to `Reserve`. extents: EXTENT records, which hold the chunks of the first `units`
    units in order.

    known: a chunk number for each digest, 0 if the peer does not have the chunk; places:
    their EXTENT in the arena. The peer pins them (`pin`) until a put shares them, or until `Unpin`,
    so that the client can compare bytes.
    """

    units: int
    extents: bytes
    known: bytes = b""
    places: bytes = b""
    pin: int = 0


class GiveBack(Body, tag=22):
    """Return extents that the client will not write to. Needs no reply."""

    extents: bytes


class Unpin(Body, tag=23):
    """Release pins that have no views. Sent if no other request can carry them. Needs no reply."""

    pins: list[int]


# rows


class Put(Body, tag=30):
    """Put new or existing rows, with values that are already in the arena or in this message.

    If the shard has no space for inline chunks, it replies ShardFull and does nothing. pin: of the
    known chunks that the values share. change: between peers, as in `Tag`. holder: for a backup,
    the session that put the rows, whose permits its new groups use. continuing: as in `Reserve`.
    reuse: keys and group ids of freed rows may be used for new ones. want_bytes: bytes to reserve
    in the host arena for the next put; want_in_pools: the same for each pool. client_s:
    seconds that the call had taken when the client sent this message.
    """

    partition: str
    generation: int
    rows: Rows
    values: Values = Values()
    tags: dict[str, list[Scalar]] = {}
    pin: int = 0
    replace: bool = False
    want_bytes: int = 0
    change: Change | None = None
    continuing: bool = False
    reuse: bool = False
    want_in_pools: list[int] = []
    holder: int = 0
    client_s: Seconds = 0.0


class PutDone(Body, tag=31):
    """The reply to a put or an ack. extents: reserved for the next put, at most the wanted bytes.
    kept: existing fields of redelivered rows that were kept. gone: the number of rows that were
    skipped, because they were put before and have been freed. there: the number of rows that were
    skipped, because they exist with all of these fields. chunks: the numbers of the chunks that
    the client wrote for an ack with `again`."""

    extents: bytes = b""
    kept: dict[str, int] = {}
    gone: int = 0
    there: int = 0
    chunks: bytes = b""


class Tag(Body, tag=32):
    """Set tags. tags: for each tag, a list of n values, or of one value for all rows. expect: set
    the tags of a row only if it has these tag values. change: only between peers. The shard applies
    a change once, and repeats its reply to every retry."""

    partition: str
    generation: int
    rows: Rows
    tags: dict[str, list[Scalar]]
    expect: dict[str, Scalar] | None = None
    change: Change | None = None


class Drop(Body, tag=33):
    """Drop `rows`, `groups` or the rows that match `where`; without any, drop the partition.
    change: as in `Tag`."""

    partition: str
    generation: int
    rows: Rows | None = None
    groups: list[Name] | None = None
    where: Where | None = None
    change: Change | None = None


class Dropped(Body, tag=34):
    """The reply to `Drop`. unknown_tags: tags of the filter that no row has ever had, each with
    some existing tags."""

    rows: int
    bytes: int
    unknown_tags: dict[str, list[str]] = {}


class Read(Body, tag=35):
    """Read rows without a lease. rows, where: as in `Drop`; neither: all rows. fields None: every
    field.

    limit: the most rows in one reply. after: the cursor of the last reply, to continue there.
    overview: reply with `has` and `states` instead of values."""

    partition: str
    generation: int
    rows: Rows | None = None
    where: Where | None = None
    fields: list[str] | None = None
    limit: int = 0
    after: bytes = b""
    overview: bool = False


class ReadDone(Body, tag=36):
    """The reply to `Read`. pin: 0: nothing is pinned. cursor: the `after` of the next request;
    empty at the end. unknown_tags: as in `Dropped`, in the first reply. has, by field, and states,
    by stage: one byte per row."""

    table: Table
    pin: int
    cursor: bytes = b""
    unknown_tags: dict[str, list[str]] = {}
    has: dict[str, bytes] = {}
    states: dict[str, bytes] = {}


# stages


class Want(msgspec.Struct, array_like=True, frozen=True):
    """The rows or groups that a claim wants. in_order: the oldest ones, even if others are local to
    the claim's peer."""

    unit: Literal["rows", "groups"]
    count: int
    minimum: int
    where: Where | None = None
    budget_tag: str | None = None
    budget: float = 0.0
    in_order: bool = False


class Claim(Body, tag=40):
    """Claim rows for a stage. declare: the fields of a stage that is not declared yet. lease_ms 0:
    no time limit. timeout_ms -1: wait as long as rows can still become ready. own: whether the
    thread or task that claims holds other rows of this partition, for which it may be waiting.

    Between peers, `fields` lists all fields to fetch. number: unique number of the claim. label:
    name of its holder for people. waited_ms: age of the claim. most_bytes: bytes that its host can
    pull at once, 0: any number; timeout_ms 0: do not wait.

    plan: join the stage's plan as this `rank` of a trainer, instead of claiming rows. Waits until
    the partition is sealed and all remaining rows are ready, and ignores `want`.
    """

    partition: str
    generation: int
    stage: str
    want: Want
    fields: list[str] | None = None
    declare: list[str] | None = None
    timeout_ms: int = -1
    lease_ms: int = 0
    number: int = 0
    label: str = ""
    waited_ms: int = 0
    most_bytes: int = 0
    plan: Shape | None = None
    rank: int = 0
    own: bool = False


class Claimed(Body, tag=41):
    """The reply to `Claim`: leased rows. plan: the rows of a plan; then `lease` is the rank's
    lease, and the table is empty. Between peers, without a pin."""

    lease: int
    pin: int
    table: Table
    plan: PlanRows | None = None


class Fetch(Body, tag=42):
    """Fetch more fields of leased rows: of all open rows, or of those at `index` (u4), without
    freed rows. Between peers, with the partition of the lease."""

    lease: int
    fields: list[str]
    partition: str = ""
    generation: int = 0
    index: bytes | None = None


class Fetched(Body, tag=43):
    """The reply to `Fetch`. index: the entries of `Fetch.index` (u4) that exist. Between peers,
    without a pin."""

    pin: int
    table: Table
    index: bytes = b""


class Finish(Body, tag=44):
    """End a lease for all its rows, or for those at `index` (u4), and store added values.

    The rows of `values` are the leased rows in order (or those at `index`). With `release`, the
    values are progress, which only the next claim of the rows by this stage returns. `keep` stores
    values, and the lease continues. In a plan, `ack` ends the part of one rank, `release` ends the
    plan for all ranks, and `leave` withdraws a cancelled call. `abandon` is a release because the
    client ends while it holds the lease; its peer logs that. `expire`, between peers, is a release
    because the `lease=` seconds are over.
    change: between peers, as in `Tag`. again: a later ack may name chunks of this one again, so the
    peer keeps them until the lease ends. client_s: seconds for which the client has had the rows,
    without those in which it copied added values; 0: unknown."""

    lease: int
    outcome: Literal["ack", "release", "drop", "keep", "leave", "abandon", "expire"]
    index: bytes | None = None
    values: Values = Values()
    tags: dict[str, list[Scalar]] = {}
    pin: int = 0
    want_bytes: int = 0
    partition: str = ""
    generation: int = 0
    change: Change | None = None
    again: bool = False
    client_s: Seconds = 0.0


class Wait(Body, tag=45):
    """Wait until `count` units are ready for the stage, or until fewer than `below` are unfinished.

    where: count only units that match; leased units, and units that are not ready yet, always
    count. key: wait until a row with this key exists instead; `stage` is "" then."""

    partition: str
    generation: int
    stage: str
    unit: Literal["rows", "groups"]
    count: int = 0
    below: int = 0
    timeout_ms: int = -1
    where: Where | None = None
    key: Name | None = None


class Losses(Body, tag=46):
    """Wait for keys of rows that were lost with a peer, after the first `after` of them."""

    partition: str
    generation: int
    after: int = 0
    timeout_ms: int = -1


class LossesDone(Body, tag=47):
    """The reply to `Losses`. missed: the number of keys that the shard has forgotten. ended: no
    more rows can be lost."""

    after: int
    names: list[Name] = []
    missed: int = 0
    ended: bool = False


# how far producers run ahead


class Admit(Body, tag=53):
    """Wait until `count` more groups may start; see `dataplane.metadata.shard.permits`. timeout_ms
    -1: wait as long as the partition accepts new groups.

    own: whether the calling thread or task already holds permits of this partition.

    Between peers: number: unique number of the permit. label: name of its holder for people.
    waited_ms: age of the call."""

    partition: str
    generation: int
    count: int
    max_lag: int
    per_version: int
    timeout_ms: int = -1
    number: int = 0
    label: str = ""
    waited_ms: int = 0
    own: bool = False


class Admitted(Body, tag=54):
    """The reply to `Admit`: a permit for groups that the session opens. version: the trainer's
    version."""

    permit: int
    version: int


class Withdraw(Body, tag=55):
    """Return permits; see `dataplane.metadata.shard.permits.Permits.take_back`. Between peers, also
    withdraw cancelled calls: after the reply, they have no lease and no permit, and get none."""

    partition: str
    generation: int
    numbers: list[int]


class Advance(Body, tag=56):
    """Set the trainer's version, which frees the places of finished groups. change: as in `Tag`."""

    partition: str
    generation: int
    version: int
    change: Change | None = None


# looking


class Stats(Body, tag=50):
    """Ask for statistics. partition None: of the whole peer. probe: test the transports between all
    peers again."""

    partition: str | None = None
    probe: bool = False


class StatsDone(Body, tag=51):
    stats: dict[str, Any]


class Done(Body, tag=60):
    """A reply without content: the request took effect."""


class Notice(Body, tag=62):
    """A line for the log of the client's process. It is not a reply (rid 0)."""

    text: str


class Failed(Body, tag=61):
    """A typed error; see `dataplane.errors`."""

    code: str
    message: str
    details: dict[str, Any] = {}


class Request(msgspec.Struct, array_like=True):
    """The envelope of a request. unpin: pins that have no views."""

    rid: int
    session: int
    op: int
    floor: int
    deadline_ms: int
    body: (
        Hello
        | Define
        | Seal
        | Close
        | Reset
        | Reserve
        | GiveBack
        | Unpin
        | Put
        | Tag
        | Drop
        | Read
        | Claim
        | Fetch
        | Finish
        | Wait
        | Losses
        | Admit
        | Withdraw
        | Advance
        | Stats
        | Events
        | Asked
    )
    unpin: list[int] = []


class Reply(msgspec.Struct, array_like=True):
    rid: int
    body: (
        Welcome
        | HelloDone
        | Defined
        | Reserved
        | PutDone
        | Dropped
        | ReadDone
        | Claimed
        | Fetched
        | LossesDone
        | Admitted
        | StatsDone
        | EventsDone
        | Answered
        | Done
        | Notice
        | Failed
    )
