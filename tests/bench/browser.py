"""Chromium without a window, by its protocol over two pipes: a page as a reader has it."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome")


@dataclass
class Browser:
    """One tab. `fetched` and `errors` are of the page that was opened last."""

    _pipes: tuple[Any, Any]
    _session: str = ""
    fetched: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    _loaded: int = 0
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def open(self, page: Path | str, width: int, dark: bool = False, high: int = 900) -> None:
        """Lay the page, a file or an address, out on a screen of this width."""
        self.fetched, self.errors = [], []
        size = {"width": width, "height": high, "deviceScaleFactor": 1, "mobile": width < 600}
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        before = self._loaded
        self.call("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        while self._loaded == before:
            self._hear()

    def tell(self, script: str) -> Any:
        """What the JavaScript expression is in the page; what a promise comes to."""
        how = {"returnByValue": True, "awaitPromise": True}
        told = self.call("Runtime.evaluate", expression=script, **how)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def picture(self, path: Path) -> None:
        """A PNG of the whole page, as high as it is."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def attach(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        session = {"sessionId": self._session} if self._session else {}
        asked = {"id": number, "method": method, "params": params, **session}
        self._pipes[1].write(json.dumps(asked).encode() + b"\0")
        self._pipes[1].flush()
        while (told := self._hear()).get("id") != number:
            pass
        assert "error" not in told, told
        result: dict[str, Any] = told["result"]
        return result

    def _hear(self) -> dict[str, Any]:
        content = bytearray()
        while (byte := self._pipes[0].read(1)) != b"\0":
            assert byte, "the browser has ended"
            content += byte
        told: dict[str, Any] = json.loads(content)
        params = told.get("params", {})
        match told.get("method"):
            case "Page.loadEventFired":
                self._loaded += 1
            case "Network.requestWillBeSent" if params["type"] != "Document":
                self.fetched.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.errors.append(params["exceptionDetails"]["text"])
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.errors.append(params["entry"]["text"])
        return told


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser of its own; without one installed the test is skipped."""
    program = next(filter(None, map(shutil.which, _NAMES)), None)
    if program is None:
        pytest.skip("no chromium, in which the page would be opened: make system-packages")
    ours_in, theirs_out = os.pipe()
    theirs_in, ours_out = os.pipe()
    # The protocol is spoken on 3 and 4. As root it starts only without its sandbox.
    script = f'exec 3<&{theirs_in} 4>&{theirs_out}; exec "$@"'
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    with TemporaryDirectory(prefix="bench-browser-", ignore_cleanup_errors=True) as profile:
        options += [f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
        process = subprocess.Popen(
            ["bash", "-c", script, "bash", program, *options],
            pass_fds=(theirs_in, theirs_out),
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        with open(ours_in, "rb") as heard, open(ours_out, "wb") as told:
            browser = Browser((heard, told))
            try:
                browser.attach()
                yield browser
                browser._session = ""
                browser.call("Browser.close")
                process.wait(20)
            finally:
                process.kill()
                process.wait()
