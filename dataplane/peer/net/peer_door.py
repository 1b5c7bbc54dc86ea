"""The peer door: greetings of other peers, over a zmq ROUTER, and their requests, over streams.

A request is answered under the roster that its sender works under, or not at all: one that is
behind is refused (`StaleEpoch`), and one that is ahead waits until this peer has caught up. A
message that is no request is answered and forgotten; the connection stays.

Unanswered requests are bounded. A call stream with `STREAM_BYTES` of them is not read, and TCP
makes its sender wait. While all streams together have `limits.MAX_BYTES_UNDER_WAY`, call streams
that have their share of it or more are not read. Control streams are always read: two peers whose
calls fill each other would wait for ever for what their backups confirm. A control stream holds at
most `CONTROL_BYTES`; what comes beyond that is refused.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from types import CoroutineType
from typing import Any, cast

import msgspec

from dataplane.errors import FrameTooLarge, ProtocolError, StaleEpoch, Unavailable
from dataplane.metadata.roster.roster import Roster
from dataplane.peer.failures import failed
from dataplane.peer.host import Caller, Host, call_deadline
from dataplane.peer.net.greetings import Gate
from dataplane.peer.net.streams import Stream, Streams
from dataplane.wire import limits, peering
from dataplane.wire.journal import Settle
from dataplane.wire.messages import Body, Failed, Stats
from dataplane.wire.peering import (
    Append,
    Beat,
    CanFree,
    Confirm,
    Duplicate,
    Identify,
    Inherited,
    PeerHello,
    PeerReply,
    PeerRequest,
    Pull,
    Release,
    Rostered,
    Sample,
)
from dataplane.wire.refusals import Refusals
from dataplane.wire.tables import Owner

log = logging.getLogger(__name__)

REQUEST_BYTES = 2_048
"""A request that waits counts as at least this, which bounds their number as well: 8,192 of a
stream, 131,072 of all."""
STREAM_BYTES = 16 << 20
"""Enough to keep a link busy; with more, what backups confirm waits longer for its share of it."""
CONTROL_BYTES = 64 << 20
"""A backup has one message of its primary at a time, of some 12 MiB at most, and repetitions of
it."""
CATCH_UP_S = 5.0
"""How long a request of a newer roster waits for this peer to have it."""
ANYBODY = frozenset({PeerHello, Beat, Rostered, Confirm, Stats})
"""What a peer may say that is no member, or not yet; its handler looks who it is."""
ANY_EPOCH = frozenset({Inherited, Release, Sample, Identify, Pull, Settle})
"""What does not depend on who serves which shard."""
OF_SHARDS = frozenset({Inherited, Release})
"""Of these what shards name. A peer that went on by itself, under a roster that nobody else got,
has undone with its end what it did there: who takes its shards over goes on from before."""
WHENEVER = ANYBODY | ANY_EPOCH
UNHELD = frozenset(
    {PeerHello, Beat, Rostered, Confirm, Append, Duplicate, Stats, Sample, Identify, Pull}
)
"""What is sent and answered although the backup has not caught up: it tells of no change, or is how
the backup catches up."""
CONTROL = frozenset(
    {Beat, Rostered, Confirm, Append, Duplicate, Inherited, Release, Settle, CanFree, Pull}
)
"""What peers ask each other so that calls can be answered: it goes over the control stream. Pulls
are among it because a shard may have to bring values before it answers."""

Handler = Callable[[Caller, Any], Body | Awaitable[Body]]


@dataclass(eq=False, repr=False)
class PeerDoor:
    host: Host
    handlers: dict[type[Body], Handler]
    _hold: Callable[[asyncio.Future[Any]], asyncio.Future[Any]]
    """has them end with this peer"""
    _gate: Gate
    _heard: Callable[[Owner], None]
    """told whose process a request came from"""

    def __post_init__(self) -> None:
        self.streams = Streams(self._gate.encrypted, self._arrived)
        self.refusals = Refusals(log, "peer door")
        self.limit_bytes = limits.MAX_BYTES_UNDER_WAY
        self.stream_bytes, self.control_bytes = STREAM_BYTES, CONTROL_BYTES
        self._unanswered_bytes = 0
        self._paused: set[Stream] = set()
        self.carry: Callable[[Owner, bytes], Append | None] = lambda to, connection: None
        """what an answer on this connection brings to the backup, so that it need not wait"""
        self.heard: Callable[[Owner, int, int], None] = lambda by, stream, end: None
        """told how far the backup is, as its requests say"""

    def greeted(self, frame: bytes) -> bytes:
        """The answer to what came over zmq: all of it are greetings."""
        try:
            request = peering.decode_request(frame)
            if not isinstance(request.body, PeerHello):
                raise ProtocolError(
                    "requests between peers must go over a stream; zmq carries only greetings"
                )
        except ProtocolError as exc:
            return self._refusal(exc)
        try:
            reply = self._carry_out(request)
            assert isinstance(reply, Body)
        except Exception as exc:
            reply = failed(exc)
        self.host.sent_between[type(reply).__name__] += 1
        return peering.encode(PeerReply(request.rid, self.host.incarnation, reply))  # type: ignore[arg-type]

    def welcome(self, hello: PeerHello) -> PeerHello:
        """The answer to a greeting: with two streams for the requests of the peer that greets."""
        return msgspec.structs.replace(
            hello,
            stream=self.streams.address,
            stream_secret=self.streams.promise(),
            control_secret=self.streams.promise(control=True),
        )

    def _refusal(self, exc: ProtocolError) -> bytes:
        """The answer to what is no request."""
        self.refusals.count(exc)
        return peering.encode(PeerReply(0, self.host.incarnation, failed(exc)))

    def _arrived(self, stream: Stream, frame: bytes | memoryview) -> None:
        """Answered at once, unless somebody or something has to be waited for."""
        try:
            request = peering.decode_request(frame)
        except ProtocolError as exc:
            self.streams.answer(stream, self._refusal(exc))
            return
        limit_s = request.deadline_ms / 1000
        sender = Owner(request.sender, request.incarnation)
        self._heard(sender)
        if request.has is not None:
            self.heard(sender, *request.has)
        # What is asked of others on the way ends before, so that the sender is told who it was.
        call_deadline.set(self.host.now() + limit_s - min(0.1, limit_s / 10))
        outcome: Body | Awaitable[Body]
        try:
            if stream.is_control:
                self._check_control(stream, request)
            if type(request.body) is Pull and stream.is_full:
                outcome = self._drained(stream, request, sender)
            elif _is_for_anybody(request.body) or self._is_in_step(request, sender):
                outcome = self._carry_out(request)
            else:
                outcome = self._in_step(request, sender)
        except Exception as exc:
            outcome = failed(exc)
        if isinstance(outcome, Body) and self._answers_now(stream, request, sender, outcome):
            return
        nbytes = max(len(frame), REQUEST_BYTES)
        self._unanswered_bytes += nbytes
        stream.unanswered_bytes += nbytes
        if self._has_too_much(stream):
            self._paused.add(stream)
            stream.pause()
        call = self._hold(asyncio.ensure_future(self._to_its_end(stream, request, sender, outcome)))
        call.add_done_callback(lambda _: self._over(stream, nbytes))

    def _check_control(self, stream: Stream, request: PeerRequest) -> None:
        """ProtocolError, Unavailable for a request that the control stream does not take."""
        if type(request.body) not in CONTROL:
            raise ProtocolError(f"{type(request.body).__name__} must go over the call stream")
        if stream.unanswered_bytes >= self.control_bytes:
            raise Unavailable(
                f"{stream.unanswered_bytes} bytes of requests from {request.sender} are "
                f"unanswered, and the limit is {self.control_bytes}: repeat the request "
                "later"
            )

    async def _drained(self, stream: Stream, request: PeerRequest, sender: Owner) -> Body:
        """A pull has a large answer: it waits until the asker has taken the answers before it."""
        await stream.drained()
        return await self._in_step(request, sender)

    def _has_too_much(self, stream: Stream) -> bool:
        """Whether a stream waits until more of its requests are answered."""
        held = 0 if stream.is_control else stream.unanswered_bytes
        share = self.limit_bytes // max(1, len(self.streams))
        is_full = self._unanswered_bytes >= self.limit_bytes
        return held >= self.stream_bytes or (is_full and held >= max(1, share))

    def _over(self, stream: Stream, nbytes: int) -> None:
        was_full = self._unanswered_bytes >= self.limit_bytes
        self._unanswered_bytes -= nbytes
        stream.unanswered_bytes -= nbytes
        is_full = self._unanswered_bytes >= self.limit_bytes
        for one in list(self._paused) if was_full > is_full else [stream]:
            if one in self._paused and not self._has_too_much(one):
                self._paused.remove(one)
                one.resume()

    async def _to_its_end(
        self, stream: Stream, request: PeerRequest, sender: Owner, outcome: Body | Awaitable[Body]
    ) -> None:
        try:
            reply = outcome if isinstance(outcome, Body) else await outcome
        except Exception as exc:
            reply = failed(exc)
        if self._answers_now(stream, request, sender, reply):
            return
        until = self.host.now() + request.deadline_ms / 1000
        try:
            await self.host.progress.reached(until)
            if _is_of_a_shard(request.body):
                await self.host.serving.until_sure(until)
        except Exception as exc:
            reply = failed(exc)
        self._answer(stream, request, reply)

    def _answers_now(
        self, stream: Stream, request: PeerRequest, sender: Owner, reply: Body
    ) -> bool:
        """The answer goes out, unless the backup has yet to get what it may tell of, or to confirm
        that this peer still serves."""
        refused = type(reply) is Failed and reply.code == StaleEpoch.__name__
        unheld = type(request.body) in UNHELD and not self._is_passed_on(request)
        if _is_of_a_shard(request.body) and not (refused or self.host.serving.is_sure()):
            return False  # it may be of the past: another peer may serve the shard by now
        append = None
        if not (unheld or refused or self.host.progress.is_settled):
            append = self.carry(sender, stream.id)
            if append is None:
                return False
        self._answer(stream, request, reply, append)
        return True

    def _is_passed_on(self, request: PeerRequest) -> bool:
        """Whether the sender relies on the backup of this peer as well, whose its shards will be:
        it leaves."""
        leaving = self.host.roster.leaving
        return type(request.body) is Append and request.sender in leaving - {self.host.address}

    def _answer(
        self, stream: Stream, request: PeerRequest, reply: Body, append: Append | None = None
    ) -> None:
        self.host.sent_between[type(reply).__name__] += 1
        here = self.host.incarnation
        try:
            frame = peering.encode(PeerReply(request.rid, here, reply, append))  # type: ignore[arg-type]
        except FrameTooLarge as exc:
            frame = peering.encode(PeerReply(request.rid, here, failed(exc), append))
        self.streams.answer(stream, frame)

    async def _in_step(self, request: PeerRequest, sender: Owner) -> Body:
        """Once both sides work under the same roster. StaleEpoch where they will not."""
        await self._catch_up(request, sender)
        outcome = self._carry_out(request)
        return outcome if isinstance(outcome, Body) else await outcome

    def _carry_out(self, request: PeerRequest) -> Body | Awaitable[Body]:
        body, kind = request.body, type(request.body)
        handler = self.handlers.get(kind)
        if handler is None:
            raise ProtocolError(f"{kind.__name__} is not accepted from peers")
        if kind not in WHENEVER:
            self.host.speak()
        caller = Caller(request.sender, request.incarnation, request.session, request.epoch)
        outcome = self._start(handler, caller, body)
        if isinstance(outcome, Body):
            return outcome
        call = asyncio.ensure_future(outcome)
        # Where this peer ends nobody waits for it: that is no bug to log.
        call.add_done_callback(lambda call: call.cancelled() or call.exception())
        return call

    def _start(self, handler: Handler, caller: Caller, body: Body) -> Body | Awaitable[Body]:
        outcome = handler(caller, body)
        if type(body) in WHENEVER or not isinstance(outcome, CoroutineType):
            return outcome
        return self._under(self.host.roster, caller, cast(Coroutine[Any, Any, Body], outcome))

    async def _under(self, roster: Roster, caller: Caller, work: Coroutine[Any, Any, Body]) -> Body:
        """A coroutine begins a turn of the loop after the epochs were compared."""
        try:
            if self.host.roster is not roster:
                raise self._out_of_step(caller.address, roster.epoch)
            self.host.speak()
        except StaleEpoch:
            work.close()
            raise
        return await work

    def _is_in_step(self, request: PeerRequest, sender: Owner) -> bool:
        """Whether it can be seen at once that both sides work under one roster."""
        roster = self.host.roster
        if request.epoch != roster.epoch or not roster.has(sender):
            return False
        return not _is_of_a_shard(request.body) or self.host.serving.is_sure()

    async def _catch_up(self, request: PeerRequest, sender: Owner) -> None:
        until = self.host.now() + min(CATCH_UP_S, request.deadline_ms / 1000)
        if _is_of_a_shard(request.body):
            await self.host.serving.until_sure(until)
        while request.epoch[1] > self.host.roster.epoch[1]:
            if not await self.host.another_roster(self.host.roster, until):
                break
        roster = self.host.roster
        if request.epoch == roster.epoch:
            known = roster.has(sender)
        else:
            known = type(request.body) in ANY_EPOCH and sender in roster.owners
            if type(request.body) in OF_SHARDS and not roster.follows(request.epoch):
                known = (
                    False  # whose the sender's shards are that roster says, or it never happened
                )
        if not known:
            raise self._out_of_step(request.sender, request.epoch)

    def _out_of_step(self, sender: str, epoch: tuple[int, int]) -> StaleEpoch:
        here = self.host.roster.epoch
        return StaleEpoch(
            f"{sender} uses roster {epoch}, the peer at {self.host.address} uses {here}: "
            "repeat the call, both will be updated",
            sender=sender,
            number=here[1],
        )


def _is_for_anybody(body: Body) -> bool:
    """Whether any peer may ask it, whatever roster it has."""
    return type(body) in ANYBODY and not _is_of_a_shard(body)


def _is_of_a_shard(body: Body) -> bool:
    """Whether only the primary of a shard may answer it."""
    if type(body) is Stats:
        return bool(body.partition)
    return type(body) not in UNHELD
