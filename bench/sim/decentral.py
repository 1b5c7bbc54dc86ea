"""`dataplane` as a model: a step's metadata is at one peer and its backup, bytes stay where they
were put until a claim of another host pulls them.

Each put, claim and finish is a request to the own host's peer, which asks the step's primary, which
tells its backup before it answers (docs/architecture.md, the way of a row).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice, permutations
from pathlib import Path
from typing import Any

from bench.run import prepared
from bench.sim.model import Claimed, Design, Model, Steps, Work
from bench.traces import Prompt
from dataplane.client.session.housekeeping import GATHER_S
from dataplane.peer.watch.janitor import PREFAULT_AHEAD_BYTES

_STAGES = ("reward", "reference", "train")
_NEAR = 64


class _Stage:
    """The ready groups of one stage of one step, oldest first, and the waiting claims."""

    def __init__(self, expected: int) -> None:
        self.left = expected  # groups that are not answered yet
        self.ready: deque[tuple[float, Prompt, int]] = deque()  # ready since, and the owner
        self.waiting: deque[Any] = deque()

    def take(self, host: int, most: int) -> list[tuple[float, Prompt, int]]:
        """Take groups of this host among the next ones first, then the oldest."""
        near = [one for one in islice(self.ready, _NEAR) if one[2] == host]
        taken = (near + [one for one in islice(self.ready, most) if one not in near])[:most]
        for one in taken:
            self.ready.remove(one)
        return taken

    def wake(self) -> None:
        """Wake the claim that has waited longest, because a group is ready."""
        if self.waiting:
            self.waiting.popleft().succeed()

    def end(self) -> None:
        while self.waiting:
            self.waiting.popleft().succeed()


class Decentral(Design):
    def __init__(self, model: Model) -> None:
        super().__init__(model)
        steps, hosts = range(self.job.steps), self.job.hosts
        self._stages = {
            (step, stage): _Stage(len(self.plan.stage_of(stage, step)))
            for step in steps
            for stage in _STAGES
        }
        # With three or more the first, which keeps the roster, has no shards; any other may be the
        # primary of a step's partition, or its backup, as names and addresses have it.
        serving = range(1 if hosts > 2 else 0, hosts)
        self._serving = [model.places.sample(serving, min(2, hosts)) for _ in steps]
        self._missing: dict[int, set[str]] = {}  # of a group, before trainers may have it
        self._owner: dict[int, int] = {}
        self._had: dict[int, dict[int, int]] = {}  # bytes of a group that each host has pulled
        self._held = [0] * hosts
        self._arena = prepared(self.job, Path()).arena_bytes
        self._ahead = min(PREFAULT_AHEAD_BYTES, self._arena // 4)
        self._touched = [self._ahead] * hosts  # before the run starts
        self._attached: set[tuple[int, str, int]] = set()
        self.outcome.peak_bytes = [0] * hosts

    def put(self, host: int, prompt: Prompt) -> Steps:
        work = self.plan.work_of("written", prompt)
        yield self.hosts.work(self.costs.of("rollout", ("put",), work))
        self._hold(host, work.nbytes)
        yield from self._attach(host, prompt.step, "rollout", host)
        yield from self._enter(host, prompt.step)
        self._owner[prompt.index] = host
        self._missing[prompt.index] = {"reward", "reference"}
        for stage in self.job.phases()[0]:
            self._ready(stage, prompt)
        yield from self._tell(self._serving[prompt.step][0], host)

    def claim(self, step: int, stage: str, rank: int, most: int) -> Claimed:
        host = self.job.host_of(stage, rank)
        queue, asked = self._stages[step, stage], self.env.now
        primary, *backup = self._serving[step]
        yield from self._attach(host, step, stage, rank)
        yield self._operate(host)
        yield from self._tell(host, primary)
        waits = False
        while queue.left and not queue.ready:
            waits, event = True, self.env.event()
            queue.waiting.append(event)
            yield event
        taken = queue.take(host, most) if queue.left else []
        if taken and not waits:  # a waiting claim is in the put's record
            yield from self._copy(step)
        yield from self._tell(primary, host)
        groups = [prompt for _, prompt, _ in taken]
        owners = dict.fromkeys(owner for _, _, owner in taken if owner != host)
        yield self.env.all_of(
            [self.env.process(self._pull(stage, owner, host, groups)) for owner in owners]
        )
        work = sum((self.plan.work_of(stage, prompt) for prompt in groups), Work())
        yield self.hosts.work(self.costs.of(stage, ("claim",), work))
        if groups:
            self.outcome.peers[len({host, primary, *backup, *owners})] += 1
            self.outcome.claim_s.append(self.env.now - max(asked, taken[0][0]))
        return groups

    def answer(self, step: int, stage: str, rank: int, groups: Sequence[Prompt]) -> Steps:
        host = self.job.host_of(stage, rank)
        if stage != "train":
            work = sum((self.plan.work_of(stage, prompt) for prompt in groups), Work())
            yield self.hosts.work(self.costs.of(stage, ("add",), work))
        yield from self._enter(host, step)
        queue = self._stages[step, stage]
        for prompt in groups:
            queue.left -= 1
            if stage == "train":
                self.env.process(self._free(prompt))
            else:
                self._done(stage, prompt)
        if not queue.left:
            queue.end()
        yield from self._tell(self._serving[step][0], host)

    def _enter(self, host: int, step: int) -> Steps:
        """Apply a put or a finish at the shard and its backup, before claims see it."""
        yield self._operate(host)
        yield from self._tell(host, self._serving[step][0])
        yield from self._copy(step)

    def _attach(self, host: int, step: int, role: str, rank: int) -> Steps:
        """Declare the partition with a worker's first call."""
        if (step, role, rank) not in self._attached:
            self._attached.add((step, role, rank))
            yield self._operate(host)
            for source, target in permutations({host, self._serving[step][0]}, 2):
                yield from self._tell(source, target)

    def _copy(self, step: int) -> Steps:
        """Send a record to the backup, which confirms it."""
        primary, *backups = self._serving[step]
        for backup in backups:
            yield from self._tell(primary, backup)
            yield from self._tell(backup, primary)

    def _operate(self, host: int) -> Any:
        self.outcome.operations += 1
        return self.hosts.operate(host, self.costs.operation)

    def _tell(self, source: int, target: int) -> Steps:
        """Send a message between peers. Sender and receiver each pay half of its cost."""
        if source != target:
            self.outcome.messages += 1
            for host in (source, target):
                yield self.hosts.operate(host, self.costs.message / 2)
            yield self.hosts.one_way()

    def _pull(self, stage: str, owner: int, host: int, groups: Sequence[Prompt]) -> Steps:
        """Pull the bytes that this host lacks. Both peers copy during the transfer."""
        nbytes = 0
        for prompt in groups:
            if self._owner[prompt.index] == owner:
                had = self._had.setdefault(prompt.index, {})
                wanted = self.plan.work_of(stage, prompt).nbytes
                nbytes += max(0, wanted - had.get(host, 0))
                had[host] = max(wanted, had.get(host, 0))
        self._hold(host, nbytes)
        self.outcome.copied_bytes += 2 * nbytes
        yield from self._tell(host, owner)
        copies = [self.hosts.copy(end, self.costs.byte * nbytes) for end in (owner, host)]
        yield self.env.all_of([*copies, *self.hosts.travel(owner, host, nbytes)])
        yield from self._tell(owner, host)

    def _ready(self, stage: str, prompt: Prompt) -> None:
        queue, owner = self._stages[prompt.step, stage], self._owner[prompt.index]
        queue.ready.append((self.env.now, prompt, owner))
        queue.wake()

    def _done(self, stage: str, prompt: Prompt) -> None:
        missing = self._missing[prompt.index]
        missing.discard(stage)
        if not self.job.is_trained(prompt):
            self.env.process(self._free(prompt))
        elif not missing:
            self._ready("train", prompt)
        elif len(self.job.phases()) > 2 and stage == "reward":
            self._ready("reference", prompt)

    def _hold(self, host: int, nbytes: int) -> None:
        """Add bytes at a host. If half of the pages touched ahead are used, the peer touches
        more."""
        self._held[host] += nbytes
        peak = self.outcome.peak_bytes
        peak[host] = max(peak[host], self._held[host])
        if self._touched[host] - peak[host] <= self._ahead // 2:
            goal = min(peak[host] + self._ahead, self._arena)
            more = max(0, goal - self._touched[host])
            self._touched[host] += more
            self.outcome.touched_bytes += more
            self.hosts.copy(host, self.costs.page * more)

    def _free(self, prompt: Prompt) -> Steps:
        """Free a group after its last stage. Clients release it later, and its owner frees it."""
        owner = self._owner[prompt.index]
        yield self.env.timeout(GATHER_S)
        self._held[owner] -= self.plan.work_of("written", prompt).nbytes
        for host, nbytes in self._had.pop(prompt.index, {}).items():
            self._held[host] -= nbytes
        yield from self._tell(self._serving[prompt.step][0], owner)
