"""The events, steps and stats of a plane that a watcher keeps. No I/O.

Each look fetches only what happened since the last one, so it costs a peer little. A step that has
ended is drawn once. Everything that is kept has a limit.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from dataplane.errors import duration, reading_statistics
from dataplane.events.follow import Follower
from dataplane.events.merge import Event
from dataplane.timeline.why import OF_ROWS
from dataplane.watch.picture import Picture, picture, short
from dataplane.wire.events import Kind, Reason

MAX_EVENTS = 100_000
"""About 500 bytes each."""
KEPT_SHARE = 0.9
"""The share of MAX_EVENTS to keep, the latest ones, once there are more."""
FIRST_S = 900.0
"""The first look asks for this many seconds of events."""
HERE = "the watcher"
"""The name used as the peer of events that this watcher dropped."""
MAX_STEPS = 100
MAX_DRAWN = 12
"""The most steps drawn at each look: the newest ones that have new events."""
LOOK_AHEAD = 5_000
"""This many events after a step are searched for waits that began in it."""
LEFT_S = 600.0
"""A peer that left is listed for this many seconds."""
MAX_QUEUES = 24
MAX_HOSTS = 256
MAX_HOLDERS = 3
MAX_STUCK = 8
STUCK_S = 10.0


class StepSummary(msgspec.Struct, frozen=True):
    """A line in the list of steps. `number`: its number when its picture is requested."""

    number: int
    partition: str
    seconds: float
    idle_s: float
    cause: str
    healthy: bool
    finished: bool


class StageQueue(msgspec.Struct, frozen=True):
    """Rows of a partition for one of its stages, now. `calls`: how many calls wait. `for_s`: how
    long the oldest has waited."""

    partition: str
    stage: str
    ready: int
    leased: int
    acked_per_s: float
    calls: int
    for_s: float


class SpaceHolder(msgspec.Struct, frozen=True):
    who: str
    nbytes: int


class HostArena(msgspec.Struct, frozen=True):
    """The state of a host. `error`: why nothing is known of it now, or ""."""

    name: str
    error: str = ""
    used_bytes: int = 0
    size_bytes: int = 0
    spilled_bytes: int = 0
    holders: list[SpaceHolder] = []


class Stuck(msgspec.Struct, frozen=True):
    """A call that has waited for long, and the reason as a sentence."""

    what: str
    peer: str
    for_s: float
    why: str


class View(msgspec.Struct, frozen=True):
    """Everything that is shown.

    - `sentence`: of the newest step, or why there is none.
    - `age_s`: seconds since the plane last answered.
    - `trouble`: what is missing in this view, in sentences.
    """

    run: str
    sentence: str
    age_s: float
    every_s: float
    trouble: list[str]
    steps: list[StepSummary]
    picture: Picture | None
    queues: list[StageQueue]
    hosts: list[HostArena]
    stuck: list[Stuck]
    left_out: dict[str, int]


class _Times:
    """The times of the first and the last event of a partition's generation, and when it first got
    rows (`put`)."""

    __slots__ = ("begin", "end", "generation", "put")

    def __init__(self, event: Event) -> None:
        self.generation = event.generation
        self.begin, self.end, self.put = event.began, event.at, float("inf")
        self.add(event)

    def add(self, event: Event) -> None:
        self.begin, self.end = min(self.begin, event.began), max(self.end, event.at)
        if event.kind in OF_ROWS:
            self.put = min(self.put, event.at)


class History:
    def __init__(self, run: str, max_events: int = MAX_EVENTS) -> None:
        self.run = run
        self._max_events = max_events
        self._events: list[Event] = []
        self._now: list[Event] = []
        """events that have not ended, and the peers that are silent"""
        self._times: dict[str, _Times] = {}
        """of each partition's latest generation"""
        self._generations: dict[tuple[str, int], _Times] = {}
        """of all generations, by partition and generation"""
        self._cut: set[str] = set()
        """partitions that lost earlier events to the limit of events"""
        self._pictures: dict[tuple[str, int], tuple[int, Picture]] = {}
        """by partition and generation, with the step's number; the oldest first. It is replaced and
        never changed, so another thread may read it."""
        self._numbers = 0
        self._queues: list[StageQueue] = []
        self._hosts: list[HostArena] = []
        self._stuck: list[Stuck] = []
        self._peers: dict[str, str] = {}
        """address → name of present peers"""
        self._left: dict[str, tuple[str, float]] = {}
        """by address: peers that have left, and when that was seen"""
        self._follower = Follower()
        self._looked_at = 0.0
        self._error = ""

    def since(self, now: float) -> float:
        """Return the time from which on events are to be fetched. now: on this host's monotonic
        clock."""
        since = self._follower.since(now)
        return now - FIRST_S if since is None else since

    def look(self, events: Sequence[Event], stats: dict[str, Any] | None, asked: float) -> None:
        """Add the plane's answer. asked: when it was asked. stats: None if only events were asked
        for. Raise ProtocolError, and change nothing, if stats of a peer of another release lack an
        entry."""
        if stats is not None:
            with reading_statistics():
                self._meet(stats, asked)
        found = self._follower.take(events, asked)
        new, self._now = found.events, found.now
        touched = {e.partition for e in (*new, *self._now)}
        self._events = sorted([*self._events, *new], key=_at)
        if len(self._events) > self._max_events:
            self._forget(len(self._events) - KEPT_SHARE * self._max_events)
            new = self._events
        for e in (*new, *self._now):
            self._extend(e)
        self._draw(touched, asked)
        self._error, self._looked_at = "", asked

    def failed(self, error: str) -> None:
        """Note that the plane could not be asked."""
        self._error = error

    def picture_of(self, number: int) -> Picture | None:
        """Return the picture of a step of the list. Any thread may ask, during a look too."""
        return next((one for known, one in self._pictures.values() if known == number), None)

    def view(self, now: float, every_s: float) -> View:
        listed = [_step(number, one) for number, one in self._pictures.values()]
        latest = list(self._pictures.values())[-1][1] if self._pictures else None
        sentence = latest.sentence if latest else "no rows have been put yet"
        order = {short(name): at for at, (name, _) in enumerate(self._pictures)}
        queues = sorted(
            self._queues, key=lambda one: (-order.get(one.partition, -1), one.partition)
        )
        hosts, stuck = self._hosts, self._stuck
        return View(
            self.run,
            sentence if latest or not self._error else self._error,
            now - self._looked_at if self._looked_at else 0.0,
            every_s,
            list(self._trouble(hosts, now)),
            listed,
            latest,
            queues[:MAX_QUEUES],
            hosts[:MAX_HOSTS],
            stuck[:MAX_STUCK],
            {
                "queues": max(0, len(queues) - MAX_QUEUES),
                "hosts": max(0, len(hosts) - MAX_HOSTS),
                "stuck": max(0, len(stuck) - MAX_STUCK),
            },
        )

    # inside

    def _meet(self, stats: dict[str, Any], asked: float) -> None:
        """Read the stats, and note which peers have left."""
        queues, hosts, stuck = _queues(stats), _hosts(stats), _stuck(stats)
        there = {one["address"]: name for name, one in stats["peers"].items()}
        left = {address: (name, asked) for address, name in self._peers.items()}
        self._left = {
            address: known
            for address, known in (left | self._left).items()
            if address not in there and asked - known[1] < LEFT_S
        }
        self._queues, self._hosts, self._stuck, self._peers = queues, hosts, stuck, there

    def _forget(self, over: float) -> None:
        """Drop this many of the earliest events."""
        dropped, self._events = self._events[: int(over)], self._events[int(over) :]
        self._times.clear()
        self._generations.clear()
        there = {e.partition for e in self._events}
        self._cut = (self._cut | {e.partition for e in dropped}) & there

    def _extend(self, event: Event) -> None:
        key = event.partition, event.generation
        known = self._generations.get(key)
        if known is None:
            known = self._generations[key] = _Times(event)
        else:
            known.add(event)
        # Generations come from clocks of several hosts, so a later one may have a lower number.
        latest = self._times.setdefault(event.partition, known)
        if known.begin > latest.begin:
            self._times[event.partition] = known

    def _draw(self, touched: set[str], now: float) -> None:
        """Draw the newest steps again, of those that have new events or have not ended."""
        times = self._times
        put = [name for name, one in times.items() if one.put < float("inf")]
        named = sorted(put, key=lambda name: times[name].put)[-MAX_STEPS:]
        pictures = dict(self._pictures)  # other threads read the one that is published
        due = []
        for name in named:
            known = pictures.get((name, times[name].generation))
            if known is None or name in touched or not known[1].finished:
                due.append(name)
        for name in due[-MAX_DRAWN:] if pictures else due:
            its = times[name]
            key = name, its.generation
            number, _ = pictures.get(key, (self._numbers + 1, None))
            self._numbers = max(self._numbers, number)
            is_newest = name == named[-1]
            during = self._during(name, its, is_newest)
            pictures[key] = (
                number,
                picture(during, name, now if is_newest else 0.0, its.generation),
            )
        order = {name: at for at, name in enumerate(named)}
        ordered = sorted(pictures.items(), key=lambda one: order.get(one[0][0], -1))
        self._pictures = dict(ordered[-MAX_STEPS:])

    def _during(self, partition: str, its: _Times, is_newest: bool) -> list[Event]:
        """Return the events while this step lasted, and those of waits that began then."""
        events, end = self._events, float("inf") if is_newest else its.end
        first = bisect_left(events, its.begin, key=_at)
        last = bisect_right(events, end, key=_at)
        ahead = events[last : last + LOOK_AHEAD]
        found = events[first:last] + [e for e in (*ahead, *self._now) if e.began <= end]
        found.sort(key=_at)
        if partition in self._cut:
            found.append(Event(Kind.MISSING, found[-1].at, HERE, reason=Reason.OVERWRITTEN))
        return found

    def _trouble(self, hosts: Sequence[HostArena], now: float) -> Iterator[str]:
        if self._error:
            since = f"; the state shown is {duration(now - self._looked_at)} old"
            yield self._error + (since if self._looked_at else "")
        silent = {e.peer for e in self._now if e.kind is Kind.MISSING}
        for host in hosts:
            if host.error:
                silent.discard(host.name)
                yield f"peer {host.name} does not answer: {host.error}"
        for name in sorted(silent):
            yield f"peer {short(name)} does not answer: its events are missing"
        for name, at in self._left.values():
            yield (f"peer {short(name)} left the run or was declared lost {duration(now - at)} ago")
        lost = {e.peer for e in self._events if e.kind is Kind.MISSING}
        for name in sorted(lost):
            yield f"peer {short(name)} overwrote events of these steps before they could be fetched"


