"""Ports of this host for processes that are about to start.

From below those that systems hand out by themselves (Linux: 32768 and up): there a connection of
anybody's could take one between the look and the start.
"""

from __future__ import annotations

import contextlib
import secrets
import socket

FIRST, LAST = 15_000, 32_000
ATTEMPTS = 1_000


def free_ports(count: int) -> list[int]:
    """Ports of loopback that are free now. All are held until all are known, so that they differ.
    OSError where hardly any is."""
    with contextlib.ExitStack() as held:
        ports: list[int] = []
        for _ in range(ATTEMPTS):
            if len(ports) == count:
                return ports
            port = FIRST + secrets.randbelow(LAST - FIRST)
            with contextlib.suppress(OSError):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
                ports.append(port)
    raise OSError(f"no {count} free ports were found between {FIRST} and {LAST}")


def free_addresses(count: int) -> list[str]:
    """The same, as peers take them."""
    return [f"tcp://127.0.0.1:{port}" for port in free_ports(count)]
