"""Where a peer shows its metrics: `HOST:PORT`, off unless given.

Whoever reaches the address reads them: there is no secret on it. So it is loopback, unless the
plane has a token and thereby was meant to be seen by other machines.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from dataplane.errors import InvalidConfig, TokenMissing
from dataplane.launch.config import is_loopback, parse_address
from dataplane.launch.token import Token


@dataclass(frozen=True, slots=True)
class MetricsAddress:
    """host: a name, an address, or `0.0.0.0` or `::` for all of the host's."""

    host: str
    port: int

    @property
    def setting(self) -> str:
        """As `--metrics` takes it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_metrics(text: str, token: Token | None) -> MetricsAddress:
    """`127.0.0.1:9464`, `[::]:9464`. InvalidConfig; TokenMissing where other machines could read it
    and the plane has no token."""
    try:
        host, port = parse_address(f"tcp://{text}")
    except InvalidConfig:
        raise InvalidConfig(
            f"{text!r} is no address for metrics: write HOST:PORT, such as 127.0.0.1:9464 "
            "(--metrics or DATAPLANE_METRICS)"
        ) from None
    if token is None and not is_loopback(host):
        raise TokenMissing(
            f"metrics on {text} can be read from other machines, and this plane has no token: give "
            "a loopback address, 127.0.0.1:PORT, or a cluster token (--token-file or "
            "DATAPLANE_TOKEN_FILE)",
            address=text,
        )
    return MetricsAddress(host, port)


def find_metrics(
    token: Token | None, environ: Mapping[str, str] = os.environ
) -> MetricsAddress | None:
    """What DATAPLANE_METRICS says; None where it is not set."""
    given = environ.get("DATAPLANE_METRICS")
    return parse_metrics(given, token) if given else None
