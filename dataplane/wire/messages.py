"""Every message between a client and the peer of its host, and what peers forward to each other.

A frame is one envelope: `Request` or `Reply`. The envelope carries the ids that make retries safe:
the session and operation id (who asks, which operation) and `floor`, the lowest operation id of
that session that may still be retried; answers to lower ones are forgotten. Requests whose answer
nobody needs have `rid` 0. The server speaks first, with `Welcome`.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from dataplane.wire.checkpoint import Answered, Asked
from dataplane.wire.events import Events, EventsDone
from dataplane.wire.tables import (
    Body as Body,
)
from dataplane.wire.tables import (
    Change,
    Definition,
    Laid,
    Name,
    PoolHandle,
    Rows,
    Scalar,
    Shape,
    Table,
    Values,
    Where,
)

UNHEARD = "unheard"
"""Detail of a `Failed`: the request was not looked at, and what it names is still its sender's."""

# handshake


class Welcome(Body, tag=1):
    """The peer's first frame; the arena's descriptors (read-only, read-write) travel with it.

    pools: its device arenas. Their addresses follow the arena's, in this order. log: the path of
    the peer's log, "" where that is no file. alone: the run has no other peers and gets none.
    address: by which other peers reach it, "" where there are none. With the incarnation it is the
    owner of the client's chunks."""

    versions: tuple[int, int]
    plane: str
    peer: str
    incarnation: int
    arena_bytes: int
    shards: int
    epoch: tuple[int, int]
    max_frame_bytes: int
    max_rows: int
    max_requests: int = 1
    pools: list[PoolHandle] = []
    log: str = ""
    alone: bool = False
    address: str = ""


class Hello(Body, tag=2):
    """The client's first frame. `session` 0 opens a session, else this connection joins it.

    pools: which device arenas the session reads in place, 1 is the first. pid, command: the
    client's process as it sees itself; a peer in another pid namespace cannot see either. rank:
    the one that the client's launcher gave it, -1 where none did."""

    version: int
    session: int = 0
    label: str = ""
    pools: list[int] = []
    pid: int = 0
    command: str = ""
    rank: int = -1


class HelloDone(Body, tag=3):
    """share_bytes: the largest unit per admission class (opening, continuing, pulls).

    clients: other sessions of this peer. Where there are none: rows: that the peer has; left_by,
    left_ms: the command of the client that left last, and how long ago."""

    session: int
    share_bytes: tuple[int, int, int]
    clients: int = 0
    rows: int = 0
    left_by: str = ""
    left_ms: int = 0


# partitions


class Define(Body, tag=10):
    """Declare a partition, or attach to it where `definition` is None (waits for one so long).

    generation: of a partition that the client has attached to. Asks for its phase and waits for
    nothing; PartitionGone where that generation is no more."""

    partition: str
    definition: Definition | None
    wait_ms: int = 0
    generation: int = 0


class Defined(Body, tag=11):
    generation: int
    definition: Definition
    phase: Literal["open", "sealed"]


class Seal(Body, tag=12):
    """No new rows from now on. keep_short: groups with fewer rows than groups have are closed as
    they are, and not dropped. change: as in `Tag`."""

    partition: str
    generation: int
    keep_short: bool = False
    change: Change | None = None


class Close(Body, tag=13):
    """A group is closed with n rows. change: as in `Tag`."""

    partition: str
    generation: int
    group: Name
    n: int
    change: Change | None = None


class Reset(Body, tag=14):
    """Rows become claimable again for a stage, whatever it acked. change: as in `Tag`."""

    partition: str
    generation: int
    stage: str
    change: Change | None = None


# memory


class Reserve(Body, tag=20):
    """Room for units (one row's or one group's part), each whole or not at all.

    units: per unit the u8 column of the sizes of its ranges.
    continuing: to groups or keys that this client put or leased before, or fields added to them.
    digests: a DIGEST record per candidate for dedup. device: in which device arena, 0: the host's;
    in that too where the device has no room now."""

    partition: str
    generation: int
    units: list[bytes]
    continuing: bool = False
    digests: bytes = b""
    device: int = 0


class Reserved(Body, tag=21):
    """extents: EXTENT records; the ranges of the first `units` units fit into them in order.

    known: RANGE per digest, generation 0 where unknown; places: their EXTENT in the arena. They are
    pinned (`pin`) so that the client can compare bytes, until the put that shares them, or Unpin.
    """

    units: int
    extents: bytes
    known: bytes = b""
    places: bytes = b""
    pin: int = 0


