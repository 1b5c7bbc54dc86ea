"""The actor through which the stages of a Ray job find each other's output.

It holds references and names, never values, and waiters wait without polling: the least that such
a job needs. Objects die with the process that put them, so workers stay until the job is over.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Group:
    """What is known of a group. `seen`: (field, host) that have a copy; `missing`: stages that its
    phase still waits for."""

    step: int
    places: dict[str, Any]
    seen: set[tuple[str, int]]
    phase: int = 0
    missing: set[str] = field(default_factory=set)


class Board:
    """Which groups are ready for which stage.

    groups: of each step. phases: stages that can work at the same time, in order; the last one ends
    a group, and the job ends with its last group. A place says where the values of one field of a
    group are: (bytes, whatever the plane needs).
    """

    def __init__(self, groups: Sequence[int], phases: Sequence[Sequence[str]]) -> None:
        self._over = asyncio.Event()
        self._phases = [list(stages) for stages in phases]
        self._expected = dict(enumerate(groups))  # of a step, dropped ones not counted
        self._unfinished = sum(groups)
        self._ready: dict[tuple[int, str], deque[int]] = defaultdict(deque)
        self._handed: Counter[tuple[int, str]] = Counter()
        self._groups: dict[int, Group] = {}
        self._change = asyncio.Condition()

    async def ready(self) -> None:
        """Answers once the actor lives."""

    async def finished(self) -> None:
        """Answers when the job is over."""
        await self._over.wait()

    async def put(self, step: int, prompt: int, host: int, places: dict[str, Any]) -> None:
        """A new group, ready for the stages of the first phase."""
        self._groups[prompt] = Group(step, dict(places), {(name, host) for name in places})
        await self._enter(prompt, 0)

    async def _enter(self, prompt: int, phase: int) -> None:
        group = self._groups[prompt]
        group.phase, group.missing = phase, set(self._phases[phase])
        for stage in self._phases[phase]:
            self._ready[group.step, stage].append(prompt)
        await self._wake()

    async def _wake(self) -> None:
        async with self._change:
            self._change.notify_all()

    async def add(self, stage: str, prompt: int, host: int, places: dict[str, Any]) -> None:
        """A stage's fields; with the last stage of its phase the group enters the next."""
        group = self._groups[prompt]
        group.places |= places
        group.seen |= {(name, host) for name in places}
        group.missing.remove(stage)
        if not group.missing and group.phase + 1 < len(self._phases):
            await self._enter(prompt, group.phase + 1)
        elif not group.missing:
            self._end(prompt)

    async def drop(self, prompt: int) -> None:
        """No stage gets this group any more."""
        group = self._groups[prompt]
        self._expected[group.step] -= 1
        for stage in self._phases[group.phase]:
            self._handed[group.step, stage] -= 1
        self._end(prompt)
        await self._wake()

    def _end(self, prompt: int) -> None:
        del self._groups[prompt]
        self._unfinished -= 1
        if not self._unfinished:
            self._over.set()

    async def next(
        self, step: int, stage: str, fields: list[str], host: int
    ) -> tuple[int, dict[str, Any], int] | None:
        """A group for a stage: prompt, places, and the bytes that its host has not seen yet.

        None once all groups of the step were handed out to the stage.
        """
        ready = self._ready[step, stage]
        async with self._change:
            await self._change.wait_for(
                lambda: ready or self._handed[step, stage] >= self._expected[step]
            )
            if not ready:
                return None
            prompt = ready.popleft()
            self._handed[step, stage] += 1
            self._change.notify_all()  # it may have been the last
        group = self._groups[prompt]
        places = {name: group.places[name] for name in fields}
        new = {(name, host) for name in fields} - group.seen
        group.seen |= new
        return prompt, places, sum(places[name][0] for name, _ in new)
