"""Calls that wait at the primary of their partition: claims, producers that want to open groups,
and callers that wait for counts.

Waiting calls are soft state (`metadata.shard.claim_queue`, `AdmitQueue`). A granted call is a
lease or a permit of the store, which knows the call by its number. A call may be repeated
because a turn ended, a link broke or a roster changed. It then gets its grant, or keeps waiting
with its age and its position. The numbers of cancelled and answered calls are remembered for a
while, so that a late repetition does not wait for a caller that has left.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Literal

from dataplane.errors import (
    ClaimTimeout,
    DataplaneError,
    DeadlineExceeded,
    LeaseExpired,
    LimitExceeded,
    PartitionGone,
    ProtocolError,
    RowsGone,
    StaleEpoch,
    StreamEnd,
    counted,
    mixed_releases,
)
from dataplane.metadata.shard import inspection, plans, reasons, rows_out
from dataplane.metadata.shard.claim_queue import ClaimQueue, WaitingClaim
from dataplane.metadata.shard.permits import AdmitQueue, WaitingAdmit
from dataplane.peer.failures import again, fail
from dataplane.peer.host import Caller, Entry, Host, waits_s
from dataplane.peer.net.mesh import Mesh
from dataplane.peer.net.router import TURN_S
from dataplane.peer.shards.partitions import Partitions
from dataplane.peer.shards.retries import Retries
from dataplane.peer.shards.value_replicas import ValueReplicas
from dataplane.wire.events import EventRecord, Kind
from dataplane.wire.messages import (
    Admit,
    Admitted,
    Body,
    Claim,
    Claimed,
    Done,
    Finish,
    Losses,
    LossesDone,
    Wait,
    Want,
    Withdraw,
)
from dataplane.wire.tables import Owner

log = logging.getLogger(__name__)

MAX_WAITING = 32_768
"""The most calls that wait at one peer."""
MAX_PAST = 16_384
"""The most ended calls that are remembered by number; the oldest are forgotten."""
LOOK_SHARE = 50.0
"""Back off: wait LOOK_SHARE times the duration of the last search before searching again."""
YIELD_S = TURN_S + 1.0
"""After a producer was seen to wait, no rows are kept for older claims for this long. A producer
that waits at a shard asks again before that."""
SHOWN_SLOW = 3
"""The most groups whose reasons a timed-out `admit` reports."""
ADMISSION = None
"""Stands for a stage's name, which may be any text: calls there wait to open groups."""

Answer = asyncio.Future[Body]
Late = Callable[[], Coroutine[Any, Any, DataplaneError]]
"""Finds out why a call got nothing in its turn."""
Key = tuple[str, int, str | None]
"""Partition, generation and stage, or `ADMISSION`."""
Form = tuple[str, str, str | None]
"""The unit, the filter and the budget tag of calls that wait for the same reasons."""


@dataclass(slots=True)
class _Stage:
    """The calls that wait for rows of one stage, or to open groups."""

    key: Key
    entry: Entry
    queue: ClaimQueue | AdmitQueue
    waits: dict[asyncio.Future[Body], Wait | Losses] = field(default_factory=dict)
    looked: dict[Form, tuple[float, dict[str, Any]]] = field(default_factory=dict)
    """until when the result of a search is reused, and the result"""
    looking: dict[Form, asyncio.Task[dict[str, Any]]] = field(default_factory=dict)
    """the searches in progress"""


