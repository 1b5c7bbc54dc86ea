"""What peers say to each other: greetings over zmq, all else over streams.

One envelope a message.
Operations that a client asked for are forwarded with the client's own bodies (`messages`), their
chunks named as their owner knows them. What is only between peers is here: the handshake,
what becomes of claims, and of bytes; what keeps a plane whole (life signs, rosters, operations for
backups, what was not answered, whether anybody still moves); and samples to try the ways between
two peers on.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from dataplane.errors import FrameTooLarge
from dataplane.wire.checkpoint import Answered, Asked
from dataplane.wire.events import Events, EventsDone
from dataplane.wire.frames import decoded
from dataplane.wire.journal import Op, Settle
from dataplane.wire.limits import MAX_FRAME_BYTES, MAX_OPS_PER_MESSAGE
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
    """Both directions: who one is. Anything that must be equal is compared before anything else.

    epoch: of the first roster, by which equal seeds are known. bulk: `host:port` of the bulk
    worker; "": there is none. bulk_fingerprint: SHA-256 in hex of the certificate that it shows;
    "": it speaks no TLS. device_bulk: as `bulk`, of the worker that moves device memory.

    In an answer only. stream: where the asker dials its two streams from now on. stream_secret,
    control_secret: the secret of the call stream and of the control stream."""

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
    device_bulk: str = ""
    stream: str = ""
    stream_secret: bytes = b""
    control_secret: bytes = b""


class Pull(Body, tag=134):
    """To the owner of values: so many bytes from the start of each of these ranges. None of any of
    them asks only which are there.

    ranges: RANGE records. sizes: u8 a range."""

    ranges: bytes
    sizes: bytes


class Pulled(Body, tag=135):
    """data: all of it, in the order asked for; empty where some are gone. gone: a byte a range, 1
    where it has been freed; empty where none has."""

    data: bytes
    gone: bytes = b""


class Release(Body, tag=120):
    """Value references that a shard no longer holds, to their owner. RANGE records, u4 counts.
    number: of one message after the other from this sender; one that came before is passed over."""

    ranges: bytes
    counts: bytes
    number: int


class Beat(Body, tag=140):
    """The sender lives; answered by `Rostered`. The first seed, as it begins, asks others for their
    rosters so.

    synced: its backup, in the roster of this message's epoch, has all that it has; None: not what
    it took over last, or did just now, and all that it was called in sync with. leaving: it wants
    to hand over its shards; said to all members while the authority is away. clear: members at
    which none of its rows' values lie. wanted: somebody uses it, or may soon. spare: one bit a
    shard, those of the sender that go to a member without any: nothing lives in them, and nothing
    will before the next roster. unreached: members whose hosts do not answer the sender.
    """

    synced: bool | None = False
    leaving: bool = False
    clear: list[str] = []
    wanted: bool = False
    spare: bytes = b""
    unreached: list[Owner] = []


class Confirm(Body, tag=142):
    """To the sender's backup, again and again: does it know of nobody who took the sender's shards
    over? Then it answers, takes none over for a moment, and the sender goes on to serve."""


class Rostered(Body, tag=141):
    """The sender's roster; None where the receiver has it. Also sent unasked, when it is new.

    wanted: to a member's `Beat`, whether the authority was told so by any member.
    """

    table: RosterTable | None = None
    wanted: bool = False


class Shipment(msgspec.Struct, array_like=True, frozen=True):
    """Operations of one partition."""

    partition: str
    generation: int
    ops: Annotated[list[Op], msgspec.Meta(max_length=MAX_OPS_PER_MESSAGE)]


class Append(Body, tag=143):
    """To the sender's backup: what its shards did, in order.

    stream: of one dump and all that follows. first: number of the first operation in the stream;
    0 begins it.
    """

    stream: int
    first: int
    shipments: list[Shipment]


class Duplicate(Body, tag=145):
    """To the sender's backup, with replicas=2: second copies of chunks of the sender's, which rows
    are about to use. Answered when they are there. RANGE records; u8 how many bytes each has."""

    partition: str
    generation: int
    ranges: bytes
    sizes: bytes


class Inherited(Body, tag=144):
    """To every owner of values: the sender has taken over the shards of `origin`, and holds these
    references of the receiver's that those held. RANGE records, u4 counts.

    began: number of the roster under which the sender began with nothing, also what it was given
    by that or one before; `origin` is its address with incarnation 0, as rosters named it before it
    came. Else 0. more: what else it holds comes with the next one."""

    origin: Owner
    ranges: bytes
    counts: bytes
    began: int = 0
    more: bool = False


class Settled(Body, tag=153):
    """To `Settle`: whether the change was carried out."""

    carried_out: bool


class CanFree(Body, tag=150):
    """The sender's producers wait for room: can anybody of the receiver's clients free some?"""


class Stirring(Body, tag=151):
    """Who at the sender's host may still free rows.

    filled: partitions of which it has rows. busy: partitions of clients that do not wait in a call.
    held: rows are leased, or stay or go for other reasons than a stage's. claims: how many wait.
    claimable: rows are ready for some stage. done: operations so far, to see whether any came.
    """

    filled: list[str]
    busy: list[str]
    held: bool
    claims: int
    claimable: bool
    done: int


class Identify(Body, tag=157):
    """Who are these clients of the receiver's? Asked when somebody waits, for a message."""

    sessions: list[int]


class Identified(Body, tag=158):
    """Per session what people call the client, and for how many ms it has been disconnected; -1: it
    is connected."""

    clients: list[tuple[str, int]]


class Sample(Body, tag=160):
    """Asks for bytes to try transports on, which the owner keeps while there is room. device: bytes
    on a device, which its device workers serve; an owner without any has none."""

    device: bool = False


class Sampled(Body, tag=161):
    """Bytes `(seed + 167 i) xor (i >> 8) xor (i >> 16)`, modulo 256, at index i of one range.

    nbytes 0: there is no room for any. transport: the engine that the owner's bulk workers run;
    missing: why not the one it was told to.
    """

    range: int
    generation: int
    nbytes: int
    seed: int
    transport: str
    missing: str
    requested: str
    version: str
    arena_bytes: int


class PeerRequest(msgspec.Struct, array_like=True):
    """has: (stream, how many operations of it), of what the sender backs up for the receiver."""

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
    """incarnation: of the answering peer; where it changed, the peer was started anew. append: to
    its backup, what that has to have before the answer may be told to anybody."""

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
        | Stirring
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
    """One message. FrameTooLarge when the other side would refuse it, and end the link for it."""
    message = _encoder.encode(envelope)
    if len(message) > MAX_FRAME_BYTES:
        what = type(envelope.body).__name__
        raise FrameTooLarge(
            f"a message of type {what} between peers would have {len(message)} bytes, over the "
            f"limit of {MAX_FRAME_BYTES}: use fewer rows per call. The small values of a row are "
            "sent together, so fewer fields may not help",
            size=len(message),
            limit=MAX_FRAME_BYTES,
        )
    return message


def decode_request(body: bytes | memoryview) -> PeerRequest:
    return decoded(_requests_decoder, body, "a peer request")


def decode_reply(body: bytes | memoryview) -> PeerReply:
    return decoded(_replies_decoder, body, "a peer reply")
