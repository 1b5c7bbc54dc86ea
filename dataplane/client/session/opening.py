"""From a name to a session: find or start this host's peer, shake hands, map its arena."""

from __future__ import annotations

import functools
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from msgspec.structs import replace

from dataplane.client.arguments import Deadline
from dataplane.client.session.connection import Connections, Opener, expect
from dataplane.client.session.handshake import (
    HANDSHAKE_S,
    QueueFull,
    further,
    is_without_descriptors,
    no_descriptors,
    open_connection,
)
from dataplane.client.session.housekeeping import Housekeeper, own_sessions
from dataplane.client.session.session import Session
from dataplane.errors import (
    DataplaneError,
    InvalidCall,
    PeerLost,
    PeerNotFound,
    reading_statistics,
)
from dataplane.gpu.registry import AUTO, Wish, client_pools
from dataplane.launch import processes, rundir, settings
from dataplane.launch.embedded import attach
from dataplane.launch.ending import Client, FreshStart
from dataplane.launch.rundir import LivingPeer
from dataplane.memory.arena import ReadMap, WriteMaps
from dataplane.wire.arrays import shown
from dataplane.wire.frames import encode
from dataplane.wire.messages import HelloDone, Stats, StatsDone, Welcome

if TYPE_CHECKING:
    from dataplane.gpu.client.pools import OpenPools

log = logging.getLogger(__name__)

_ATTEMPTS = 3
_VISIT_S = 4.0
_RESTORE_S = 5.0
_LOOK_S = 0.05

P = TypeVar("P")


def open_session(
    name: str | None,
    run: str | None,
    fresh: bool | Literal["force"] = False,
    wish: Wish = AUTO,
) -> Housekeeper:
    """A new session at the peer `name` of this host, or at the run's embedded one. The log says
    which; processes that this one starts from now on belong to the same run."""
    try:
        return _open_session(name, run, fresh, wish)
    except OSError as exc:
        if is_without_descriptors(exc):
            raise no_descriptors() from exc
        raise


def _open_session(
    name: str | None, run: str | None, fresh: bool | Literal["force"], wish: Wish
) -> Housekeeper:
    if not (isinstance(fresh, bool) or (isinstance(fresh, str) and fresh == "force")):
        said = f"{shown(fresh):.80}"
        raise InvalidCall(f'fresh={said}: expected False, True or "force"', fresh=said)
    processes.open_standard_descriptors()  # before a peer is started with pipes of ours
    _warn_of_unknown()
    for setting in ("tracebacks", "progress"):
        settings.of_variable(setting)  # InvalidConfig here, and not in a later call
    fresh_start = FreshStart(_clients_of, fresh == "force") if fresh else None
    for attempt in range(_ATTEMPTS):
        attached = attach(run, name, fresh_start=fresh_start)
        fresh_start = None if attached.began else fresh_start
        try:
            keeper = join(partial(_connected, attached.socket), wish)
        except PeerLost:
            # An embedded peer may have left between the two steps; the next one starts another.
            if attempt == _ATTEMPTS - 1:
                raise
            continue
        session = keeper.session
        first = not session.found.clients and not session.found.left_by
        level, line = attached.line(_found(session, attached.began), first)
        log.log(level, "%s", line)
        if os.environ.get("DATAPLANE_RUN", "") in ("", attached.run.over):
            os.environ["DATAPLANE_RUN"] = attached.run.name
        return keeper
    raise AssertionError("unreachable")


def _found(session: Session, began: bool) -> HelloDone | None:
    """The other clients, or the rows without clients, that a new session finds in its run. The peer
    knows those of its own host; the statistics report the others. None if a host does not reply.
    began: the peer was started for this session."""
    found = session.found
    if began or found.clients or session.welcome.alone:
        return found
    try:
        stats = _stats(session)
    except DataplaneError:
        return None
    with reading_statistics():
        if any("error" in host for host in stats["peers"].values()):
            return None
        rows = sum(one["rows"] for one in stats["everywhere"]["partitions"].values())
        return replace(found, clients=len(stats["everywhere"]["clients"]), rows=rows)


