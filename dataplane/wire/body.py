"""The base of all message bodies, apart so that each channel's messages can have their own file."""

from __future__ import annotations

import msgspec


class Body(msgspec.Struct, array_like=True):
    """Base of all message bodies; the tag is the first element of the array."""
