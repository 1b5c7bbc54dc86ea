"""How a reader joins at a bulk worker's port, without I/O: greeting, join, joined.

Both sides prove that they have the run's key. `connections` uses this over blocking streams, and
`witness` on an event loop.
"""

from __future__ import annotations

import hmac
import secrets

from dataplane.errors import ProtocolError, TicketRefused, VersionMismatch
from dataplane.transport.bulk_frames import (
    CHALLENGE_BYTES,
    FromOwner,
    Greeting,
    Join,
    Joined,
    Refused,
    decode_from_owner,
    encode,
)
from dataplane.transport.tickets import proof
from dataplane.wire.limits import PROTOCOL_VERSION, PROTOCOL_VERSION_MIN


def answer_of(body: bytes) -> FromOwner:
    """Decode a frame of the owner. Raises the error with which the owner refused the reader."""
    frame = decode_from_owner(body)
    if isinstance(frame, Refused):
        raise frame.error()
    return frame


class Joining:
    """The reader's side of the join."""

    def __init__(self, address: str, key: bytes, greeting: FromOwner) -> None:
        """Raises ProtocolError if the process is no bulk worker, or VersionMismatch."""
        if not isinstance(greeting, Greeting) or len(greeting.challenge) != CHALLENGE_BYTES:
            raise ProtocolError(
                f"the process at {address} is not a bulk worker: check that no other program uses "
                "this address"
            )
        self.greeting, self._version = greeting, _common_version(greeting.versions)
        self._address, self._key = address, key
        self._challenge = secrets.token_bytes(CHALLENGE_BYTES)

    def join(self) -> bytearray:
        """Return the frame to send."""
        mine, theirs = self._challenge, self.greeting.challenge
        return encode(Join(self._version, mine, proof(self._key, "reader", theirs, mine)))

    def check(self, answer: FromOwner) -> None:
        """Raise TicketRefused unless the owner proves that it has the key too."""
        expected = proof(self._key, "owner", self.greeting.challenge, self._challenge)
        if not isinstance(answer, Joined) or not hmac.compare_digest(answer.proof, expected):
            raise TicketRefused(
                f"the process at {self._address} cannot prove that it is a peer of this "
                "run: start all peers with the same --run and --token-file",
                address=self._address,
            )


def _common_version(versions: tuple[int, int]) -> int:
    version = min(versions[1], PROTOCOL_VERSION)
    if version < max(versions[0], PROTOCOL_VERSION_MIN):
        raise VersionMismatch(
            f"the owner of the values speaks bulk protocol versions {versions[0]} to "
            f"{versions[1]}, but the reader speaks versions {PROTOCOL_VERSION_MIN} to "
            f"{PROTOCOL_VERSION}: install the same dataplane release everywhere",
            versions=list(versions),
        )
    return version
