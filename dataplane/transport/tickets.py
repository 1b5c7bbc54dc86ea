"""Proofs in bulk transfer: that both sides belong to the run, what a read may read, and which
certificate a peer has.

A connection starts with a proof of each side: an HMAC of its role and of both sides' challenges. A
ticket then signs one request with the run's key, and a nonce (the owner's challenge and a counter)
binds it to the connection. A copied ticket is worthless on another connection, so no clocks are
compared: `expiry_ms` is how long the owner works on the request, on its own clock from its arrival.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

import msgspec

from dataplane.errors import TicketRefused
from dataplane.transport.bulk_frames import Get
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
    return _mac(key, _JOIN_CONTEXT, role, owners_challenge, readers_challenge)


def ticket_of(key: bytes, nonce: bytes, get: Get) -> bytes:
    """Return the ticket of a request. It signs all fields, the connection and the number there."""
    way = get.transport, get.card
    return _mac(key, _CONTEXT, nonce, *_named(get.owner), get.expiry_ms, get.pieces, *way)


def held_mac(key: bytes, nonce: bytes, card: bytes, sources: bytes) -> bytes:
    """The owner's proof that a card and offsets are its own, for this request."""
    return _mac(key, _HELD_CONTEXT, nonce, card, sources)


def watched_mac(key: bytes, nonce: bytes, owner: Owner, ended: bool) -> bytes:
    """The proof that an answer about a process's exit comes from the owner's host."""
    return _mac(key, _WATCHED_CONTEXT, nonce, *_named(owner), ended)


def _mac(key: bytes, *signed: object) -> bytes:
    return hmac.digest(key, msgspec.msgpack.encode(signed), "sha256")


def _named(owner: Owner) -> tuple[str, int]:
    return owner.peer, owner.incarnation


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
    # No reader checks the dates: the certificate lasts as long as the process, whatever the clocks
    # say.
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
