"""`dataplane` as a model: groups stay where they were put, claims go to them, bytes host to host.

A claim is met from its own host's peer, or it queues at the stage's home, which orders the peer
that has a group to grant it (SEMANTICS 12: one own peer, one home, one supplier at most).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from bench.sim.costs import Work
from bench.sim.model import Claimed, Design, Model, Steps
from bench.traces import Prompt

_STAGES = ("reward", "reference", "train")
_AHEAD_BYTES = 256 << 20


class Pages:
    """Those of an arena that were ever touched: some ahead of the highest use, as the peer's
    janitor keeps them (dataplane/peer/watch/janitor.py). It has touched the first before a run
    starts."""

    def __init__(self, arena_bytes: int) -> None:
        self._arena_bytes = arena_bytes
        self._ahead = min(_AHEAD_BYTES, arena_bytes // 4)
        self._touched = self._ahead

    def touch(self, used: int) -> int:
        """Bytes to touch now that so many are in use."""
        if self._touched - used > self._ahead // 2:
            return 0
        before = self._touched
        self._touched = max(before, min(used + self._ahead, self._arena_bytes))
        return self._touched - before


class _Queue:
    """What one stage of one step has ready, by host, and who waits for it."""

    def __init__(self, home: int, expected: int) -> None:
        self.home = home
        self.left = expected  # groups that are not answered yet
        self.ready: dict[int, deque[tuple[float, Prompt]]] = {}
        self.waiting: deque[tuple[int, Any]] = deque()

    def take(self, host: int, most: int) -> tuple[int, list[tuple[float, Prompt]]]:
        """Of this host or else of the one that has had something for longest."""
        supplier = host if host in self.ready else next(iter(self.ready))
        groups = self.ready[supplier]
        taken = [groups.popleft() for _ in range(min(most, len(groups)))]
        if not groups:
            del self.ready[supplier]
        return supplier, taken


class Decentral(Design):
    """One peer a host."""

    name = "dataplane"

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        steps, hosts = range(self.job.steps), self.job.hosts
        self._queues = {
            (step, stage): _Queue((3 * step + place) % hosts, len(self.plan.stage_of(stage, step)))
            for step in steps
            for place, stage in enumerate(_STAGES)
        }
        self._missing: dict[int, set[str]] = {}  # of a group, before trainers may have it
        self._owner: dict[int, int] = {}
        self._had: dict[int, dict[int, int]] = {}  # bytes of a group that each host has pulled
        self._held = [0] * hosts
        self._pages = [Pages(self.job.arena_bytes) for _ in range(hosts if model.fresh else 0)]
        self.outcome.peak_bytes = [0] * hosts

    def put(self, host: int, prompt: Prompt, share: float, last: bool) -> Steps:
        work = self.plan.work_of("written", prompt)
        yield self.hosts.work(share * self.costs.of("rollout", ("put",), work))
        yield self.hosts.operate(host, self.costs.service(1))
        self._hold(host, round(work.nbytes * share))
        if last and self.job.fate(prompt) != "aborted":
            self._owner[prompt.index] = host
            self._missing[prompt.index] = {"reward", "reference"}
            first = self.job.phases()[0]
            for stage in first:
                self._ready(stage, prompt)

    def rolled(self, step: int) -> None:
        """Sealing costs one message to each peer, in the background."""

    def claim(self, step: int, stage: str, rank: int, most: int) -> Claimed:
        host = self.job.host_of(stage, rank * (self.job.tp if stage == "train" else 1))
        queue, asked = self._queues[step, stage], self.env.now
        yield self.hosts.operate(host, self.costs.service(1))
        waited = False
        while queue.left and not queue.ready:
            waited = True
            event = self.env.event()
            queue.waiting.append((host, event))
            yield event
        if not queue.left:
            yield self.hosts.work(self.costs.of(stage, ("claim",), Work()))
            return []
        supplier, taken = queue.take(host, most)
        groups = [prompt for _, prompt in taken]
        if supplier != host:
            yield from self._cross(queue.home, host, supplier)
            yield from self._pull(stage, supplier, host, groups)
        elif waited:  # the home's order to its own host
            yield self.hosts.round_trip()
        yield self.env.timeout(self.costs.delay_s)
        yield self.hosts.work(self.costs.of(stage, ("claim",), self._work(stage, groups)))
        touched = {host, supplier, *([queue.home] if supplier != host or waited else ())}
        self.outcome.peers[len(touched)] += 1
        self.outcome.crossings += supplier != host
        self.outcome.claim_s.append(self.env.now - max(asked, taken[0][0]))
        return groups

    def answer(self, step: int, stage: str, rank: int, groups: Sequence[Prompt]) -> Steps:
        queue = self._queues[step, stage]
        if stage != "train":
            yield self.hosts.work(self.costs.of(stage, ("add",), self._work(stage, groups)))
        yield self.hosts.operate(self._owner[groups[0].index], self.costs.service(1))
        for prompt in groups:
            queue.left -= 1
            if stage == "train":
                self._free(prompt)
            else:
                self._done(stage, prompt)
        if not queue.left:
            while queue.waiting:
                queue.waiting.popleft()[1].succeed()

    def _cross(self, home: int, host: int, supplier: int) -> Steps:
        """A demand to the home, an order to the supplier, its grant. Where the home is one of the
        other two, what it would tell that one is no letter: with two hosts always."""
        for peer in dict.fromkeys((home, supplier, host)):
            yield self.hosts.operate(peer, self.costs.crossed())
            yield self.env.timeout(self.costs.crossing_delay_s)
        yield self.hosts.round_trip()

    def _pull(self, stage: str, supplier: int, host: int, groups: Sequence[Prompt]) -> Steps:
        """What this host has not pulled yet: both peers copy while the links carry."""
        nbytes = 0
        for prompt in groups:
            had = self._had.setdefault(prompt.index, {})
            wanted = self.plan.work_of(stage, prompt).nbytes
            nbytes += max(0, wanted - had.get(host, 0))
            had[host] = max(wanted, had.get(host, 0))
        self._hold(host, nbytes)
        self.outcome.across_bytes += nbytes
        half = self.costs.service(0, nbytes) / 2
        copies = [self.hosts.copy(supplier, half), self.hosts.copy(host, half)]
        yield self.env.all_of([*copies, *self.hosts.travel(supplier, host, nbytes)])
        yield self.hosts.round_trip()

    def _ready(self, stage: str, prompt: Prompt) -> None:
        queue = self._queues[prompt.step, stage]
        host = self._owner[prompt.index]
        queue.ready.setdefault(host, deque()).append((self.env.now, prompt))
        if queue.waiting:
            queue.waiting.popleft()[1].succeed()

    def _done(self, stage: str, prompt: Prompt) -> None:
        phases, fate = self.job.phases(), self.job.fate(prompt)
        missing = self._missing[prompt.index]
        missing.discard(stage)
        if fate == "filtered" and self.job.task.survive is not None:
            self._free(prompt)
        elif not missing:
            self._ready("train", prompt)
        elif len(phases) > 2 and stage == "reward":
            self._ready("reference", prompt)

    def _hold(self, host: int, nbytes: int) -> None:
        self._held[host] += nbytes
        peak = self.outcome.peak_bytes
        peak[host] = max(peak[host], self._held[host])
        if self._pages and (fresh := self._pages[host].touch(peak[host])):
            self.hosts.copy(host, self.costs.touched_byte * fresh)  # in the background

    def _free(self, prompt: Prompt) -> None:
        """All stages are through: the group's bytes go, and pulled copies are evictable."""
        self._held[self._owner[prompt.index]] -= self.plan.work_of("written", prompt).nbytes
        for host, nbytes in self._had.pop(prompt.index, {}).items():
            self._held[host] -= nbytes

    def _work(self, stage: str, groups: Sequence[Prompt]) -> Any:
        first, *rest = (self.plan.work_of(stage, prompt) for prompt in groups)
        return sum(rest, first)