@dataclass(eq=False, repr=False)
class WaitingCalls:
    host: Host
    mesh: Mesh
    partitions: Partitions
    value_replicas: ValueReplicas
    run_effects: Callable[[Entry], None]
    producers: Callable[[], int]
    """how many puts wait for space here, or at this peer's shards"""
    retries: Retries

    def __post_init__(self) -> None:
        self._stages: dict[Key, _Stage] = {}
        self._answers: dict[int, Answer] = {}
        self._past: OrderedDict[int, None] = OrderedDict()
        self._yields_until = 0.0
        self.partitions.on_drop = self._dropped

    def __len__(self) -> int:
        """The number of claims and calls of `admit` that wait here."""
        return len(self._answers)

    # calls that arrive

    def claim(self, caller: Caller, body: Claim) -> Body | Answer:
        """Grant rows at once if there are enough and no claim is ahead, else return a future reply.

        Raises PartitionGone, StageUndefined, StreamEnd, RowsLost, ValueTooLarge or
        LimitExceeded, and LeaseExpired for a claim that has already ended. The future reply fails
        with ClaimTimeout at the end of the claim's turn. A claim that waits keeps its position
        until it is withdrawn.
        """
        entry = self.host.shard(body.partition, body.generation)
        if body.declare is not None and body.stage not in entry.store.stages:
            entry.store.declare_stage(body.stage, body.declare)
            self.run_effects(entry)
        declared, now = entry.store.stage(body.stage), self.host.now()  # StageUndefined
        if body.fields is None:
            body.fields = list(declared.fields)
        declared.claimed_at = now
        repeated = self._repeated(entry, body)
        if repeated is not None:
            return repeated
        stage = self._stage(entry, body.stage)
        assert isinstance(stage.queue, ClaimQueue)
        self._check_room(stage, body.number)
        one = WaitingClaim(body, caller.session, caller.address, now - body.waited_ms / 1000)
        met = self._at_once(stage, stage.queue, one)
        if isinstance(met, DataplaneError):
            raise met
        if met is not None:
            self.host.label(caller.session, body.label)
            return met
        stage.queue.add(one)
        late = functools.partial(self._late, stage, body.want, body.number)
        return self._answer_to(stage, caller, body, late)

    def _at_once(
        self, stage: _Stage, queue: ClaimQueue, claim: WaitingClaim
    ) -> Claimed | DataplaneError | None:
        """Serve a claim that no other claim is ahead of, without a place in the queue. Return None
        if it must wait."""
        if self.host.silent or claim.number in self._answers:
            return None
        try:
            met = queue.at_once(claim, self.host.now())
        except ProtocolError:
            raise
        except Exception:
            self._failed(stage)
            return None
        if met is not None:
            self._remember(claim.number)
            self._waited(stage, claim)
        return met

    def admit(self, caller: Caller, body: Admit) -> Body | Answer:
        """Grant a permit at once or return a future reply: first come, first served, whatever
        the size."""
        entry = self.host.shard(body.partition, body.generation)
        permits = entry.store.permits
        if body.number in permits.given:
            return Admitted(body.number, permits.given[body.number].version)
        permits.check(entry.store, body.count, body.max_lag, body.per_version)
        if body.number in self._past:
            raise LeaseExpired(
                "the client withdrew this admit call, or disconnected: call part.admit(…) again"
            )
        stage = self._stage(entry, ADMISSION)
        assert isinstance(stage.queue, AdmitQueue)
        self._check_room(stage, body.number)
        one = WaitingAdmit(body, caller.session, self.host.now() - body.waited_ms / 1000)
        stage.queue.add(one)
        late = functools.partial(self._not_admitted, stage, one)
        answer = self._answer_to(stage, caller, body, late)
        if not isinstance(answer, Body):
            self.producers_wait()
        return answer

    def _check_room(self, stage: _Stage, number: int) -> None:
        if len(self._answers) >= MAX_WAITING and number not in stage.queue:
            raise LimitExceeded(
                f"the peer at {self.host.address} already has {MAX_WAITING} waiting "
                "calls, the maximum: let fewer processes wait at the same time",
                limit=MAX_WAITING,
            )

    def _answer_to(
        self, stage: _Stage, caller: Caller, body: Claim | Admit, late: Late
    ) -> Body | Answer:
        """Return the reply to a call that is now in its queue, or a future if it must wait."""
        if body.number in self._answers:
            self._answer(
                body.number,
                StaleEpoch(
                    "this attempt was replaced by a newer attempt at the same call: wait for the "
                    "reply to the newer attempt"
                ),
            )
        self.host.label(caller.session, body.label)
        mine = self._serve(stage, body.number)
        if isinstance(mine, DataplaneError):
            raise mine
        if mine is not None:
            return mine
        if isinstance(stage.queue, ClaimQueue):
            try:
                stage.queue.note_reason(body.number, self.host.now())
            except Exception:  # it would wait in the queue for rows that no caller takes
                self._failed(stage)
        answer: Answer = asyncio.get_running_loop().create_future()
        self._answers[body.number] = answer
        ends = functools.partial(self._gives_up, stage, body.number)
        self._in_time(answer, body.timeout_ms, late, None if body.timeout_ms else ends)
        return answer

    def _repeated(self, entry: Entry, body: Claim) -> Claimed | None:
        """Return the reply to a claim that has a lease already."""
        leases = entry.store.leases
        if body.plan is not None and (member := leases.member_of_claim(body.number)) is not None:
            return plans.part(member)
        lease = leases.of_claim(body.number)
        if lease is not None:
            try:
                table = rows_out.table(entry.store, lease.number, body.fields, body.stage)
                return Claimed(lease.number, 0, table)
            except RowsGone:  # no client has seen the lease: grant other rows
                self._finish(entry, lease.number, "release")
                return None
        if body.number in self._past:
            raise LeaseExpired(
                "the client withdrew this claim, or the claim's lease ended: claim again"
            )
        return None

    # calls that end

    def withdraw(self, caller: Caller, body: Withdraw) -> Body:
        """Withdraw waiting calls. They have no lease and no permit, and never get one."""
        for number in body.numbers:
            self._remember(number)
        entry = self.host.entry(body.partition, body.generation)
        if entry is None:
            return Done()
        entry.store.take_back(body.numbers)
        for stage in [one for one in self._stages.values() if one.entry is entry]:
            for number in body.numbers:
                if number in stage.queue:
                    self._end(stage, number)
            self._serve(stage)
        leases = entry.store.leases
        for number in body.numbers:
            if (lease := leases.of_claim(number)) is not None:
                self._finish(entry, lease.number, "release")
            member = leases.member_of_claim(number)
            if member is not None and not member.acked:
                self._finish(entry, member.number, "leave")
        return Done()

    def _finish(self, entry: Entry, lease: int, outcome: Literal["release", "leave"]) -> None:
        entry.store.finish(Finish(lease, outcome), self.host.now())
        self.run_effects(entry)

    def _end(self, stage: _Stage, number: int, why: DataplaneError | None = None) -> None:
        """Remove a call from the queue."""
        if (call := stage.queue.get(number)) is not None:
            self._waited(stage, call)
        stage.queue.withdraw(number)
        self._answer(
            number,
            again(why)
            if why
            else StaleEpoch(
                "the caller cancelled this call: repeat the call if you still need its result"
            ),
        )

    def _gives_up(self, stage: _Stage, number: int) -> None:
        """End a call that does not wait, after its reply. Serve the others, which may now get the
        rows that were kept for it during the search for its reason."""
        self._end(stage, number)
        self._serve(stage)

    def _remember(self, number: int) -> None:
        self._past[number] = None
        if len(self._past) > MAX_PAST:
            self._past.popitem(last=False)

    def _answer(self, number: int, outcome: Body | DataplaneError) -> None:
        if (answer := self._answers.pop(number, None)) is not None:
            _give(answer, outcome)

    # changes that may answer them

    def changed(self, entry: Entry, stages: set[str]) -> None:
        """Look at waiting calls again, because these stages of the partition changed."""
        for name in (*stages, ADMISSION):
            stage = self._stages.get((entry.name, entry.generation, name))
            if stage is not None:
                self._recheck(stage)

    def producers_wait(self) -> None:
        """Note that a producer somewhere waits for space, for permits to open groups, or for
        rows to leave. Claims by others may free those, so they now get the rows that are ready."""
        kept, self._yields_until = self._yields_until < self.host.now(), self.host.now() + YIELD_S
        for stage in list(self._stages.values()) if kept else ():
            self._recheck(stage)

    def _recheck(self, stage: _Stage) -> None:
        self._serve(stage)
        for answer, body in list(stage.waits.items()):
            self._recheck_wait(stage, answer, body)

    def _recheck_wait(self, stage: _Stage, answer: Answer, body: Wait | Losses) -> None:
        try:
            outcome = _met(stage.entry, body)
        except Exception:
            self._failed(stage)
            return
        if outcome is not None:
            _give(answer, outcome)

    def _stage(self, entry: Entry, name: str | None) -> _Stage:
        key = (entry.name, entry.generation, name)
        found = self._stages.get(key)
        if found is None:
            if name is ADMISSION:
                queue: ClaimQueue | AdmitQueue = AdmitQueue(entry.store)
            else:
                entry.store.stage(name)  # StageUndefined
                queue = ClaimQueue(entry.store, name)
            found = self._stages[key] = _Stage(key, entry, queue)
        return found

    def _serve(self, stage: _Stage, number: int = 0) -> Body | DataplaneError | None:
        """Serve the calls that can be served. Return the reply to call `number`; the others get
        theirs."""
        if not len(stage.queue) or self.host.silent:  # the new primary would not know of a change
            return None
        mine: Body | DataplaneError | None = None
        now = self.host.now()
        keep = now >= self._yields_until and not self.producers()
        try:
            for claim, told in stage.queue.serve(now, keep):
                self._remember(claim.number)
                self._waited(stage, claim)
                if claim.number == number:
                    mine = told
                else:
                    self._answer(claim.number, told)
        except Exception:
            self._failed(stage)
        return mine

    def _waited(self, stage: _Stage, call: WaitingClaim | WaitingAdmit) -> None:
        if self.host.events.keeps_wait(call.since):  # most claims wait for nothing
            self.host.events.waited(_record(stage, call), call.since)

    def going_on(self) -> list[EventRecord]:
        """Return a record of each waiting call: its reason and start time, as for a wait that
        ends now."""
        found = []
        for stage in self._stages.values():
            for call in stage.queue:
                if isinstance(stage.queue, ClaimQueue):
                    stage.queue.note_reason(call.number, self.host.now())
                record = _record(stage, call)
                record.at = self.host.now()
                record.seconds = max(0.0, record.at - call.since)
                found.append(record)
        return found

    def _failed(self, stage: _Stage) -> None:
        """Serve the stage again soon after serving its waiting calls failed. The command before
        that is not affected."""
        partition, _, name = stage.key
        who = "admit" if name is ADMISSION else f"claims of stage {name!r}"
        what = f"partition {partition!r}: serving waiting {who}"
        self.retries.failed(what, functools.partial(self._recheck_if_there, stage.key), stage.key)

    def _recheck_if_there(self, key: Key) -> None:
        if key in self._stages:
            self._recheck(self._stages[key])

    # waiting without claiming

    def wait(self, caller: Caller, body: Wait) -> Answer:
        """Wait until the counts satisfy the request, or until a row with its key exists.

        Raise StreamEnd if that can never happen, and ClaimTimeout at the deadline: the asking
        peer then states the reason, or asks again.
        """
        entry = self.host.shard(body.partition, body.generation)
        if body.key is None:
            stage = self._stage(entry, body.stage)
            units = entry.store.stage(body.stage).units(body.unit)
            units.want(body.where, True)  # ProtocolError for no filter, before others are looked at
        else:  # checked after every change
            stage, units = self._stage(entry, ADMISSION), None
        answer: Answer = asyncio.get_running_loop().create_future()
        stage.waits[answer] = body

        def ended(answer: Answer) -> None:
            del stage.waits[answer]
            if units is not None:
                units.want(body.where, False)

        answer.add_done_callback(ended)
        if body.below:
            self.producers_wait()
        self._recheck_wait(stage, answer, body)  # nothing has changed for the others
        late = self._late if body.key is None else self._no_key
        self._in_time(answer, body.timeout_ms, functools.partial(late, stage, body))
        return answer

    # why

    def _in_time(
        self, answer: Answer, timeout_ms: int, late: Late, ends: Callable[[], None] | None = None
    ) -> None:
        """Fail an answer at the end of the call's turn, with the reason that `late` finds out.
        ends: called after that."""

        async def fail_late() -> None:
            why: Exception
            try:
                why = await late()
            except Exception as exc:  # a bug: the caller gets the error and waits no longer
                why = exc
            if not answer.done():
                fail(answer, why)
                if ends is not None:
                    ends()

        if (left_s := waits_s(timeout_ms)) < math.inf:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(max(0.0, left_s), lambda: self.mesh.spawn(fail_late()))
            answer.add_done_callback(lambda _: timer.cancel())

    def losses(self, caller: Caller, body: Losses) -> Answer:
        """Wait for lost rows after the caller's number, or until no row can be lost. Raise
        DeadlineExceeded at the deadline."""
        if body.after < 0:
            raise mixed_releases(
                f"invalid position {body.after} in the list of lost rows: expected 0 or more"
            )
        entry = self.host.shard(body.partition, body.generation)
        stage = self._stage(entry, ADMISSION)  # this queue is checked after every change
        answer: Answer = asyncio.get_running_loop().create_future()
        stage.waits[answer] = body
        answer.add_done_callback(stage.waits.pop)
        self._recheck_wait(stage, answer, body)
        self._in_time(answer, body.timeout_ms, functools.partial(self._no_losses, body))
        return answer

    async def _no_losses(self, body: Losses) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"timed out while waiting for losses: no row of partition {body.partition!r} was lost. "
            "Repeat the call to keep waiting"
        )

    async def _no_key(self, stage: _Stage, body: Wait) -> ClaimTimeout:
        """Return the error of a timed-out wait for a key, with `reasons.Facts` and `near`."""
        assert body.key is not None
        told = inspection.around_key(stage.entry.store, body.key, self.host.now())
        return ClaimTimeout(
            f"row {body.key!r} does not exist yet: repeat the call to keep waiting", **told
        )

    async def _late(self, stage: _Stage, want: Want | Wait, claim: int = 0) -> ClaimTimeout:
        """Return the error of a timed-out claim or wait, with `reasons.Facts` by name."""
        missing = await self._missing(stage, want)
        assert isinstance(stage.queue, ClaimQueue)
        now = self.host.now()
        told = missing | {
            "before": stage.queue.before(claim),
            "plan": stage.queue.waits_for(claim, now),
        }
        if claim in stage.queue:
            told["reason"] = str(stage.queue.reason(claim, now))
        told["waiting_puts"] = self.producers()
        return ClaimTimeout(
            f"stage {stage.queue.stage!r} does not have enough rows yet: "
            "repeat the call to keep waiting",
            **told,
        )

    async def _missing(self, stage: _Stage, want: Want | Wait) -> dict[str, Any]:
        """Return why a call gets no rows, now or a moment ago. Calls of one form share one scan."""
        form = want.unit, str(want.where), want.budget_tag if isinstance(want, Want) else None
        until, missing = stage.looked.get(form, (0.0, {}))
        if self.host.now() < until:
            return missing
        if form not in stage.looking:
            assert isinstance(stage.queue, ClaimQueue)
            name, store = stage.queue.stage, stage.entry.store
            look = inspection.Look(store, name, want.unit, want.where, form[2])
            stage.looking[form] = self.mesh.spawn(self._scan(stage, look, form))
        return await asyncio.shield(stage.looking[form])

    async def _scan(self, stage: _Stage, look: inspection.Look, form: Form) -> dict[str, Any]:
        took_s, more, host = 0.0, True, self.host
        try:
            while more:
                began = host.now()
                more = look.go_on()
                took_s += host.now() - began
                await asyncio.sleep(0)
            missing = inspection.missing(look, now := host.now())
        finally:
            del stage.looking[form]
        missing["leases"] = [[host.who(holder), *rest] for holder, *rest in missing["leases"]]
        until = host.now() + LOOK_SHARE * (took_s + host.now() - now)
        stage.looked = {k: one for k, one in stage.looked.items() if now < one[0]}
        stage.looked[form] = until, missing
        return missing

    async def _not_admitted(self, stage: _Stage, one: WaitingAdmit) -> ClaimTimeout:
        """Return the error of a timed-out `admit`, with what the call waits for."""
        store = stage.entry.store
        told = store.permits.stats(store) | {"before": stage.queue.before(one.number)}
        # The partition has its limits from the first call that was granted.
        told["slots"] = (one.asked.max_lag + 1) * one.asked.per_version
        holders: Counter[int] = Counter()
        for permit in store.permits.given.values():
            holders[permit.holder] += permit.left
        who, me = {self.host.who(h): n for h, n in (+holders).items()}, one.asked.label
        told["only_own"] = one.asked.own and reasons.only_permits(told, who, me)
        now, (_, groups) = self.host.now(), store.permits.slowest(store)
        slow = [inspection.unfinished(store, group) for group in groups[:SHOWN_SLOW]]
        held = inspection.holders(store, now)
        leases = [(self.host.who(holder), of, rows, age) for holder, of, rows, age in held]
        idle = inspection.idle(store, now)
        why = reasons.of_admission(told, one.asked.count, who, me, slow, idle, leases)
        return ClaimTimeout(why, **told, reason=str(one.reason))

    # ends of partitions and of shards

    def _dropped(self, entry: Entry) -> None:
        for key in [k for k in self._stages if k[:2] == entry.key]:
            self._close(key, self.host.gone(entry.name, entry.generation))

    def turned(self) -> None:
        """Apply a new roster: callers of partitions that moved ask their new peer."""
        for key in [k for k in self._stages if not self.host.serves(k[0])]:
            self._close(
                key,
                StaleEpoch(f"partition {key[0]!r} is now served by another peer: repeat the call"),
            )

    def _close(self, key: Key, why: DataplaneError) -> None:
        stage = self._stages.pop(key)
        for claim in stage.queue:
            self._end(stage, claim.number, why)
        for answer, body in stage.waits.items():
            if isinstance(body, Losses) and isinstance(why, PartitionGone):
                _give(answer, LossesDone(body.after, ended=True))
            else:
                fail(answer, again(why))

    def gone(self, gone: Owner) -> None:
        """Handle a lost peer: drop its calls, return the rows that its clients had leased, and
        mark rows with values there as lost."""
        for stage in self._stages.values():
            for claim in stage.queue:
                if gone.has_session(claim.holder):
                    self._end(stage, claim.number)
        for entry in list(self.host.entries.values()):
            holders = filter(gone.has_session, entry.store.lessees)
            back = sum(entry.store.release_holder(holder) for holder in holders)
            self.value_replicas.owner_gone(entry, gone)
            lost = entry.store.lost(gone)
            if back or lost:
                log.warning(
                    "partition %r: peer %s was lost (%d rows lost, %d leased rows claimable again)",
                    entry.name,
                    gone.peer,
                    lost,
                    back,
                )
                self.host.lost_rows += lost
            self.run_effects(entry)
            self.changed(entry, set(entry.store.stages))


