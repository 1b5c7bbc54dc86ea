"""An asyncio event loop in virtual time, on which several machines run side by side.

What a machine's code schedules runs as that machine's, and only while it is neither frozen nor
crashed; each has a monotonic clock of its own. Whatever has nothing more to do jumps to the next
timer, so hours pass in no time, and equal seeds give equal runs.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from contextvars import Context
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

STEP_S = 2e-6
"""What one callback takes. Not nothing, or a task that never waits would stop time."""


log = logging.getLogger(__name__)

START_S = 1000.0
"""What the clock says at first: not 0, which would pass for "never"."""

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

if TYPE_CHECKING:
    # A simulation needs few methods of a loop. To a type checker the class of all of them is
    # abstract, and this one is not.
    Loop = asyncio.BaseEventLoop
else:
    Loop = asyncio.AbstractEventLoop


class Machine:
    """One process: what it has to do, its clock, and whether it runs."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ahead_s = 0.0
        """its clock less the simulation's"""
        self.frozen = False
        self.crashed = False
        self.disturbed_at = 0.0
        """when it went on last after it had been frozen, or its clock jumped"""
        self.ready: deque[tuple[int, asyncio.Handle]] = deque()
        self.timers: list[tuple[float, int, asyncio.TimerHandle]] = []

    def __repr__(self) -> str:
        state = "crashed" if self.crashed else "frozen" if self.frozen else "runs"
        return f"<{self.name} {state}>"

    @property
    def runs(self) -> bool:
        return not (self.frozen or self.crashed)


class NumberedTask(asyncio.Task[Any]):
    """Told apart by a number and not by its address, so that sets of them have one order."""

    number = 0

    def __hash__(self) -> int:
        return self.number


class VirtualLoop(Loop):
    def __init__(self) -> None:
        self.now = START_S
        self.steps = 0
        self.world = Machine("world")
        self.machines = [self.world]
        self.current = self.world
        self.failures: list[str] = []
        self.tasks: dict[asyncio.Task[Any], Machine] = {}
        self._numbers = itertools.count()

    def machine(self, name: str) -> Machine:
        made = Machine(name)
        self.machines.append(made)
        return made

    # between machines

    def call_on(
        self, machine: Machine, delay_s: float, callback: Callable[..., object], *args: Any
    ) -> None:
        """Something from outside reaches a machine, so much later."""
        before, self.current = self.current, machine
        try:
            self.call_at(self.now + delay_s + machine.ahead_s, callback, *args)
        finally:
            self.current = before

    def start_on(self, machine: Machine, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        before, self.current = self.current, machine
        try:
            return self.create_task(work)
        finally:
            self.current = before

    # what asyncio asks of a loop

    def time(self) -> float:
        return self.now + self.current.ahead_s

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self.current.ready.append((next(self._numbers), handle))
        return handle

    call_soon_threadsafe = call_soon

    def call_later(
        self,
        delay: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self.current.timers, (when, next(self._numbers), handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Cancelled timers are passed over when their time comes."""

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: Any = None, context: Any = None) -> NumberedTask:
        task = NumberedTask(coro, loop=self, name=name, context=context)
        task.number = next(self._numbers)
        self.tasks[task] = self.current
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self.tasks.pop(task, None)

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts
    ) -> asyncio.Future[T]:
        raise AssertionError("nothing simulated runs in a thread")

    def add_reader(self, fd: Any, callback: Callable[[*Ts], Any], *args: *Ts) -> None:
        raise AssertionError("nothing simulated has a descriptor")

    def remove_reader(self, fd: Any) -> bool:
        return False

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        problem = context.get("exception") or context.get("message")
        log.error(
            "in the loop of %s: %r", self.current.name, problem, exc_info=context.get("exception")
        )
        self.failures.append(f"in the loop of {self.current.name}: {problem!r}")

    # running

    def step(self) -> bool:
        """Run one callback of one machine. False where nothing is left to do."""
        machine = self._next()
        if machine is None:
            return False
        handle = self._take(machine)
        if not handle.cancelled():
            self.steps += 1
            self.now += STEP_S
            self.current = machine
            try:
                handle._run()
            finally:
                self.current = self.world
        return True

    def _take(self, machine: Machine) -> asyncio.Handle:
        if machine.ready:
            return machine.ready.popleft()[1]
        when, _, handle = heapq.heappop(machine.timers)
        self.now = max(self.now, when - machine.ahead_s)
        return handle

    def _next(self) -> Machine | None:
        """Whose turn it is: what is due first, and of that what was scheduled first."""
        now = best_due = self.now
        best_number, chosen, by_timer = 0, None, False
        for machine in self.machines:
            ready, timers = machine.ready, machine.timers
            if machine.frozen or machine.crashed or not (ready or timers):
                continue
            if ready:
                number = ready[0][0]
                if chosen is None or best_due > now or number < best_number:
                    best_due, best_number, chosen, by_timer = now, number, machine, False
            while timers and timers[0][2]._cancelled:
                heapq.heappop(timers)
            if timers:
                when, number, _ = timers[0]
                due = when - machine.ahead_s
                if due < now:
                    due = now
                if due > best_due and chosen is not None:
                    continue
                if chosen is None or (due, number) < (best_due, best_number):
                    best_due, best_number, chosen, by_timer = due, number, machine, True
        if chosen is not None and by_timer and chosen.ready:
            # A timer that is due before what is ready goes first.
            chosen.ready.appendleft((best_number, heapq.heappop(chosen.timers)[2]))
        return chosen

    def end(self) -> None:
        """Cancel whatever still runs anywhere; again what took that for the end of what it waited
        for, and goes on."""
        for machine in self.machines:
            machine.frozen = machine.crashed = False
        for _ in range(20):
            for task, machine in list(self.tasks.items()):
                self.current = machine
                task.cancel()
            self.current = self.world
            steps = 2_000
            while self.tasks and steps and self.step():
                steps -= 1
