"""The table of operations: every request that a peer serves, who may send it, and how it is served.

Both doors read this table. A request passes them in one order, which `peer.pipeline` implements:

    decode → admit → once → handle → hold → encode

`Hello` is not in it: it opens a connection at the client door.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec

from dataplane.wire import checkpoint as c
from dataplane.wire import events as e
from dataplane.wire import journal
from dataplane.wire import messages as m
from dataplane.wire import peering as p
from dataplane.wire.tables import Body

if TYPE_CHECKING:
    from dataplane.peer.host import Caller
    from dataplane.peer.peer import Peer
    from dataplane.peer.sessions import Session

ClientHandler = Callable[["Session", m.Request, Any], Body | Awaitable[Body]]
PeerHandler = Callable[["Caller", Any], Body | Awaitable[Body]]


class Sender(enum.Enum):
    """Which peers may send an operation, judged by the rosters of both sides."""

    IN_STEP = enum.auto()
    """A member that works under the receiver's roster. A receiver that is behind catches up first.
    A receiver whose shards are moving refuses (`StaleEpoch`)."""
    MEMBER = enum.auto()
    """A member of the receiver's roster, whichever roster it has itself: the operation does not
    depend on who serves which shard."""
    SUCCESSOR = enum.auto()
    """As MEMBER, and the receiver's roster follows the sender's. A sender with a roster that no
    other peer got continued alone: what it did there ended with it."""
    ANYBODY = enum.auto()
    """Also a peer that is not a member yet. The handler checks who it is."""


class Once(enum.Enum):
    """What a client gets when it repeats a request with the same operation id."""

    NO = enum.auto()
    """The request is carried out again."""
    ANSWER = enum.auto()
    """The first answer, remembered until the client raises its floor."""
    LEASE = enum.auto()
    """The lease of the first attempt, until the client uses it. A claim may wait for days, so it
    holds up no floor."""
    PIN = enum.auto()
    """A new reply. The pin of the first reply is released, because no client received it."""


class WaitLimit(enum.Enum):
    """How long a request may wait for the effect of other calls."""

    NO = enum.auto()
    """Not at all. It runs to its end even if its client leaves."""
    DEADLINE = enum.auto()
    """Until the request's deadline. It is cancelled when its connection closes."""
    TIMEOUT = enum.auto()
    """As long as its body says (`timeout_ms`). It is cancelled when its connection closes."""


class Channel(enum.Enum):
    """Which stream of a link a request uses. Requests on one stream arrive in order, so a request
    waits for the bytes of those before it."""

    CALLS = "call"
    """Requests of clients. Not read while too many are unanswered."""
    CONTROL = "control"
    """Requests that calls wait for, such as log records for a backup. Always read."""
    HEARTBEAT = "heartbeat"
    """Small requests that decide who serves. The sender may serve for one second after it sent
    them, so none of them waits behind a record of several megabytes. Always read."""


class Operation(msgspec.Struct, frozen=True):
    """One line of the table.

    client, peer: the handlers of the client door and of the peer door; None if that door rejects
    the message. held: the reply depends on this peer's shards. It leaves only after the backup
    has their operations, and only while no other peer can serve them. None: held if the request
    names a partition. bulky: the reply is large, so it waits until the caller has received earlier
    replies.
    """

    message: type[Body]
    client: Callable[[Peer], ClientHandler] | None = None
    peer: Callable[[Peer], PeerHandler] | None = None
    sender: Sender = Sender.IN_STEP
    held: bool | None = True
    once: Once = Once.NO
    waits: WaitLimit = WaitLimit.NO
    channel: Channel = Channel.CALLS
    bulky: bool = False

    def is_held(self, body: Body) -> bool:
        """Whether the reply to this request is held."""
        return bool(body.partition) if self.held is None else self.held  # type: ignore[attr-defined]


def _change(message: type[Body]) -> Operation:
    """A change that moves no bytes."""
    return Operation(
        message,
        client=lambda peer: peer.changes.change,
        peer=lambda peer: peer.changes.change_here,
        once=Once.ANSWER,
    )