def _record(stage: _Stage, call: WaitingClaim | WaitingAdmit) -> EventRecord:
    (partition, generation, name), reason = stage.key, call.reason
    kind = Kind.ADMIT_WAIT if name is ADMISSION else Kind.CLAIM_WAIT
    return EventRecord(kind, 0.0, reason, partition, generation, name or "", worker=call.holder)


def _give(answer: Answer, outcome: Body | DataplaneError) -> None:
    if answer.done():
        return
    if isinstance(outcome, Body):
        answer.set_result(outcome)
    else:
        fail(answer, outcome)


def _met(entry: Entry, body: Wait | Losses) -> Body | DataplaneError | None:
    """Return the reply to a wait; None if the wait continues."""
    if isinstance(body, Losses):
        names, number, missed = entry.store.losses.after(body.after)
        over = not (names or missed) and _over(entry)
        return LossesDone(number, names, missed, over) if names or missed or over else None
    if body.key is not None:
        return inspection.key_status(entry.store, body.key)
    counts = entry.store.counts(body.stage, body.unit, body.where)
    enough = body.count and counts.ready >= body.count
    if enough or (body.below and counts.outstanding < body.below):
        return Done()
    if body.count and entry.store.sealed and counts.to_come < body.count:
        noun = body.unit.removesuffix("s")
        one, many = f"{noun} left", f"{noun}s left"
        if body.where:
            one, many = f"{one} that matches", f"{many} that match"
        return StreamEnd(
            f"partition {body.partition!r} is sealed: stage {body.stage!r} has only "
            f"{counted(counts.remaining, one, many)}, so the {body.count} "
            "requested will never be ready. Claim what is left, or leave the loop",
            remaining=counts.remaining,
        )
    return None


def _over(entry: Entry) -> bool:
    """Return whether the partition is sealed and no stage has outstanding rows."""
    stages = entry.store.stages
    return (
        entry.store.sealed
        and bool(stages)
        and not any(entry.store.counts(stage).outstanding for stage in stages)
    )
