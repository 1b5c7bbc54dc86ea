"""Messages between peers: the handshake over zmq, everything else over streams.

Each message is one envelope. A peer forwards a client's requests with the same bodies (`messages`),
but with the owners' names of the chunks. Messages only between peers are here: the handshake,
references, heartbeats, rosters, log records for backups, unanswered changes, checks for a
standstill, and samples to test transports.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from dataplane.errors import FrameTooLarge
from dataplane.wire.checkpoint import Answered, Asked
from dataplane.wire.events import Events, EventsDone, Seconds
from dataplane.wire.frames import decoded
from dataplane.wire.journal import LogRecord, Settle
from dataplane.wire.limits import MAX_FRAME_BYTES, MAX_LOG_RECORDS
from dataplane.wire.messages import (
    Admit,
    Admitted,
    Advance,
    Body,
    Claim,
    Claimed,
    Close,
    Define,
    Defined,
    Done,
    Drop,
    Dropped,
    Failed,
    Fetch,
    Fetched,
    Finish,
    Losses,
    LossesDone,
    Put,
    PutDone,
    Read,
    ReadDone,
    Reset,
    Seal,
    Stats,
    StatsDone,
    Tag,
    Wait,
    Withdraw,
)
from dataplane.wire.tables import Owner, RosterTable


class PeerHello(Body, tag=100):
    """The identity of a peer, sent in both directions. The receiver first compares the values that
    must be equal.

    epoch: of the first roster, which shows whether the seeds are equal. bulk: `host:port` of the
    bulk worker; "": there is none. bulk_fingerprint: SHA-256 of its certificate, in hex; "": it
    does not use TLS. pool_bulk: as `bulk`, for the worker that moves pools.

    Only in a reply. stream: the address at which the requester opens its streams.
    stream_secret, control_secret, heartbeat_secret: the secrets of the call stream, the control
    stream and the heartbeat stream."""

    versions: tuple[int, int]
    plane: str
    name: str
    incarnation: int
    address: str
    epoch: tuple[int, int]
    shards: int
    bulk: str
    max_frame_bytes: int = MAX_FRAME_BYTES
    bulk_fingerprint: str = ""
    pool_bulk: str = ""
    stream: str = ""
    stream_secret: bytes = b""
    control_secret: bytes = b""
    heartbeat_secret: bytes = b""


class Pull(Body, tag=134):
    """Ask the owner of values for the first bytes of each of these chunks.

    chunks: chunk numbers. sizes: u8 per chunk; empty: ask only which chunks were freed."""

    chunks: bytes
    sizes: bytes = b""


class Pulled(Body, tag=135):
    """The reply to `Pull`. data: the bytes of all chunks in order; empty if a chunk was freed.
    gone: one byte per chunk, 1 if it was freed; empty if none was and bytes were asked for."""

    data: bytes
    gone: bytes = b""


class Release(Body, tag=120):
    """Tell the owner of values that a shard has released references. chunk numbers, u4 counts.
    number: increases with each message of this sender; the receiver ignores repeated numbers."""

    chunks: bytes
    counts: bytes
    number: int


class Beat(Body, tag=140):
    """A heartbeat. The receiver replies with `Rostered`. A starting keeper also sends it, to ask
    other peers for their rosters.

    synced: whether the backup in the roster of this message's epoch has all data of the sender;
    None: it has all data except shards that the sender took over recently. leaving: the sender
    wants to hand off its shards; sent to all members while the keeper is unreachable. clear:
    members that store no values of the sender's rows. wanted: a client uses the sender, or may
    soon. spare: one bit per shard: empty shards of the sender that the keeper may move to a member
    without shards; they stay empty until the next roster. unreached: members whose hosts do not
    answer the sender.
    """

    synced: bool | None = False
    leaving: bool = False
    clear: list[str] = []
    wanted: bool = False
    spare: bytes = b""
    unreached: list[Owner] = []


class Confirm(Body, tag=142):
    """Ask the sender's backup repeatedly to confirm that no peer has taken over the sender's
    shards. The backup replies, and takes over no shard for a moment. The sender may then serve."""


class Rostered(Body, tag=141):
    """The sender's roster; None if the receiver already has it. Also sent without a request when
    it is new.

    wanted: in a reply to a member's `Beat`, whether any member reported `wanted`.
    """

    table: RosterTable | None = None
    wanted: bool = False


class PartitionLog(msgspec.Struct, array_like=True, frozen=True):
    """Log records of one partition."""

    partition: str
    generation: int
    records: Annotated[list[LogRecord], msgspec.Meta(max_length=MAX_LOG_RECORDS)]


class Append(Body, tag=143):
    """Send log records of the sender's shards to its backup, in order.

    stream: number of the stream, which starts with a snapshot. first: number of the first record; 0
    starts the stream.
    """

    stream: int
    first: int
    partitions: list[PartitionLog]


class Duplicate(Body, tag=145):
    """With replicas=2, ask the sender's backup to copy chunks of the sender that rows will use. The
    backup replies when it has the copies. chunk numbers; sizes: u8 bytes per chunk."""

    partition: str
    generation: int
    chunks: bytes
    sizes: bytes


class Inherited(Body, tag=144):
    """Tell an owner of values that the sender has taken over the shards of `origin`, with these
    references to the receiver's values. chunk numbers, u4 counts.

    began: the number of the roster under which the sender started with empty shards; `origin` is
    then its address with incarnation 0. Otherwise 0. more: another message with more references
    follows."""

    origin: Owner
    chunks: bytes
    counts: bytes
    began: int = 0
    more: bool = False


class Settled(Body, tag=153):
    """The reply to `Settle`: whether the shard has applied the change."""

    carried_out: bool


class CanFree(Body, tag=150):
    """Ask whether clients of the receiver can free space, because calls of the sender wait for it.

    why: also ask which rows keep values in the sender's arena, for a message about such a call."""

    why: bool = False


