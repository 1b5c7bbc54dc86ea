"""When an embedded peer ends by itself: nobody wants it, and nobody can want what it has."""

from __future__ import annotations

from dataplane.launch import runs
from dataplane.launch.settings import LINGER_S, PeerConfig
from dataplane.peer.host import Host
from dataplane.peer.sessions import Sessions

ARRIVAL_S = 5.0
"""Whoever started this peer has so long to come, however short it is to linger."""


class Lingering:
    def __init__(self, host: Host, sessions: Sessions, config: PeerConfig) -> None:
        self.host = host
        self.sessions = sessions
        self.linger_s = config.linger_s
        self.linger_unread_s = config.linger_unread_s
        self._run = config.run
        # The run has no name: when all that it had is sealed and drained, it ends with its last
        # client, so that the same command after it in a script begins anew.
        self._brief = runs.is_unnamed(config.run) and config.linger_s == LINGER_S
        self._began = False

    def begin(self) -> None:
        """The peer serves: to be let in may have taken long."""
        self.sessions.last_seen = self.host.now()
        self._began = True

    def is_wanted(self) -> bool:
        """Whether somebody uses this peer, or did so a short while ago. While one of a plane's
        peers is wanted, all that came with their clients stay."""
        if not self._began:
            return True
        if self.linger_s is None or len(self.sessions):
            return bool(len(self.sessions))
        unread = len(self.host.lent) > 0
        unread |= any(entry.store.unread for entry in self.host.entries.values())
        unread = unread and not runs.has_ended(self._run)  # else nobody can come any more
        if self._brief and self.sessions.came and self._finished():
            return False
        linger_s = max(self.linger_s, self.linger_unread_s or 0) if unread else self.linger_s
        if not self.sessions.came:
            linger_s = max(linger_s, ARRIVAL_S)
        return self.host.now() - self.sessions.last_seen <= linger_s

    def _finished(self) -> bool:
        """Whether there were partitions, and nothing can come of any of them."""
        entries = self.host.entries.values()
        return bool(entries) and all(e.sealed and not e.store.unread for e in entries)
