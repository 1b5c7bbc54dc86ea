"""What a client does without being asked: release pins, give grants back, end the session.

One daemon thread a client, started when there is something to do. It owns the anchor: a connection
that no call borrows, so that the session outlives cancelled calls. Also here: process exit, and
forks, whose children must not touch what their parent has.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref

import msgspec

from dataplane.client.arguments import Deadline
from dataplane.client.session.connection import REPEATS, Connection
from dataplane.client.session.handshake import further
from dataplane.client.session.session import Session
from dataplane.client.session.slabs import IDLE_S
from dataplane.errors import ClientClosed, DataplaneError, DeadlineExceeded
from dataplane.wire.checkpoint import SaveDone
from dataplane.wire.frames import encode
from dataplane.wire.messages import (
    Admitted,
    Body,
    Claimed,
    Failed,
    Fetched,
    Finish,
    GiveBack,
    PutDone,
    ReadDone,
    Request,
    Reserved,
    Unpin,
    Withdraw,
)

log = logging.getLogger(__name__)

GATHER_S = 0.2
"""Releases are collected this long, so that a loop over batches sends few messages."""
POOLS_S = 0.002
"""... and meanwhile pools that are read in place are asked so often whether that is done."""
_SEND_S = 5.0
_CLOSE_S = 2.0
"""How long a client that closes waits for its peer, and a process that exits for all clients."""
_LEAST_S = 0.5
"""... and so long at least for the last message."""

COLLECTED = (
    "this client was garbage-collected: keep a reference to the plane that connect() returned"
)

_living: weakref.WeakSet[Housekeeper] = weakref.WeakSet()


class Housekeeper:
    """Keeps house for one session, on its anchor connection."""

    def __init__(self, session: Session, anchor: Connection) -> None:
        self.session = session
        self._anchor: Connection | None = anchor
        """None after it broke, until another one is open."""
        self._ended = False
        """This client has closed, or its peer or session has ended: nothing more is sent."""
        self._untold: list[Request] = []
        """what the peer has not said yet that it heard"""
        self._sending = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._deserted = False
        session.tend, session.settle = self.start, self.settle
        self._undoing = threading.Lock()
        _living.add(self)
        if session.pools is not None:
            self.start()  # it closes them, whatever becomes of the plane

    def start(self) -> None:
        if self._thread is not None or self._closing.is_set():
            return
        with self._sending:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="dataplane-housekeeping", daemon=True
                )
                self._thread.start()

    def _run(self) -> None:
        session = self.session
        while not self._ended and not self._over():
            # The driver tells nobody when a copy from the arena is done: it is asked.
            soon = session.direct.pending or session.orphaned
            woken = session.bell.wait(GATHER_S if soon else IDLE_S)
            if woken and not self._deserted:
                self._gather()
            session.bell.heard()
            if self._deserted and session.closed is None:
                self.close(COLLECTED)
            session.settle_pools()
            with self._undoing:
                self.tell([*self._undone(), *self._parting(), *session.idle_grants()])
            if not woken:
                self._look()
        if self._closing.is_set():  # no view is left, or no peer
            self._drop_anchor()

    def _gather(self) -> None:
        """What was read in place in a pool is let go by the next call, as soon as that is done: who
        puts there finds room, or goes to the host."""
        pools, until = self.session.pools, time.monotonic() + GATHER_S
        step_s = POOLS_S if pools is not None and pools.in_place else GATHER_S
        while (left_s := until - time.monotonic()) > 0 and not self._closing.wait(
            min(step_s, left_s)
        ):
            self.session.settle_pools(step_s)

    def _look(self) -> None:
        """Whether the peer is there, while nobody calls it: the arena of one that died is let go,
        so that its memory can go to the next."""
        with self._sending:
            if self._anchor is not None and self._anchor.ended():
                self._anchor.close()
                self._anchor = None
            if self._anchor is None and not self._over():
                self._anchor = self._another(_SEND_S)

    def settle(self, until: float) -> None:
        """Return to the peer what it granted to abandoned calls, and wait for its replies. until:
        the end of the wait, on the monotonic clock."""
        until = min(until, time.monotonic() + _SEND_S)
        if not self._undoing.acquire(timeout=max(0.0, until - time.monotonic())):
            return  # the housekeeping thread waits for the same replies
        try:
            due = self._undone(max(0.0, until - time.monotonic()))
            self.tell(due, max(0.0, until - time.monotonic()))
        finally:
            self._undoing.release()

    def _undone(self, limit_s: float = 0.0) -> list[Body]:
        """What takes back the answers that came when nobody waited for them any more. A connection
        that the peer has not ended within `limit_s`, for all of them, is looked at again later."""
        due: list[Body] = []
        until = time.monotonic() + limit_s
        for connection in self.session.orphans():
            if connection.early is not None:
                due += undo(connection.early.body)
                connection.early = None
            try:
                while True:
                    while (reply := connection.arrived()) is not None:
                        due += undo(reply.body)
                    connection.sock.settimeout(max(0.0, until - time.monotonic()))
                    connection.take(flags=0)
            except (TimeoutError, BlockingIOError):
                self.session.look_later(connection)
            except (OSError, DataplaneError):
                self.session.end_orphan(connection)
        return due

    def _parting(self) -> list[Body]:
        """What no call took along."""
        due, pins = self.session.parting()
        return [*due, Unpin(pins)] if pins else due

    def _over(self) -> bool:
        """After close() the anchor stays only for views that are still alive."""
        return self._closing.is_set() and not self.session.pins

    def tell(self, bodies: list[Body], limit_s: float = _SEND_S) -> None:
        """Send these messages and wait until the peer confirms them. If the connection breaks, they
        are sent again on a new anchor; if none can be opened now, a later call sends them. Nothing
        is sent to a peer that has ended."""
        with self._sending:
            for request in self.session.undelivered():
                self._untold.append(msgspec.structs.replace(request, rid=request.op))
            self._untold += [self.session.request(body, parting=True) for body in bodies]
            for _ in range(1 + REPEATS):
                if not self._untold or self._ended:
                    return
                if self._anchor is None:
                    self._anchor = self._another(limit_s)
                if self._anchor is None:
                    return
                try:
                    self._tell_all(self._anchor, limit_s)
                except DeadlineExceeded as exc:
                    log.info(
                        "peer %r has not acknowledged some messages (%s); the client will resend "
                        "them",
                        self.session.peer,
                        exc,
                    )
                    return
                except (OSError, DataplaneError) as exc:
                    log.info(
                        "peer %r: connection lost (%s); the client will resend messages that were "
                        "not acknowledged",
                        self.session.peer,
                        exc,
                    )
                    self._anchor.close()
                    self._anchor = None

    def _tell_all(self, anchor: Connection, limit_s: float) -> None:
        """The peer carries out once what it is told twice."""
        deadline = Deadline(limit_s)
        for request in self._untold:
            anchor.send(encode(request), deadline)
        while (reply := anchor.receive(deadline)).rid != self._untold[-1].rid:
            if isinstance(reply.body, Failed):
                log.info(
                    "peer %r rejected a one-way message: %s",
                    self.session.peer,
                    reply.body.message,
                )
        for request in self._untold:
            self.session.answered(request)
        self._untold.clear()

    def _another(self, limit_s: float) -> Connection | None:
        """Open another anchor. None if the peer has ended or cannot be reached now."""
        try:
            return further(self.session, Deadline(limit_s))
        except (DataplaneError, OSError) as exc:
            self._ended = self.session.peer_died or isinstance(exc, ClientClosed)
            then = "dropped its unacknowledged messages" if self._ended else "will retry"
            log.info(
                "peer %r: could not reconnect (%s); the client %s", self.session.peer, exc, then
            )
            return None

    def close(self, why: str, exiting: bool = False) -> None:
        """End the session in order; live views stay readable, their pins go when they do. Calls
        under way end as well, but for those of a process that does: its daemon threads go silently.
        """
        session = self.session
        if session.closed is not None:
            return
        session.closed = why
        if not exiting:
            session.connections.end_calls(why)
        self._hand_back()
        session.connections.close(why)
        self._closing.set()
        if session.pins and self._thread is not None and self._thread.is_alive():
            session.bell.ring()
            return
        session.bell.ring()
        self._drop_anchor()

    def desert(self) -> None:
        """The last reference to the plane died. Runs inside the collector, so it takes no lock:
        the thread closes; without one nothing was ever held, and only sockets remain."""
        self._deserted = True
        if self._thread is not None:
            self.session.bell.ring()
            return
        self.session.connections.close(COLLECTED)
        if self._anchor is not None:
            self._anchor.close()

    def _hand_back(self) -> None:
        """What no call has in hand. Room that another thread, or a copy, may still write into
        comes back when this process is proved gone."""
        session, until = self.session, time.monotonic() + _CLOSE_S
        session.settle_pools(_CLOSE_S)
        due = self._parting()
        due += [
            Finish(lease, "abandon" if got else "release") for lease, got in session.leases.clear()
        ]
        if session.spans is not None:
            session.spans.close()
        # What waits for orphans may wait in vain for a peer that is stopped: it has half the time.
        due += self._undone(_CLOSE_S / 2)
        left_s = max(_LEAST_S, until - time.monotonic())
        # Another thread may wait for an answer: if it waits in vain, so would this one.
        if self._sending.acquire(timeout=left_s):
            self._sending.release()
            left_s = max(_LEAST_S, until - time.monotonic())
            self.tell([*due, *self._parting(), *session.idle_grants(0)], left_s)
        for connection in session.orphans():
            connection.close()

    def _drop_anchor(self) -> None:
        if not self._sending.acquire(timeout=_LEAST_S):
            self._ended = True
            if (awaited := self._anchor) is not None:
                awaited.shut()  # ends the wait of another thread for a peer that is stopped
            self._sending.acquire()
        anchor, self._anchor, self._ended = self._anchor, None, True
        self._sending.release()
        if anchor is not None:
            anchor.close()
        self.session.direct.close()
        if self.session.pools is not None:
            self.session.pools.close()

    def poison(self) -> None:
        """In a forked child: close the copies of the sockets, silently."""
        self._sending, self._undoing = threading.Lock(), threading.Lock()
        self._thread = None
        self._closing.set()
        self.session.poison()
        self._drop_anchor()


def undo(body: Body) -> list[Body]:
    """The messages that give back what an answer gave."""
    due: list[Body] = []
    if isinstance(body, Claimed):
        due.append(Finish(body.lease, "release" if body.plan is None else "leave"))
    if isinstance(body, Admitted):
        due.append(Withdraw("", 0, [body.permit]))  # the peer knows of which partition it is
    if isinstance(body, Reserved | PutDone) and body.extents:
        due.append(GiveBack(body.extents))
    if isinstance(body, Claimed | Fetched | ReadDone | Reserved | SaveDone) and body.pin:
        due.append(Unpin([body.pin]))
    if isinstance(body, Failed) and (pin := body.details.get("pin")):  # values of a refused message
        due.append(Unpin([pin]))
    return due


def own_sessions() -> set[int]:
    """The ids of the open sessions of this process."""
    return {keeper.session.id for keeper in list(_living) if keeper.session.closed is None}


def close_all() -> None:
    """At exit, every client leaves in order."""
    started = time.monotonic()
    for keeper in list(_living):
        if time.monotonic() - started > _CLOSE_S:
            return
        keeper.close("the client was closed because this process is exiting", exiting=True)


def _poison_all() -> None:
    for keeper in list(_living):
        keeper.poison()


atexit.register(close_all)
os.register_at_fork(after_in_child=_poison_all)
