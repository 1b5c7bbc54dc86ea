"""Tickets: the proof that a bulk read is asked for by a member of the plane.

A ticket names the owner in one life of its process, binds the pieces by digest and the connection
by nonce (the owner's challenge and a counter), and carries an HMAC-SHA256 under the plane's key.
A copied ticket is worthless on another connection, so no clock is compared: `expiry_ms` is how
long the owner works on the request, counted on its own clock from its arrival.
"""

from __future__ import annotations

import hashlib
import hmac

import msgspec

from dataplane.errors import TicketRefused
from dataplane.transport.bulk_frames import Ticket
from dataplane.wire.tables import Owner

_CONTEXT = b"dataplane bulk ticket 1"


def plane_key(plane: str, epoch: tuple[int, int]) -> bytes:
    """The key of a plane that has no cluster token yet.

    It keeps the peers of different planes apart. It keeps out nobody who knows the plane's name
    and seeds: until there is a token, only the refusal to listen beyond loopback does that.
    """
    return hashlib.sha256(msgspec.msgpack.encode((_CONTEXT, plane, epoch))).digest()


def nonce_of(challenge: bytes, sequence: int) -> bytes:
    """The nonce of the n-th request on a connection."""
    return challenge + sequence.to_bytes(8, "little")


def issue(key: bytes, owner: Owner, expiry_ms: int, nonce: bytes, pieces: bytes) -> Ticket:
    """A ticket for exactly this column of PIECE records at this owner."""
    digest = _digest(pieces)
    mac = _mac(key, owner.peer, owner.incarnation, expiry_ms, nonce, digest)
    return Ticket(owner.peer, owner.incarnation, expiry_ms, nonce, digest, mac)


def verify(key: bytes, ticket: Ticket, owner: Owner, nonce: bytes, pieces: bytes) -> None:
    """TicketRefused unless the ticket holds for this owner, connection and column."""
    expected = _mac(
        key,
        ticket.peer,
        ticket.incarnation,
        ticket.expiry_ms,
        ticket.nonce,
        ticket.digest,
    )
    authentic = hmac.compare_digest(expected, ticket.mac)
    # One answer for every way to be a stranger: it tells nothing about the key.
    if not authentic or ticket.nonce != nonce or ticket.digest != _digest(pieces):
        raise TicketRefused(
            "the ticket does not hold: it was made with another plane's key, for another "
            "connection or for other ranges"
        )
    if (ticket.peer, ticket.incarnation) != (owner.peer, owner.incarnation):
        raise TicketRefused(
            f"the ticket is for peer {ticket.peer!r} in life {ticket.incarnation}, this is "
            f"{owner.peer!r} in life {owner.incarnation}; ask the shard where the bytes are now",
            peer=owner.peer,
            incarnation=owner.incarnation,
        )


def _digest(pieces: bytes) -> bytes:
    return hashlib.blake2b(pieces, digest_size=32).digest()


def _mac(
    key: bytes, peer: str, incarnation: int, expiry_ms: int, nonce: bytes, digest: bytes
) -> bytes:
    signed = msgspec.msgpack.encode((_CONTEXT, peer, incarnation, expiry_ms, nonce, digest))
    return hmac.digest(key, signed, "sha256")
