"""Which transports a peer may use: `--transport`, DATAPLANE_TRANSPORT.

`auto`: the best that works, tried against TCP with every other host. `required:NAME`: that one or
an error. `off:NAME,NAME`: as `auto` without these; `off`: TCP alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from dataplane.errors import InvalidConfig

_CHOICE = re.compile(r"auto|off|required:([a-z0-9_-]+)|off:([a-z0-9_-]+(?:,[a-z0-9_-]+)*)")


@dataclass(frozen=True, slots=True)
class TransportChoice:
    """required: the only one allowed. off: those that are not. only_tcp: no other is."""

    required: str | None = None
    off: frozenset[str] = frozenset()
    only_tcp: bool = False

    def __str__(self) -> str:
        if self.required:
            return f"required:{self.required}"
        if self.only_tcp:
            return "off"
        return "off:" + ",".join(sorted(self.off)) if self.off else "auto"

    def allows(self, name: str) -> bool:
        if self.required:
            return name == self.required
        return not self.only_tcp and name not in self.off


AUTO = TransportChoice()


def parse_transport(text: str) -> TransportChoice:
    """InvalidConfig for what is none of the forms above."""
    match = _CHOICE.fullmatch(text.strip().lower())
    if match is None:
        raise InvalidConfig(
            f"{text!r} chooses no transport: write auto, required:nixl, off:nixl,ucx or off "
            "(--transport or DATAPLANE_TRANSPORT)"
        )
    required, off = match.groups()
    if match[0] == "off" or required == "tcp":
        return TransportChoice(only_tcp=True)
    return TransportChoice(required, frozenset(off.split(",")) if off else frozenset())


def find_transport(environ: Mapping[str, str] = os.environ) -> TransportChoice:
    """What DATAPLANE_TRANSPORT says; `auto` where it is not set."""
    return parse_transport(environ.get("DATAPLANE_TRANSPORT") or "auto")
