"""A process that does what a peer does as seen from outside: holds a name and answers a socket.

`python stand_in.py peer FOLDER NAME` is such a peer; it says "ready", and ends on SIGTERM.
`python stand_in.py attach RUN` attaches with such a peer as the embedded one, and prints the
path of the socket.
`python stand_in.py broken` fails at once.
"""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from dataplane.errors import DataplaneError
from dataplane.launch import embedded, rundir
from dataplane.launch.settings import PeerConfig


def peer(folder: str, name: str) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    lock = rundir.claim_name(Path(folder), name)
    try:
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(str(lock.socket_path))
            door.listen(64)
            print("ready", flush=True)
            while True:
                door.accept()[0].close()
    finally:
        lock.release()


def stand_in_command(config: PeerConfig) -> list[str]:
    folder = rundir.plane_dir(config.run, config.run_dir)
    return [sys.executable, __file__, "peer", str(folder), config.name]


def broken_command(config: PeerConfig) -> list[str]:
    return [sys.executable, __file__, "broken"]


def attach(run: str) -> None:
    embedded.command_line = stand_in_command
    try:
        print(embedded.attach(run).socket, flush=True)
    except DataplaneError as error:
        print(f"{type(error).__name__}: {error}", flush=True)


def broken() -> None:
    raise SystemExit("this peer cannot start: no luck today")


if __name__ == "__main__":
    roles: dict[str, Callable[..., None]] = {"peer": peer, "attach": attach, "broken": broken}
    roles[sys.argv[1]](*sys.argv[2:])
