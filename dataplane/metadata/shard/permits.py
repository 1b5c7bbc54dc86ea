"""How far producers run ahead of the trainer: permits to open groups, and the trainer's version.

Sans-I/O, a part of a store's state. A group takes one of (max_lag + 1) · per_version places from
when it is permitted until the trainer goes on to another version after having finished it. While a
group that was begun at a version is not all there yet, none that was finished since then gives its
place back: that is what bounds the lag, whoever overtakes whom.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dataplane.errors import InvalidCall, PartitionConflict, PartitionSealed
from dataplane.metadata.shard.units import ACKED, PENDING
from dataplane.metadata.tables.columns import Array, grow

if TYPE_CHECKING:
    from dataplane.metadata.shard.state import State

DONE = (1 << 63) - 1
"""In place of the version at which it was begun: the group is finished, and still here."""
MAX_PLACES = 1 << 31
SHOWN = 3
"""Names of groups in a message."""


@dataclass(slots=True)
class Permit:
    """Until its holder says that it is over. count: how many groups it was given out for. left: how
    many may still be opened with it. version: the trainer's, when it was given out: at which
    whatever is opened with it was begun."""

    number: int
    holder: int
    version: int
    count: int
    left: int


class Permits:
    """Of one partition. Keeps account of groups from when the first permit is asked for, or the
    trainer first says its version. limits: (max_lag, per_version), once somebody asked."""

    def __init__(self) -> None:
        self.version = 0
        self.limits: tuple[int, int] | None = None
        self.given: dict[int, Permit] = {}
        self.left = 0
        """groups that may still be opened with permits"""
        self._of: dict[int, dict[int, Permit]] = {}
        """by holder, the oldest first"""
        self.trained: dict[int, int] = {}
        """version → groups that were finished while the trainer was at it, so far as they may
        still take places"""
        self.begun: Array = np.zeros(0, np.int64)
        """per group at which of the trainer's versions it was begun, or `DONE`; empty until it
        counts"""
        self.done = 0
        """groups that are here and `DONE`"""
        self._slow = -1
        """a group that was not all there, when somebody looked last, and none was begun earlier"""

    @property
    def nbytes(self) -> int:
        return self.begun.nbytes

    @property
    def counts(self) -> bool:
        return len(self.begun) > 0

    @property
    def places(self) -> int:
        return 0 if self.limits is None else (self.limits[0] + 1) * self.limits[1]

    def of(self, holder: int) -> list[int]:
        return list(self._of.get(holder, ()))

    @property
    def holders(self) -> set[int]:
        return set(self._of)

    # what becomes of groups

    def begin(self, state: State) -> None:
        """Keep account from now on; what is here was begun at the version that is."""
        if self.counts:
            return
        self.begun = np.full(max(1, state.groups.capacity), self.version, np.int64)
        live = state.groups.live()
        if state.definition.free == "drop":
            self._finish(live[_acked(state, live)])

    def opened(self, groups: Array, capacity: int) -> None:
        if capacity > len(self.begun):
            grow(self.begun, capacity)
        self.begun[groups] = self.version

    def use(self, holder: int, groups: Array) -> None:
        """New groups were opened by a session: with its permits, the oldest first."""
        for permit in self._of.get(holder, {}).values():
            if permit.left:
                mine, groups = groups[: permit.left], groups[permit.left :]
                self.begun[mine] = permit.version
                if self._slow >= 0 and permit.version < self.begun.item(self._slow):
                    self._slow = mine.item(0)
                permit.left -= len(mine)
                self.left -= len(mine)
            if not len(groups):
                return

    def acked(self, state: State, groups: Array) -> None:
        """A stage acked rows of these groups, which are kept until they are dropped."""
        groups = groups[self.begun[groups] != DONE]
        groups = groups[_acked(state, groups)]
        self._finish(groups)
        self._count(len(groups))

    def removed(self, groups: Array, finished: Array) -> None:
        """Groups are no more; which of them were finished, and not dropped or lost."""
        if self._slow in groups:
            self._slow = -1
        before = self.begun[groups] == DONE
        self.done -= int(np.count_nonzero(before))
        self._count(int(np.count_nonzero(finished & ~before)))

    def _finish(self, groups: Array) -> None:
        self.begun[groups] = DONE
        self.done += len(groups)

    def _count(self, many: int) -> None:
        if many:
            self.trained[self.version] = self.trained.get(self.version, 0) + many

    # what may go on

    def check(self, state: State, count: int, max_lag: int, per_version: int) -> None:
        """Raise what is to be said at once: InvalidCall, PartitionConflict, PartitionSealed."""
        places = (max_lag + 1) * per_version
        if count < 1 or max_lag < 0 or per_version < 1 or places > MAX_PLACES:
            raise InvalidCall(
                f"admit({count}, max_lag={max_lag}, per_version={per_version}): so many groups, 1 "
                f"or more; a lag of 0 or more versions; groups per version; {MAX_PLACES} in all"
            )
        if state.definition.group_size is None:
            raise InvalidCall(
                f"admit counts groups, and partition {state.partition!r} has no group_size: "
                "declare it with plane.partition(…, group_size=n), 1 where each row is for itself"
            )
        if count > places:
            raise InvalidCall(
                f"admit({count}) can never be: with max_lag={max_lag} and "
                f"per_version={per_version} at most {places} groups are unfinished at a time",
                places=places,
            )
        if self.limits not in (None, (max_lag, per_version)):
            assert self.limits is not None
            raise PartitionConflict(
                f"partition {state.partition!r} admits with max_lag={self.limits[0]}, "
                f"per_version={self.limits[1]}, as somebody else asked it to, and not with "
                f"max_lag={max_lag}, per_version={per_version}: a bound on the lag is one for all",
                max_lag=self.limits[0],
                per_version=self.limits[1],
            )
        if state.sealed:
            raise PartitionSealed(
                f"partition {state.partition!r} is sealed and takes no new groups",
                partition=state.partition,
            )

    def fits(self, state: State, count: int, places: int) -> bool:
        """Whether so many groups more may be begun now."""
        taken = self.left + self.unfinished(state) + self.trained.get(self.version, 0) + count
        if taken > places or not self.counts:
            return taken <= places
        return taken + self._held(state) <= places

    def unfinished(self, state: State) -> int:
        """Groups that are here, and not finished by every stage."""
        return len(state.groups) - self.done

    def _held(self, state: State) -> int:
        """Places of what was finished before this version, which nothing yet gives back."""
        if all(version >= self.version for version in self.trained):
            return 0
        since = self.oldest(state)
        return sum(n for v, n in self.trained.items() if since <= v < self.version)

    def slowest(self, state: State) -> tuple[int, list[int]]:
        """`oldest`, and which groups were begun then that are not all there."""
        oldest, groups = self.oldest(state), self._not_all_there(state)
        return oldest, groups[self.begun[groups] == oldest].tolist() if self.counts else []

    def oldest(self, state: State) -> int:
        """The version at which the first was begun of all that is not all there yet; a permit may
        have been given out then, too. Asked whenever something changes while somebody waits: all
        groups are looked at when the slowest one is there."""
        if self.counts and not self._lacks(state, self._slow):
            groups = self._not_all_there(state)
            groups = groups[self.begun[groups] != DONE]
            self._slow = groups.item(int(np.argmin(self.begun[groups]))) if len(groups) else -1
        slow: list[int] = [self.begun.item(self._slow)] if self._slow >= 0 else []
        return min([self.version, *slow, *self._promised()])

    def look_again(self) -> None:
        """Groups that were all there may not be any more, or were begun earlier than was known."""
        self._slow = -1

    def _lacks(self, state: State, group: int) -> bool:
        """Whether this group is not all there."""
        if group < 0:
            return False
        one = np.array([group])
        slots = state.groups.members.gather(one)[1].astype(np.int64)
        stages = state.stages.values()
        return not state.groups.closed(one).item() or any(
            PENDING in stage.rows.state[slots].tobytes() for stage in stages
        )

    def _not_all_there(self, state: State) -> Array:
        """Groups that are open, or have rows that some stage's fields lack."""
        rows = [stage.rows for stage in state.stages.values() if stage.rows.counts[PENDING]]
        live = state.live() if rows else np.zeros(0, np.int64)
        pending = [state.group[live[one.state[live] == PENDING]] for one in rows]
        groups = np.unique(np.concatenate([state.groups.open(), *pending]))
        groups = groups[groups >= 0]
        return groups.astype(np.int64)

    def _promised(self) -> list[int]:
        """At which versions that was begun which may still be opened with permits."""
        return [permit.version for permit in self.given.values() if permit.left]

    # what is told

    def give(self, permit: Permit, limits: tuple[int, int], state: State) -> None:
        self.begin(state)
        self.limits = limits
        self.enter(permit)

    def enter(self, permit: Permit) -> None:
        self.given[permit.number] = permit
        self._of.setdefault(permit.holder, {})[permit.number] = permit
        self.left += permit.left

    def take_back(self, numbers: list[int]) -> list[int]:
        """These are over. Returns those of them that were not yet."""
        over = [permit for number in numbers if (permit := self.given.pop(number, None))]
        for permit in over:
            held = self._of[permit.holder]
            del held[permit.number]
            if not held:
                del self._of[permit.holder]
        for permit in over:
            self._hand_on(permit)
        return [permit.number for permit in over]

    def _hand_on(self, over: Permit) -> None:
        """What is left of a permit is what others of its holder were used for in its place, the
        oldest having been used first, so far as they were; the rest is nobody's."""
        self.left -= over.left
        for permit in self._of.get(over.holder, {}).values():
            many = min(over.left, permit.count - permit.left)
            if many and not permit.left:  # what its own was begun at counts for another's group
                permit.version = max(permit.version, over.version)
            permit.left += many
            over.left -= many
            self.left += many
            if not over.left:
                return

    def advance(self, version: int, state: State) -> bool:
        """The trainer is at this version. False where it was already; InvalidCall for an older."""
        if not 0 <= version < DONE:
            raise InvalidCall(f"advance({version}): a version is a number from 0 on")
        if version < self.version:
            raise InvalidCall(
                f"advance({version}): partition {state.partition!r} is at version {self.version} "
                "already, and goes on from there: a trainer that begins again at an older one "
                "drops the partition, or counts on",
                version=self.version,
            )
        if version == self.version:
            return False
        self.begin(state)
        self.version = version
        live = self.begun[state.groups.live()].tolist()
        oldest = min([version, *live, *self._promised()])
        self.trained = {v: n for v, n in self.trained.items() if v >= oldest}
        return True

    def stats(self, state: State) -> dict[str, Any]:
        """lag: how many versions the slowest groups are behind that are not all there yet."""
        slowest, groups = self.slowest(state)
        return {
            "version": self.version,
            "lag": self.version - slowest,
            "permits": self.left,
            "unfinished_groups": self.unfinished(state),
            "finished_groups": self.trained.get(self.version, 0),
            "held_groups": self._held(state),
            "places": self.places,
            "slowest": [state.groups.name(group) for group in groups[:SHOWN]],
        }


def _acked(state: State, groups: Array) -> Array:
    """Per group: has every stage acked all its rows."""
    done: Array = np.full(len(groups), bool(state.stages))
    for stage in state.stages.values():
        done &= stage.groups.state[groups] == ACKED
    return done
