"""What peers say to each other over the control channel (zmq ROUTER/DEALER).

One envelope a message.

Operations that a client asked for are forwarded with the client's own bodies (`messages`), their
VALUE columns resolved and `owners` filled in. What is only between peers is here: the handshake,
what becomes of claims, and of bytes.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from dataplane.errors import FrameTooLarge, ProtocolError
from dataplane.wire import rosters, sampling
from dataplane.wire.checkpoint import Answered, Asked
from dataplane.wire.limits import MAX_FRAME_BYTES
from dataplane.wire.messages import (
    Admit,
    Admitted,
    Advance,
    Body,
    Claim,
    Close,
    Define,
    Defined,
    Done,
    Drop,
    Dropped,
    Failed,
    Fetch,
    Finish,
    Losses,
    LossesDone,
    Put,
    PutDone,
    Read,
    Reset,
    Seal,
    Stats,
    StatsDone,
    Tag,
    Unadmit,
    Wait,
)
from dataplane.wire.tables import Laid, Table, Where


class PeerHello(Body, tag=100):
    """Both directions: who one is. Anything that must be equal is compared before anything else.

    epoch: of the first roster, by which equal seeds are known. bulk: `host:port` of each bulk
    worker. bulk_fingerprint: SHA-256 in hex of the certificate that they show; "": they speak no
    TLS. device_bulk: as `bulk`, of the workers that move device memory within a host."""

    versions: tuple[int, int]
    plane: str
    name: str
    incarnation: int
    address: str
    epoch: tuple[int, int]
    shards: int
    bulk: list[str]
    max_frame_bytes: int = MAX_FRAME_BYTES
    bulk_fingerprint: str = ""
    device_bulk: list[str] = []


class AddStage(Body, tag=103):
    """A stage that was not declared with its partition; answered by `Defined`."""

    partition: str
    generation: int
    stage: str
    fields: list[str]


class Withdraw(Body, tag=112):
    """To a claim's shard: nobody waits for it any more. When this is answered it has no lease, and
    never will."""

    partition: str
    generation: int
    stage: str
    number: int


class Granted(Body, tag=115):
    """The answer to a claim: leased rows, with VALUE columns of the fields that it fetches; or a
    part in a plan."""

    lease: int
    table: Table
    plan: Laid | None = None


class Missing(Body, tag=119):
    """Why units of a stage are not ready, for a ClaimTimeout's message. claim: the number of the
    one that waits; 0: none does."""

    partition: str
    generation: int
    stage: str
    unit: Literal["rows", "groups"]
    where: Where | None = None
    claim: int = 0


class Pull(Body, tag=134):
    """To the owner of values: so many bytes from the start of each of these ranges.

    ranges: RANGE records. sizes: u8 a range."""

    ranges: bytes
    sizes: bytes


class Pulled(Body, tag=135):
    """data: all of it, in the order asked for; empty where some are gone. gone: how many."""

    data: bytes
    gone: int = 0


class Release(Body, tag=120):
    """Value references that a shard no longer holds, to their owner. RANGE records, u4 counts."""

    ranges: bytes
    counts: bytes


class Found(Body, tag=121):
    """Rows of a Read or Fetch between peers: VALUE columns. more: ask again behind the last key.
    index: as in `Fetched`."""

    table: Table
    more: bool = False
    index: bytes = b""


class PeerRequest(msgspec.Struct, array_like=True):
    """has: (stream, how many operations of it), of what the sender backs up for the receiver."""

    rid: int
    sender: str
    incarnation: int
    session: int
    op: int
    floor: int
    epoch: tuple[int, int]
    deadline_ms: int
    body: (
        PeerHello
        | rosters.Beat
        | rosters.Rostered
        | rosters.Append
        | rosters.Inherited
        | rosters.CanFree
        | rosters.Void
        | AddStage
        | Claim
        | Withdraw
        | Missing
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
        | Unadmit
        | Advance
        | Stats
        | sampling.Sample
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
        | rosters.Rostered
        | Granted
        | Pulled
        | Defined
        | PutDone
        | Dropped
        | Found
        | rosters.Stirring
        | LossesDone
        | Admitted
        | StatsDone
        | sampling.Sampled
        | Answered
        | Done
        | Failed
    )
    append: rosters.Append | None = None


_encoder = msgspec.msgpack.Encoder()
_requests_decoder = msgspec.msgpack.Decoder(PeerRequest)
_replies_decoder = msgspec.msgpack.Decoder(PeerReply)


def encode(envelope: PeerRequest | PeerReply) -> bytes:
    """One message. FrameTooLarge when the other side would refuse it, and end the link for it."""
    message = _encoder.encode(envelope)
    if len(message) > MAX_FRAME_BYTES:
        what = type(envelope.body).__name__
        raise FrameTooLarge(
            f"{what} between peers would be a message of {len(message)} bytes, the limit is "
            f"{MAX_FRAME_BYTES}: name fewer rows at a time, or fewer fields with fields=",
            size=len(message),
            limit=MAX_FRAME_BYTES,
        )
    return message


def _decode(decoder: msgspec.msgpack.Decoder[Any], body: bytes | memoryview, what: str) -> Any:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise ProtocolError(f"not a {what} of this protocol: {exc}") from exc


def decode_request(body: bytes | memoryview) -> PeerRequest:
    request: PeerRequest = _decode(_requests_decoder, body, "peer request")
    return request


def decode_reply(body: bytes | memoryview) -> PeerReply:
    reply: PeerReply = _decode(_replies_decoder, body, "peer reply")
    return reply