def _queues(stats: dict[str, Any]) -> list[StageQueue]:
    """Return the queues of partitions that have rows or waiting calls."""
    everywhere, found = stats["everywhere"], list[StageQueue]()
    for name, partition in everywhere["partitions"].items():
        for stage, figures in partition["stages"].items():
            waits = [
                w for w in everywhere["waits"] if w["partition"] == name and w["stage"] == stage
            ]
            queue = StageQueue(
                short(name),
                short(stage),
                figures["ready_rows"],
                figures["leased_rows"],
                figures["acked_rows_per_s"],
                sum(wait["calls"] for wait in waits),
                max([wait["for_s"] for wait in waits], default=0.0),
            )
            if queue.ready or queue.leased or waits:
                found.append(queue)
    return found


def _hosts(stats: dict[str, Any]) -> list[HostArena]:
    found, clients = list[HostArena](), stats["everywhere"]["clients"]
    called = {one["peer"]: one["host"] for one in clients}  # embedded peers have one name
    for name, host in stats["peers"].items():
        if "error" in host:
            found.append(HostArena(short(name), short(host["error"])))
            continue
        held = [
            SpaceHolder(short(one["client"]), one["granted_bytes"] + one["pinned_bytes"])
            for one in clients
            if one["peer"] == name and one["granted_bytes"] + one["pinned_bytes"]
        ]
        found.append(
            HostArena(
                short(called.get(name, name)),
                "",
                host["used_bytes"],
                host["size_bytes"],
                host["spilled_bytes"],
                sorted(held, key=lambda one: -one.nbytes)[:MAX_HOLDERS],
            )
        )
    return found


def _stuck(stats: dict[str, Any]) -> list[Stuck]:
    waits = [w for w in stats["everywhere"]["waits"] if w["for_s"] >= STUCK_S]
    return [
        Stuck(
            short(f"{w['kind']} of {w['partition']!r}" if w["partition"] else w["kind"])
            + (f", stage {short(w['stage'])!r}" if w["stage"] else ""),
            short(w["peer"]),
            w["for_s"],
            w["why"],
        )
        for w in sorted(waits, key=lambda one: -one["for_s"])
    ]


def _at(event: Event) -> float:
    return event.at


def _step(number: int, one: Picture) -> StepSummary:
    cause = one.cause.value.replace("_", " ")
    return StepSummary(
        number, one.partition, one.seconds, one.idle_s, cause, one.healthy, one.finished
    )
