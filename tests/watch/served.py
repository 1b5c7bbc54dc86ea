"""A page that is served in this process, and requests to it as they are written on a wire."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dataplane.watch.history import History, View
from dataplane.watch.server import Server

KEY = "a-key-of-the-page"


class Page:
    """Shows what a history knows."""

    def __init__(self, history: History) -> None:
        self.history = history
        self._loop = asyncio.new_event_loop()
        self.faults = list[dict[str, Any]]()
        """what tasks of the server raised and nobody retrieved"""
        self._loop.set_exception_handler(lambda _, fault: self.faults.append(fault))
        self.server = Server(history.picture_of, KEY)
        self.port = self._loop.run_until_complete(self.server.open("127.0.0.1", 0))[1]
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/?key={KEY}"

    def show(self, view: View) -> None:
        self._loop.call_soon_threadsafe(self.server.show, view)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def ask(self, path: str, *headers: str, method: str = "GET") -> tuple[str, dict[str, str], str]:
        """(status, headers, body)."""
        with self.connect() as sock:
            lines = "\r\n".join((f"{method} {path} HTTP/1.1", "Host: here", *headers, "", ""))
            sock.sendall(lines.encode("latin-1"))
            answer = b""
            while more := sock.recv(1 << 16):
                answer += more
        head, _, body = answer.decode().partition("\r\n\r\n")
        status, *lines_ = head.split("\r\n")
        told = dict(line.split(": ", 1) for line in lines_)
        return status.removeprefix("HTTP/1.1 "), told, body

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self.server.close(), self._loop).result(20)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)
        self._loop.close()
        gc.collect()
        assert self.faults == []


@contextmanager
def served(history: History) -> Iterator[Page]:
    page = Page(history)
    try:
        yield page
    finally:
        page.close()
