"""How far producers run ahead of the trainer: permits to open groups, calls that wait for them, and
the trainer's version.

Sans-I/O. Except for waiting calls, this is part of a store's state. A group uses one of (max_lag
+ 1) · per_version slots from its permit until the trainer advances to another version after it
finished the group. While a group of an earlier version is incomplete, groups finished since then
keep their slots. That bounds the lag in any order of completion.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from dataplane.errors import (
    DataplaneError,
    InvalidCall,
    PartitionConflict,
    PartitionSealed,
    counted,
)
from dataplane.metadata.shard.blocks import ACKED, Group
from dataplane.wire.events import Reason
from dataplane.wire.messages import Admit, Admitted

if TYPE_CHECKING:
    from dataplane.metadata.shard.state import State
    from dataplane.metadata.shard.store import Store

DONE = (1 << 63) - 1
"""In place of the version at which a group started: the group is finished and still exists."""
MAX_SLOTS = 1 << 31
_FEW = 64
SHOWN = 3
"""Names of groups in a message."""


@dataclass(slots=True)
class Permit:
    """A permit, valid until its holder returns it. count: how many groups it allows. left: how
    many it still allows. version: the trainer's version at its grant, at which its groups count
    as started."""

    number: int
    holder: int
    version: int
    count: int
    left: int


class Permits:
    """The permits of one partition. Groups are counted from the first request for a permit, or
    from the first version of the trainer. limits: (max_lag, per_version), after the first
    request."""

    def __init__(self) -> None:
        self.version = 0
        self.limits: tuple[int, int] | None = None
        self.given: dict[int, Permit] = {}
        self._of: dict[int, dict[int, Permit]] = {}
        """by holder, the oldest first"""
        self.trained: dict[int, int] = {}
        """version → groups that were finished while the trainer was at it, as long as they may
        still take slots"""
        self.counts = False
        """whether groups are counted: each then has the version at which it started, or `DONE`"""
        self.done = 0
        """existing groups that are `DONE`"""
        self._begun: list[tuple[int, int, Group]] | None = None
        """a heap of groups by the version at which they started. It has every incomplete group;
        `_slowest` removes complete ones from the front. None: built on the next use"""
        self._spent = 0
        """entries in the heap of groups that no longer exist or have a second entry"""

    @property
    def slots(self) -> int:
        return 0 if self.limits is None else (self.limits[0] + 1) * self.limits[1]

    @property
    def left(self) -> int:
        """How many groups may still be opened with permits."""
        return sum([permit.left for permit in self.given.values()])

    def of(self, holder: int) -> list[int]:
        return list(self._of.get(holder, ()))

    @property
    def holders(self) -> set[int]:
        return set(self._of)

    # groups

    def begin(self, state: State) -> None:
        """Start to count groups. Existing ones count as started at the current version."""
        if self.counts:
            return
        self.counts = True
        self.look_again()
        for group in state.groups.values():
            group.begun = self.version
            if state.definition.free == "drop" and _acked(group):
                self._finish(state, group)

    def opened(self, group: Group) -> None:
        group.begun = self.version
        self._enter(group)

    def _enter(self, group: Group) -> None:
        if self._begun is not None:
            heapq.heappush(self._begun, (group.begun, group.number, group))

    def _spend(self) -> None:
        if self._begun is not None:
            self._spent += 1
            if self._spent > _FEW and 2 * self._spent > len(self._begun):
                self.look_again()

    def use(self, holder: int, groups: Sequence[Group]) -> None:
        """Note that a session opened new groups. Its oldest permits are used first."""
        coming = iter(groups)
        for permit in self._of.get(holder, {}).values():
            for group in islice(coming, permit.left):
                group.begun = permit.version
                self._enter(group)
                self._spend()  # of the entry from `opened`
                permit.left -= 1

    def acked(self, state: State, groups: Iterable[Group]) -> None:
        """Note that a stage acked rows of these groups, which stay until they are dropped."""
        for group in groups:
            if group.begun != DONE and _acked(group):
                self._finish(state, group)
                self._count()

    def removed(self, group: Group, finished: bool) -> None:
        """Note that a group no longer exists. Return whether it was finished, and not dropped or
        lost."""
        self._spend()
        if not self.counts:
            return
        if group.begun == DONE:
            self.done -= 1
        elif finished:
            self._count()

    def _finish(self, state: State, group: Group) -> None:
        if state.images is not None:
            state.images.keep_group(group)
        group.begun = DONE
        self.done += 1

    def _count(self) -> None:
        self.trained[self.version] = self.trained.get(self.version, 0) + 1

    # admission

    def check(self, state: State, count: int, max_lag: int, per_version: int) -> None:
        """Raise InvalidCall, PartitionConflict or PartitionSealed for a call that can never
        succeed."""
        slots = (max_lag + 1) * per_version
        if count < 1:
            raise InvalidCall(f"admit({count}) is invalid: pass a count of at least 1")
        if max_lag < 0:
            raise InvalidCall(f"max_lag={max_lag} is invalid: pass a value of at least 0")
        if per_version < 1:
            raise InvalidCall(f"per_version={per_version} is invalid: pass a value of at least 1")
        if slots > MAX_SLOTS:
            raise InvalidCall(
                f"max_lag={max_lag} and per_version={per_version} allow up to {slots} unfinished "
                f"groups, over the limit of {MAX_SLOTS}: lower max_lag or per_version"
            )
        if state.definition.group_size is None:
            raise InvalidCall(
                f"admit() admits whole groups, but partition {state.partition!r} has no "
                "group_size: declare the partition with plane.partition(…, group_size=n). To "
                "admit single rows, use group_size=1"
            )
        if count > slots:
            raise InvalidCall(
                f"admit({count}) can never succeed: with max_lag={max_lag} and "
                f"per_version={per_version}, at most {counted(slots, 'group')} can be unfinished "
                f"at a time. Admit at most {counted(slots, 'group')} per call",
                slots=slots,
            )
        if self.limits not in (None, (max_lag, per_version)):
            assert self.limits is not None
            raise PartitionConflict(
                f"partition {state.partition!r} already limits admission with "
                f"max_lag={self.limits[0]}, per_version={self.limits[1]}, which conflicts with "
                f"max_lag={max_lag}, per_version={per_version}: pass the same max_lag and "
                "per_version in every process",
                max_lag=self.limits[0],
                per_version=self.limits[1],
            )
        if state.sealed:
            raise PartitionSealed(
                f"partition {state.partition!r} is sealed and takes no new groups: use "
                "another partition",
                partition=state.partition,
            )

    def fits(self, state: State, count: int, slots: int) -> bool:
        """Whether this many more groups may be started now."""
        taken = self.left + self.unfinished(state) + self.trained.get(self.version, 0) + count
        if taken > slots or not self.counts:
            return taken <= slots
        return taken + self._held(state) <= slots

    def unfinished(self, state: State) -> int:
        """The groups that exist and that not every stage has finished."""
        return len(state.groups) - self.done

    def _held(self, state: State) -> int:
        """Slots that groups finished before this version still hold."""
        if all(version >= self.version for version in self.trained):
            return 0
        since = self.oldest(state)
        return sum(n for v, n in self.trained.items() if since <= v < self.version)

    def slowest(self, state: State) -> tuple[int, list[Group]]:
        """`oldest`, and the incomplete groups that were started at it."""
        oldest = self.oldest(state)
        every = state.groups.values()
        here = [one for one in every if not self.counts or one.begun == oldest]
        return oldest, [one for one in here if self._lacks(state, one)]

    def oldest(self, state: State) -> int:
        """The version at which the oldest incomplete group was started, or the oldest permit was
        granted. Computed whenever something changes while a call waits."""
        slow = self._slowest(state)
        begun = [] if slow is None else [slow.begun]
        return min([self.version, *begun, *self._promised()])

    def _slowest(self, state: State) -> Group | None:
        """The incomplete group that started first."""
        if not self.counts:
            return None
        if self._begun is None:
            self._begun = [(group.begun, group.number, group) for group in state.groups.values()]
            heapq.heapify(self._begun)
        while self._begun:
            begun, _, group = self._begun[0]
            here = state.groups.get(group.key) is group and group.begun == begun != DONE
            if here and self._lacks(state, group):
                return group
            heapq.heappop(self._begun)
        return None

    def lag(self, state: State) -> int:
        """How many versions the slowest incomplete groups are behind."""
        return self.version - self.oldest(state)

    def look_again(self) -> None:
        """Note that complete groups may be incomplete again, or were started earlier than known."""
        self._begun, self._spent = None, 0

    def _lacks(self, state: State, group: Group) -> bool:
        """Whether a group is incomplete: it is open, or has rows that lack fields of a stage."""
        return not group.closed or any(
            stage.pending(block) for stage in state.stages.values() for block in group.blocks
        )

    def _promised(self) -> list[int]:
        """The versions of permits that still allow groups."""
        return [permit.version for permit in self.given.values() if permit.left]

    # permits

    def enter(self, permit: Permit) -> None:
        self.given[permit.number] = permit
        self._of.setdefault(permit.holder, {})[permit.number] = permit

    def take_back(self, numbers: list[int]) -> list[int]:
        """End permits. Return those that had not ended yet."""
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
        """Return the unused groups of an ended permit to the holder's other permits, the oldest
        first, up to what each has used: groups use the oldest permit, whichever admitted them. The
        rest expires."""
        for permit in self._of.get(over.holder, {}).values():
            many = min(over.left, permit.count - permit.left)
            if many and not permit.left:  # its used groups keep the older version
                permit.version = max(permit.version, over.version)
            permit.left += many
            over.left -= many
            if not over.left:
                return

    def advance(self, version: int, state: State) -> None:
        """Set the trainer's version. Raises InvalidCall for an older one."""
        if not 0 <= version < DONE:
            raise InvalidCall(f"advance({version}) is invalid: pass a version from 0 to {DONE - 1}")
        if version < self.version:
            raise InvalidCall(
                f"advance({version}) is invalid, because partition {state.partition!r} is "
                f"already at version {self.version} and versions only increase. To start "
                "again at an older version, drop the partition first",
                version=self.version,
            )
        if version == self.version:
            return
        self.begin(state)
        self.version = version
        live = [group.begun for group in state.groups.values()]
        oldest = min([version, *live, *self._promised()])
        self.trained = {v: n for v, n in self.trained.items() if v >= oldest}

    def stats(self, state: State) -> dict[str, Any]:
        """Figures. lag: how many versions the slowest incomplete groups are behind."""
        slowest, groups = self.slowest(state)
        return {
            "version": self.version,
            "lag": self.version - slowest,
            "permits": self.left,
            "unfinished_groups": self.unfinished(state),
            "finished_groups": self.trained.get(self.version, 0),
            "held_groups": self._held(state),
            "slots": self.slots,
            "slowest": [group.name for group in groups[:SHOWN]],
        }


