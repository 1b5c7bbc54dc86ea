"""A page in a browser without a window: what it holds once it is laid out, and a picture of it."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from html import unescape
from pathlib import Path

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_DEADLINE_S = 90
_HEIGHT = "document.body.offsetHeight"


class NoPicture(RuntimeError):
    """The browser made none; the message has the end of what it said."""


class BrowserMissing(NoPicture):
    """No browser is installed; the message names the target that installs one."""


def told_by(page: Path, script: str, width: int = 900) -> str:
    """What the JavaScript expression is, as text, in the page as a browser lays it out."""
    ask = f"<script>document.body.dataset.told = {script};</script></body>"
    with tempfile.TemporaryDirectory(prefix="bench-page-") as folder:
        asked = Path(folder) / "page.html"
        asked.write_text(page.read_text().replace("</body>", ask))
        shown = _open(asked, width, 1200, "--dump-dom")
    found = re.search(r'data-told="([^"]*)"', shown)
    if not found:
        raise NoPicture(f"the browser said nothing about {page}: {shown[-500:]}")
    return unescape(found[1])


def take(page: Path, picture: Path, width: int = 900) -> None:
    """A PNG of the whole page, as high as it is."""
    height = int(told_by(page, _HEIGHT, width))
    picture.parent.mkdir(parents=True, exist_ok=True)
    _open(page, width, height, f"--screenshot={picture.resolve()}")


def _open(page: Path, width: int, height: int, what: str) -> str:
    browser = next(filter(None, map(shutil.which, _NAMES)), None)
    if browser is None:
        raise BrowserMissing("no chromium, in which the page would be opened: make system-packages")
    with tempfile.TemporaryDirectory(prefix="bench-browser-") as profile:
        # As root it starts only without its sandbox; the page is ours and fetches nothing.
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        size = f"--window-size={width},{height}"
        asked = [f"--user-data-dir={profile}", size, what, page.resolve().as_uri()]
        try:
            done = subprocess.run(
                [browser, *options, *asked],
                capture_output=True,
                text=True,
                check=False,
                timeout=_DEADLINE_S,
            )
        except subprocess.TimeoutExpired as exc:
            raise NoPicture(f"{browser} was not done within {_DEADLINE_S} s") from exc
    if done.returncode:
        raise NoPicture(f"{browser} ended with {done.returncode}: {done.stderr[-500:]}")
    return done.stdout
