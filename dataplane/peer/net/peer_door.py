"""The peer door: greetings of other peers over a zmq ROUTER, and their requests over streams.

A request runs only under the roster of its sender. A request under an older roster is refused
(`StaleEpoch`). A request under a newer roster waits until this peer has caught up. An invalid
message is answered with an error and forgotten; the connection stays open.

Unanswered requests are bounded. A call stream with `STREAM_BYTES` of them is not read, and TCP
makes its sender wait. While all streams together have `limits.MAX_BYTES_UNDER_WAY`, call streams
at or above their share are not read. Control and heartbeat streams are always read: otherwise two
peers whose calls fill each other would wait for ever for confirmations of their backups. Each of
these streams holds at most `CONTROL_BYTES`. Requests beyond that are refused.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from dataplane.errors import FrameTooLarge, ProtocolError, StaleEpoch, Unavailable, mixed_releases
from dataplane.peer.failures import failed
from dataplane.peer.host import CallContext, Caller, Host, call_context
from dataplane.peer.net.greetings import Gate
from dataplane.peer.net.streams import Stream, Streams
from dataplane.peer.operations import OPERATIONS, Channel, Operation, PeerHandler, Sender
from dataplane.peer.pipeline import MARGIN_S, Call
from dataplane.peer.tasks import begin
from dataplane.wire import limits, peering
from dataplane.wire.messages import Body, Failed
from dataplane.wire.peering import Append, PeerHello, PeerReply, PeerRequest
from dataplane.wire.refusals import Refusals
from dataplane.wire.tables import Owner

log = logging.getLogger(__name__)

REQUEST_BYTES = 2_048
"""A waiting request counts as at least this many bytes. That bounds the number of requests: 8,192
per stream, 131,072 in all."""
STREAM_BYTES = 16 << 20
"""Unanswered bytes per call stream. This keeps a link busy; more would delay what backups
confirm."""
CONTROL_BYTES = 64 << 20
"""Unanswered bytes per control or heartbeat stream. A primary sends its backup one message at a
time, at most as long as a frame. Few messages exceed 4 MiB."""
CATCH_UP_S = 5.0
"""How long a request under a newer roster waits until this peer has that roster."""


@dataclass(eq=False, repr=False)
class PeerDoor:
    host: Host
    handlers: dict[type[Body], PeerHandler]
    _hold: Callable[[asyncio.Future[Any]], asyncio.Future[Any]]
    """makes a task end with this peer"""
    _gate: Gate
    _heard: Callable[[Owner], None]
    """called with the process that sent a request"""

    def __post_init__(self) -> None:
        self.streams = Streams(self._gate.encrypted, self._arrived)
        self.refusals = Refusals(log, "peer door")
        self.limit_bytes = limits.MAX_BYTES_UNDER_WAY
        self.stream_bytes, self.control_bytes = STREAM_BYTES, CONTROL_BYTES
        self._unanswered_bytes = 0
        self._paused: set[Stream] = set()
        self.carry: Callable[[Owner, bytes], Append | None] = lambda to, connection: None
        """returns records to send along with a reply on this connection, so that it need not
        wait"""
        self.heard: Callable[[Owner, int, int], None] = lambda by, stream, end: None
        """called with the backup's position in the log, which its requests state"""

    def greeted(self, frame: bytes) -> bytes:
        """Return the reply to a message that arrived over zmq, where only greetings are valid."""
        try:
            request = peering.decode_request(frame)
            if not isinstance(request.body, PeerHello):
                raise mixed_releases(
                    f"expected PeerHello on the zmq socket, got {type(request.body).__name__}"
                )
        except ProtocolError as exc:
            return self._refusal(exc)
        try:
            reply = self.handlers[PeerHello](_caller(request), request.body)
            assert isinstance(reply, Body)
        except Exception as exc:
            reply = failed(exc)
        self.host.sent_between[type(reply).__name__] += 1
        return peering.encode(PeerReply(request.rid, self.host.incarnation, reply))  # type: ignore[arg-type]

    def welcome(self, hello: PeerHello) -> PeerHello:
        """Return the reply to a greeting, with a stream for each channel of the greeting peer."""
        return msgspec.structs.replace(
            hello,
            stream=self.streams.address,
            stream_secret=self.streams.promise(Channel.CALLS),
            control_secret=self.streams.promise(Channel.CONTROL),
            heartbeat_secret=self.streams.promise(Channel.HEARTBEAT),
        )

    def _refusal(self, exc: ProtocolError) -> bytes:
        """Return the reply to an invalid request."""
        self.refusals.count(exc)
        return peering.encode(PeerReply(0, self.host.incarnation, failed(exc)))

    def _arrived(self, stream: Stream, frame: bytes | memoryview) -> None:
        """Handle a frame. Reply at once unless the request must wait."""
        try:
            request = peering.decode_request(frame)
            operation = OPERATIONS.get(type(request.body))
            if operation is None:
                raise mixed_releases(f"peers may not send {type(request.body).__name__} messages")
        except ProtocolError as exc:
            self.streams.answer(stream, self._refusal(exc))
            return
        sender = Owner(request.sender, request.incarnation)
        self._heard(sender)
        if request.has is not None:
            self.heard(sender, *request.has)
        # Calls to other peers end earlier, so that the reply can say which peer was late.
        limit_s = request.deadline_ms / 1000
        until = self.host.now() + limit_s - min(MARGIN_S, limit_s / 10)
        call_context.set(CallContext(until))
        held = operation.is_held(request.body)
        call = _Call(self.host, operation, until, held, self, stream, request, sender)
        task = begin(call.serve())
        if task is None:
            return
        nbytes = max(len(frame), REQUEST_BYTES)
        self._unanswered_bytes += nbytes
        stream.unanswered_bytes += nbytes
        if self._has_too_much(stream):
            self._paused.add(stream)
            stream.pause()
        self._hold(task)
        task.add_done_callback(lambda _: self._over(stream, nbytes))

    def _has_too_much(self, stream: Stream) -> bool:
        """Whether a stream waits until more of its requests are answered."""
        held = stream.unanswered_bytes if stream.channel is Channel.CALLS else 0
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

    def check(self, stream: Stream, request: PeerRequest, operation: Operation) -> None:
        """Raise ProtocolError or Unavailable for a request that the control stream or the heartbeat
        stream does not accept."""
        if operation.channel is not stream.channel:
            what = type(request.body).__name__
            raise mixed_releases(f"unexpected {what} on the {stream.channel.value} stream")
        if stream.unanswered_bytes >= self.control_bytes:
            raise Unavailable(
                f"the unanswered requests from peer {request.sender} add up to "
                f"{stream.unanswered_bytes} bytes, over the limit of {self.control_bytes}: "
                "repeat the request later"
            )


