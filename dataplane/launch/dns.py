"""Seeds from one DNS name with an address for each host: `dns://NAME:PORT/COUNT`.

A headless Service of Kubernetes is such a name. The peer resolves the name until it has COUNT
addresses, so that all hosts get the same list, however late the others start. An address
identifies a peer, so this is for jobs whose hosts are not replaced. The pods of a StatefulSet
have stable names instead.
"""

from __future__ import annotations

import ipaddress
import logging
import re
import socket
import time
from collections.abc import Callable

from dataplane.errors import InvalidConfig, SeedsMissing, counted, duration

log = logging.getLogger(__name__)

SCHEME = "dns://"
WAIT_S = 300.0
PAUSE_S = 1.0
MAX_HOSTS = 65_536

_SETTING = re.compile(r"dns://([A-Za-z0-9._-]+):(\d{1,5})/(\d{1,5})")
Resolve = Callable[[str], set[str]]


def addresses_of(name: str) -> set[str]:
    """Return all IPv4 addresses of a name, or its IPv6 addresses if it has no others; none while it
    is unknown."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            found = socket.getaddrinfo(name, None, family=family, type=socket.SOCK_STREAM)
        except OSError:
            continue
        return {str(entry[4][0]) for entry in found}
    return set()


def seeds_of(
    setting: str,
    resolve: Resolve = addresses_of,
    wait_s: float = WAIT_S,
    pause_s: float = PAUSE_S,
) -> tuple[str, ...]:
    """Return the seeds of `dns://NAME:PORT/COUNT`, in the order of their addresses. Waits until
    there are COUNT addresses. Raises InvalidConfig, or SeedsMissing if there are not enough in
    time."""
    name, port, count = _parsed(setting)
    until = time.monotonic() + wait_s
    found = resolve(name)
    if len(found) != count:
        log.info(
            "seeds: %s resolves to %s so far; waiting for %d in total",
            name,
            counted(len(found), "address", "addresses"),
            count,
        )
    while len(found) != count:
        if time.monotonic() >= until:
            raise SeedsMissing(
                f"{name} still resolved to {counted(len(found), 'address', 'addresses')} after "
                f"{duration(wait_s)}, but {setting} expects {count}: check that exactly "
                f"{count} peers are running. On Kubernetes, the headless Service needs "
                "publishNotReadyAddresses: true",
                name=name,
                found=sorted(found),
                expected=count,
            )
        time.sleep(pause_s)
        found = resolve(name)
    ordered = sorted(map(ipaddress.ip_address, found), key=lambda one: (one.version, int(one)))
    return tuple(f"tcp://{f'[{one}]' if one.version == 6 else one}:{port}" for one in ordered)


def _parsed(setting: str) -> tuple[str, int, int]:
    match = _SETTING.fullmatch(setting.strip())
    port, count = (int(match[2]), int(match[3])) if match else (0, 0)
    if match is None or not 0 < port < 65536 or not 0 < count <= MAX_HOSTS:
        raise InvalidConfig(
            f"{setting!r} is not a valid DNS name for seeds: use dns://NAME:PORT/COUNT, for "
            "example dns://grpo.default.svc:7101/4"
        )
    return match[1], port, count
