"""The actor through which the stages of a Ray job find each other's output.

It holds references and names, never values, and waiters wait without polling: the least that such
a job needs. Objects die with the process that put them, so workers stay until the job is over.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Group:
    """What is known of a group. `seen`: (field, host) that have a copy; `handed`: stages that have
    got it."""

    step: int
    places: dict[str, Any]
    seen: set[tuple[str, int]]
    handed: set[str] = field(default_factory=set)


class Board:
    """Which groups are ready for which stage: those that have all fields that it reads.

    groups: of each step; the job ends with the last group. A place says where the values of one
    field of a group are: (bytes, whatever the plane needs).
    """

    def __init__(self, groups: Sequence[int]) -> None:
        self._over = asyncio.Event()
        self._expected = dict(enumerate(groups))  # of a step, dropped ones not counted
        self._unfinished = sum(groups)
        self._handed: Counter[tuple[int, str]] = Counter()
        self._groups: dict[int, Group] = {}  # by number; the one that changed last is at the end
        self._change = asyncio.Condition()

    async def ready(self) -> None:
        """Answers once the actor lives."""

    async def finished(self) -> None:
        """Answers when the job is over."""
        await self._over.wait()

    async def put(self, step: int, prompt: int, host: int, places: dict[str, Any]) -> None:
        """A new group."""
        self._groups[prompt] = Group(step, {}, set())
        await self.add(prompt, host, places)

    async def add(self, prompt: int, host: int, places: dict[str, Any]) -> None:
        """Fields that a stage has added to a group."""
        group = self._groups[prompt] = self._groups.pop(prompt)
        group.places |= places
        group.seen |= {(name, host) for name in places}
        await self._wake()

    async def end(self, prompt: int, dropped: bool) -> None:
        """No stage gets this group any more: it was trained, or dropped."""
        group = self._groups.pop(prompt)
        if dropped:
            self._expected[group.step] -= 1
            self._handed.subtract((group.step, stage) for stage in group.handed)
        self._unfinished -= 1
        if not self._unfinished:
            self._over.set()
        await self._wake()

    async def _wake(self) -> None:
        async with self._change:
            self._change.notify_all()

    async def next(
        self, step: int, stage: str, fields: list[str], host: int
    ) -> tuple[int, dict[str, Any], int] | None:
        """A group for a stage: prompt, places, and the bytes that its host has not seen yet.

        None once all groups of the step were handed out to the stage.
        """

        def first() -> int | None:
            for prompt, group in self._groups.items():
                is_new = group.step == step and stage not in group.handed
                if is_new and group.places.keys() >= set(fields):
                    return prompt
            return None

        async with self._change:
            await self._change.wait_for(
                lambda: first() is not None or self._handed[step, stage] >= self._expected[step]
            )
            if (prompt := first()) is None:
                return None
            group = self._groups[prompt]
            group.handed.add(stage)
            self._handed[step, stage] += 1
            self._change.notify_all()  # it may have been the last
        places = {name: group.places[name] for name in fields}
        new = {(name, host) for name in fields} - group.seen
        group.seen |= new
        return prompt, places, sum(places[name][0] for name, _ in new)
