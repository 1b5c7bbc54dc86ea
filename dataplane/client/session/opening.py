"""From a name to a session: find or start this host's peer, shake hands, map its arena."""

from __future__ import annotations

import functools
import logging
import os
import socket
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from dataplane.client.session.connection import Connections
from dataplane.client.session.devices import AUTO, Devices, Wish
from dataplane.client.session.handshake import HANDSHAKE_S, open_connection
from dataplane.client.session.housekeeping import Housekeeper
from dataplane.client.session.session import Session
from dataplane.errors import PeerLost, PeerNotFound
from dataplane.launch import processes, settings
from dataplane.launch.embedded import attach
from dataplane.launch.rundir import LivingPeer
from dataplane.memory.mapping import ReadMap, WriteMaps

log = logging.getLogger(__name__)

_ATTEMPTS = 3
_VISIT_S = 4.0

P = TypeVar("P")


def open_session(
    name: str | None,
    run: str | None,
    fresh: bool = False,
    wish: Wish = AUTO,
) -> Housekeeper:
    """A new session at the peer `name` of this host, or at the run's embedded one. The log says
    which; processes that this one starts from now on belong to the same run."""
    processes.open_standard_descriptors()  # before a peer is started with pipes of ours
    _warn_of_unknown()
    for attempt in range(_ATTEMPTS):
        attached = attach(run, name, fresh=fresh)
        fresh = fresh and not attached.began
        try:
            keeper = join(partial(_connected, attached.socket), wish)
        except PeerLost:
            # An embedded peer may have left between the two steps; the next one starts another.
            if attempt == _ATTEMPTS - 1:
                raise
            continue
        log.log(logging.WARNING if attached.remarks() else logging.INFO, "%s", attached.line())
        if not os.environ.get("DATAPLANE_RUN"):
            os.environ["DATAPLANE_RUN"] = attached.run.name
        return keeper
    raise AssertionError("unreachable")


def visit(peer: LivingPeer) -> Housekeeper:
    """A session for a command that only looks: it starts no peer, also where this one has left
    meanwhile, which is PeerLost, and its run is nobody else's. DeadlineExceeded for one that lets
    nobody in, sooner than for who needs it: it may be stopped, and others are looked at as well."""
    return join(partial(_connected, str(peer.socket)), limit_s=_VISIT_S)


_reconnected: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()
_reconnecting = threading.Lock()


def reconnect(kind: Callable[[Housekeeper], P], run: str, peer: str) -> P:
    """What a pickled plane is in this process: a client of its run, at the same peer where that is
    on this host. One for all that come in, for as long as somebody has it."""
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
    """Once a process: a variable whose name is wrong would do nothing, without a word."""
    if wrong := settings.unknown():
        log.warning("%s", wrong)


def _connected(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(path)
    except BaseException:
        sock.close()
        raise
    return sock


def join(
    opener: Callable[[], socket.socket], wish: Wish = AUTO, limit_s: float = HANDSHAKE_S
) -> Housekeeper:
    """A new session over the sockets that `opener` makes."""
    processes.open_standard_descriptors()
    devices = Devices(wish)
    try:
        anchor, welcome, done, (readable, writable) = open_connection(
            opener, limit_s=limit_s, greet=devices.greet
        )
    except BaseException:
        devices.close()
        raise
    try:
        reads = ReadMap(readable, welcome.arena_bytes)
        writes = WriteMaps(writable)
    except BaseException:
        anchor.close()
        os.close(writable)
        devices.close()
        raise
    finally:
        os.close(readable)
    offered = devices if devices.offered else None
    session = Session(welcome, done, Connections(opener), reads, writes, offered)
    # The arena is mapped from it for as long as anybody writes.
    session.close_arena = end = weakref.finalize(writes, os.close, writable)
    end.atexit = False
    return Housekeeper(session, anchor)
