"""Whether bulk transfer is encrypted: `--bulk-tls`, DATAPLANE_BULK_TLS; off unless given."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec

from dataplane.errors import InvalidConfig
from dataplane.launch.transport import TransportChoice

_SAID = {"1": True, "true": True, "0": False, "false": False, "": False}


def find_bulk_tls(environ: Mapping[str, str] = os.environ) -> bool:
    """What DATAPLANE_BULK_TLS says: 1 or 0. InvalidConfig for anything else."""
    given = environ.get("DATAPLANE_BULK_TLS", "")
    said = _SAID.get(given.strip().lower())
    if said is None:
        raise InvalidConfig(f"{given!r} is neither 1 nor 0 (DATAPLANE_BULK_TLS)")
    return said


def check_bulk_tls(transport: TransportChoice) -> None:
    """InvalidConfig where TLS cannot be had as the rest is set, or as things are installed."""
    if transport.required:
        raise InvalidConfig(
            f"{transport.required} moves bytes unencrypted: give --transport {transport} or "
            "--bulk-tls (DATAPLANE_BULK_TLS), not both",
            transport=transport.required,
        )
    if find_spec("cryptography") is None:
        raise InvalidConfig(
            "--bulk-tls (DATAPLANE_BULK_TLS) makes certificates with cryptography, which is not "
            "installed: pip install 'dataplane[tls]'"
        )
