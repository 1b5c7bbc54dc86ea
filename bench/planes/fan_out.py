"""How the tensor-parallel ranks of one trainer learn which rows their leader holds.

One line of JSON a batch over a unix socket, as a broadcast over the model-parallel group would
carry it: only names, never values. The leader keeps its lease until all have read.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any


def _path(folder: str, trainer: int) -> str:
    return str(Path(folder) / f"tp-{trainer}.sock")


class Leader:
    """Listens from the start; the others connect once the run has begun."""

    def __init__(self, folder: str, trainer: int, followers: int) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(_path(folder, trainer))
        self._listener.listen()
        self._followers = followers
        self._files: list[Any] = []

    def tell(self, message: Any) -> None:
        """Send a message to every follower."""
        while len(self._files) < self._followers:
            self._files.append(self._listener.accept()[0].makefile("rw"))
        for file in self._files:
            file.write(json.dumps(message) + "\n")
            file.flush()

    def wait(self) -> None:
        """Until every follower has answered."""
        for file in self._files:
            if not file.readline():
                raise EOFError("a tensor-parallel rank went away")

    def close(self) -> None:
        self._listener.close()
        for file in self._files:
            file.close()


class Follower:
    """Hears what the leader holds."""

    def __init__(self, folder: str, trainer: int) -> None:
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.connect(_path(folder, trainer))
        self._file = self._sock.makefile("rw")

    def hear(self) -> Any:
        line = self._file.readline()
        if not line:
            raise EOFError("the leader of the tensor-parallel ranks went away")
        return json.loads(line)

    def answer(self) -> None:
        self._file.write("\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()
        self._sock.close()
