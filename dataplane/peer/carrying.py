"""Small values that ride in the message of a client, written into the arena here.

Each client has a stretch for them, granted to it like what it asks for itself, so that all that
follows is the same for both. Where there is no room at once the message is refused before anything
is done: to wait is for `Reserve`. Unused stretches go back after a second, or when others wait.
"""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct

import numpy as np

from dataplane.errors import BackPressure, ProtocolError
from dataplane.memory.admission import Admission
from dataplane.memory.extents import Records
from dataplane.peer.host import Host
from dataplane.peer.room import Room
from dataplane.peer.sessions import Session
from dataplane.wire.limits import ALIGNMENT_BYTES, CARRIED, MAX_CARRIED_BYTES
from dataplane.wire.messages import Finish, Put
from dataplane.wire.records import EXTENT, U8, column

STRETCH_BYTES = 256 << 10
"""Granted at once for what is to come, where there is plenty of room."""
IDLE_S = 1.0
_EXTENT = Struct("<QQ")


class Carrying:
    def __init__(self, host: Host, room: Room) -> None:
        self.host = host
        self.room = room

    def land(self, session: Session, body: Put | Finish) -> None:
        """Write what rides in the message into the arena; from here on it is a message whose
        client wrote all of it. BackPressure where there is no room at once."""
        size = len(body.carried)
        if size > MAX_CARRIED_BYTES or not body.columns:
            raise ProtocolError(
                f"{size} bytes ride in a message with {len(body.columns)} columns; at most "
                f"{MAX_CARRIED_BYTES} do, of values that it names",
                limit=MAX_CARRIED_BYTES,
            )
        ranges = _laid(body.ranges, size)
        start = self._take(session, size)
        self.host.arena.view[start : start + size] = body.carried
        body.carried = b""
        body.ranges = b"".join(
            _EXTENT.pack(at + start if rides else at, length) for rides, at, length in ranges
        )

    def _take(self, session: Session, size: int) -> int:
        """The start of so many bytes that are granted to the client, and now this message's."""
        start, end = session.stretch
        if end - start < size or not self.host.space.may_write(session.id, start, end):
            start, end = self._another(session, size)
        session.stretch = start + size, end
        session.stretched_at = self.host.now()
        return start

    def _another(self, session: Session, size: int) -> tuple[int, int]:
        self.give_back([session])
        extents = self._granted(session, size)
        if not len(extents):
            raise BackPressure(
                f"there is no room at once for {size} bytes that ride in a message: reserve room "
                "for them",
                needed_bytes=size,
            )
        offset, length = extents.item()
        return offset, offset + length

    def _granted(self, session: Session, size: int) -> Records:
        nothing = np.zeros(0, EXTENT)
        if session.ended:
            return nothing
        if not len(self.room):
            ahead = self.host.space.grant(session.id, Admission.OPEN, STRETCH_BYTES)
            if len(ahead):
                return ahead
        found = self.room.at_once(session.id, Admission.OPEN, [np.array([size], U8)])
        return nothing if found is None else found[1]

    def give_back(self, sessions: Iterable[Session]) -> None:
        """What is left of their stretches is free."""
        for session in sessions:
            (start, end), session.stretch = session.stretch, (0, 0)
            if start < end and self.host.space.may_write(session.id, start, end):
                left = np.array([(start, end - start)], EXTENT)
                self.host.space.give_back(session.id, left)

    def tidy(self, sessions: Iterable[Session]) -> None:
        """By the clock: stretches that nobody used for a while go back."""
        before = self.host.now() - IDLE_S
        idle = [s for s in sessions if s.stretch[1] and s.stretched_at < before]
        if idle:
            self.give_back(idle)
            self.room.pump()


def _laid(ranges: bytes, size: int) -> list[tuple[bool, int, int]]:
    """Per EXTENT whether it rides, where it starts (counted from the first byte that rides), and
    its length. ProtocolError unless those that ride fill `size` bytes."""
    laid, at = [], 0
    for offset, length in column(ranges, EXTENT).tolist():
        rides = offset == CARRIED
        laid.append((rides, at if rides else offset, length))
        if rides:
            at += -(-length // ALIGNMENT_BYTES) * ALIGNMENT_BYTES or ALIGNMENT_BYTES
    if at != size:
        raise ProtocolError(f"{size} bytes ride in a message, its ranges name {at}")
    return laid
