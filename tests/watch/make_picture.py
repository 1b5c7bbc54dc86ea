"""Make the pictures of the page in docs/observe.md: `python -m tests.watch.make_picture`."""

from __future__ import annotations

import base64
import time
from pathlib import Path

from dataplane.events.merge import Event
from dataplane.watch.history import History
from tests.bench.browser import chromium
from tests.watch.plane import STEP_S, stats, step
from tests.watch.served import served

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
WIDE, HIGH = 900, 790
HOSTS = 8


def history() -> tuple[History, float]:
    """Twelve steps; from the sixth on, reward is slow on the last host."""
    events, begin = list[Event](), 0.0
    for nth in range(12):
        begin = 1_000.0 + STEP_S * nth
        slow = 8.0 if nth > 5 else 1.0
        how = {"groups": 32, "batch": 8, "generate_s": 0.8, "train_s": 0.6, "seed": nth}
        name = f"step-{30 + nth}"
        events += step(name, begin, len(events), hosts=HOSTS, slow_reward=slow, **how)
    known = History("grpo-7b")
    known.look(events, stats(HOSTS, "step-41"), begin + STEP_S)
    return known, begin + STEP_S


def main() -> None:
    known, now = history()
    with served(known) as page, chromium() as browser:
        page.show(known.view(now, 2.0))
        for dark in (False, True):
            browser.open(page.address, WIDE, dark, HIGH)
            while not browser.tell("document.querySelector('canvas') !== null"):
                time.sleep(0.05)
            shot = browser.call("Page.captureScreenshot")
            path = PICTURES / f"watch-{'dark' if dark else 'light'}.png"
            path.write_bytes(base64.b64decode(shot["data"]))
        browser.open("about:blank", WIDE)


if __name__ == "__main__":
    main()
