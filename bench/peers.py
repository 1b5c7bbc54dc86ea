"""How the bench starts peers on this machine: their ports, command line and token.

Ports are below the range that systems assign (Linux: from 32768), where another connection could
take one between the check and the start.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import sys
from pathlib import Path

FIRST, LAST = 15_000, 32_000
ATTEMPTS = 1_000


def free_ports(count: int) -> list[int]:
    """Free ports of loopback, all different. Raises OSError if there are too few."""
    with contextlib.ExitStack() as held:
        ports: list[int] = []
        for _ in range(ATTEMPTS):
            if len(ports) == count:
                return ports
            port = FIRST + secrets.randbelow(LAST - FIRST)
            with contextlib.suppress(OSError):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
                ports.append(port)
    raise OSError(
        f"found fewer than {count} free ports from {FIRST} to {LAST}: end programs that use them"
    )


def free_addresses(count: int) -> list[str]:
    """The same ports as addresses of peers."""
    return [f"tcp://127.0.0.1:{port}" for port in free_ports(count)]


def peer_command(name: str, run: str, *options: str) -> list[str]:
    """The command line of a peer. options: as `dataplane peer` takes them."""
    return [sys.executable, "-m", "dataplane", "peer", "--name", name, "--run", run, *options]


def token_file(folder: Path, token: str = "") -> Path:
    """A file with a cluster token, created unless `$DATAPLANE_TOKEN_FILE` names one."""
    from dataplane.launch.token import new_token

    path = folder / "token"
    path.touch(0o600)
    path.write_text(token or new_token())
    return path
