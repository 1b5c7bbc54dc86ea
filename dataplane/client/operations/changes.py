"""What is said of rows without moving bytes: tags, drops, permits to open groups, which were lost.

Groups that a session opens use its permits, whichever came first. So at the end of one `with` the
shard leaves to those that are open what was used of theirs in its place, and takes the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from dataplane.client import arguments
from dataplane.client.core import (
    Handle,
    Operation,
    ask,
    limit_beside,
    milliseconds,
    wait_for,
)
from dataplane.client.deadline import Deadline
from dataplane.client.session.session import caller
from dataplane.client.write.rows import (
    Index,
    Names,
    TagValues,
    chunks,
    name_list,
    named_rows,
    tag_columns,
    take_tags,
)
from dataplane.errors import InvalidCall, PartitionGone, PartitionSealed, StreamEnd, counted
from dataplane.metadata.tables.where import Where
from dataplane.wire import messages
from dataplane.wire.messages import (
    Admit,
    Admitted,
    Advance,
    Done,
    Drop,
    Losses,
    LossesDone,
    Tag,
    Withdraw,
)
from dataplane.wire.tables import Name, Scalar

T = TypeVar("T")


class Dropped(NamedTuple):
    """How many rows and bytes a drop freed."""

    rows: int
    bytes: int


def tag(
    handle: Handle,
    keys: Names,
    tags: TagValues,
    expect: Mapping[str, Scalar] | None,
    timeout: float | None,
) -> Operation[None]:
    names = name_list(keys, "key")
    columns = tag_columns(tags, len(names))
    expected = {n: v[0] for n, v in tag_columns(expect, 1).items()} if expect is not None else None
    deadline = Deadline(timeout)
    generation = yield from handle.attach(deadline)
    size = handle.session.max_rows
    for start in range(0, len(names), size):
        part = names[start : start + size]
        at: Index = np.arange(start, start + len(part), dtype=np.intp)
        body = Tag(handle.name, generation, named_rows(part), take_tags(columns, at), expected)
        yield from ask(body, Done, deadline)


def drop(
    handle: Handle,
    keys: Names | None,
    groups: Names | None,
    where: Where | None,
    timeout: float | None,
) -> Operation[Dropped]:
    """One message, but for very long lists of keys or groups."""
    if sum(a is not None for a in (keys, groups, where)) > 1:
        raise InvalidCall(
            "drop takes at most one of keys=, groups= and where=; without any it drops the whole "
            "partition"
        )
    deadline = Deadline(timeout)
    generation = yield from handle.attach(deadline)
    name, size = handle.name, handle.session.max_rows
    bodies: list[Drop]
    if keys is not None:
        parts = chunks(name_list(keys, "key", ordered=False), size)
        bodies = [Drop(name, generation, rows=named_rows(part)) for part in parts]
    elif groups is not None:
        parts = chunks(name_list(groups, "group", ordered=False), size)
        bodies = [Drop(name, generation, groups=part) for part in parts]
    else:
        bodies = [Drop(name, generation, where=arguments.filter_of(where))]
    rows = nbytes = 0
    for body in bodies:
        done = yield from ask(body, messages.Dropped, deadline)
        handle.session.warn_of_tags(name, done.unknown_tags)
        rows += done.rows
        nbytes += done.bytes
    if (keys, groups, where) == (None, None, None):
        handle.session.leases.end(name)
    return Dropped(rows, nbytes)


class Admitting:
    """What an admission is without its methods that wait. `version`: the trainer's, when it was
    granted: what is begun under it samples from these weights, or newer ones."""

    def __init__(
        self, handle: Handle, n: int, max_lag: int, per_version: int, timeout: float | None
    ) -> None:
        self.n = arguments.count(n, "n")
        self.version = 0
        self._handle = handle
        self._max_lag = arguments.whole(max_lag, "max_lag")
        self._per_version = arguments.count(per_version, "per_version")
        self._timeout = arguments.seconds(timeout, "timeout")
        self._held: Withdraw | None = None
        """what is to be said at the end"""

    def _admit(self) -> Operation[None]:
        if self._held is not None:
            raise InvalidCall(
                "this admit(…) is already in use in another `with`: call admit(…) once per `with`"
            )
        try:
            yield from self._admitted()
        except (PartitionSealed, PartitionGone) as exc:
            if not (yield from self._handle.comes_too_late(exc)):
                raise
            self.n = 0  # the loop over `producing` ends when its body does

    def _admitted(self) -> Operation[None]:
        generation = yield from self._handle.attach_to_wait(self._timeout)
        name, limit_ms = self._handle.name, milliseconds(self._timeout)
        permits = self._handle.session.permits
        body = Admit(
            name,
            generation,
            self.n,
            self._max_lag,
            self._per_version,
            limit_ms,
            own=permits.mine(name),
        )
        admitted = yield from wait_for(body, Admitted, self._timeout)
        self.version = admitted.version
        permits.add(admitted.permit, name)
        self._held = Withdraw(name, generation, [admitted.permit])

    def _give_back(self) -> Operation[None]:
        held, self._held = self._held, None
        if held is None:
            return
        self._handle.session.permits.discard(held.numbers[0])
        yield from ask(held, Done, Deadline(limit_beside(self._timeout)))

    def __repr__(self) -> str:
        state = "not admitted" if self._held is None else f"started at version {self.version}"
        return f"<Permits for {counted(self.n, 'group')} of {self._handle.name!r}: {state}>"


def advance(handle: Handle, version: int, timeout: float | None) -> Operation[None]:
    deadline, version = Deadline(timeout), arguments.whole(version, "version")
    generation = yield from handle.attach(deadline)
    yield from ask(Advance(handle.name, generation, version), Done, deadline)


class Producing(Generic[T]):
    """Items, one after the other. Ends when the partition takes no new rows."""

    def __init__(self, handle: Handle, items: Iterable[T]) -> None:
        self._caller: int | None = None
        """the thread or task that has an item in hand"""
        self._handle = handle
        self._items = iter(items)
        self._over = False

    def _next(self) -> Operation[T]:
        """The next item; StreamEnd where there is none, or new rows are not taken any more."""
        self._leave()
        if not self._over and (yield from self._handle.takes_rows()):
            for item in self._items:
                self._caller = caller()
                self._handle.producers.add(self._caller)
                return item
        self._over = True
        raise StreamEnd("no more items, or the partition takes no new rows")

    def _leave(self) -> None:
        if self._caller is not None:
            self._handle.producers.discard(self._caller)
            self._caller = None

    def __del__(self) -> None:
        self._leave()  # left by break, return or an exception

    def __repr__(self) -> str:
        state = "ended" if self._over else "goes on"
        return f"<Producing for {self._handle.name!r}: {state}>"


class Losing:
    """Keys of lost rows, list after list. `missed`: rows of which the peer had forgotten the names
    before they were asked for."""

    def __init__(self, handle: Handle, timeout: float | None) -> None:
        self.missed = 0
        self._handle = handle
        self._timeout = timeout
        self._after = 0
        self._ended = False

    def _next(self) -> Operation[list[Name]]:
        """What was lost beyond those told already; StreamEnd when no more can be."""
        if self._ended:
            raise self._over()
        timeout = arguments.seconds(self._timeout, "timeout")
        generation = yield from self._handle.attach_to_wait(timeout)
        body = Losses(self._handle.name, generation, self._after, milliseconds(timeout))
        try:
            done = yield from wait_for(body, LossesDone, timeout)
        except PartitionGone as exc:
            if exc.details.get("reason") == "lost":
                raise  # with all of its rows, which nobody can name
            done = LossesDone(self._after, ended=True)
        self._after, self._ended = done.after, done.ended
        self.missed += done.missed
        if done.ended:
            raise self._over()
        return done.names

    def _over(self) -> StreamEnd:
        return StreamEnd(
            f"partition {self._handle.name!r} is over: it was dropped, or it is sealed and every "
            "stage has its rows, so no more rows can be lost"
        )

    def __repr__(self) -> str:
        state = "ended" if self._ended else f"{self._after} so far"
        return f"<Lost rows of {self._handle.name!r}: {state}>"
