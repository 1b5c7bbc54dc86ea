"""Processor sharing: a pool of cores or a link, shared equally by its users; and a loop on such a
pool, which serves one request after the other."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from typing import Any

import simpy


class Shared:
    """A resource of `capacity` units per second, of which each user gets at most `each`.

    A pool of cores: capacity = cores, each = 1, units are seconds. A link: both are bytes per
    second. `rivals` are other programs that always want a part. With more than `crowd` users, a
    link has only `crowded` of its capacity (incast). A user that arrives while the capacity is used
    up first waits `late` seconds: a kernel lets threads run for a while before it schedules a woken
    one.
    """

    def __init__(
        self,
        env: simpy.Environment,
        capacity: float,
        each: float,
        crowd: float = float("inf"),
        crowded: float = 1.0,
        rivals: float = 0.0,
        late: float = 0.0,
    ) -> None:
        self._env, self._late = env, late
        self._capacity, self._each = capacity, each
        self._crowd, self._crowded = crowd, crowded
        self._rivals = rivals
        self._served = 0.0  # units that a user since the start has received
        self._at = 0.0
        self._users: list[tuple[float, int, Any]] = []  # by `served` at the end of each
        self._numbers = itertools.count()
        self._version = 0  # of the alarm; earlier alarms are ignored

    def use(self, amount: float) -> Any:
        """Return an event that succeeds after this amount of service."""
        done = self._env.event()
        if amount <= 0:
            return done.succeed()
        taken = self._each * (len(self._users) + self._rivals)
        if self._late and taken >= self._capacity:
            self._env.timeout(self._late).callbacks.append(lambda _: self._join(amount, done))
        else:
            self._join(amount, done)
        return done

    def _join(self, amount: float, done: Any) -> None:
        self._advance()
        heapq.heappush(self._users, (self._served + amount, next(self._numbers), done))
        self._set_alarm()

    def _rate(self) -> float:
        users = len(self._users)
        capacity = self._capacity * (self._crowded if users > self._crowd else 1.0)
        return min(self._each, capacity / (users + self._rivals))

    def _advance(self) -> None:
        if self._users:
            self._served += self._rate() * (self._env.now - self._at)
        self._at = self._env.now

    def _set_alarm(self) -> None:
        self._version += 1
        version = self._version
        left = max(0.0, self._users[0][0] - self._served) / self._rate()
        self._env.timeout(left).callbacks.append(lambda _: self._ring(version))

    def _ring(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        # The first is done by definition. Rounding must not set alarms of length 0 for ever.
        self._served = max(self._served, self._users[0][0])
        while self._users and self._users[0][0] <= self._served:
            heapq.heappop(self._users)[2].succeed()
        if self._users:
            self._set_alarm()


class Loop:
    """One thread of a service on shared cores. It uses at most one core, however many requests
    wait."""

    def __init__(self, env: simpy.Environment, cores: Shared) -> None:
        self._env, self._cores = env, cores
        self._waiting: deque[tuple[float, Any]] = deque()
        self._busy = False

    def use(self, amount: float) -> Any:
        """Return an event that succeeds after this amount of service, behind all earlier
        requests."""
        done = self._env.event()
        self._waiting.append((amount, done))
        if not self._busy:
            self._begin()
        return done

    def _begin(self) -> None:
        self._busy = True
        amount, done = self._waiting.popleft()
        self._cores.use(amount).callbacks.append(lambda _: self._end(done))

    def _end(self, done: Any) -> None:
        done.succeed()
        self._busy = False
        if self._waiting:
            self._begin()