class GiveBack(Body, tag=22):
    """Extents that the client will not write into. One-way."""

    extents: bytes


class Unpin(Body, tag=23):
    """Pins whose last view is gone, where no request follows that would name them. One-way."""

    pins: list[int]


# rows


class Put(Body, tag=30):
    """Rows, new or known, with values whose bytes are already in place, or come along.

    ranges: EXTENT records, written by this client inside its grants. shared: RANGE records of
    known ranges (dedup). The number of a chunk from a client is its place, from 1 on, among ranges,
    then shared. ShardFull, and nothing is done, where the shard has no room for inline chunks.
    digests: DIGEST per entry of `ranges` that later puts may share, `digest_index` (u4) says which.
    change: between peers, as in `Tag`. holder: as a backup is told, the session that put the rows,
    whose permits its new groups use.
    continuing: as in `Reserve`. reuse: names of rows and groups that are no more are new ones.
    want_bytes: of the host arena, for the next put; want_on_devices: of each device arena.
    """

    partition: str
    generation: int
    rows: Rows
    values: Values = Values()
    tags: dict[str, list[Scalar]] = {}
    ranges: bytes = b""
    shared: bytes = b""
    pin: int = 0
    replace: bool = False
    digests: bytes = b""
    digest_index: bytes = b""
    want_bytes: int = 0
    change: Change | None = None
    continuing: bool = False
    reuse: bool = False
    want_on_devices: list[int] = []
    holder: int = 0


class PutDone(Body, tag=31):
    """extents: granted for the next put, at most what it wants. kept: fields of rows that were
    there already and stayed (redelivered adds). gone: rows of a put that were passed over, because
    they were there before and have been freed. there: rows of a put that were passed over, because
    they are there with all of its fields. ranges: RANGE records of what an ack has written, where
    it says `again`."""

    extents: bytes = b""
    kept: dict[str, int] = {}
    gone: int = 0
    there: int = 0
    ranges: bytes = b""


class Tag(Body, tag=32):
    """tags: a list of n values, or of one for all. expect: compared first, all or nothing a row.
    change: between peers. The shard carries the change out once and answers every retry alike; a
    client leaves it out."""

    partition: str
    generation: int
    rows: Rows
    tags: dict[str, list[Scalar]]
    expect: dict[str, Scalar] | None = None
    change: Change | None = None


class Drop(Body, tag=33):
    """Exactly one of rows, groups, where; none of them drops the partition. change: as in `Tag`."""

    partition: str
    generation: int
    rows: Rows | None = None
    groups: list[Name] | None = None
    where: Where | None = None
    change: Change | None = None


class Dropped(Body, tag=34):
    """unknown_tags: tags of the filter that no row has ever had, each with some that rows have."""

    rows: int
    bytes: int
    unknown_tags: dict[str, list[str]] = {}


class Read(Body, tag=35):
    """Read without a lease. rows/where: as in Drop; none: all rows. fields None: every field.

    limit bounds the rows of one answer, `after` continues at the cursor of the last one. overview:
    no values; `has` and `states` instead."""

    partition: str
    generation: int
    rows: Rows | None = None
    where: Where | None = None
    fields: list[str] | None = None
    limit: int = 0
    after: bytes = b""
    overview: bool = False


class ReadDone(Body, tag=36):
    """pin: 0 where nothing was pinned. cursor: ask again with it as `after`; empty at the end.
    unknown_tags: as in Dropped, on the first page. has, by field, and states, by stage: a byte per
    row."""

    table: Table
    pin: int
    cursor: bytes = b""
    unknown_tags: dict[str, list[str]] = {}
    has: dict[str, bytes] = {}
    states: dict[str, bytes] = {}


# stages


class Want(msgspec.Struct, array_like=True, frozen=True):
    """A form of demand; claims with equal `unit` and `where` share a lane."""

    unit: Literal["rows", "groups"]
    count: int
    minimum: int
    where: Where | None = None
    budget_tag: str | None = None
    budget: float = 0.0


