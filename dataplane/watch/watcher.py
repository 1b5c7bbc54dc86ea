"""Asks the plane at a steady pace, in a thread, as a read-only client. All viewers share the
answers.

The cost to the plane does not depend on the number of viewers. Each look asks every peer for its
newest events. Some looks also ask for stats. A longer pause follows a look that took long.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from dataplane.client._sync.plane import Plane
from dataplane.client.session.opening import visit
from dataplane.errors import DataplaneError
from dataplane.launch.rundir import LivingPeer
from dataplane.watch.history import History, View

log = logging.getLogger(__name__)

EVERY_S = 2.0
SLOWEST_S = 15.0
BUSY_SHARE = 0.2
"""Looking takes at most this share of the time, until the pause is SLOWEST_S."""
STATS_SLOWEST_S = 30.0
STATS_SHARE = 0.05
"""Asking for stats takes at most this share of the time, until the pause is STATS_SLOWEST_S.
Stats cost a peer more than events, because they grow with the rows that it serves."""


class Watcher:
    """find: returns the peer to ask. It is called at each look, because the peer may have been
    replaced. One thread looks; other threads may call `history.picture_of` at the same time."""

    def __init__(self, run: str, find: Callable[[], LivingPeer]) -> None:
        self._run, self._find = run, find
        self.history = History(run)
        self._over = threading.Event()
        self._every_s = EVERY_S
        self._stats_due = float("-inf")

    def look(self) -> View:
        """Ask the plane once. The view says what could not be asked."""
        began = time.monotonic()
        try:
            with Plane(visit(self._find())) as plane:
                events = plane.events(self.history.since(began))
                stats, due = None, self._stats_due
                if began >= due:
                    stats, due = self._stats(plane)
            self.history.look(events, stats, began)
        except DataplaneError as error:
            self.history.failed(error.message)
        else:
            self._stats_due = due
        took_s = time.monotonic() - began
        self._every_s = min(SLOWEST_S, max(EVERY_S, took_s / BUSY_SHARE))
        return self.view()

    @staticmethod
    def _stats(plane: Plane) -> tuple[dict[str, Any], float]:
        """Ask for stats. Return them and when to ask for them again."""
        began = time.monotonic()
        stats = plane.stats()
        now = time.monotonic()
        return stats, now + min(STATS_SLOWEST_S, (now - began) / STATS_SHARE)

    def view(self) -> View:
        return self.history.view(time.monotonic(), self._every_s)

    def pause(self) -> bool:
        """Wait until the next look is due. Return whether there is to be one."""
        return not self._over.wait(self._every_s)

    @contextlib.contextmanager
    def looking(self, seen: Callable[[View], None]) -> Iterator[None]:
        """Look in a thread of its own, which passes each view to `seen`."""

        def run() -> None:
            while True:
                try:
                    seen(self.look())
                except Exception as error:
                    log.exception("watcher of run %r: update failed, trying again", self._run)
                    self.history.failed(
                        f"`dataplane watch` failed to show the run: {error!r}; "
                        "its log has the traceback, please report it"
                    )
                    with contextlib.suppress(Exception):  # the error is logged already
                        seen(self.view())
                if not self.pause():
                    return

        thread = threading.Thread(target=run, name="dataplane-watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join(1.0)  # a thread that still asks ends with the process
