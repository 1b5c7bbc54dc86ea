"""Other peers: their identity, and the link to each, from the first greeting until it breaks.

Unknown peers are refused. A link is three connections to a peer that was greeted (`greetings`), a
stream for each channel. When one of them breaks, the link's calls fail, and the next call makes a
new link, which learns which process is there now. A broken link says nothing about the peer.
Only the roster decides whether the peer is lost (`peer.membership.membership`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from dataplane.errors import (
    DataplaneError,
    PeerNameTaken,
    ProtocolError,
    RosterMismatch,
    StaleEpoch,
    Unavailable,
    VersionMismatch,
    from_wire,
    mixed_releases,
)
from dataplane.peer.failures import LinkBroken, again, fail
from dataplane.peer.host import Host
from dataplane.peer.net.streams import Stream
from dataplane.peer.operations import OPERATIONS, Channel
from dataplane.peer.tasks import in_time
from dataplane.wire import limits, peering
from dataplane.wire.events import MAX_FORMER
from dataplane.wire.messages import Body, Failed
from dataplane.wire.peering import PeerHello, PeerReply
from dataplane.wire.tables import Owner

if TYPE_CHECKING:
    from dataplane.peer.net.mesh import Mesh

log = logging.getLogger(__name__)

Bulk = Callable[[], tuple[str, str, str]]
"""Where this peer's bulk workers listen, the fingerprint of their certificate, and where its pool
workers do; see `PeerHello`."""


class Unreadable(LinkBroken):
    """A reply could not be decoded. The network may have damaged it; one retry shows."""


class KnownPeers:
    def __init__(self, host: Host, bulk: Bulk) -> None:
        self.host = host
        self._bulk = bulk
        self._met: dict[str, PeerHello] = {}
        self.former: dict[str, Owner] = {}
        """by name, the last incarnation of peers that ended, for events that they are in"""

    def name(self, address: str) -> str:
        """The name of the peer at an address, as far as it is known."""
        return self._met[address].name if address in self._met else "?"

    def introduction(self) -> PeerHello:
        """This peer's own identity."""
        bulk, fingerprint, pool_bulk = self._bulk()
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
            pool_bulk=pool_bulk,
        )

    def meet(self, hello: PeerHello) -> None:
        """Check the identity of another peer. Raise VersionMismatch, RosterMismatch or
        PeerNameTaken to refuse it."""
        self._check(hello)
        if self.incarnation(hello.address) not in (None, hello.incarnation):
            self.forget(hello.address)
        self._met[hello.address] = hello

    def incarnation(self, address: str) -> int | None:
        """The incarnation of the peer that was last met at an address."""
        return self._met[address].incarnation if address in self._met else None

    def hello(self, owner: Owner) -> PeerHello | None:
        """The identity of this process if it was met and no later process at its address was."""
        hello = self._met.get(owner.peer)
        return hello if hello is not None and hello.incarnation == owner.incarnation else None

    def forget(self, address: str) -> None:
        """Forget a peer that is no longer a member, so that its name is free."""
        if (hello := self._met.pop(address, None)) is not None:
            self.former.pop(hello.name, None)
            self.former[hello.name] = Owner(address, hello.incarnation)
            if len(self.former) > MAX_FORMER:
                del self.former[next(iter(self.former))]

    def _check(self, hello: PeerHello) -> None:
        """Compare what must be equal; the first difference names both sides."""
        mine = self.introduction()
        if max(hello.versions[0], mine.versions[0]) > min(hello.versions[1], mine.versions[1]):
            raise VersionMismatch(
                f"peer {hello.name!r} speaks protocol versions {hello.versions[0]} to "
                f"{hello.versions[1]}, but this peer speaks {mine.versions[0]} to "
                f"{mine.versions[1]}: install the same dataplane release everywhere"
            )
        compared = {"plane": "run", "shards": "shard count", "epoch": "founding epoch"}
        for what, label in compared.items():
            theirs, ours = getattr(hello, what), getattr(mine, what)
            if theirs != ours:
                raise RosterMismatch(
                    f"peer {hello.name!r} at {hello.address} has {label} {theirs!r}, but this "
                    f"peer ({mine.name!r} at {mine.address}) has {ours!r}: start all peers of a "
                    "run with the same --run and --seeds, and call connect(fresh=True) either in "
                    "every process of a launch or in none",
                    what=what,
                )
        taken = {met.name: address for address, met in self._met.items()} | {
            mine.name: mine.address
        }
        same = self.incarnation(hello.address) == hello.incarnation
        renamed = same and self.name(hello.address) != hello.name
        if taken.get(hello.name, hello.address) != hello.address or renamed:
            raise PeerNameTaken(
                f"two peers of run {mine.plane!r}, at {taken.get(hello.name)} and at "
                f"{hello.address}, are both named {hello.name!r}: give each peer its own --name",
                name=hello.name,
            )


