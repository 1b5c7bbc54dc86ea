"""Frames and records of bulk transfer: between two workers (TCP), and between worker and peer.

Both are a u32 little-endian length and one MessagePack body, as at the local door. Between workers
the owner's side sends first (`Greeting`). `Join` and `Joined` prove to each side that the other
belongs to the run. A `Get` is then answered by `Held`. Over TCP the raw bytes of all pieces that
still exist follow, in order, and `Sent`. If another transport moves the bytes, `Sent` follows the
reader's `Release`. `Refused` ends the connection.

Lengths are checked before anything is stored. Data per piece are raw columns.
"""

from __future__ import annotations

import functools
from typing import Any

import msgspec
import numpy as np

from dataplane.errors import DataplaneError, from_wire
from dataplane.wire.frames import HEADER_BYTES, decoded
from dataplane.wire.tables import Owner, PoolHandle

MAX_JOIN_FRAME_BYTES = 4_096
"""The limit for frames before both sides have proved that they belong to the run."""
MAX_GET_FRAME_BYTES = 1 << 20
MAX_GET_ITEMS = 16_384
MAX_GET_BYTES = 32 << 20
"""The most bytes that one `Get` over TCP may request. Each costs both sides 3 ms of processor time,
whatever its size."""
MAX_HELD_BYTES = 1 << 30
"""The most bytes that one `Get` over another transport may pin: a one-sided transport pays two
exchanges for each."""
MAX_CARD_BYTES = 64 << 10
"""The most bytes with which an engine may describe a registered region."""
CHALLENGE_BYTES = 16

PIECE = np.dtype([("chunk", "<u8"), ("start", "<u8"), ("nbytes", "<u8")])
"""A part of a chunk, as requested from the owner."""

COPY = np.dtype([("chunk", "<u8"), ("start", "<u8"), ("nbytes", "<u8"), ("dest", "<u8")])
"""A part of a remote chunk, and the offset in the local arena where it goes."""

GONE = np.uint64(0xFFFF_FFFF_FFFF_FFFF)
"""`offset` of the EXTENT with which a peer answers for a chunk that it no longer has."""


class Frame(msgspec.Struct, array_like=True):
    """Base class of all bodies. The tag is the first element."""


# between two workers


class Greeting(Frame, tag=1):
    """The owner's first frame: protocol versions, and what tickets must be bound to."""

    versions: tuple[int, int]
    challenge: bytes


class Join(Frame, tag=6):
    """The reader's first frame: its own challenge, and the proof that it has the run's key."""

    version: int
    challenge: bytes
    proof: bytes


class Joined(Frame, tag=7):
    """The owner's proof. From here on the connection accepts pulls."""

    proof: bytes


class Get(Frame, tag=2):
    """A request for pieces, which the owner pins until they have arrived.

    expiry_ms: how long the owner works on it, from its arrival. pieces: PIECE records. transport:
    what moves the bytes. card: of the reader, for a transport whose owner sends. ticket: the right
    to read these pieces, once; see `tickets`.
    """

    owner: Owner
    expiry_ms: int
    pieces: bytes
    transport: str = "tcp"
    card: bytes = b""
    ticket: bytes = b""


class Sent(Frame, tag=4):
    """The confirmation that the chunks were pinned until the last byte was sent."""

    nbytes: int


class Held(Frame, tag=9):
    """The reply to `Get`: the owner pins the pieces. Over TCP their bytes follow.

    sources: u64 per piece, its offset in the owner's region, or GONE. mac: see `tickets`.
    """

    sources: bytes
    card: bytes
    mac: bytes


class Release(Frame, tag=15):
    """The reader has received `nbytes` of the held pieces, by another transport than TCP. `Sent`
    confirms that they were held until now."""

    nbytes: int


class Watch(Frame, tag=16):
    """A question whether this process has exited. The connection then stays open and idle. How
    it ends says what happened to the owner's host."""

    owner: Owner