class StoredRows(msgspec.Struct, array_like=True):
    """Rows of a partition that keep values in one peer's arena, and what may still free them.
    nbytes: of these values. ready: stages that have leased no rows, as (stage, rows that are ready
    for it, seconds since a client last asked for some; None: never). leases: (client, stage, rows,
    seconds), the most rows first. lacks: (stage, field that it needs, rows without it).
    until_dropped: the rows stay until a client drops them, whatever stages do.
    """

    partition: str
    rows: int
    nbytes: int
    ready: list[tuple[str, int, Seconds | None]] = []
    leases: list[tuple[str, str, int, Seconds]] = []
    lacks: list[tuple[str, str, int]] = []
    until_dropped: bool = False


class Activity(Body, tag=151):
    """The reply to `CanFree`: activity at the sender's host that may still free rows.

    filled: partitions with rows on this host. busy: partitions of clients that are not waiting in
    a call. held: rows are leased, or not only stages can free them. claims: number of waiting
    claims. claimable: rows are ready for a stage. done: number of operations so far, which shows
    whether there were new ones. kept: the answer to `why`, of the partitions with the most bytes
    there; more: how many others have values there.
    """

    filled: list[str]
    busy: list[str]
    held: bool
    claims: int
    claimable: bool
    done: int
    kept: list[StoredRows] = []
    more: int = 0


class Identify(Body, tag=157):
    """Ask for the names of clients of the receiver, for a message about a waiting call."""

    sessions: list[int]


class Identified(Body, tag=158):
    """The reply to `Identify`. For each session, the client's name, and the ms since it was
    disconnected; -1: it is connected."""

    clients: list[tuple[str, int]]


class Sample(Body, tag=160):
    """Ask for bytes with which to test transports. The owner keeps them while it has space. pool:
    bytes in a pool, if the owner has one."""

    pool: bool = False


class Sampled(Body, tag=161):
    """Bytes `(seed + 167 i) xor (i >> 8) xor (i >> 16)`, modulo 256, at index i of one chunk.

    nbytes 0: the owner has no space for them. transport: the transport of the owner's bulk
    workers.
    """

    chunk: int
    nbytes: int
    seed: int
    transport: str


class PeerRequest(msgspec.Struct, array_like=True):
    """The envelope of a request. has: (stream, number of records of it) that the sender, as a
    backup, has of the receiver's log."""

    rid: int
    sender: str
    incarnation: int
    session: int
    epoch: tuple[int, int]
    deadline_ms: int
    body: (
        PeerHello
        | Beat
        | Rostered
        | Confirm
        | Append
        | Duplicate
        | Inherited
        | CanFree
        | Settle
        | Claim
        | Release
        | Pull
        | Define
        | Seal
        | Close
        | Reset
        | Put
        | Tag
        | Drop
        | Read
        | Fetch
        | Finish
        | Wait
        | Losses
        | Admit
        | Withdraw
        | Advance
        | Stats
        | Sample
        | Identify
        | Events
        | Asked
    )
    has: tuple[int, int] | None = None


class PeerReply(msgspec.Struct, array_like=True):
    """The envelope of a reply. incarnation: of the replying peer; it changes when the peer
    restarts. append: for its backup: the log records that the backup must have before the receiver
    may use the reply."""

    rid: int
    incarnation: int
    body: (
        PeerHello
        | Rostered
        | Claimed
        | Pulled
        | Defined
        | PutDone
        | Dropped
        | ReadDone
        | Fetched
        | Activity
        | LossesDone
        | Admitted
        | StatsDone
        | Settled
        | Sampled
        | Identified
        | EventsDone
        | Answered
        | Done
        | Failed
    )
    append: Append | None = None


_encoder = msgspec.msgpack.Encoder()
_requests_decoder = msgspec.msgpack.Decoder(PeerRequest)
_replies_decoder = msgspec.msgpack.Decoder(PeerReply)


def encode(envelope: PeerRequest | PeerReply) -> bytes:
    """Return the bytes of one message. Raise FrameTooLarge if the receiver would refuse it."""
    message = _encoder.encode(envelope)
    if len(message) > MAX_FRAME_BYTES:
        what = type(envelope.body).__name__
        raise FrameTooLarge(
            f"a message of type {what} between peers would be {len(message)} bytes long, over the "
            f"limit of {MAX_FRAME_BYTES}: use fewer rows per call. Fewer fields "
            "may not help, because the small values of all fields of a row travel together",
            size=len(message),
            limit=MAX_FRAME_BYTES,
        )
    return message


def decode_request(body: bytes | memoryview) -> PeerRequest:
    return decoded(_requests_decoder, body, "a peer request")


def decode_reply(body: bytes | memoryview) -> PeerReply:
    return decoded(_replies_decoder, body, "a peer reply")
