"""The cluster token: the one secret that the peers of a run share, read from a private file.

Every key is derived from the token, the run's name and the key's role. The token itself is never
sent, and two runs with one token cannot use each other's keys. It is never an argument, and its
bytes are in no log and no repr.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from pathlib import Path

import msgspec

from dataplane.errors import InvalidConfig

MIN_TOKEN_BYTES = 32
MAX_TOKEN_BYTES = 4_096

_CONTEXT = b"dataplane token 1"


class Token:
    """A secret and the file that it was read from."""

    __slots__ = ("_secret", "path")

    def __init__(self, path: Path, secret: bytes) -> None:
        self.path = path
        self._secret = secret

    def __repr__(self) -> str:
        return f"<Token of {self.path}>"

    def key(self, plane: str, role: str) -> bytes:
        """32 bytes for one role in one run."""
        signed = msgspec.msgpack.encode((_CONTEXT, plane, role))
        return hmac.digest(self._secret, signed, "sha256")


def read_token(path: Path | str) -> Token:
    """Read the token from a file, without surrounding white space.

    Raises InvalidConfig unless the file belongs to this user or root, no other user may read it,
    and it holds 32 to 4,096 bytes.
    """
    path = Path(path).absolute()
    try:
        # Non-blocking: opening a pipe without a writer would wait.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as exc:
        raise InvalidConfig(
            f"cannot read the token file {path}: {exc.strerror}. Correct --token-file or "
            "DATAPLANE_TOKEN_FILE",
            path=str(path),
        ) from exc
    try:
        _check_private(path, os.fstat(fd))
        with open(fd, "rb", closefd=False) as file:
            secret = file.read(MAX_TOKEN_BYTES + 1).strip()
    finally:
        os.close(fd)
    if not MIN_TOKEN_BYTES <= len(secret) <= MAX_TOKEN_BYTES:
        raise InvalidConfig(
            f"the token in {path} is {min(len(secret), MAX_TOKEN_BYTES + 1)} bytes long, but a "
            f"token must be {MIN_TOKEN_BYTES} to {MAX_TOKEN_BYTES} bytes long: create one with "
            f"`dataplane token > {path}`",
            path=str(path),
        )
    return Token(path, secret)


def _check_private(path: Path, found: os.stat_result) -> None:
    """Check the file behind a symbolic link, because Kubernetes mounts secrets that way."""
    private = stat.S_ISREG(found.st_mode) and not found.st_mode & 0o077
    if not private or found.st_uid not in (os.getuid(), 0):
        raise InvalidConfig(
            f"the token file {path} must belong to uid {os.getuid()} or root and be readable only "
            f"by its owner, but it has mode {stat.filemode(found.st_mode)} and owner uid "
            f"{found.st_uid}: correct its owner and run `chmod 600 {path}`. If others may have "
            "read the token, create a new one",
            path=str(path),
        )


def new_token() -> str:
    """Create a token of 32 random bytes, in hexadecimal."""
    return secrets.token_hex(MIN_TOKEN_BYTES)
