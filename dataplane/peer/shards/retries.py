"""Retries of effects of commands on other callers.

The command itself stands. The first failure of an effect is logged with its traceback, and later
failures are counted in one log line a minute.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from dataplane.errors import counted

log = logging.getLogger(__name__)

SWEEP_S = 0.5
"""The pause before failed effects are retried."""
LOG_EVERY_S = 60.0
MAX_DUE = 1_000
"""Effects that wait for a retry; beyond that, the oldest are given up."""

Effect = Callable[[], object]


@dataclass(slots=True)
class _Failed:
    what: str
    again: Effect
    is_last: bool
    """the next retry is the last"""


@dataclass(slots=True)
class _Logged:
    at: float
    since: int = 0
    """failures that are not logged yet"""


@dataclass(eq=False, repr=False)
class Retries:
    _due: dict[Hashable, _Failed] = field(default_factory=dict)
    _logged: dict[str, _Logged] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _is_set: bool = False
    """the next sweep is scheduled"""

    def failed(self, what: str, again: Effect, key: Hashable = None) -> None:
        """Schedule a retry of an effect that raised.

        what: the name of the effect in the log. again: the effect, retried within SWEEP_S. key:
        set for an idempotent effect, which is retried until it succeeds, once per sweep and key.
        An effect without a key is retried only once, because each attempt may have applied a
        part of it.
        """
        is_last = key is None
        self._log(what, f"trying {'once more' if is_last else 'again'} in {SWEEP_S:g} s")
        if key not in self._due and len(self._due) >= MAX_DUE:
            given_up = self._due.pop(next(iter(self._due)))
            log.error(
                "%s: giving up, because more than %d failed operations are waiting for a retry",
                given_up.what,
                MAX_DUE,
            )
        self._due[next(self._numbers) if is_last else key] = _Failed(what, again, is_last)
        if not self._is_set:
            self._is_set = True
            asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        due, self._due, self._is_set = self._due, {}, False
        for key, one in due.items():
            try:
                one.again()
            except Exception:
                if one.is_last:
                    self._log(one.what, "giving up")
                else:
                    self.failed(one.what, one.again, key)
        now = time.monotonic()
        self._logged = {k: one for k, one in self._logged.items() if now - one.at < 2 * LOG_EVERY_S}

    def _log(self, what: str, then: str) -> None:
        now = time.monotonic()
        one = self._logged.get(what)
        if one is None:
            log.exception("%s failed; %s", what, then)
            self._logged[what] = _Logged(now)
            return
        one.since += 1
        if now - one.at >= LOG_EVERY_S:
            many = counted(one.since, "more time")
            log.error("%s failed %s in %.0f s; %s", what, many, now - one.at, then)
            one.at, one.since = now, 0