class Watched(Frame, tag=17):
    """The reply to a watch. ended: the owner's process has exited, as its witness reports. mac:
    see `tickets`."""

    ended: bool
    mac: bytes


class Refused(Frame, tag=5):
    """A typed error. The connection ends."""

    code: str
    message: str
    details: dict[str, Any] = {}

    @classmethod
    def of(cls, error: DataplaneError) -> Refused:
        return cls(type(error).__name__, error.message, error.details)

    def error(self) -> DataplaneError:
        return from_wire(self.code, self.message, self.details)


# from the peer to its worker


class Configure(Frame, tag=10):
    """The first frame: the identity of this peer, and the run's key for tickets.

    transports: the engines to run besides TCP. tls: the private key and certificate in PEM of a
    peer that accepts only TLS; empty without TLS. pools: the region is these pools, one
    after the other; [] for the host arena.
    """

    owner: Owner
    key: bytes
    transports: list[str] = []
    tls: bytes = b""
    pools: list[PoolHandle] = []

    def __repr__(self) -> str:
        return f"<Configure {self.transports} for {self.owner.peer}>"


class Read(Frame, tag=11):
    """A read job. copies: COPY records. timeout_ms: counted from the arrival of this frame.
    fingerprint: see `seam.Remote`."""

    job: int
    owner: Owner
    address: str
    copies: bytes
    timeout_ms: int
    transport: str = "tcp"
    fingerprint: str = ""


class Cancel(Frame, tag=12):
    job: int


class PinAnswer(Frame, tag=13):
    """The reply to a pin request. places: EXTENT records. refused: the error if nothing was
    pinned."""

    ask: int
    places: bytes
    refused: Refused | None = None


class Forget(Frame, tag=14):
    """The peer `owner` is no longer a member."""

    owner: Owner


# from a worker to its peer


class Ready(Frame, tag=20):
    """The arena is mapped and the worker serves. missing: the requested engines that it does not
    run, and why."""

    missing: dict[str, str] = {}


class PinAsked(Frame, tag=21):
    """A request to pin. chunks: chunk numbers. The pin holds until `Unpin` with the same `ask`."""

    ask: int
    chunks: bytes


class Unpin(Frame, tag=22):
    """The end of a pin. nbytes: the bytes that were sent under it."""

    ask: int
    nbytes: int


class Finished(Frame, tag=23):
    """The end of a job, successful or not. After this, nothing writes to its destinations."""

    job: int
    gone: bytes
    nbytes: int
    refused: Refused | None = None


ToOwner = Get | Release | Watch
FromOwner = Greeting | Joined | Sent | Refused | Held | Watched
ToWorker = Configure | Read | Cancel | PinAnswer | Forget
FromWorker = Ready | PinAsked | Unpin | Finished

_encoder = msgspec.msgpack.Encoder()
_FRAME = "a frame of bulk transfer"


def encode(body: Frame) -> bytearray:
    """Encode one frame."""
    frame = bytearray(HEADER_BYTES)
    _encoder.encode_into(body, frame, HEADER_BYTES)
    frame[:HEADER_BYTES] = (len(frame) - HEADER_BYTES).to_bytes(HEADER_BYTES, "little")
    return frame


decode_join = functools.partial(decoded, msgspec.msgpack.Decoder(Join), what=_FRAME)
decode_to_owner = functools.partial(decoded, msgspec.msgpack.Decoder[ToOwner](ToOwner), what=_FRAME)
decode_from_owner = functools.partial(
    decoded, msgspec.msgpack.Decoder[FromOwner](FromOwner), what=_FRAME
)
decode_to_worker = functools.partial(
    decoded, msgspec.msgpack.Decoder[ToWorker](ToWorker), what=_FRAME
)
decode_from_worker = functools.partial(
    decoded, msgspec.msgpack.Decoder[FromWorker](FromWorker), what=_FRAME
)
