"""What a peer on this machine is started with: its ports, its command line, its token.

Ports are taken from below those that systems hand out (Linux: 32768 and up): there a connection of
anybody's could take one between the look and the start.
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
    raise OSError(
        f"found fewer than {count} free ports from {FIRST} to {LAST}: end programs that use them"
    )


def free_addresses(count: int) -> list[str]:
    """The same, as peers take them."""
    return [f"tcp://127.0.0.1:{port}" for port in free_ports(count)]


def peer_command(name: str, run: str, *options: str) -> list[str]:
    """The command line of a peer. options: as `dataplane peer` takes them."""
    return [sys.executable, "-m", "dataplane", "peer", "--name", name, "--run", run, *options]


def token_file(folder: Path, token: str = "") -> Path:
    """A file with a cluster token, a new one unless given, as `$DATAPLANE_TOKEN_FILE` takes it."""
    from dataplane.launch.token import new_token

    path = folder / "token"
    path.touch(0o600)
    path.write_text(token or new_token())
    return path
