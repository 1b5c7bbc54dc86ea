"""Background work of a client: release pins, return grants, end the session.

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
"""Releases are collected for this long, so that a loop over batches sends few messages."""
POOLS_S = 0.002
"""Poll interval of pools that are read in place, during GATHER_S."""
_SEND_S = 5.0
_CLOSE_S = 2.0
"""How long a client that closes waits for its peer, and an exiting process for all its clients."""
_LEAST_S = 0.5
"""The least part of this time that is left for the last message."""

COLLECTED = (
    "this client was garbage-collected: keep a reference to the plane that connect() returned"
)

_living: weakref.WeakSet[Housekeeper] = weakref.WeakSet()


class Housekeeper:
    """Does the background work of one session, on its anchor connection."""

    def __init__(self, session: Session, anchor: Connection) -> None:
        self.session = session
        self._anchor: Connection | None = anchor
        """None after it broke, until another one is open."""
        self._ended = False
        """Whether the client has closed, or its peer or session has ended: nothing more is sent."""
        self._unsent: list[Request] = []
        """messages that the peer has not confirmed yet"""
        self._sending = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._deserted = False
        session.tend, session.settle = self.start, self.settle
        self._undoing = threading.Lock()
        _living.add(self)
        if session.pools is not None:
            self.start()  # it closes the pools, even if the plane is never closed

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
            # The driver does not report finished copies from the arena, so poll it.
            soon = session.direct.pending or session.orphaned
            woken = session.bell.wait(GATHER_S if soon else IDLE_S)
            if woken and not self._deserted:
                self._gather()
            session.bell.reset()
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
        """Release the pins of reads in a pool as soon as the reads are done, so that puts find
        space there."""
        pools, until = self.session.pools, time.monotonic() + GATHER_S
        step_s = POOLS_S if pools is not None and pools.in_place else GATHER_S
        while (left_s := until - time.monotonic()) > 0 and not self._closing.wait(
            min(step_s, left_s)
        ):
            self.session.settle_pools(step_s)

    def _look(self) -> None:
        """Check that the peer runs while no call does. The arena of a dead peer is unmapped, so
        that the next peer can have the memory."""
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
        """Return the messages that undo replies to abandoned calls. A connection that the peer has
        not ended within `limit_s`, for all of them, is checked again later."""
        due: list[Body] = []
        until = time.monotonic() + limit_s
        for connection in self.session.orphans():
            try:
                while True:
                    for reply in connection.unclaimed():
                        if not (connection.is_retry and isinstance(reply.body, PutDone)):
                            due += undo(reply.body)
                    connection.sock.settimeout(max(0.0, until - time.monotonic()))
                    connection.take(flags=0)
            except (TimeoutError, BlockingIOError):
                self.session.look_later(connection)
            except (OSError, DataplaneError):
                self.session.end_orphan(connection)
        return due

    def _parting(self) -> list[Body]:
        """Return the due messages that no call has taken along."""
        due, pins = self.session.drain_due()
        return [*due, Unpin(pins)] if pins else due

    def _over(self) -> bool:
        """Return whether the session is over. After close() the anchor stays only while views are
        alive."""
        return self._closing.is_set() and not self.session.pins

    def tell(self, bodies: list[Body], limit_s: float = _SEND_S) -> None:
        """Send these messages and wait until the peer confirms them. If the connection breaks, they
        are sent again on a new anchor; if none can be opened now, a later call sends them. Nothing
        is sent to a peer that has ended."""
        with self._sending:
            for request in self.session.drain_unsent():
                self._unsent.append(msgspec.structs.replace(request, rid=request.op))
            self._unsent += [self.session.request(body, parting=True) for body in bodies]
            for _ in range(1 + REPEATS):
                if not self._unsent or self._ended:
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
        """Send all messages that are not confirmed. The peer carries out a repeated message
        once."""
        deadline = Deadline(limit_s)
        for request in self._unsent:
            anchor.send(encode(request), deadline)
        while (reply := anchor.receive(deadline)).rid != self._unsent[-1].rid:
            if isinstance(reply.body, Failed):
                log.info(
                    "peer %r rejected a one-way message: %s",
                    self.session.peer,
                    reply.body.message,
                )
        for request in self._unsent:
            self.session.answered(request)
        self._unsent.clear()

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
        """End the session in order. Live views stay readable, and their pins end with them. Calls
        in flight end as well, except those of an exiting process, whose daemon threads just
        stop."""
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
        """Close after the last reference to the plane died. Runs inside the collector, so it takes
        no lock: the thread closes. Without a thread nothing was ever held, and only sockets
        remain."""
        self._deserted = True
        if self._thread is not None:
            self.session.bell.ring()
            return
        self.session.connections.close(COLLECTED)
        if self._anchor is not None:
            self._anchor.close()

    def _hand_back(self) -> None:
        """Return the grants and leases that no call uses. Space that another thread or a copy may
        still write to is returned when this process is proved dead."""
        session, until = self.session, time.monotonic() + _CLOSE_S
        session.settle_pools(_CLOSE_S)
        due = self._parting()
        due += [
            Finish(lease, "abandon" if got else "release") for lease, got in session.leases.clear()
        ]
        if session.spans is not None:
            session.spans.close()
        # A stopped peer never ends orphans, so the wait for them gets half the time.
        due += self._undone(_CLOSE_S / 2)
        left_s = max(_LEAST_S, until - time.monotonic())
        # If another thread waits for a reply that never arrives, this one would too.
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
                awaited.shut()  # ends another thread's wait for a stopped peer
            self._sending.acquire()
        anchor, self._anchor, self._ended = self._anchor, None, True
        self._sending.release()
        if anchor is not None:
            anchor.close()
        self.session.direct.close()
        if self.session.pools is not None:
            self.session.pools.close()

    def poison(self) -> None:
        """Close the copies of the sockets in a forked child, without a message to the peer."""
        self._sending, self._undoing = threading.Lock(), threading.Lock()
        self._thread = None
        self._closing.set()
        self.session.poison()
        self._drop_anchor()


def undo(body: Body) -> list[Body]:
    """Return the messages that give back what a reply granted."""
    due: list[Body] = []
    if isinstance(body, Claimed):
        due.append(Finish(body.lease, "release" if body.plan is None else "leave"))
    if isinstance(body, Admitted):
        due.append(Withdraw("", 0, [body.permit]))  # the peer knows the permit's partition
    if isinstance(body, Reserved | PutDone) and body.extents:
        due.append(GiveBack(body.extents))
    if isinstance(body, Claimed | Fetched | ReadDone | Reserved | SaveDone) and body.pin:
        due.append(Unpin([body.pin]))
    if isinstance(body, Failed) and (pin := body.details.get("pin")):  # values of a refused message
        due.append(Unpin([pin]))
    return due


def own_sessions() -> set[int]:
    """Return the ids of the open sessions of this process."""
    return {keeper.session.id for keeper in list(_living) if keeper.session.closed is None}


def close_all() -> None:
    """Close every client of this process in order, at exit."""
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