_TABLE = (
    # partitions
    Operation(
        m.Define,
        client=lambda peer: peer.directory.define,
        peer=lambda peer: peer.partitions.define_here,
        waits=WaitLimit.DEADLINE,
    ),
    _change(m.Seal),
    _change(m.Close),
    _change(m.Reset),
    # space in the arena
    Operation(
        m.Reserve,
        client=lambda peer: peer.grants.reserve,
        once=Once.ANSWER,
        waits=WaitLimit.DEADLINE,
    ),
    Operation(m.GiveBack, client=lambda peer: peer.grants.give_back, held=False, once=Once.ANSWER),
    Operation(m.Unpin, client=lambda peer: peer.grants.unpin, held=False),
    # rows
    Operation(
        m.Put,
        client=lambda peer: peer.writing.put,
        peer=lambda peer: peer.writing.put_here,
        once=Once.ANSWER,
    ),
    _change(m.Tag),
    _change(m.Drop),
    Operation(
        m.Read,
        client=lambda peer: peer.reading.read,
        peer=lambda peer: peer.reading.read_here,
        once=Once.PIN,
    ),
    # leases
    Operation(
        m.Claim,
        client=lambda peer: peer.claims.claim,
        peer=lambda peer: peer.calls.claim,
        once=Once.LEASE,
        waits=WaitLimit.TIMEOUT,
    ),
    Operation(
        m.Fetch,
        client=lambda peer: peer.reading.fetch,
        peer=lambda peer: peer.reading.fetch_here,
        once=Once.PIN,
    ),
    Operation(
        m.Finish,
        client=lambda peer: peer.finishing.finish,
        peer=lambda peer: peer.finishing.finish_here,
        once=Once.ANSWER,
    ),
    # waits and permits
    Operation(
        m.Wait,
        client=lambda peer: peer.waits.wait,
        peer=lambda peer: peer.calls.wait,
        waits=WaitLimit.TIMEOUT,
    ),
    Operation(
        m.Losses,
        client=lambda peer: peer.partitions.losses,
        peer=lambda peer: peer.calls.losses,
        waits=WaitLimit.TIMEOUT,
    ),
    Operation(
        m.Admit,
        client=lambda peer: peer.waits.admit,
        peer=lambda peer: peer.calls.admit,
        waits=WaitLimit.TIMEOUT,
    ),
    Operation(
        m.Withdraw, client=lambda peer: peer.waits.withdraw, peer=lambda peer: peer.calls.withdraw
    ),
    _change(m.Advance),
    # reads and statistics
    Operation(
        m.Stats,
        client=lambda peer: peer.reporting.stats,
        peer=lambda peer: peer.reporting.stats_here,
        sender=Sender.ANYBODY,
        held=None,
    ),
    Operation(
        e.Events,
        client=lambda peer: peer.timeline.events,
        peer=lambda peer: peer.timeline.events_here,
        sender=Sender.MEMBER,
        held=False,
    ),
    # checkpoints
    Operation(
        c.Census,
        client=lambda peer: peer.checkpoints.census,
        peer=lambda peer: peer.checkpoints.census_here,
    ),
    Operation(
        c.Survey,
        client=lambda peer: peer.checkpoints.survey,
        peer=lambda peer: peer.checkpoints.survey_here,
    ),
    Operation(
        c.Save,
        client=lambda peer: peer.checkpoints.save,
        peer=lambda peer: peer.checkpoints.save_here,
        once=Once.PIN,
    ),
    Operation(
        c.Restore,
        client=lambda peer: peer.checkpoints.restore,
        peer=lambda peer: peer.checkpoints.restore_here,
        once=Once.ANSWER,
    ),
    Operation(
        c.Restored,
        client=lambda peer: peer.checkpoints.restored,
        peer=lambda peer: peer.checkpoints.restored_here,
    ),
    # between peers: membership
    Operation(
        p.PeerHello, peer=lambda peer: peer.mesh.hello_here, sender=Sender.ANYBODY, held=False
    ),
    Operation(
        p.Beat,
        peer=lambda peer: peer.membership.beat_here,
        sender=Sender.ANYBODY,
        held=False,
        channel=Channel.HEARTBEAT,
    ),
    Operation(
        p.Rostered,
        peer=lambda peer: peer.membership.rostered_here,
        sender=Sender.ANYBODY,
        held=False,
        channel=Channel.HEARTBEAT,
    ),
    Operation(
        p.Confirm,
        peer=lambda peer: peer.log_receiver.confirm,
        sender=Sender.ANYBODY,
        held=False,
        channel=Channel.HEARTBEAT,
    ),
    Operation(
        p.Identify, peer=lambda peer: peer.directory.identify, sender=Sender.MEMBER, held=False
    ),
    # backups
    Operation(
        p.Append, peer=lambda peer: peer.log_receiver.append, held=False, channel=Channel.CONTROL
    ),
    Operation(
        p.Duplicate,
        peer=lambda peer: peer.log_receiver.duplicate,
        held=False,
        channel=Channel.CONTROL,
    ),
    # values of other hosts
    Operation(
        p.Pull,
        peer=lambda peer: peer.pulls.pull_here,
        sender=Sender.MEMBER,
        held=False,
        channel=Channel.CONTROL,
        bulky=True,
    ),
    Operation(
        p.Inherited,
        peer=lambda peer: peer.references.inherited,
        sender=Sender.SUCCESSOR,
        channel=Channel.CONTROL,
    ),
    Operation(
        p.Release,
        peer=lambda peer: peer.references.release_here,
        sender=Sender.SUCCESSOR,
        channel=Channel.CONTROL,
    ),
    Operation(
        journal.Settle,
        peer=lambda peer: peer.changes.settle_here,
        sender=Sender.MEMBER,
        channel=Channel.CONTROL,
    ),
    Operation(
        p.Sample,
        peer=lambda peer: peer.pulls.sampling.sample_here,
        sender=Sender.MEMBER,
        held=False,
    ),
    Operation(p.CanFree, peer=lambda peer: peer.standstill.can_free, channel=Channel.CONTROL),
)

OPERATIONS: dict[type[Body], Operation] = {one.message: one for one in _TABLE}
