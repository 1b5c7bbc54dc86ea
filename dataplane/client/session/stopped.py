"""Whether the process at the other end of a unix socket is stopped: it will not answer.

Runs in the client, at the deadline of a call. A peer that is only busy gets a moment more, for its
own answer says more than the client's.
"""

from __future__ import annotations

import socket
import struct
from pathlib import Path

_CREDENTIALS = struct.Struct("3i")


def is_stopped(sock: socket.socket) -> bool:
    """False where that cannot be seen from here, as in another pid namespace."""
    try:
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, _, _ = _CREDENTIALS.unpack(raw)
        # The name in brackets may contain anything; the state comes behind it.
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state in ("T", "t")
