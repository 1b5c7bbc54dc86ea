"""Producers that wait to be let open groups, and the permits that they get.

They wait at their partition's shard, first come first served whatever they want, and hold nothing
meanwhile. Who asks (`requests.waits`) does so in turns, under the permit's number and at its age,
and tells the shard, until that has answered, when nobody waits for it any more, or its client has
ended.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from dataplane.errors import (
    ClaimTimeout,
    DataplaneError,
    LeaseExpired,
    LimitExceeded,
    StaleEpoch,
)
from dataplane.metadata.shard import reasons
from dataplane.peer.failures import again, fail
from dataplane.peer.host import Caller, Entry, Host, waits_s
from dataplane.peer.net.mesh import Mesh
from dataplane.peer.shards.claim_queues import MAX_PAST, MAX_WAITING
from dataplane.peer.shards.partitions import Partitions
from dataplane.peer.tasks import in_time
from dataplane.wire.messages import Admit, Admitted, Body, Done, Unadmit
from dataplane.wire.tables import Owner

Answer = asyncio.Future[Body]


@dataclass(slots=True, eq=False)
class _Waiting:
    """A call of admit."""

    asked: Admit
    holder: int
    since: float
    answer: Answer = field(default_factory=lambda: asyncio.get_running_loop().create_future())


@dataclass(eq=False, repr=False)
class Admissions:
    host: Host
    mesh: Mesh
    partitions: Partitions
    on_wait: Callable[[], None]
    """called while somebody waits here, in every turn"""

    def __post_init__(self) -> None:
        self._waiting: dict[tuple[str, int], dict[int, _Waiting]] = {}
        """by partition, the oldest first"""
        self._past: OrderedDict[int, None] = OrderedDict()
        self.partitions.on_phase.append(self._on_phase)
        self.mesh.handlers |= {Admit: self._admit_here, Unadmit: self._unadmit_here}

    def _admit_here(self, caller: Caller, body: Admit) -> Body | Answer:
        entry = self.host.shard(body.partition, body.generation)
        known = entry.store.permits.given.get(body.number)
        if known is not None:
            return Admitted(body.number, known.version)
        if body.number in self._past:
            raise LeaseExpired("this call was given up: call admit again")
        entry.store.permits.check(entry.store, body.count, body.max_lag, body.per_version)
        waiting = self._waiting.setdefault(entry.key, {})
        if len(waiting) >= MAX_WAITING:
            raise LimitExceeded(
                f"{MAX_WAITING} calls of admit wait at {self.host.address}, which is the limit",
                limit=MAX_WAITING,
            )
        self.host.label(caller.session, body.label)
        since = self.host.now() - body.waited_ms / 1000
        one = _Waiting(body, caller.session, since)
        before = waiting.pop(body.number, None)
        if before is not None:
            one.since = min(one.since, before.since)
            fail(before.answer, StaleEpoch("the call was repeated"))
        waiting[body.number] = one
        by_age = sorted(waiting.items(), key=lambda item: item[1].since)
        self._waiting[entry.key] = dict(by_age)
        self.look(entry)
        if not one.answer.done():
            self.on_wait()
            until = self.host.now() + waits_s(body.timeout_ms)
            in_time(one.answer, until, lambda: self._late(entry, one))
            one.answer.add_done_callback(lambda _: self._waits_no_more(entry, one))
        return one.answer

    def _waits_no_more(self, entry: Entry, one: _Waiting) -> None:
        self._withdraw(entry.key, one)
        self.look(entry)

    def _withdraw(self, key: tuple[str, int], one: _Waiting) -> None:
        waiting = self._waiting.get(key, {})
        if waiting.get(one.asked.number) is one:
            del waiting[one.asked.number]
        if not waiting:
            self._waiting.pop(key, None)

    def _unadmit_here(self, caller: Caller, body: Unadmit) -> Body:
        """What waits of them waits no more, and what is left of them is nobody's."""
        for number in body.permits:
            self._past[number] = None
            if len(self._past) > MAX_PAST:
                self._past.popitem(last=False)
        entry = self.host.entry(body.partition, body.generation)
        if entry is None:
            return Done()
        for number in body.permits:
            one = self._waiting.get(entry.key, {}).get(number)
            if one is not None:
                self._withdraw(entry.key, one)
                fail(one.answer, StaleEpoch("the call was given up"))
        entry.store.take_back(body.permits)
        self.look(entry)
        return Done()

    def look(self, entry: Entry) -> None:
        """Something changed by which somebody may go on."""
        waiting = self._waiting.get(entry.key)
        if not waiting or self.host.silent:  # what it did now its heir would not know
            return
        for one in list(waiting.values()):
            asked = one.asked
            if one.answer.done():
                continue
            try:
                limits = asked.max_lag, asked.per_version
                if not entry.store.admit(asked.number, one.holder, asked.count, *limits):
                    return
            except DataplaneError as exc:
                fail(one.answer, exc)
            else:
                version = entry.store.permits.given[asked.number].version
                one.answer.set_result(Admitted(asked.number, version))
            self._withdraw(entry.key, one)

    def _late(self, entry: Entry, one: _Waiting) -> ClaimTimeout:
        """With what it waits for."""
        waiting = list(self._waiting.get(entry.key, {}).values())
        permits = entry.store.permits
        told = permits.stats(entry.store)
        told["before"] = waiting.index(one) if one in waiting else 0
        holders: Counter[int] = Counter()
        for permit in permits.given.values():
            holders[permit.holder] += permit.left
        holders = +holders
        who = {self.host.who(h): n for h, n in holders.items()}
        me = one.asked.label
        told["only_own"] = one.asked.own and reasons.only_permits(told, who, me)
        return ClaimTimeout(reasons.of_admission(told, one.asked.count, who, me), **told)

    # whoever waits must go

    def _on_phase(self, entry: Entry, phase: str) -> None:
        if phase == "sealed":
            self.look(entry)
        else:
            self._fail(entry.key, self.host.gone(entry.name, entry.generation))

    def turned(self) -> None:
        """A new roster: who waits for what is served elsewhere now asks there."""
        for key in [k for k in self._waiting if not self.host.serves(k[0])]:
            self._fail(key, StaleEpoch(f"partition {key[0]!r} is served by another peer now"))

    def gone(self, gone: Owner) -> None:
        """A peer is no more: who waits there gets nothing. To be called before its permits go."""
        for key, waiting in list(self._waiting.items()):
            for one in list(waiting.values()):
                if gone.has_session(one.holder):
                    self._withdraw(key, one)
                    fail(one.answer, StaleEpoch("its peer is no more"))

    def _fail(self, key: tuple[str, int], why: DataplaneError) -> None:
        for one in self._waiting.pop(key, {}).values():
            fail(one.answer, again(why))
