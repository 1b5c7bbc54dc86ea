"""Proofs in bulk transfer: that both sides belong to the run, what a read may read, and which
certificate a peer has.

A connection starts with a proof of each side: an HMAC of its role and of both sides' challenges.
A ticket then names one incarnation of the owner, binds the request by digest and the connection
by nonce (the owner's challenge and a counter), and carries an HMAC-SHA256 under the run's key. A
copied ticket is worthless on another connection, so no clocks are compared: `expiry_ms` is how
long the owner works on the request, on its own clock from its arrival.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

import msgspec

from dataplane.errors import TicketRefused
from dataplane.transport.bulk_frames import Get, Ticket
from dataplane.wire.tables import Owner

_CONTEXT = b"dataplane bulk ticket 1"
_JOIN_CONTEXT = b"dataplane bulk join 1"
_HELD_CONTEXT = b"dataplane bulk held 1"
_WATCHED_CONTEXT = b"dataplane bulk watched 1"


def plane_key(plane: str, epoch: tuple[int, int], secret: bytes | None = None) -> bytes:
    """The key of a run's bulk transfer under one roster. secret: derived from its token.

    Without a secret the key separates the peers of different runs, but does not keep out a
    process that knows the run's name and seeds. Then only the refusal to listen beyond loopback
    protects the run.
    """
    named = msgspec.msgpack.encode((_CONTEXT, plane, epoch))
    if secret is None:
        return hashlib.sha256(named).digest()
    return hmac.digest(secret, named, "sha256")


def nonce_of(challenge: bytes, sequence: int) -> bytes:
    """The nonce of the n-th request on a connection."""
    return challenge + sequence.to_bytes(8, "little")


def proof(
    key: bytes, role: Literal["owner", "reader"], owners_challenge: bytes, readers_challenge: bytes
) -> bytes:
    """The proof that one side of a new connection shows to the other."""
    signed = msgspec.msgpack.encode((_JOIN_CONTEXT, role, owners_challenge, readers_challenge))
    return hmac.digest(key, signed, "sha256")


def issue(
    key: bytes,
    owner: Owner,
    expiry_ms: int,
    nonce: bytes,
    pieces: bytes,
    transport: str = "tcp",
    card: bytes = b"",
) -> Ticket:
    """Issue a ticket for exactly this column of PIECE records at this owner, this transport and
    this card."""
    digest = _digest(pieces, transport, card)
    mac = _mac(key, owner.peer, owner.incarnation, expiry_ms, nonce, digest)
    return Ticket(owner.peer, owner.incarnation, expiry_ms, nonce, digest, mac)


def verify(key: bytes, get: Get, owner: Owner, nonce: bytes) -> None:
    """Raise TicketRefused unless the ticket is valid for this owner, connection and request."""
    ticket, digest = get.ticket, _digest(get.pieces, get.transport, get.card)
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
    if not authentic or ticket.nonce != nonce or ticket.digest != digest:
        raise TicketRefused(
            "the ticket is invalid: it was issued with the key of a different run, for a "
            "different connection, or for different ranges. Start all peers with the same --run "
            "and --token-file"
        )
    if (ticket.peer, ticket.incarnation) != (owner.peer, owner.incarnation):
        raise TicketRefused(
            f"the ticket is for incarnation {ticket.incarnation} of peer {ticket.peer!r}, but it "
            f"reached incarnation {owner.incarnation} of peer {owner.peer!r}: repeat the call to "
            "find where the values are now",
            peer=owner.peer,
            incarnation=owner.incarnation,
        )


def held_mac(key: bytes, nonce: bytes, card: bytes, sources: bytes) -> bytes:
    """The owner's proof that a card and offsets are its own, for this request."""
    signed = msgspec.msgpack.encode((_HELD_CONTEXT, nonce, card, sources))
    return hmac.digest(key, signed, "sha256")


def watched_mac(key: bytes, nonce: bytes, owner: Owner, ended: bool) -> bytes:
    """The proof that the answer whether this process has exited comes from the owner's host."""
    signed = (_WATCHED_CONTEXT, nonce, owner.peer, owner.incarnation, ended)
    return hmac.digest(key, msgspec.msgpack.encode(signed), "sha256")


def _digest(pieces: bytes, transport: str, card: bytes) -> bytes:
    return hashlib.blake2b(pieces + transport.encode() + card, digest_size=32).digest()


def _mac(
    key: bytes, peer: str, incarnation: int, expiry_ms: int, nonce: bytes, digest: bytes
) -> bytes:
    signed = msgspec.msgpack.encode((_CONTEXT, peer, incarnation, expiry_ms, nonce, digest))
    return hmac.digest(key, signed, "sha256")


@dataclass(frozen=True, slots=True)
class Identity:
    """The key and certificate that a peer's bulk workers present to TLS connections.

    Created for each incarnation of a peer, never written to a disk, and self-signed: readers know
    the certificate's digest from the control channel, which is authenticated.

    pem: private key and certificate. fingerprint: SHA-256 of the certificate's DER, in hex.
    """

    pem: bytes = field(repr=False)
    fingerprint: str


def new_identity() -> Identity:
    """A fresh P-256 key and a self-signed certificate."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "dataplane bulk worker")])
    # Nobody looks at the dates: it lasts as long as the process, whatever the clocks say.
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime(2000, 1, 1, tzinfo=UTC))
        .not_valid_after(datetime(9999, 12, 31, tzinfo=UTC))
        .sign(key, hashes.SHA256())
    )
    private: bytes = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    public: bytes = certificate.public_bytes(serialization.Encoding.PEM)
    der: bytes = certificate.public_bytes(serialization.Encoding.DER)
    return Identity(private + public, fingerprint_of(der))


def fingerprint_of(der: bytes) -> str:
    """SHA-256 of a certificate, in hex."""
    return hashlib.sha256(der).hexdigest()


def check_certificate(der: bytes | None, fingerprint: str, address: str) -> None:
    """Raise TicketRefused unless the certificate that was presented has this fingerprint."""
    if not hmac.compare_digest(fingerprint_of(der or b"").encode(), fingerprint.encode()):
        raise TicketRefused(
            f"the process at {address} presented a certificate that differs from the one that "
            "the peer announced, so another process may be intercepting the connection: check the "
            "network between the hosts",
            address=address,
        )
