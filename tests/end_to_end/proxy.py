"""A unix socket in front of a peer's, which can break connections in the middle of a call."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path


class Proxy:
    """Clients connect to `path`. `asking` and `answering` decide where connections break: before a
    request reaches the peer, or before its answer reaches the client. Handshakes pass."""

    def __init__(self, path: Path, peer: Path) -> None:
        self.path = path
        self.peer = peer
        self.broken = 0
        self._counting = threading.Lock()
        self.asking: Callable[[bytes], bool] = lambda data: False
        self.answering: Callable[[bytes], bool] = lambda data: False
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(64)
        threading.Thread(target=self._accept, daemon=True).start()

    def connect(self, limit_s: float = 0.0) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(str(self.path))
        except OSError:  # it is closed already
            sock.close()
            raise
        return sock

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                peer = socket.socket(socket.AF_UNIX)
                peer.connect(str(self.peer))
                self._pairs.append((client, peer))
                self._greet(client, peer)
                for source, sink, breaks in ((client, peer, "asking"), (peer, client, "answering")):
                    run = partial(self._carry, source, sink, breaks)
                    threading.Thread(target=run, daemon=True).start()

    @staticmethod
    def _greet(client: socket.socket, peer: socket.socket) -> None:
        """The peer's welcome with its descriptors, the hello, and its answer."""
        welcome, fds, _, _ = socket.recv_fds(peer, 1 << 16, 2)
        socket.send_fds(client, [welcome], fds)
        for fd in fds:
            socket.close(fd)
        peer.sendall(client.recv(1 << 16))
        client.sendall(peer.recv(1 << 16))

    def _carry(self, source: socket.socket, sink: socket.socket, breaks: str) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 20):
                if getattr(self, breaks)(data):
                    with self._counting:
                        self.broken += 1
                    break
                sink.sendall(data)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for pair in self._pairs:
            for sock in pair:
                sock.close()
