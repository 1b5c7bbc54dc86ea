"""A shard's replies to the changes of its callers, so that a retry gets the first reply.

A caller is one incarnation of a peer. The shard remembers a reply until the caller has raised
its floor above the change's number. No count limits what it remembers. Sans-I/O.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from dataplane.errors import ChangeExpired, LimitExceeded
from dataplane.wire import journal
from dataplane.wire.limits import MAX_CHANGES_ABOVE_FLOOR
from dataplane.wire.messages import Body
from dataplane.wire.tables import Change, Owner

AnswerT = TypeVar("AnswerT")


class CallerAnswers(Generic[AnswerT]):
    """The replies to one caller, by the numbers of its requests. None is below its floor."""

    __slots__ = ("answers", "floor")

    def __init__(self, floor: int = 0) -> None:
        self.floor = floor
        self.answers: dict[int, AnswerT] = {}

    def raise_floor(self, floor: int) -> None:
        """Forget the replies below this number. A floor only rises."""
        if floor > self.floor:
            self.floor = floor
            self.answers = {n: answer for n, answer in self.answers.items() if n >= floor}


class Answers:
    """The replies of one partition's shard."""

    def __init__(self) -> None:
        self._callers: dict[Owner, CallerAnswers[Body | None]] = {}
        """an answer of None: the change was settled before it arrived"""

    def __len__(self) -> int:
        return sum([len(one.answers) for one in self._callers.values()])

    def __repr__(self) -> str:
        return f"<Answers {len(self)} of {len(self._callers)} callers>"

    def __contains__(self, change: Change) -> bool:
        caller = self._callers.get(change.caller)
        return caller is not None and change.number in caller.answers

    def __iter__(self) -> Iterator[tuple[Owner, int]]:
        """Caller and number of each change."""
        return ((owner, n) for owner, caller in self._callers.items() for n in caller.answers)

    @property
    def callers(self) -> set[Owner]:
        return set(self._callers)

    def to(self, change: Change) -> Body | None:
        """Return the reply to a change, or None if the change is new.

        Raises ChangeExpired below the caller's floor and for a settled change, and LimitExceeded
        for a change too far above the floor.
        """
        self._check(change)
        if change not in self:
            return None
        answer = self._callers[change.caller].answers[change.number]
        if answer is None:
            raise ChangeExpired(
                f"peer {change.caller.peer} cancelled its change {change.number} before the change "
                "arrived, so the change was not applied: repeat the call",
                number=change.number,
            )
        return answer

    def remember(self, change: Change, answer: Body) -> None:
        """Store the reply to a change that was applied, and forget replies below its floor."""
        self._raise_floor(change).answers[change.number] = answer

    def settle(self, change: Change) -> bool:
        """Refuse the change from now on, unless it was applied. Return whether it was. Raises as
        `to`."""
        self._check(change)
        answers = self._raise_floor(change).answers
        return answers.setdefault(change.number, None) is not None

    def forget(self, caller: Owner) -> None:
        """Forget a caller whose process has exited, so no retry can come."""
        self._callers.pop(caller, None)

    def _check(self, change: Change) -> None:
        caller = self._callers.get(change.caller) or CallerAnswers()
        if change.number < max(change.floor, caller.floor):
            raise ChangeExpired(
                f"change {change.number} arrived after its sender, peer {change.caller.peer}, had "
                "stopped waiting for the answer, so this attempt was not applied. An earlier "
                "attempt may have taken effect: read the rows, and repeat the call if they are "
                "unchanged",
                number=change.number,
            )
        above = len(caller.answers)
        if change.floor > caller.floor:
            above = sum([number >= change.floor for number in caller.answers])
        if above >= MAX_CHANGES_ABOVE_FLOOR and change.number not in caller.answers:
            raise LimitExceeded(
                f"peer {change.caller.peer} already has {above} unconfirmed changes, the maximum: "
                "wait until the oldest is confirmed, then repeat the call",
                limit=MAX_CHANGES_ABOVE_FLOOR,
            )

    def _raise_floor(self, change: Change) -> CallerAnswers[Body | None]:
        caller = self._callers.get(change.caller)
        if caller is None:
            caller = self._callers[change.caller] = CallerAnswers()
        caller.raise_floor(change.floor)
        return caller

    # for a copy

    def records(self) -> Iterator[journal.Answers]:
        for owner, caller in self._callers.items():
            yield journal.Answers(owner, caller.floor, list(caller.answers.items()))  # type: ignore[arg-type]

    def enter(self, told: journal.Answers) -> None:
        caller = self._callers[told.caller] = CallerAnswers(told.floor)
        caller.answers = dict(told.given)
