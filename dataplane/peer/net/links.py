"""Other peers: who they are, and the link to each, from the first greeting until it breaks.

Strangers are refused. A link is two connections to a peer that was greeted (`greetings`): a call
stream and a control stream. When either breaks its calls fail, and the next call makes a new link,
which learns who is there now. A broken link says nothing about the peer: whether that is lost, and
what becomes of its rows, only the roster says (`peer.membership.membership`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from dataplane.errors import (
    DataplaneError,
    PeerNameTaken,
    ProtocolError,
    RosterMismatch,
    StaleEpoch,
    Unavailable,
    VersionMismatch,
    from_wire,
)
from dataplane.peer.failures import LinkBroken, again, fail
from dataplane.peer.host import Host
from dataplane.peer.net.greetings import Greetings
from dataplane.peer.net.streams import Dial, Stream
from dataplane.peer.operations import OPERATIONS
from dataplane.peer.tasks import in_time
from dataplane.wire import limits, peering
from dataplane.wire.messages import Body, Failed
from dataplane.wire.peering import Append, PeerHello, PeerReply
from dataplane.wire.tables import Owner

log = logging.getLogger(__name__)

Bulk = Callable[[], tuple[str, str, str]]
"""Where this peer's bulk workers listen, the fingerprint of their certificate, and where its device
workers do; see `PeerHello`."""


class Unreadable(LinkBroken):
    """What came on it is no answer. The way may have damaged it: asked once more it shows."""


class KnownPeers:
    def __init__(self, host: Host, bulk: Bulk) -> None:
        self.host = host
        self._bulk = bulk
        self._met: dict[str, PeerHello] = {}

    def name(self, address: str) -> str:
        """What the peer there is called, as far as that is known."""
        return self._met[address].name if address in self._met else "?"

    def introduction(self) -> PeerHello:
        """Who this peer is."""
        bulk, fingerprint, device_bulk = self._bulk()
        return PeerHello(
            versions=(limits.PROTOCOL_VERSION_MIN, limits.PROTOCOL_VERSION),
            plane=self.host.plane,
            name=self.host.name,
            incarnation=self.host.incarnation,
            address=self.host.address,
            epoch=self.host.founding,
            shards=limits.SHARDS,
            bulk=bulk,
            bulk_fingerprint=fingerprint,
            device_bulk=device_bulk,
        )

    def meet(self, hello: PeerHello) -> None:
        """A peer said who it is. VersionMismatch, RosterMismatch, PeerNameTaken for a stranger."""
        self._check(hello)
        self._met[hello.address] = hello

    def incarnation(self, address: str) -> int | None:
        """Of the peer that was met there last."""
        return self._met[address].incarnation if address in self._met else None

    def hello(self, owner: Owner) -> PeerHello | None:
        """What this process said of itself, where it was met and no later one at its address."""
        hello = self._met.get(owner.peer)
        return hello if hello is not None and hello.incarnation == owner.incarnation else None

    def forget(self, address: str) -> None:
        """It is no member any more: its name is free."""
        self._met.pop(address, None)

    def _check(self, hello: PeerHello) -> None:
        """Compare what must be equal; the first difference names both sides."""
        mine = self.introduction()
        if max(hello.versions[0], mine.versions[0]) > min(hello.versions[1], mine.versions[1]):
            raise VersionMismatch(
                f"peer {hello.name!r} speaks protocol versions {hello.versions[0]} to "
                f"{hello.versions[1]}, but this peer speaks {mine.versions[0]} to "
                f"{mine.versions[1]}: install the same release on both"
            )
        for what in ("plane", "shards", "epoch"):
            theirs, ours = getattr(hello, what), getattr(mine, what)
            if theirs != ours:
                raise RosterMismatch(
                    f"peer {hello.name!r} at {hello.address} has {what} {theirs!r}, but this peer "
                    f"({mine.name!r} at {mine.address}) has {ours!r}: start all peers of a plane "
                    "with the same --run and --seeds, and call connect(fresh=True) in all "
                    "processes of a launch or in none",
                    what=what,
                )
        taken = {met.name: address for address, met in self._met.items()} | {
            mine.name: mine.address
        }
        same = self.incarnation(hello.address) == hello.incarnation
        renamed = same and self.name(hello.address) != hello.name
        if taken.get(hello.name, hello.address) != hello.address or renamed:
            raise PeerNameTaken(
                f"two peers of plane {mine.plane!r} are named {hello.name!r}, at "
                f"{taken.get(hello.name)} and at {hello.address}: give each its own --name",
                name=hello.name,
            )


@dataclass(slots=True, eq=False)
class Link:
    """The way to one remote peer, for calls once it has been greeted.

    broke: told when the connection breaks. bring: takes answers that bring operations of the peer
    there, whose backup this one is, and has them `answered` afterwards. stale: told when the peer
    there works under another roster. heard: told whose process an answer came from.
    """

    address: str
    broke: Callable[[Link], None]
    bring: Callable[[Link, PeerReply, Append], None]
    stale: Callable[[], None]
    heard: Callable[[Owner], None]
    hello: PeerHello | None = None
    calls: Stream | None = None
    control: Stream | None = None
    answers: dict[int, asyncio.Future[Body]] = field(default_factory=dict)
    ended: Unavailable | None = None
    """why nothing is answered here any more"""

    async def greet(
        self,
        greetings: Greetings,
        rid: int,
        greeting: bytes,
        meet: Callable[[PeerHello], None],
        dial: Dial,
    ) -> None:
        """As soon as somebody is there: who it is, and the streams that it promises. meet: may
        refuse it. LinkBroken where the connection ends before, or there is no descriptor left for
        it: one may be free a moment later. To be closed where this fails."""
        answer = self._expect(rid)
        dialled = greetings.dial(self.address, greeting, self.received, lambda: self.broke(self))
        try:
            hello = await answer
        finally:
            dialled.close()
        if not isinstance(hello, PeerHello):
            raise ProtocolError(
                f"unexpected reply to a greeting from the peer at {self.address}: expected "
                f"PeerHello, got {type(hello).__name__}"
            )
        meet(hello)
        self.calls = await self._stream(dial, hello.stream, hello.stream_secret)
        self.control = await self._stream(dial, hello.stream, hello.control_secret)
        self.hello = hello

    async def _stream(self, dial: Dial, address: str, secret: bytes) -> Stream:
        """Dial one of the link's streams."""
        stream = await dial(
            address,
            secret,
            lambda _, frame: self.received(frame),
            lambda _, why: self.broke(self),
        )
        if self.ended is not None:
            stream.close()
            raise again(self.ended)
        return stream

    def _way(self, kind: type[Body]) -> Stream | None:
        """The stream for requests of this kind."""
        return self.control if OPERATIONS[kind].control else self.calls

    def takes_now(self, kind: type[Body]) -> bool:
        """Whether a request of this kind can be sent."""
        way = self._way(kind)
        return self.ended is None and way is not None and not way.is_full

    async def takes(self, kind: type[Body]) -> None:
        """As soon as one of this kind can be sent, or the link has ended."""
        if (way := self._way(kind)) is not None:
            await way.drained()

    def ask(
        self,
        kind: type[Body],
        rid: int,
        frame: bytes,
        until: float,
        late: Callable[[], Exception],
    ) -> asyncio.Future[Body]:
        """Send a request that the link takes: the answer. It fails with its typed error, what the
        link ended with, or as `late` says where it does not come in time (monotonic)."""
        answer, way = self._expect(rid), self._way(kind)
        if self.ended is not None or way is None:
            closed = LinkBroken(
                f"the connection to {self.address} is not open", address=self.address
            )
            fail(answer, again(self.ended or closed))
            return answer
        in_time(answer, until, late)
        way.post(frame)
        return answer

    def _expect(self, rid: int) -> asyncio.Future[Body]:
        answer: asyncio.Future[Body] = asyncio.get_running_loop().create_future()
        self.answers[rid] = answer
        answer.add_done_callback(lambda _: self.answers.pop(rid, None))
        return answer

    def received(self, frame: bytes | memoryview) -> None:
        """Hand an answer to who waits for it."""
        try:
            reply = peering.decode_reply(frame)
            if not reply.rid:
                raise ProtocolError(f"the peer could not decode the request: {reply.body}")
        except ProtocolError as exc:
            # Whose answer that was, or would have been, nobody can tell.
            log.warning("link to %s: closed after an invalid reply: %s", self.address, exc)
            self.ended = Unreadable(
                f"this peer could not decode a reply from the peer at {self.address} ({exc}). The "
                "call may have taken effect; if this persists, install the same release on both",
                address=self.address,
            )
            self.broke(self)
            return
        if self.hello is not None and reply.incarnation != self.hello.incarnation:
            return  # of another process than was greeted: its ranges are others
        self.heard(Owner(self.address, reply.incarnation))
        if reply.append is None:
            self.answered(reply)
        else:
            self.bring(self, reply, reply.append)

    def answered(self, reply: PeerReply, failure: DataplaneError | None = None) -> None:
        """Whoever waits for it has an answer, or cannot get it."""
        answer = self.answers.get(reply.rid)
        if answer is None or answer.done():
            return
        body = reply.body
        if failure is None and type(body) is Failed:
            failure = from_wire(body.code, body.message, body.details)
            if isinstance(failure, StaleEpoch):
                self.stale()
        if failure is None:
            answer.set_result(body)
        else:
            fail(answer, failure)

    def close(self, why: Unavailable) -> None:
        """End it; calls under way fail with `why`, unless it ended before."""
        self.ended = self.ended or why
        for stream in (self.calls, self.control):
            if stream is not None:
                stream.close()
        for answer in self.answers.values():
            fail(answer, again(self.ended))
