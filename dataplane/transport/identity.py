"""What a peer's bulk workers show to whoever connects with TLS: a key and a certificate.

Made anew by each life of a peer, never written to a disk, and vouched for by nobody: readers know
the certificate's digest from the control channel, which is authenticated. So there is nothing to
hand out, to renew or to take back.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from datetime import UTC, datetime


@dataclass(frozen=True, slots=True)
class Identity:
    """pem: private key and certificate. fingerprint: SHA-256 of the certificate's DER, in hex."""

    pem: bytes = field(repr=False)
    fingerprint: str


def new_identity() -> Identity:
    """A fresh P-256 key and a certificate that it signed itself. ImportError without `[tls]`."""
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