def _acked(group: Group) -> bool:
    """Whether every stage has acked all its rows."""
    return bool(group.states) and group.states.count(ACKED) == len(group.states)


@dataclass(slots=True, eq=False)
class WaitingAdmit:
    """A waiting call of admit. since: when it was made."""

    asked: Admit
    holder: int
    since: float
    reason: Reason = Reason.LAG

    @property
    def number(self) -> int:
        return self.asked.number


def by_age(call: Any) -> tuple[float, int]:
    """Sort waiting calls by when they were made, and by number where that is equal."""
    return call.since, call.number


class AdmitQueue:
    """The calls of admit that wait at a shard, the oldest first, like claims in `ClaimQueue`."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._calls: dict[int, WaitingAdmit] = {}
        self._line: list[WaitingAdmit] = []
        """the same calls, the oldest first"""

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[WaitingAdmit]:
        return iter(list(self._line))

    def __contains__(self, number: int) -> bool:
        return number in self._calls

    def add(self, one: WaitingAdmit) -> None:
        """Queue a call by its age. A call with the same number is replaced and keeps its age."""
        before = self._calls.get(one.number)
        if before is not None:
            self.withdraw(one.number)
            one.since = min(one.since, before.since)
        self._calls[one.number] = one
        insort(self._line, one, key=by_age)

    def get(self, number: int) -> WaitingAdmit | None:
        return self._calls.get(number)

    def withdraw(self, number: int) -> bool:
        """Withdraw a call. Return whether it waited here."""
        one = self._calls.pop(number, None)
        if one is not None:
            self._line.remove(one)
        return one is not None

    def before(self, number: int) -> int:
        """How many calls are ahead of a waiting one."""
        return self._line.index(self._calls[number]) if number in self._calls else 0

    def serve(
        self, now: float, keep: bool
    ) -> Iterator[tuple[WaitingAdmit, Admitted | DataplaneError]]:
        """Grant every call that can be granted, one by one, and report the outcome of each.

        Time and `keep` have no effect here, because no call overtakes another. A call that fails
        because of a bug keeps waiting and blocks no other. The first such error is raised at the
        end.
        """
        broken: dict[int, Exception] = {}
        while (one := self._first(broken)) is not None:
            asked, limits = one.asked, (one.asked.max_lag, one.asked.per_version)
            outcome: Admitted | DataplaneError
            try:
                if not self.store.admit(asked.number, one.holder, asked.count, *limits):
                    break
                outcome = Admitted(asked.number, self.store.permits.version)
            except DataplaneError as exc:
                outcome = exc
            except Exception as exc:
                broken[asked.number] = exc
                continue
            self.withdraw(asked.number)
            yield one, outcome
        for failure in broken.values():
            raise failure

    def _first(self, broken: Container[int]) -> WaitingAdmit | None:
        return next((one for one in self._line if one.number not in broken), None)
