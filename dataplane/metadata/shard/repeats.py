"""Answers to operations that a client may repeat: a retry is answered as the first time.

Each request carries the lowest operation id of its session that has no answer yet; what is below
can never be repeated, and is forgotten. No I/O; one table per peer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from dataplane.errors import ProtocolError

MAX_ANSWERS_PER_SESSION = 1_024
MAX_SESSIONS = 65_536
"""Sessions whose end was never told are forgotten, the longest silent first."""

ReplyT = TypeVar("ReplyT")


@dataclass(slots=True)
class _Session(Generic[ReplyT]):
    floor: int = 0
    forgotten: int = -1  # the highest operation whose answer was pushed out before its time
    answers: OrderedDict[int, ReplyT] = field(default_factory=OrderedDict)


class Operations(Generic[ReplyT]):
    """Remembered answers by session and operation."""

    def __init__(self, limit: int = MAX_ANSWERS_PER_SESSION) -> None:
        self._limit = limit
        self._sessions: OrderedDict[Hashable, _Session[ReplyT]] = OrderedDict()

    def __len__(self) -> int:
        return sum(len(session.answers) for session in self._sessions.values())

    def remember(self, session: Hashable, op: int, floor: int, reply: ReplyT) -> None:
        """Keep the answer to `op`, and forget those below `floor`."""
        known = self._sessions.get(session)
        if known is None:
            known = self._sessions[session] = _Session()
        self._sessions.move_to_end(session)
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        self._raise_floor(known, floor)
        if op < known.floor:
            return
        known.answers[op] = reply
        if len(known.answers) > self._limit:
            oldest, _ = known.answers.popitem(last=False)
            known.forgotten = max(known.forgotten, oldest)

    def recall(self, session: Hashable, op: int) -> ReplyT | None:
        """The answer to `op`, None where it is new.

        ProtocolError for an operation whose answer was forgotten: doing it twice would be wrong.
        """
        known = self._sessions.get(session)
        if known is None:
            return None
        reply = known.answers.get(op)
        if reply is None and (op < known.floor or op <= known.forgotten):
            raise ProtocolError(
                f"operation {op} of session {session} was answered and forgotten; operations below "
                f"{max(known.floor, known.forgotten + 1)} cannot be repeated",
                op=op,
                floor=known.floor,
            )
        return reply

    def forget(self, session: Hashable, op: int) -> None:
        """The answer was taken back before anybody had it: a retry is carried out anew."""
        known = self._sessions.get(session)
        if known is not None:
            known.answers.pop(op, None)

    def end(self, session: Hashable) -> None:
        """The session is over: nothing of it will be repeated."""
        self._sessions.pop(session, None)

    def _raise_floor(self, known: _Session[ReplyT], floor: int) -> None:
        if floor <= known.floor:
            return
        known.floor = floor
        while known.answers and (oldest := next(iter(known.answers))) < floor:
            del known.answers[oldest]
