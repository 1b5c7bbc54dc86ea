"""The client's operations as generators, without I/O: they yield steps and return results.

`sync` carries the steps out with blocking sockets, `aio` on an event loop; so both do the same. A
step's outcome is sent in, its error thrown in. Bodies of several messages, copies and the
bookkeeping that must survive a failure between them belong here and in the files beside it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from dataplane.client import arguments
from dataplane.client.deadline import Deadline
from dataplane.client.session.outgoing import Call
from dataplane.client.session.session import Session, caller
from dataplane.client.write import schema
from dataplane.client.write.rows import name_list
from dataplane.errors import (
    ClientClosed,
    DataplaneError,
    DeadlineExceeded,
    InvalidCall,
    PartitionGone,
    PartitionSealed,
    PeerLost,
    ProtocolError,
    PutIncomplete,
    RowsDropped,
    Unavailable,
)
from dataplane.events.merge import Event, merged
from dataplane.metadata.tables.where import Where
from dataplane.wire.checkpoint import Census, CensusDone
from dataplane.wire.events import Events, EventsDone
from dataplane.wire.messages import (
    Body,
    Close,
    Define,
    Defined,
    Done,
    Reset,
    Seal,
    Stats,
    StatsDone,
    Wait,
)
from dataplane.wire.tables import Definition, Name

DEFAULT_TIMEOUT_S = 30.0
ATTACH_S = 1.0
"""A call that waits for rows takes at least so long to find the partition that it is about."""
UNKNOWN = (DeadlineExceeded, PeerLost, Unavailable)
"""Failures that do not say whether a call took effect."""
SHARD_FULL_S = 1.0
"""A shard that had no room for small values is asked again after so long."""

MAX_PAGES = 64
"""of events of one peer, more than its ring has"""

T = TypeVar("T")
B = TypeVar("B", bound=Body)


class Offload(msgspec.Struct, eq=False, frozen=True):
    """Run `work`, which copies `nbytes`: off the event loop where that is much."""

    work: Callable[[], Any]
    nbytes: int


Step = Call | Offload
Operation = Generator[Step, Any, T]


def ask(body: Body, expected: type[B], deadline: Deadline, doing: str = "") -> Operation[B]:
    """One request and its answer, of the expected type."""
    deadline.check(doing or type(body).__name__.lower())
    return expect((yield Call(body, deadline)), expected, body)


def wait_for(body: Body, expected: type[B], timeout_s: float | None) -> Operation[B]:
    """A request that the peer may hold until rows come; its body carries the same time-out."""
    return expect((yield Call(body, Deadline(timeout_s), True)), expected, body)


def expect(reply: object, expected: type[B], body: Body) -> B:
    if not isinstance(reply, expected):
        raise ProtocolError(
            f"the peer replied to {type(body).__name__} with {type(reply).__name__}, not "
            f"{expected.__name__}"
        )
    return reply


def limit_beside(timeout_s: float | None) -> float:
    """The time-out of calls that go with those that wait `timeout_s` for rows, such as a stream's
    acks: as long, but from 1 s up to the usual one."""
    if timeout_s is None:
        return DEFAULT_TIMEOUT_S
    return min(max(timeout_s, ATTACH_S), DEFAULT_TIMEOUT_S)


def milliseconds(timeout_s: float | None) -> int:
    """As messages tell it: -1 for ever."""
    return -1 if timeout_s is None else max(0, int(timeout_s * 1e3))


# partitions


class Handle(msgspec.Struct, eq=False):
    """One partition as this client knows it. `defined` is there once it has been attached."""

    session: Session
    name: str
    defined: Defined | None = None
    full_until: float = 0.0
    producers: set[int] = set()
    """threads and tasks in the body of a loop over `producing`"""

    def takes_inline(self) -> bool:
        """Whether the shard may have room for small values: it said nothing else of late."""
        return time.monotonic() >= self.full_until

    def shard_is_full(self) -> None:
        """It had no room for small values; for a while nobody need ask it."""
        self.full_until = time.monotonic() + SHARD_FULL_S

    def attach(self, deadline: Deadline) -> Operation[int]:
        """The generation; asks once, waiting until somebody has defined the partition."""
        if self.session.closed is not None:  # before anything is copied
            raise ClientClosed(self.session.closed)
        if self.defined is None:
            yield from self.define(None, deadline)
        return self.generation

    @property
    def generation(self) -> int:
        """Of one that has been attached."""
        assert self.defined is not None
        return self.defined.generation

    def attach_to_wait(self, timeout_s: float | None) -> Operation[int]:
        """As `attach`, for a call that waits for rows: for ever where that has no time-out."""
        return self.attach(Deadline(None if timeout_s is None else max(timeout_s, ATTACH_S)))

    def define(self, definition: Definition | None, deadline: Deadline) -> Operation[None]:
        doing = f"attaching to partition {self.name!r}"
        self.defined = yield from ask(Define(self.name, definition), Defined, deadline, doing)

    def takes_rows(self) -> Operation[bool]:
        """Whether new rows may still be put: it is neither sealed nor dropped."""
        yield from self.attach_to_wait(None)
        body = Define(self.name, None, generation=self.generation)
        try:
            now = yield from ask(body, Defined, Deadline(DEFAULT_TIMEOUT_S))
        except PartitionGone as exc:
            if exc.details.get("reason") == "lost":
                raise
            return False
        return now.phase == "open"

    def comes_too_late(self, exc: DataplaneError) -> Operation[bool]:
        """Whether a call of a loop over `producing` failed because the partition takes no new rows
        any more, which ends the loop and is no error."""
        if caller() not in self.producers:
            return False
        if isinstance(exc, PartitionSealed):
            return True
        if isinstance(exc, PartitionGone | RowsDropped | PutIncomplete):
            return not (yield from self.takes_rows())
        return False

    @property
    def definition(self) -> Definition:
        return self.defined.definition if self.defined is not None else Definition()

    @property
    def unit(self) -> str:
        """What one counts by where nothing is said."""
        return "groups" if self.definition.group_size is not None else "rows"


def definition_of(
    stages: Mapping[str, Sequence[str]] | None,
    group_size: int | None,
    groups: int | None,
    free: str | None,
    replicas: int,
    fields: Mapping[str, str] | None = None,
) -> Definition | None:
    """The definition that the arguments of `partition(…)` spell; None where they only attach."""
    if (stages, group_size, groups, free, replicas, fields) == (None, None, None, None, 1, None):
        return None
    if group_size is not None:
        group_size = arguments.count(group_size, "group_size")
    if groups is not None:
        groups = arguments.count(groups, "groups")
    free = free or ("acked" if stages else "drop")
    if free not in ("acked", "drop"):
        raise InvalidCall(f"free={free!r}: expected 'acked' or 'drop'")
    if replicas not in (1, 2):
        raise InvalidCall(
            f"replicas={replicas!r}: expected 1, or 2 for a second copy on another peer"
        )
    named: dict[str, list[str]] = {}
    form = "of stage names to lists of fields"
    for stage, needed in arguments.mapping(stages or {}, "stages", form).items():
        named[arguments.text(stage, "a stage")] = arguments.texts(needed, f"stages[{stage!r}]")
    copies: Literal[1, 2] = 2 if replicas == 2 else 1
    return Definition(
        named,
        group_size,
        groups,
        free,  # type: ignore[arg-type]
        copies,
        schema.canonical(fields or {}),
    )


def close_group(handle: Handle, group: Name, n: int, timeout: float | None) -> Operation[None]:
    deadline = Deadline(timeout)
    (name,) = name_list([group], "group")
    n = arguments.count(n, "n")
    generation = yield from handle.attach(deadline)
    yield from ask(Close(handle.name, generation, name, n), Done, deadline)


def seal(handle: Handle, short: str, timeout: float | None) -> Operation[None]:
    deadline = Deadline(timeout)
    if short not in ("drop", "keep"):
        raise InvalidCall(f"short={short!r:.40}: expected 'drop' or 'keep'")
    generation = yield from handle.attach(deadline)
    yield from ask(Seal(handle.name, generation, short == "keep"), Done, deadline)


def reset(handle: Handle, stage: str, timeout: float | None) -> Operation[None]:
    deadline = Deadline(timeout)
    arguments.text(stage, "a stage")
    generation = yield from handle.attach(deadline)
    yield from ask(Reset(handle.name, generation, stage), Done, deadline)


def wait(
    handle: Handle,
    stage: str | None,
    rows: int | None,
    groups: int | None,
    below: int | None,
    unit: str | None,
    where: Where | None,
    key: Name | None,
    timeout: float | None,
) -> Operation[None]:
    """Until so many rows or groups are ready, or fewer than `below` are not yet done, or there is a
    row with this key."""
    if key is not None:
        if any(a is not None for a in (stage, rows, groups, below, unit, where)):
            raise InvalidCall(
                "wait(key=…) waits for one row and takes no argument other than timeout="
            )
        yield from _wait_for_key(handle, key, timeout)
        return
    if stage is None or sum(n is not None for n in (rows, groups, below)) != 1:
        raise InvalidCall(
            "wait takes either a stage and exactly one of rows=, groups= and below=, or key= alone"
        )
    if unit not in (None, "rows", "groups"):
        raise InvalidCall(f"unit={unit!r}: expected 'rows' or 'groups'")
    if below is None:
        unit = "rows" if groups is None else "groups"
    wanted = (
        0 if below is not None else arguments.count(rows if groups is None else groups, str(unit))
    )
    below = 0 if below is None else arguments.count(below, "below")
    timeout = arguments.seconds(timeout, "timeout")
    arguments.text(stage, "a stage")
    generation = yield from handle.attach_to_wait(timeout)
    body = Wait(
        handle.name,
        generation,
        stage,
        unit or handle.unit,  # type: ignore[arg-type]
        count=wanted,
        below=below,
        timeout_ms=milliseconds(timeout),
        where=arguments.filter_of(where),
    )
    yield from wait_for(body, Done, timeout)


def _wait_for_key(handle: Handle, key: Name, timeout: float | None) -> Operation[None]:
    timeout = arguments.seconds(timeout, "timeout")
    (name,) = name_list([key], "key")
    generation = yield from handle.attach_to_wait(timeout)
    timeout_ms = milliseconds(timeout)
    body = Wait(handle.name, generation, "", "rows", timeout_ms=timeout_ms, key=name)
    yield from wait_for(body, Done, timeout)


def partitions(timeout: float | None) -> Operation[list[str]]:
    done = yield from ask(Census(), CensusDone, Deadline(timeout))
    return sorted(done.partitions)


def probe(timeout: float | None) -> Operation[dict[str, Any]]:
    """The ways between all peers, tried anew; see `dataplane probe`."""
    done = yield from ask(Stats(probe=True), StatsDone, Deadline(timeout))
    return done.stats


def events(since: float | None, timeout: float | None) -> Operation[list[Event]]:
    """Of every peer, one after another, page by page."""
    deadline = Deadline(timeout)
    since = 0.0 if since is None else since
    pages, silent = (yield from _pages("", since, deadline)), list[str]()
    for address in pages[0].members:
        if address == pages[0].address:
            continue
        try:
            pages += yield from _pages(address, since, deadline)
        except (Unavailable, InvalidCall):  # it died, or left meanwhile
            silent.append(address)
    return merged(pages, silent)


def _pages(address: str, since: float, deadline: Deadline) -> Operation[list[EventsDone]]:
    pages, after = list[EventsDone](), 0
    while len(pages) < MAX_PAGES:
        page = yield from ask(Events(address, since, after), EventsDone, deadline)
        pages.append(page)
        after = page.first + len(page.records) - 1
        if after >= page.last or not page.records:
            break
    return pages


def stats(handle: Handle | None, timeout: float | None) -> Operation[dict[str, Any]]:
    deadline = Deadline(timeout)
    if handle is not None:
        yield from handle.attach(deadline)
    body = Stats(None if handle is None else handle.name)
    done = yield from ask(body, StatsDone, deadline)
    if handle is not None and done.stats.get("generation") != (yield from handle.attach(deadline)):
        raise PartitionGone(
            f"partition {handle.name!r} was dropped after this handle was opened; get a new "
            f"handle with plane.partition({handle.name!r}, …)",
            partition=handle.name,
        )
    return done.stats