class _Call(Call):
    """A request of another peer. append: the log records that its reply carries to the backup."""

    door: PeerDoor
    stream: Stream
    request: PeerRequest
    sender: Owner
    append: Append | None = None

    def is_admitted(self) -> bool:
        """Whether both sides are known to use one roster, without a wait."""
        host, request = self.host, self.request
        if self.stream.channel is not Channel.CALLS:
            self.door.check(self.stream, request, self.operation)
        if self.operation.bulky and self.stream.is_full:
            return False
        if self._is_for_anybody:
            return True
        roster = host.roster
        if request.epoch != roster.epoch or not roster.has(self.sender):
            return False
        return not self.held or host.serving.is_sure()

    async def admission(self) -> None:
        """Wait until both sides use the same roster. Raise StaleEpoch if they do not in time."""
        if self.operation.bulky:
            await self.stream.drained()
        host, request, sender = self.host, self.request, self.sender
        until = host.now() + min(CATCH_UP_S, request.deadline_ms / 1000)
        if self.held:
            await host.serving.until_sure(until)
        while request.epoch[1] > host.roster.epoch[1]:
            if not await host.another_roster(host.roster, until):
                break
        roster, sent_by = host.roster, self.operation.sender
        if request.epoch == roster.epoch:
            known = roster.has(sender)
        elif sent_by is Sender.SUCCESSOR:  # the sender's roster lists its shards
            known = sender in roster.owners and roster.follows(request.epoch)
        else:
            known = sent_by is Sender.MEMBER and sender in roster.owners
        if not known:
            raise StaleEpoch(
                f"peer {request.sender} has roster version {request.epoch}, but the peer at "
                f"{host.address} has version {roster.epoch}: repeat the call, which will wait "
                "until both peers have the latest roster",
                sender=request.sender,
                number=roster.epoch[1],
            )

    def handle(self) -> Body | Awaitable[Body]:
        if self.operation.sender is Sender.IN_STEP:
            self.host.speak()
        return self.door.handlers[type(self.request.body)](_caller(self.request), self.request.body)

    def may_leave(self, reply: Body) -> bool:
        """Whether the reply may leave: the backup has every record behind it, and has confirmed
        that this peer still serves. Another peer may serve the shard by now."""
        if type(reply) is Failed and reply.code == StaleEpoch.__name__:
            return True
        if self.held:
            if not self.host.serving.is_sure():
                return False
        elif not self._is_passed_on:
            return True
        if self.host.progress.is_settled:
            return True
        self.append = self.door.carry(self.sender, self.stream.id)
        return self.append is not None

    def answer(self, reply: Body) -> None:
        door, rid, here = self.door, self.request.rid, self.host.incarnation
        self.host.sent_between[type(reply).__name__] += 1
        try:
            frame = peering.encode(PeerReply(rid, here, reply, self.append))  # type: ignore[arg-type]
        except FrameTooLarge as exc:
            frame = peering.encode(PeerReply(rid, here, failed(exc), self.append))
        door.streams.answer(self.stream, frame)

    @property
    def _is_for_anybody(self) -> bool:
        """Whether any peer may send the request, whatever its roster."""
        return self.operation.sender is Sender.ANYBODY and not self.held

    @property
    def _is_passed_on(self) -> bool:
        """Whether the sender, which is leaving, also relies on this peer's backup: this peer will
        serve its shards."""
        leaving = self.host.roster.leaving
        sender = self.request.sender
        return type(self.request.body) is Append and sender in leaving - {self.host.address}


def _caller(request: PeerRequest) -> Caller:
    return Caller(request.sender, request.incarnation, request.session, request.epoch)
