"""Serves the page over HTTP. It is read-only, needs a key, and has a limit on requests.

`/` is the page, `/live` a stream of views (server-sent events), `/step?number=N` one step's
picture. A browser that opens `/?key=KEY` gets a cookie with the key. Requests without the key are
refused. A viewer that reads slowly misses views, so nothing queues.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import importlib.resources
import logging
import socket
from collections.abc import Callable
from urllib.parse import parse_qs, urlsplit

import msgspec

from dataplane.errors import AddressInUse, InvalidConfig
from dataplane.watch.history import View
from dataplane.watch.picture import Picture

log = logging.getLogger(__name__)

MAX_VIEWERS = 32
MAX_REQUESTS = 64
"""Requests with the key in progress, viewers included. More are refused."""
MAX_STRANGERS = 32
"""Connections that have not shown the key. A further one replaces the oldest of them, so idle
strangers do not shut out those who have the key."""
MAX_HEAD_BYTES = 16 << 10
READ_S = 5.0
"""A connection that has sent no request after this many seconds is closed."""
WRITE_S = 15.0
"""A viewer that takes longer than this to read one view is disconnected."""
TEXT = "text/plain; charset=utf-8"
JSON = "application/json"

Answer = tuple[str, str, bytes, tuple[str, ...]]
"""Status, content type, body, and further header lines."""


def _page() -> tuple[bytes, str]:
    """Return the page as one document, and a policy that lets it run only its own script."""
    files = importlib.resources.files("dataplane.watch")
    page, style, script = (
        (files / f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js")
    )

    def digest(text: str) -> str:
        return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

    policy = (
        f"default-src 'none'; script-src 'sha256-{digest(script)}'; "
        f"style-src 'sha256-{digest(style)}'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    text = page.replace("/*style*/", style).replace("/*script*/", script)
    return text.encode(), policy


class Server:
    """Serves views. `picture_of`: returns a step's picture by the step's number. `key`: the
    secret without which nothing is shown."""

    def __init__(self, picture_of: Callable[[int], Picture | None], key: str) -> None:
        self._picture_of, self._key = picture_of, key
        self._page, self._policy = _page()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._strangers: dict[asyncio.Task[None], None] = {}
        """tasks that serve a connection without the key, the oldest first"""
        self._viewers = 0
        self._view = b"{}"
        self._version = 0
        self._newer = asyncio.Event()

    async def open(self, host: str, port: int) -> tuple[str, int]:
        """Start listening, and return the address. Raises InvalidConfig or AddressInUse."""
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        except OSError as exc:
            raise InvalidConfig(
                f"cannot serve the watch page at {host}: {exc}. Correct the address in --page "
                "HOST:PORT",
                address=host,
            ) from exc
        try:
            self._server = await asyncio.start_server(
                self._accept, *found[4][:2], limit=MAX_HEAD_BYTES
            )
        except OSError as exc:
            raise AddressInUse(
                f"cannot serve the watch page at {host}:{port}: {exc}. Choose another address "
                "with --page HOST:PORT, or stop the process that is using this address",
                address=f"{host}:{port}",
            ) from exc
        where = self._server.sockets[0].getsockname()
        return str(where[0]), int(where[1])

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def show(self, view: View) -> None:
        """Send this view to all viewers, now and when they connect."""
        self._view = msgspec.json.encode(view)
        self._version += 1
        newer, self._newer = self._newer, asyncio.Event()
        newer.set()

    # inside

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._strangers) >= MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.cancel()
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        self._strangers[task] = None
        # A task that is cancelled before its first step closes nothing itself.
        task.add_done_callback(lambda _: writer.transport.abort())
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda done: self._strangers.pop(done, None))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._exchange(reader, writer)
        except (OSError, EOFError, TimeoutError, ValueError, asyncio.LimitOverrunError) as exc:
            log.debug("watch page: invalid or aborted request: %s", exc)

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(READ_S):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("ascii")
        request, *lines = head.split("\r\n")
        method, target, _ = request.split(" ")
        url = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        cookies = [line[7:] for line in lines if line[:7].lower() == "cookie:"]
        answer: Answer
        if method not in ("GET", "HEAD"):
            answer = "405 Method Not Allowed", TEXT, b"this page is read-only: use GET\n", ()
        elif not self._may(query.get("key", ""), cookies):
            told = b"open the link that `dataplane watch --page` printed: it has the page's key\n"
            answer = "403 Forbidden", TEXT, told, ()
        elif not self._admit():
            told = f"{MAX_REQUESTS} requests are in progress: try again\n".encode()
            answer = "503 Service Unavailable", TEXT, told, ()
        elif url.path == "/live" and method == "GET":
            if self._viewers < MAX_VIEWERS:
                await self._live(reader, writer)
                return
            told = f"{MAX_VIEWERS} viewers are connected, the maximum: close one of them\n".encode()
            answer = "503 Service Unavailable", TEXT, told, ()
        else:
            answer = self._answer(url.path, query)
        status, kind, body, more = answer
        headers = self._head(status, kind, f"Content-Length: {len(body)}", *more)
        await self._write(writer, headers + (b"" if method == "HEAD" else body))
        writer.write_eof()
        async with asyncio.timeout(WRITE_S):
            await reader.read(1)  # until the viewer has everything

    def _may(self, key: str, cookies: list[str]) -> bool:
        """Return whether a request has the key, in its address or in our cookie."""
        given = [key]
        for line in cookies:
            for cookie in line.split(";"):
                name, _, value = cookie.strip().partition("=")
                given += [value] if name == self._cookie else []
        return any(hmac.compare_digest(one.encode(), self._key.encode()) for one in given)

    def _admit(self) -> bool:
        """Stop counting this request as a stranger's. Return False if too many requests are in
        progress."""
        if len(self._tasks) - len(self._strangers) >= MAX_REQUESTS:
            return False
        task = asyncio.current_task()
        assert task is not None
        self._strangers.pop(task, None)
        return True

    @property
    def _cookie(self) -> str:
        """Return the cookie's name. Browsers keep cookies by host, so each port needs its own."""
        assert self._server is not None
        return f"dataplane-page-{self._server.sockets[0].getsockname()[1]}"

    def _answer(self, path: str, query: dict[str, str]) -> Answer:
        if path == "/":
            if "key" in query:  # so that the key leaves the address bar
                cookie = f"{self._cookie}={self._key}; HttpOnly; SameSite=Lax; Path=/"
                return "303 See Other", TEXT, b"", ("Location: /", f"Set-Cookie: {cookie}")
            return "200 OK", "text/html; charset=utf-8", self._page, ()
        if path == "/step":
            found = self._picture_of(int(query.get("number", "0")[:18]))
            if found is not None:
                return "200 OK", JSON, msgspec.json.encode(found), ()
            return "404 Not Found", TEXT, b"this step is no longer available\n", ()
        return "404 Not Found", TEXT, b"not found: use /, /live or /step?number=N\n", ()

    async def _live(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Send every view from now on, or as many as the viewer can read."""
        self._viewers += 1
        gone = asyncio.create_task(reader.read(1))
        try:
            await self._write(writer, self._head("200 OK", "text/event-stream"))
            seen = 0
            while not gone.done():
                newer = self._newer
                if self._version != seen:
                    seen = self._version
                    await self._write(writer, b"data: " + self._view + b"\n\n")
                    continue
                wakes = asyncio.create_task(newer.wait())
                try:
                    await asyncio.wait((gone, wakes), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    wakes.cancel()
        finally:
            gone.cancel()
            self._viewers -= 1

    async def _write(self, writer: asyncio.StreamWriter, content: bytes) -> None:
        writer.transport.set_write_buffer_limits(0)  # `drain` returns when all of it is sent
        writer.write(content)
        async with asyncio.timeout(WRITE_S):
            await writer.drain()

    def _head(self, status: str, kind: str, *more: str) -> bytes:
        lines = (
            f"HTTP/1.1 {status}",
            f"Content-Type: {kind}",
            f"Content-Security-Policy: {self._policy}",
            "Cache-Control: no-store",
            "Referrer-Policy: no-referrer",
            "X-Content-Type-Options: nosniff",
            "Cross-Origin-Resource-Policy: same-origin",
            "Connection: close",
            *more,
        )
        return "\r\n".join((*lines, "", "")).encode("ascii")