def _clients_of(peer: LivingPeer) -> list[Client]:
    """The clients of a peer's run on all its hosts, without this visit."""
    keeper = visit(peer)
    try:
        stats = _stats(keeper.session)
    finally:
        keeper.close("this client only read the run's statistics, and is closed")
    mine = own_sessions()
    with reading_statistics():
        return [
            Client(
                one["pid"], one["command"] or one["client"], one["age_s"], one["session"] in mine
            )
            for one in stats["everywhere"]["clients"]
        ]


def _stats(session: Session) -> dict[str, Any]:
    """The statistics of a run, without this session."""
    deadline = Deadline(_VISIT_S)
    connection = further(session, deadline)
    request = session.request(Stats(), int(_VISIT_S * 1e3))
    try:
        answer = connection.exchange(encode(request), request.rid, deadline)
    finally:
        session.answered(request)
        connection.close()
    return expect(answer, StatsDone, request.body).stats


def visit(peer: LivingPeer) -> Housekeeper:
    """Open a session for a command that only inspects a run. It starts no peer, and other calls do
    not inherit the run. Raises PeerLost if the peer has left, and ConnectError if it does not reply
    within _VISIT_S: it may be stopped, and the command inspects other peers too."""
    return join(partial(_connected, str(peer.socket)), limit_s=_VISIT_S)


_reconnected: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()
_reconnecting = threading.Lock()


def reconnect(kind: Callable[[Housekeeper], P], run: str, peer: str) -> P:
    """Return the plane for a pickled plane: a client of its run, at the same peer if that is on
    this host. All pickles of one plane share one client while it is referenced."""
    with _reconnecting:
        known = (kind, os.getpid(), run, peer)
        plane = _reconnected.get(known)
        if plane is None or plane._session.closed is not None:
            try:
                keeper = open_session(peer, run)
            except PeerNotFound:
                keeper = open_session(None, run)
            plane = _reconnected[known] = kind(keeper)
        return plane


@functools.cache
def _warn_of_unknown() -> None:
    """Warn once per process of unknown DATAPLANE_* variables, which have no effect."""
    if wrong := settings.unknown():
        log.warning("%s", wrong)


def _connected(path: str, limit_s: float) -> socket.socket:
    """Return a socket. Raise QueueFull if the listen queue stays full: the peer is stopped or
    busy."""
    began = time.monotonic()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)  # a blocking connect would wait for the queue without limit
    try:
        while True:
            try:
                sock.connect(path)
                sock.setblocking(True)
                return sock
            except BlockingIOError:
                if time.monotonic() - began > limit_s:
                    raise QueueFull(path) from None
                time.sleep(_LOOK_S)
            except FileNotFoundError:
                # The socket file was removed; a living peer restores it.
                at = Path(path)
                late = time.monotonic() - began > _RESTORE_S
                if late or rundir.holder(at.parent, at.stem) is None:
                    raise
                time.sleep(_LOOK_S)
    except BaseException:
        sock.close()
        raise


def join(opener: Opener, wish: Wish = AUTO, limit_s: float = HANDSHAKE_S) -> Housekeeper:
    """Open a session over the sockets that `opener` creates."""
    processes.open_standard_descriptors()
    pools: OpenPools | None = None

    def greet(welcome: Welcome) -> list[int]:
        nonlocal pools
        pools = client_pools(wish, bool(welcome.pools))
        return [] if pools is None else pools.greet(welcome)

    def close_pools() -> None:
        if pools is not None:
            pools.close()

    with ExitStack() as undone:
        undone.callback(close_pools)
        anchor, welcome, done, (readable, writable) = open_connection(
            opener, limit_s=limit_s, greet=greet
        )
        undone.callback(anchor.close)
        undone.callback(os.close, writable)
        try:
            reads = ReadMap(readable, welcome.arena_bytes)
        finally:
            os.close(readable)
        writes = WriteMaps(writable)
        undone.pop_all()
    session = Session(welcome, done, Connections(opener), reads, writes, pools)
    # Writers map the arena from this descriptor, so it lives as long as `writes`.
    session.close_arena = end = weakref.finalize(writes, os.close, writable)
    end.atexit = False
    return Housekeeper(session, anchor)
