"""One link to another peer: from the first greeting to the moment in which it breaks.

It is two connections, the one over which it greeted (`greetings`) and a stream for calls, and ends
with either of them: its calls fail, and the next one makes a new link, which learns who is there
now.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from dataplane.errors import (
    DataplaneError,
    ProtocolError,
    StaleEpoch,
    Unavailable,
    from_wire,
)
from dataplane.launch.values import parse_address
from dataplane.peer.failures import LinkBroken, again, fail
from dataplane.peer.net.greetings import Dialled, Greetings
from dataplane.peer.net.streams import Dial, Stream
from dataplane.peer.tasks import in_time
from dataplane.wire import peering
from dataplane.wire.messages import Body, Failed
from dataplane.wire.peering import Append, PeerHello, PeerReply

log = logging.getLogger(__name__)

KNOCK_S = 1.0


class Unreadable(LinkBroken):
    """What came on it is no answer. The way may have damaged it: asked once more it shows."""


async def refuses(address: str) -> bool:
    """Whether the host there says that nobody listens: that process has ended, for sure."""
    host, port = parse_address(address)
    try:
        async with asyncio.timeout(KNOCK_S):
            _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.close()
    return False


@dataclass(slots=True, eq=False)
class Link:
    """The way to one remote peer, for calls once it has been greeted.

    broke: told when the connection breaks. bring: takes answers that bring operations of the peer
    there, whose backup this one is, and has them `answered` afterwards. stale: told when the peer
    there works under another roster.
    """

    address: str
    broke: Callable[[Link], None]
    bring: Callable[[Link, PeerReply, Append], None]
    stale: Callable[[], None]
    hello: PeerHello | None = None
    calls: Stream | None = None
    answers: dict[int, asyncio.Future[Body]] = field(default_factory=dict)
    ended: Unavailable | None = None
    """why nothing is answered here any more"""
    _dialled: Dialled | None = None

    async def greet(
        self,
        greetings: Greetings,
        rid: int,
        greeting: bytes,
        meet: Callable[[PeerHello], None],
        dial: Dial,
    ) -> None:
        """As soon as somebody is there: who it is, and the stream that it promises. meet: may
        refuse it. LinkBroken where the connection ends before, or there is no descriptor left for
        it: one may be free a moment later. To be closed where this fails."""
        answer = self._expect(rid)
        self._dialled = greetings.dial(
            self.address, greeting, self.received, lambda: self.broke(self)
        )
        hello = await answer
        if not isinstance(hello, PeerHello):
            raise ProtocolError(f"{self.address} greets with a {type(hello).__name__}")
        meet(hello)
        stream = await dial(
            hello.stream,
            hello.stream_secret,
            lambda _, frame: self.received(frame),
            lambda _, why: self.broke(self),
        )
        if self.ended is not None:
            stream.close()
            raise again(self.ended)
        self.calls, self.hello = stream, hello

    def takes_now(self) -> bool:
        """Whether a request can be sent."""
        return self.ended is None and self.calls is not None and not self.calls.is_full

    async def takes(self) -> None:
        """As soon as one can be, or the link has ended."""
        if self.calls is not None:
            await self.calls.drained()

    def ask(
        self, rid: int, frame: bytes, until: float, late: Callable[[], Exception]
    ) -> asyncio.Future[Body]:
        """Send a request that the link takes: the answer. It fails with its typed error, what the
        link ended with, or as `late` says where it does not come in time (monotonic)."""
        answer = self._expect(rid)
        if self.ended is not None or self.calls is None:
            fail(answer, again(self.ended or LinkBroken("not greeted", address=self.address)))
            return answer
        in_time(answer, until, late)
        self.calls.post(frame)
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
                raise ProtocolError(f"it could not read what it was asked: {reply.body}")
        except ProtocolError as exc:
            # Whose answer that was, or would have been, nobody can tell.
            log.warning("the link to %s ends, over a bad reply: %s", self.address, exc)
            self.ended = Unreadable(
                f"the peer at {self.address} and this one do not understand each other, and what "
                f"was asked may or may not have taken effect: {exc}",
                address=self.address,
            )
            self.broke(self)
            return
        if self.hello is not None and reply.incarnation != self.hello.incarnation:
            return  # of another process than was greeted: its ranges are others
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
        if self._dialled is not None:
            self._dialled.close()
        if self.calls is not None:
            self.calls.close()
        for answer in self.answers.values():
            fail(answer, again(self.ended))
