"""How the tensor-parallel ranks of one trainer learn which rows their leader holds.

One line of JSON a batch over a unix socket, as a broadcast over the model-parallel group would
carry it: only names, never values. The leader keeps its lease until all have read.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

from bench.planes.base import Worker


def _path(worker: Worker) -> str:
    return str(Path(worker.job.folder) / f"tp-{worker.rank // worker.job.tp}.sock")


class Leader:
    """The worker that takes batches: a trainer's first rank, which the others follow, or a worker
    that nobody follows. It listens from the start; followers connect once the run has begun."""

    def __init__(self, worker: Worker) -> None:
        leads = worker.role == "train" and worker.tp_rank == 0
        self._followers = worker.job.tp - 1 if leads else 0
        self._listener = socket.socket(socket.AF_UNIX)
        self._files: list[Any] = []
        if self._followers:
            self._listener.bind(_path(worker))
            self._listener.listen()

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
    """A further rank of a trainer. It connects when it first hears what the leader holds."""

    def __init__(self, worker: Worker) -> None:
        self._path = _path(worker)
        self._sock = socket.socket(socket.AF_UNIX)
        self._file: Any = None

    def hear(self) -> Any:
        if self._file is None:
            self._sock.connect(self._path)
            self._file = self._sock.makefile("rw")
        line = self._file.readline()
        if not line:
            raise EOFError("the leader of the tensor-parallel ranks went away")
        return json.loads(line)

    def answer(self) -> None:
        self._file.write("\n")
        self._file.flush()

    def close(self) -> None:
        if self._file:
            self._file.close()
        self._sock.close()