class Claim(Body, tag=40):
    """declare: the fields of a stage that is not declared yet. lease_ms 0: no hard limit.
    timeout_ms -1: as long as rows can come. own: the thread or task that claims has rows of this
    partition already, for which it may wait in vain.

    Between peers with all fields that it fetches. number: of the claim, which no other one has.
    label: what people call its holder. waited_ms: its age. most_bytes: what its host can have
    pulled at once, 0: any number; timeout_ms 0: it does not wait.

    plan: not rows, but a part in the stage's plan, as this `rank` of a trainer: waits until the
    partition is sealed and all rows that the stage has left are ready. Of `want` nothing counts."""

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
    """Leased rows. plan: what was asked for is a part in a plan, which `lease` names; the table is
    empty. Between peers without a pin."""

    lease: int
    pin: int
    table: Table
    plan: Laid | None = None


class Fetch(Body, tag=42):
    """More fields of leased rows: of all that are left, or of those at `index` (u4), without those
    that are gone. Between peers, with the partition that the lease is of."""

    lease: int
    fields: list[str]
    partition: str = ""
    generation: int = 0
    index: bytes | None = None


class Fetched(Body, tag=43):
    """index: where `Fetch` has one, u4: those of it that are there. Between peers as `Claimed`."""

    pin: int
    table: Table
    index: bytes = b""


class Finish(Body, tag=44):
    """The end of a lease, for all its rows or for those at `index` (u4), with what was added.

    The rows of `values` are the leased rows in order (or those at `index`). On `release` they are
    progress, which the stage's next claim of the rows brings, and nobody else's. `keep`: the lease
    goes on (adds only). Of a plan, an ack is for all that its rank has to do, a release ends
    the plan for all, and `leave` ends nothing: the client had given up its call. `abandon`: a
    release because the client ends, or has ended, while it holds the lease; its peer logs that.
    `expire`, between peers: a release because `lease=` seconds are over.
    change: between peers, as in Tag. ranges, shared: as in Put. again: a later ack may name chunks
    of this one again, so the peer holds them until the lease ends."""

    lease: int
    outcome: Literal["ack", "release", "drop", "keep", "leave", "abandon", "expire"]
    index: bytes | None = None
    values: Values = Values()
    tags: dict[str, list[Scalar]] = {}
    ranges: bytes = b""
    shared: bytes = b""
    pin: int = 0
    want_bytes: int = 0
    partition: str = ""
    generation: int = 0
    change: Change | None = None
    again: bool = False


class Wait(Body, tag=45):
    """Until `count` units are ready for the stage, or fewer than `below` are not yet done.

    where: of those that match; what is leased or not ready yet counts until it is known. key: until
    there is a row with this key instead, whatever stages need; `stage` is "" then."""

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
    """Names of rows that were lost with a peer, beyond the first `after`; waits for some."""

    partition: str
    generation: int
    after: int = 0
    timeout_ms: int = -1


class LossesDone(Body, tag=47):
    """missed: names in between that the shard has no more. ended: no row can be lost any more."""

    after: int
    names: list[Name] = []
    missed: int = 0
    ended: bool = False


# how far producers run ahead


class Admit(Body, tag=53):
    """Until `count` groups more may be begun: see `dataplane.metadata.shard.permits`. timeout_ms
    -1: for as long as there may be new groups.

    own: the thread or task that asks has permits of this partition already.

    Between peers: number: of the permit, which no other one has. label: what people call its
    holder. waited_ms: its age."""

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
    """A permit, which the groups use that its session opens. version: the trainer's."""

    permit: int
    version: int


class Withdraw(Body, tag=55):
    """These permits are over: see `dataplane.metadata.shard.permits.Permits.take_back`. Between
    peers also calls that nobody waits for any more: when this is answered they have no lease and no
    permit, and never will."""

    partition: str
    generation: int
    numbers: list[int]


class Advance(Body, tag=56):
    """The trainer is at this version; what it has finished may give its places back. change: as in
    `Tag`."""

    partition: str
    generation: int
    version: int
    change: Change | None = None


# looking


class Stats(Body, tag=50):
    """partition None: the whole peer. probe: the ways between all peers, tried anew."""

    partition: str | None = None
    probe: bool = False


class StatsDone(Body, tag=51):
    stats: dict[str, Any]


class Done(Body, tag=60):
    """Nothing to tell."""


class Notice(Body, tag=62):
    """Something for the log of the client's process; answers no request (rid 0)."""

    text: str


class Failed(Body, tag=61):
    """A typed error; see `dataplane.errors`."""

    code: str
    message: str
    details: dict[str, Any] = {}


class Request(msgspec.Struct, array_like=True):
    """unpin: pins whose last view is gone."""

    rid: int
    session: int
    op: int
    floor: int
    epoch: tuple[int, int]
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
