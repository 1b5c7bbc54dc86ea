"""Keys of rows and groups: 16 bytes that either side can compute without asking anybody.

A name that the user gave becomes the xxh3-128 digest of its type and text. A name that the client
mints is its session and a counter, big-endian, so that minted keys sort in the order in which a
session made them. Shared by client and peer; no state.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from xxhash import xxh3_128_digest

from dataplane.errors import InvalidRows, LimitExceeded
from dataplane.wire.limits import MAX_NAME_BYTES
from dataplane.wire.tables import Name

KEY_BYTES = 16
MINTED_MARK = "~"
PROGRESS = "~"
"""Between a stage and a field in the name of the stage's progress. Only stages may have it in their
names."""

_MINTED = re.compile(r"~[0-9a-f]{32}")
_FEW = 8
_MINTED_RECORD = np.dtype([("session", ">u8"), ("counter", ">u8")])


def hash_name(name: Name) -> bytes:
    """The key of a name. InvalidRows for anything but str and int, LimitExceeded when too long."""
    if type(name) is str:
        if name.startswith(MINTED_MARK):
            return parse_minted(name)
        if not name.isascii() and (reason := unencodable(name)):
            raise InvalidRows(f"invalid key or group id {name!r:.80}, {reason}")
        text = name.encode()
        if len(text) > MAX_NAME_BYTES:
            raise LimitExceeded(
                f"the name {name!r:.40}… has {len(text)} bytes, over the limit of "
                f"{MAX_NAME_BYTES}: use a shorter name",
                size=len(text),
                limit=MAX_NAME_BYTES,
            )
        return xxh3_128_digest(b"s" + text)
    if isinstance(name, bool) or not isinstance(name, int | str):
        raise InvalidRows(
            "a key or group id must be a str or an int, not "
            f"{type(name).__name__} ({name!r:.40}): convert it"
        )
    if isinstance(name, str):
        return hash_name(str(name))
    if not -(1 << 63) <= name < 1 << 64:
        raise InvalidRows(f"invalid key or group id {name!r:.80}, {unencodable(name)}")
    return xxh3_128_digest(b"i%d" % name)


def unencodable(value: object) -> str | None:
    """Why a name or a tag of these types has no form on the wire; None where it has one."""
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        return "which does not fit in a 64-bit int; pass it as a str"
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as exc:
            return f"which is not valid text ({exc.reason}); encode it as valid Unicode"
    return None


def hash_names(names: Sequence[Name]) -> bytes:
    """The KEY column of many names."""
    return b"".join([hash_name(name) for name in names])


def mint(session: int, counter: int) -> bytes:
    """The key of row or group number `counter` of a session."""
    return session.to_bytes(8, "big") + counter.to_bytes(8, "big")


def mint_many(session: int, first: int, count: int) -> bytes:
    """The KEY column of `count` minted keys with consecutive counters."""
    if count <= _FEW:  # numpy costs more than the work
        start = session.to_bytes(8, "big")
        return b"".join([start + n.to_bytes(8, "big") for n in range(first, first + count)])
    keys = np.empty(count, _MINTED_RECORD)
    keys["session"] = session
    keys["counter"] = np.arange(first, first + count, dtype=np.uint64)
    return keys.tobytes()


def format_minted(key: bytes) -> str:
    """A minted key as users see it."""
    return MINTED_MARK + key.hex()


def format_minted_many(keys: bytes) -> list[Name]:
    """A KEY column of minted keys as users see it."""
    text = keys.hex()
    width = 2 * KEY_BYTES
    return [MINTED_MARK + text[i : i + width] for i in range(0, len(text), width)]


def parse_minted(name: str) -> bytes:
    """The key of a shown minted name. InvalidRows for other names that start with its mark."""
    if not _MINTED.fullmatch(name):
        raise InvalidRows(
            f"key {name!r} starts with {MINTED_MARK!r}, which is reserved for generated "
            "keys: choose another first character"
        )
    return bytes.fromhex(name[1:])
