"""Events of made-up steps: rollout and reward on every host, one trainer, and a cause planted."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field

import msgspec

from dataplane.events.merge import Event
from dataplane.wire.events import Kind, Reason

STEP = "step-41"


@dataclass
class Steps:
    """Each host has a rollout worker, which makes its groups one after another, and `rewarders`
    reward workers. The trainer takes `batch` groups at a time."""

    seed: int = 0
    hosts: int = 4
    groups: int = 16
    rewarders: int = 1
    batch: int = 4
    generate_s: float = 1.0
    reward_s: float = 0.2
    train_s: float = 0.5
    pull_s: float = 0.01
    slow_reward: float = 1.0
    """how many times longer reward takes on the last host"""
    slow_rollout: float = 1.0
    straggler: float = 1.0
    """how many times longer the last group takes"""
    slow_link: float = 1.0
    """how many times longer a pull from the first host to the trainer takes"""
    room_s: float = 0.0
    """the first host waits so long for room before each put"""
    admit_s: float = 0.0
    stall_s: float = 0.0
    """the last host's peer gets no processor time for so long, in its first reward"""
    backup_s: float = 0.0
    """the backup, a peer without workers, gets no processor time for so long; calls wait for it"""
    overdue_s: float = 60.0
    """a backup that confirms nothing for so long leaves the in-sync set"""
    forgotten: bool = False
    """a reward worker never acks its last lease"""
    sealed: bool = True
    more: str = ""
    """the trainer goes on to wait, for this reason"""
    begin: float = 1_000.0
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def note(self, kind: Kind, at: float, **more: object) -> None:
        more = {"peer": "a", "partition": STEP, "generation": 1, "rows": 8} | more
        self.events.append(Event(kind, at, **more))  # type: ignore[arg-type]

    def about(self, seconds: float) -> float:
        return seconds * self.random.uniform(0.8, 1.2)

    def play(self) -> list[Event]:
        names = [chr(ord("a") + n) for n in range(self.hosts)]
        put = sorted(one for nth, host in enumerate(names) for one in self._roll(nth, host))
        ready = self._reward(put, names)
        self._train(put, ready)
        if self.backup_s:
            self._starve_the_backup("z")
        return sorted(self.events, key=lambda event: event.at)

    def _starve_the_backup(self, backup: str) -> None:
        """Every call waits for the backup until it runs again or leaves the in-sync set."""
        since = self.begin + 1.5 * self.generate_s
        waited_s = min(self.backup_s, self.overdue_s)
        replace, known = msgspec.structs.replace, self.events
        self.events = [e for e in known if e.at <= since]
        for e in known:
            if e.at > since:
                longer_s = e.seconds + waited_s if e.began < since and e.seconds else e.seconds
                self.events.append(replace(e, at=e.at + waited_s, seconds=longer_s))
        until = max(e.at for e in self.events) if waited_s == self.backup_s else since + waited_s
        backup_s = until - self.begin + 100.0
        self.events += [
            Event(Kind.STALL, since + self.backup_s, backup, seconds=self.backup_s),
            Event(Kind.BACKUP, until, "a", seconds=backup_s, by=backup),
        ]

    def _roll(self, nth: int, host: str) -> list[tuple[float, str, str]]:
        at, worker, put = self.begin, f"rollout {host}", []
        mine = range(nth, self.groups, self.hosts)
        for number in mine:
            if self.admit_s:
                took, at = self.admit_s, at + self.admit_s
                self.note(
                    Kind.ADMIT_WAIT, at, seconds=took, worker=worker, host=host, reason=Reason.LAG
                )
            slow = self.slow_rollout if nth == self.hosts - 1 else 1.0
            slow *= self.straggler if number == self.groups - 1 else 1.0
            at += self.about(self.generate_s) * slow
            if self.room_s and not nth:
                at += self.room_s
                by = "rows of partition 'step-40', leased by pid 7 on host b for stage 'train'"
                self.events.append(
                    Event(
                        Kind.ROOM_WAIT, at, host, seconds=self.room_s, worker=worker, by=by,
                        reason=Reason.OPEN,
                    )
                )  # fmt: skip
            group = f"g{number}"
            self.note(Kind.PUT, at, group=group, worker=worker, host=host, nbytes=1 << 20)
            of = {"group": group, "worker": worker, "host": host, "field": "tokens"}
            self.note(Kind.READY, at + 1e-4, stage="reward", **of)
            put.append((at + 1e-4, group, host))
        return put

    def _reward(self, put: list[tuple[float, str, str]], names: list[str]) -> dict[str, float]:
        free = [
            (self.begin, f"reward {host}{n}", host) for host in names for n in range(self.rewarders)
        ]
        heapq.heapify(free)
        ready, stalled = {}, False
        for lease, (came, group, _) in enumerate(put):
            since, worker, host = heapq.heappop(free)
            begin = max(since, came) + 1e-4
            of = {"stage": "reward", "worker": worker, "host": host}
            self.note(Kind.LEASE_BEGIN, begin, group=group, lease=lease, **of)
            if begin - since > 1e-3:
                reason = Reason.NO_ROWS
                self.note(Kind.CLAIM_WAIT, begin, seconds=begin - since, reason=reason, **of)
            if self.forgotten and lease == self.groups - 1:
                continue
            took = self.about(self.reward_s)
            if host == names[-1]:
                took *= self.slow_reward
                if self.stall_s and not stalled:
                    stalled, took = True, took + self.stall_s
                    self.events.append(
                        Event(Kind.STALL, begin + self.stall_s, host, seconds=self.stall_s)
                    )
            end = begin + took
            self.note(
                Kind.READY, end, **of | {"stage": "train"}, group=group, field="reward", by="reward"
            )
            self.note(
                Kind.LEASE_END, end + 1e-4, group=group, lease=lease, seconds=took,
                reason=Reason.ACK, **of,
            )  # fmt: skip
            ready[group] = end
            heapq.heappush(free, (end + 1e-3, worker, host))
        return ready

    def _train(self, put: list[tuple[float, str, str]], ready: dict[str, float]) -> None:
        at, of = self.begin, {"stage": "train", "worker": "trainer", "host": "a"}
        hosts = {group: host for _, group, host in put}
        order = sorted(ready, key=lambda group: ready[group])
        for first in range(0, len(order), self.batch):
            groups = order[first : first + self.batch]
            if len(groups) < self.batch:
                break
            begin = max(at, max(ready[group] for group in groups)) + 2e-4
            for group in groups:
                self.note(Kind.LEASE_BEGIN, begin, group=group, lease=1_000 + first, **of)
            if begin - at > 1e-3:
                reason = Reason.NO_ROWS
                self.note(Kind.CLAIM_WAIT, begin, seconds=begin - at, reason=reason, **of)
            end = begin
            for host in sorted({hosts[group] for group in groups} - {"a"}):
                took = self.about(self.pull_s) * (self.slow_link if host == "b" else 1.0)
                self.events.append(
                    Event(
                        Kind.PULL, begin + took, "a", seconds=took, stage="train", by=host,
                        nbytes=1 << 20, transport="tcp",
                    )
                )  # fmt: skip
                end = max(end, begin + took)
            end += self.about(self.train_s)
            for group in groups:
                self.note(
                    Kind.LEASE_END, end, group=group, lease=1_000 + first, seconds=end - begin,
                    reason=Reason.ACK, **of,
                )  # fmt: skip
            at = end + 1e-3
        if self.sealed:
            self.note(Kind.SEAL, max(came for came, *_ in put) + 1e-3, rows=0)
        if self.more or self.forgotten:
            now = at + 60.0
            self.note(
                Kind.CLAIM_WAIT, now, seconds=now - at, reason=Reason(self.more or "field"),
                going_on=True, rows=0, **of,
            )  # fmt: skip
