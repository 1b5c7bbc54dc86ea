"""Sessions: one client process each, what it holds, and the proof that it has exited.

A session has several connections. Its leases end when the last connection closes or the process
exits, whichever happens first. Memory that the process can still write or read is quarantined
until the client releases it, or until its exit is proven (pidfd).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from dataplane.errors import ClientClosed, counted
from dataplane.latest import Latest
from dataplane.launch.embedded import is_embedded
from dataplane.peer.host import Host
from dataplane.peer.once import Repeats
from dataplane.wire.messages import Hello
from dataplane.wire.tables import SESSIONS

log = logging.getLogger(__name__)

MAX_ENDED = 1_024
"""Ended sessions whose names are remembered; the oldest are forgotten."""
COMMAND_CHARACTERS = 200
"""The length limit of a client's command line; the rest is cut off."""


class HeldPermit(NamedTuple):
    """A permit to open groups, and the operation that requested it."""

    partition: str
    generation: int
    op: int
    version: int


@dataclass(slots=True, eq=False)
class Session:
    """A client process.

    pid: as the kernel shows it to this peer; 0 if the client is in another pid namespace.
    own_pid, command, rank: as the client reports them; rank -1 means none. began: on the host's
    clock.
    """

    id: int
    pid: int
    label: str
    own_pid: int = 0
    command: str = ""
    rank: int = -1
    began: float = 0.0
    connections: int = 0
    leases: set[int] = field(default_factory=set)
    permits: dict[int, HeldPermit] = field(default_factory=dict)
    """by number, permits that it has not returned"""
    partitions: set[str] = field(default_factory=set)
    """partitions that it has declared or attached to"""
    pidfd: int = -1
    ended: bool = False
    gone: bool = False
    waiting: int = 0
    """its calls that wait for space or for rows"""
    repeats: Repeats = field(default_factory=Repeats)

    def is_of(self, other: Session) -> bool:
        """Whether both are certainly sessions of one process. Two containers may use one pid."""
        return self is other or (self.pid != 0 and self.pid == other.pid)

    @property
    def who(self) -> str:
        """The client's name in messages."""
        return f"{self.label}, `{self.command}`" if self.command else self.label

    def check(self) -> None:
        """Raise ClientClosed if the process exited before this request was read: it could not
        return what the reply grants."""
        if self.ended:
            raise ClientClosed(
                "the peer closed this session because the process that opened the "
                "session has exited: call dataplane.connect() again"
            )


class Sessions:
    """All sessions of this peer. `ended(session)` is called once, when the session's leases must
    end."""

    def __init__(self, host: Host, ended: Callable[[Session], None]) -> None:
        self._host = host
        self._ended = ended
        self._numbers = itertools.count(1)
        self._live: dict[int, Session] = {}
        self._quarantined: dict[int, Session] = {}
        self._over = Latest[int, tuple[str, str, float]](MAX_ENDED)
        """of ended sessions: label, name in messages, end time"""
        self.completing: dict[asyncio.Future[list[bool]], int] = {}
        """sessions whose restores are complete: they count as connected until the shards confirm"""
        self.last_seen = host.now()
        self.came = False
        """whether there has been a client"""
        self.last: Session | None = None
        """the last session to end that used a partition"""

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._live.values()))

    @property
    def where(self) -> str:
        """The name of this host in messages: its host name if the peer is embedded."""
        name = self._host.name
        return socket.gethostname() if is_embedded(name) else name

    @property
    def watched(self) -> int:
        """The number of client processes for which this peer has a file descriptor."""
        sessions = (*self._live.values(), *self._quarantined.values())
        return sum([one.pidfd >= 0 for one in sessions])

    def open(self, pid: int, hello: Hello) -> Session:
        """Open a session. pid: of the client, as the kernel shows it here."""
        number = self._number()
        session = Session(
            number,
            pid,
            hello.label or self._label(number, pid, hello.pid),
            hello.pid,
            hello.command[:COMMAND_CHARACTERS],
            hello.rank,
            self._host.now(),
        )
        self._live[session.id] = session
        self.came = True
        self._host.label(session.id, session.label)
        if hello.pools:
            self._host.space.reads_in_place(session.id, hello.pools)
        try:
            session.pidfd = os.pidfd_open(pid)
            asyncio.get_running_loop().add_reader(session.pidfd, self._exited, session)
        except OSError:
            # In another pid namespace, or already exited: only the connections are watched.
            session.pidfd = -1
        return session

    def _label(self, number: int, pid: int, own_pid: int) -> str:
        """Return a client's label, which names one process, so that messages can say "this
        process". In another pid namespace, where pids repeat, it includes the session's number."""
        if pid:
            return f"pid {pid} on host {self.where}"
        nth = number - self._host.owner.first_session
        return f"pid {own_pid} in another container on host {self.where} (client {nth})"

    def _number(self) -> int:
        while True:
            number = self._host.owner.first_session + next(self._numbers) % SESSIONS
            if number not in self._live and number not in self._quarantined:
                return number

    def identify(self, session_id: int) -> tuple[str, float] | None:
        """Return a client's name and for how many seconds it has been disconnected, 0 if it is
        connected. None if this peer never had the client, or had it long ago."""
        session = self._live.get(session_id)
        if session is not None:
            return session.who, 0.0
        _, who, at = self._over.get(session_id, ("", "", 0.0))
        if session_id in self.completing.values():
            return who, 0.0
        return (who, max(1e-3, self._host.now() - at)) if who else None

    def label(self, session_id: int) -> str:
        """Return a client's label, also after it ended. "" if this peer never had the client, or
        had it long ago."""
        live = self._live.get(session_id)
        return live.label if live else self._over.get(session_id, ("",))[0]

    def join(self, session_id: int, pid: int, own_pid: int) -> Session:
        """Return the session for another connection of its process."""
        session = self._live.get(session_id)
        if session is None or (session.pid, session.own_pid) != (pid, own_pid):
            raise ClientClosed("the peer has closed this session: call dataplane.connect() again")
        return session

    def connection_lost(self, session: Session) -> None:
        session.connections -= 1
        if session.partitions:  # else it only read figures, as `dataplane status` does
            self.last_seen = self._host.now()
        if session.connections == 0 and session.id in self._live:
            self._end(session)
            if session.pidfd < 0:
                self._prove(session)

    def _end(self, session: Session) -> None:
        del self._live[session.id]
        session.ended = True
        if session.partitions:
            self.last = session
        self._over[session.id] = session.label, session.who, self._host.now()
        self._ended(session)
        if not self._host.space.holds(session.id):
            self._prove(session)  # nothing that it does not hold may be returned
            return
        self._quarantined[session.id] = session
        self._host.space.disown(session.id)

    def sweep(self, session: Session) -> None:
        """Take back what a call granted that ended after its session."""
        if session.ended:
            self._ended(session)
        if session.gone:
            self._host.space.forget(session.id)

    def _exited(self, session: Session) -> None:
        if session.id in self._live:
            log.info(
                "client %s: exited while holding %s",
                session.label,
                counted(len(session.leases), "lease"),
            )
            self._end(session)
        self._prove(session)

    def _prove(self, session: Session) -> None:
        """Return its extents and pins: no process maps its memory now."""
        session.gone = True
        self._quarantined.pop(session.id, None)
        self._host.space.forget(session.id)
        self._host.labels.pop(session.id, None)
        if session.pidfd >= 0:
            asyncio.get_running_loop().remove_reader(session.pidfd)
            os.close(session.pidfd)
            session.pidfd = -1