@dataclass(slots=True, eq=False)
class Link:
    """The connection of a mesh to one remote peer, usable for calls after the greeting."""

    address: str
    mesh: Mesh
    hello: PeerHello | None = None
    streams: dict[Channel, Stream] = field(default_factory=dict)
    answers: dict[int, asyncio.Future[Body]] = field(default_factory=dict)
    ended: Unavailable | None = None
    """the error that ended the link"""

    async def greet(self, rid: int, greeting: bytes) -> None:
        """Greet the peer as soon as it is there, and open its streams.

        Raises the refusal of `KnownPeers.meet`, and LinkBroken if the connection ends before that,
        or if no file descriptor is left for it; one may be free a moment later. Close the link if
        this fails.
        """
        answer, mesh = self._expect(rid), self.mesh
        broke = partial(mesh.broke, self)
        close = mesh.greetings.dial(self.address, greeting, self.received, broke)
        try:
            hello = await answer
        finally:
            close()
        if not isinstance(hello, PeerHello):
            raise mixed_releases(
                f"the peer at {self.address} sent an unexpected reply to a greeting: expected "
                f"PeerHello, got {type(hello).__name__}"
            )
        mesh.others.meet(hello)
        for channel, secret in (
            (Channel.CALLS, hello.stream_secret),
            (Channel.CONTROL, hello.control_secret),
            (Channel.HEARTBEAT, hello.heartbeat_secret),
        ):
            self.streams[channel] = await self._stream(hello.stream, secret)
        self.hello = hello

    async def _stream(self, address: str, secret: bytes) -> Stream:
        """Dial one of the link's streams."""
        stream = await self.mesh.door.streams.dial(
            address,
            secret,
            lambda _, frame: self.received(frame),
            lambda _, why: self.mesh.broke(self),
        )
        if self.ended is not None:
            stream.close()
            raise again(self.ended)
        return stream

    def _way(self, kind: type[Body]) -> Stream | None:
        """The stream for requests of this kind."""
        return self.streams.get(OPERATIONS[kind].channel)

    def is_full(self, kind: type[Body]) -> bool:
        """Whether long requests of this kind wait until earlier ones have been sent."""
        way = self._way(kind)
        return self.ended is None and way is not None and way.is_full

    def lets_pass(self, kind: type[Body]) -> bool:
        """Whether short requests of this kind need not wait while the stream is full."""
        way = self._way(kind)
        return way is not None and way.waiting_bytes <= limits.MAX_BYTES_UNDER_WAY

    async def takes(self, kind: type[Body]) -> None:
        """Wait until a request of this kind can be sent, or the link has ended."""
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
        """Send a request and return a future of the reply. It fails with the remote error, with
        the error that ended the link, or with that of `late` at `until` (monotonic)."""
        answer, way = self._expect(rid), self._way(kind)
        if self.ended is not None or way is None:
            closed = LinkBroken(
                f"the connection to {self.address} is not open: repeat the call",
                address=self.address,
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
        """Give a reply to the call that waits for it."""
        try:
            reply = peering.decode_reply(frame)
            if not reply.rid:
                body = reply.body
                why = (
                    body.message
                    if isinstance(body, Failed)
                    else f"expected Failed, got {type(body).__name__}. Install the same dataplane "
                    "release everywhere"
                )
                raise ProtocolError(f"the peer at {self.address} rejected a request: {why}")
        except ProtocolError as exc:
            # It is not known which call the reply belongs to.
            log.warning("link to %s: closed after an invalid reply: %s", self.address, exc)
            self.ended = Unreadable(
                f"this peer could not decode a reply from the peer at {self.address}, so the call "
                f"may have taken effect: {exc}",
                address=self.address,
            )
            self.mesh.broke(self)
            return
        if self.hello is not None and reply.incarnation != self.hello.incarnation:
            return  # another process answers, whose chunks have other numbers
        self.mesh.on_heard(Owner(self.address, reply.incarnation))
        if reply.append is None:
            self.answered(reply)
        else:
            self.mesh.bring(self, reply, reply.append)

    def answered(self, reply: PeerReply, failure: DataplaneError | None = None) -> None:
        """Complete a call with its reply, or with an error."""
        answer = self.answers.get(reply.rid)
        if answer is None or answer.done():
            return
        body = reply.body
        if failure is None and type(body) is Failed:
            failure = from_wire(body.code, body.message, body.details)
            if isinstance(failure, StaleEpoch):
                self.mesh.on_stale()
        if failure is None:
            answer.set_result(body)
        else:
            fail(answer, failure)

    def close(self, why: Unavailable) -> None:
        """Close the link. Pending calls fail with `why`, unless the link ended before."""
        self.ended = self.ended or why
        for stream in self.streams.values():
            stream.close()
        for answer in self.answers.values():
            fail(answer, again(self.ended))
