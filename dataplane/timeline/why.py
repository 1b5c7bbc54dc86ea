"""Why a step took as long as it did, found in the events alone.

A step is a partition, its end the last ack of its last stage. From each interval in which a worker
of that stage waited, the search goes back to the input that arrived last, to who made it, and from
there to what that one waited for, until somebody was busy instead of waiting. What the events do
not show is called unknown: no cause is named without evidence for it.
"""

from __future__ import annotations

import enum
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from statistics import median

import msgspec

from dataplane.errors import counted, duration, sized
from dataplane.timeline.merge import Event
from dataplane.wire.events import Kind, Reason
from dataplane.wire.tables import Name

NEAR_S = 0.05
"""Events of one call are so close together; clocks of peers add their uncertainty."""
SLOW = 0.7
"""A worker or link below this share of its peers' rate is slow."""
SKEWED = 1.0
"""The last group is a straggler if it needs so many times longer after three quarters of the groups
than those needed."""
UNACKED = 5.0
"""A lease that lasts so many times longer than any other of its stage is taken to be forgotten."""
QUIET = 3.0
"""A producer that was silent for so many times its longest pause is taken to have finished."""
LEAST_S = 1.0
"""For either of the two, and not less than this."""
IDLE_SHARE = 0.1
"""A stage that is idle for less of the step is what bounds the step."""
NAMED_SHARE = 0.2
"""A cause of less of the idle time is not named."""
MAX_WALK = 10_000
_OTHER = {Kind.PULL, Kind.ROOM_WAIT, Kind.ADMIT_WAIT, Kind.STALL}


class Cause(enum.StrEnum):
    SLOW_WORKER = "slow_worker"
    TOO_FEW_WORKERS = "too_few_workers"
    SLOW_LINK = "slow_link"
    FULL_ARENA = "full_arena"
    UNACKED_LEASE = "unacked_lease"
    NOT_SEALED = "not_sealed"
    FILTER = "filter"
    ADMIT = "admit"
    STRAGGLER = "straggler"
    STARVED_PEER = "starved_peer"
    STAGE = "stage"
    """A stage worked, no slower than its peers, and nothing queued: nothing is wrong."""
    GENERATION = "generation"
    """Rollout was at work: nothing is wrong."""
    LAST_STAGE = "last_stage"
    """The last stage was busy: nothing is wrong."""
    UNKNOWN = "unknown"


HEALTHY = {Cause.STAGE, Cause.GENERATION, Cause.LAST_STAGE}


class Share(msgspec.Struct, frozen=True):
    """A cause, how many seconds of the last stage's idle time it explains, and in words."""

    cause: Cause
    seconds: float
    text: str


class Why(msgspec.Struct, frozen=True):
    """What is known of one step. stage: its last one. shares: first what is wrong and explains much
    of the idle time, then the rest, each by size. finished: the step is over. missing: peers of
    which events are missing."""

    partition: str
    seconds: float
    stage: str
    idle_s: float
    finished: bool
    shares: tuple[Share, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def cause(self) -> Cause:
        return self.shares[0].cause if self.shares else Cause.UNKNOWN

    @property
    def sentence(self) -> str:
        took = "took" if self.finished else "has taken"
        was = "was" if self.finished else "has been"
        said = f"{self.partition} {took} {duration(self.seconds)}"
        if not self.stage:
            return f"{said}; no stage has claimed any of it{self._incomplete}"
        if self.cause is Cause.LAST_STAGE:
            busy = 1 - self.idle_s / self.seconds if self.seconds else 1.0
            return (
                f"{said}; {self.stage} {was} busy {busy:.0%} of it, so {self.stage} itself bounds "
                f"the step{self._incomplete}"
            )
        said += f"; {self.stage} {was} idle {duration(self.idle_s)} of it"
        for share in self.shares[:2]:
            if share is self.shares[0] or share.seconds >= NAMED_SHARE * self.idle_s:
                said += f", {duration(share.seconds)} {share.text}"
        return said + self._incomplete

    @property
    def _incomplete(self) -> str:
        if not self.missing:
            return ""
        return f" (events of {', '.join(self.missing)} are missing, so this may be wrong)"


class _Lease(msgspec.Struct, eq=False):
    stage: str
    worker: str
    host: str
    number: int
    began: float
    ended: float
    rows: int = 0
    left: int = 0
    reason: Reason = Reason.NONE
    groups: set[Name] = set()

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def is_open(self) -> bool:
        return self.left > 0


class _Piece(msgspec.Struct, frozen=True):
    """A stretch of idle time and what it was spent on. what: "work", "put", "pull", "room",
    "admit", "stall", "held", or "" where that is unknown."""

    begin: float
    end: float
    what: str = ""
    stage: str = ""
    worker: str = ""
    host: str = ""
    by: str = ""
    group: Name = ""
    queued: bool = False

    @property
    def seconds(self) -> float:
        return self.end - self.begin


def steps(events: Iterable[Event]) -> list[str]:
    """The partitions of which rows were put, in the order of their first put."""
    return list(dict.fromkeys(e.partition for e in events if e.kind is Kind.PUT))


def explain(events: Sequence[Event], partition: str) -> Why:
    """Why this step took as long as it did. events: of the whole plane, as `merged` gives them."""
    return _Step(events, partition).why()


class _Step:
    def __init__(self, events: Sequence[Event], partition: str) -> None:
        self.partition = partition
        self.everything = events
        generation = max((e.generation for e in events if e.partition == partition), default=0)
        self.events = [e for e in events if e.partition == partition and e.generation == generation]
        self.now = max((e.at for e in events if e.kind is not Kind.MISSING), default=0.0)
        self.near_s = NEAR_S + max((e.uncertain for e in events), default=0.0)
        self.puts = self._of(Kind.PUT)
        self.ready = self._of(Kind.READY)
        self.waits = self._of(Kind.CLAIM_WAIT)
        self.leases = _leases(self.events, self.now)
        self.other = [e for e in events if e.kind in _OTHER]
        self.came = defaultdict[tuple[str, Name], list[Event]](list)
        for e in self.events:
            given_back = e.kind is Kind.LEASE_END and e.reason not in (Reason.ACK, Reason.DROP)
            if e.kind is Kind.READY or given_back:
                self.came[e.stage, e.group].append(e)
        self.sealed = bool(self._of(Kind.SEAL))
        self.last = self._last_stage()
        mine = [one for one in self.leases if one.stage == self.last]
        waits = [wait for wait in self.waits if wait.stage == self.last]
        self.finished = bool(mine) and not (
            any(one.is_open for one in mine)
            or any(wait.going_on for wait in waits)
            or any(one.is_open for one in self.leases)
        )
        self.begin = min([e.began for e in (*waits, *self.puts)], default=self.now)
        self.end = max(one.ended for one in mine) if self.finished else self.now

    def _of(self, kind: Kind) -> list[Event]:
        return [event for event in self.events if event.kind is kind]

    def _last_stage(self) -> str:
        """The stage whose fields no stage waits for; of several the one that is busy last."""
        adders = {e.by for e in self.everything if e.kind is Kind.READY}
        lacks = {w.stage for w in self.waits if w.going_on and w.reason is Reason.FIELD}
        latest = dict[str, float]()
        for stage, at in [
            *((one.stage, one.ended) for one in self.leases),
            *((wait.stage, wait.at) for wait in self.waits),
        ]:
            latest[stage] = max(at, latest.get(stage, 0.0))
        last = [stage for stage in latest if stage not in adders] or list(latest)
        begun = Counter({one.stage: one.began for one in self.leases})
        return max(last, key=lambda s: (s in lacks, latest[s], begun[s]), default="")

    # the whole

    def why(self) -> Why:
        seconds = max(0.0, self.end - self.begin)
        pieces, workers = self._idle()
        idle_s = sum(piece.seconds for piece in pieces) / max(1, workers)
        if self.last and idle_s < IDLE_SHARE * seconds:
            text = f"because {self.last} was busy"
            shares = [Share(Cause.LAST_STAGE, seconds - idle_s, text)]
        else:
            shares = self._shares(pieces, max(1, workers))
        return Why(
            self.partition,
            seconds,
            self.last,
            idle_s,
            self.finished,
            tuple(shares),
            tuple(self._missing()),
        )

    def _missing(self) -> list[str]:
        """Peers that did not answer, or whose events begin after the step did."""
        return sorted(
            {
                e.peer
                for e in self.everything
                if e.kind is Kind.MISSING and (e.reason is Reason.SILENT or e.at > self.begin)
            }
        )

    def _idle(self) -> tuple[list[_Piece], int]:
        """What idle time of the last stage's workers was spent on, and how many they are."""
        pieces = list[_Piece]()
        workers = {one.worker for one in self.leases if one.stage == self.last}
        for wait in self.waits:
            if wait.stage != self.last:
                continue
            workers.add(wait.worker)
            begin, end = max(wait.began, self.begin), min(wait.at, self.end)
            if end <= begin:
                continue
            lease = self._lease_at(self.last, wait.worker, end)
            if wait.going_on:
                pieces += self._going_on(wait, begin, end)
            elif lease is not None:
                pieces += self._before(lease, begin, end)
            elif self.finished and not self._arrived(self.last, begin, end):
                continue  # it asked for more than there was: its last claim, after the end
            else:
                pieces.append(_Piece(begin, end))
        for lease in self.leases:
            if lease.stage == self.last:
                busy = self._busy(lease, lease.began, min(lease.ended, self.end))
                pieces += [piece for piece in busy if piece.what in ("pull", "room", "stall")]
        return pieces, len(workers)

    def _arrived(self, stage: str, begin: float, end: float) -> bool:
        return any(r.stage == stage and begin < r.at <= end for r in self.ready)

    # back from a wait

    def _lease_at(self, stage: str, worker: str, at: float) -> _Lease | None:
        """The lease with which a wait of this worker ended then."""
        found = [
            one
            for one in self.leases
            if one.stage == stage and one.worker == worker and abs(one.began - at) < self.near_s
        ]
        return min(found, key=lambda one: abs(one.began - at), default=None)

    def _before(self, lease: _Lease, begin: float, end: float) -> list[_Piece]:
        """What [begin, end] was spent on, at the end of which a waiting worker got this lease."""
        pieces = list[_Piece]()
        for _ in range(MAX_WALK):
            source = self._input(lease, end)
            if source is None or source.at <= begin:
                return [*pieces, _Piece(begin, end)]
            if end - source.at > self.near_s:
                pieces.append(_Piece(source.at, end))
            end = source.at
            if source.kind is Kind.LEASE_END:  # its holder gave the rows back
                held = max(begin, source.began)
                pieces.append(_Piece(held, end, "held", source.stage, source.worker, source.host))
                return pieces + ([_Piece(begin, held)] if held > begin else [])
            if not source.by:
                return pieces + self._put(source, begin, end)
            maker = self._maker(source)
            if maker is None:
                return [*pieces, _Piece(begin, end)]
            more, busy_since, lease = self._made(maker, source, begin, end)
            pieces += more
            end = busy_since
            if end <= begin:
                return pieces
        return pieces

    def _input(self, lease: _Lease, end: float) -> Event | None:
        """What arrived last of what the lease has: rows that became ready, or that came back."""
        until = min(end, lease.began) + self.near_s
        came = [e for group in lease.groups for e in self.came[lease.stage, group] if e.at <= until]
        return max(came, key=lambda e: e.at, default=None)

    def _maker(self, ready: Event) -> _Lease | None:
        """The lease under which a stage added the field that came last."""
        found = [
            one
            for one in self.leases
            if one.stage == ready.by
            and one.worker == ready.worker
            and ready.group in one.groups
            and one.began <= ready.at
        ]
        return max(found, key=lambda one: one.began, default=None)

    def _made(
        self, lease: _Lease, ready: Event, begin: float, end: float
    ) -> tuple[list[_Piece], float, _Lease]:
        """(pieces, since when, lease): what a stage's worker did back to when it last waited, or to
        `begin`, and the lease that it got then."""
        pieces, queued = list[_Piece](), False
        for _ in range(MAX_WALK):
            since = max(begin, lease.began)
            pieces += self._busy(lease, since, end, ready.group, queued)
            if lease.began <= begin or self._waited(lease):
                return pieces, since, lease
            before = [
                one
                for one in self.leases
                if one.stage == lease.stage
                and one.worker == lease.worker
                and one.began < lease.began
                and one.ended <= lease.began + self.near_s
            ]
            source = self._input(lease, lease.began)
            if not before or source is None or lease.began - source.at < self.near_s:
                return pieces, since, lease
            queued, previous = True, max(before, key=lambda one: one.ended)
            end = since
            if previous.ended < since:  # between two leases it is at work too
                between = max(begin, previous.ended)
                pieces.append(
                    _Piece(
                        between,
                        since,
                        "work",
                        lease.stage,
                        lease.worker,
                        lease.host,
                        group=ready.group,
                        queued=True,
                    )
                )
                end = between
            lease = previous
            if end <= begin:
                return pieces, begin, lease
        return pieces, end, lease

    def _waited(self, lease: _Lease) -> bool:
        """Whether its worker waited for it."""
        return any(
            wait.stage == lease.stage
            and wait.worker == lease.worker
            and not wait.going_on
            and abs(wait.at - lease.began) < self.near_s
            for wait in self.waits
        )

    def _busy(
        self, lease: _Lease, begin: float, end: float, group: Name = "", queued: bool = False
    ) -> list[_Piece]:
        """What a worker did under a lease: bytes came to it, it waited for room, or it worked."""
        taken = list[_Piece]()
        for e in self.other:
            if e.at <= begin or e.began >= end:
                continue
            if e.kind is Kind.PULL and e.peer == lease.host and e.stage == lease.stage:
                taken.append(_Piece(e.began, e.at, "pull", e.stage, host=e.peer, by=e.by))
            elif e.kind is Kind.ROOM_WAIT and e.worker == lease.worker:
                taken.append(_Piece(e.began, e.at, "room", worker=e.worker, host=e.peer, by=e.by))
            elif e.kind is Kind.STALL and e.peer == lease.host:
                taken.append(_Piece(e.began, e.at, "stall", host=e.peer))
        rest = _Piece(
            begin, end, "work", lease.stage, lease.worker, lease.host, group=group, queued=queued
        )
        return _carved(rest, taken)

    def _put(self, ready: Event, begin: float, end: float) -> list[_Piece]:
        """What the producer of a group did until it was put."""
        taken = list[_Piece]()
        for e in self.other:
            if e.at <= begin or e.began >= end:
                continue
            if e.kind is Kind.ROOM_WAIT and e.worker == ready.worker:
                taken.append(_Piece(e.began, e.at, "room", worker=e.worker, host=e.peer, by=e.by))
            elif e.kind is Kind.STALL and e.peer == ready.host:
                taken.append(_Piece(e.began, e.at, "stall", host=e.peer))
            elif (
                e.kind is Kind.ADMIT_WAIT
                and e.partition == self.partition
                and e.worker == ready.worker
            ):
                taken.append(_Piece(e.began, e.at, "admit", worker=e.worker))
        rest = _Piece(begin, end, "put", worker=ready.worker, host=ready.host, group=ready.group)
        return _carved(rest, taken)

    # a wait that goes on

    def _going_on(self, wait: Event, begin: float, end: float) -> list[_Piece]:
        """What can be said of a wait that has not ended."""
        if wait.reason is Reason.FILTER:
            return [_Piece(begin, end, "filter", wait.stage, wait.worker)]
        for e in self.other:
            if e.going_on and e.kind in (Kind.ROOM_WAIT, Kind.ADMIT_WAIT):
                if e.kind is Kind.ADMIT_WAIT and e.partition != self.partition:
                    continue
                what = "room" if e.kind is Kind.ROOM_WAIT else "admit"
                since = max(begin, e.began)
                piece = _Piece(since, end, what, worker=e.worker, host=e.peer, by=e.by)
                return [*([_Piece(begin, since)] if since > begin else []), piece]
        forgotten = [one for one in self.leases if self._is_forgotten(one, wait)]
        if forgotten:
            one = min(forgotten, key=lambda one: one.began)
            since = max(begin, one.began)
            piece = _Piece(since, end, "held", one.stage, one.worker, one.host)
            return [*([_Piece(begin, since)] if since > begin else []), piece]
        if self._nothing_comes(wait):
            since = max(begin, max(put.at for put in self.puts))
            piece = _Piece(since, end, "seal", wait.stage)
            return [*([_Piece(begin, since)] if since > begin else []), piece]
        at_work = [one for one in self.leases if one.is_open and one.stage != wait.stage]
        if at_work:
            one = min(at_work, key=lambda one: one.began)
            since = max(begin, one.began)
            more, since, _ = self._made(one, _no_event(end), begin, end)
            return [*more, *([_Piece(begin, since)] if since > begin else [])]
        return [_Piece(begin, end)]

    def _is_forgotten(self, lease: _Lease, wait: Event) -> bool:
        """Whether an open lease has lasted far longer than any that ended."""
        if not lease.is_open or (lease.stage, lease.worker) == (wait.stage, wait.worker):
            return False
        others = [
            one.seconds / max(1, one.rows)
            for one in _leases(self.everything, self.now)
            if one.stage == lease.stage and not one.is_open
        ]
        if not others:
            return False
        longest_s = max(others) * max(1, lease.rows)
        return lease.seconds > max(LEAST_S, UNACKED * longest_s)

    def _nothing_comes(self, wait: Event) -> bool:
        """Whether all that was put is done or claimable, no producer has come back for long, and
        the partition is not sealed."""
        if self.sealed or not self.puts or any(one.is_open for one in self.leases):
            return False
        if wait.reason not in (Reason.NO_ROWS, Reason.TOO_FEW, Reason.PLAN):
            return False
        times = sorted(put.at for put in self.puts)
        pause_s = max([b - a for a, b in zip(times, times[1:], strict=False)], default=0.0)
        if len(times) < 2 or self.now - times[-1] < max(LEAST_S, QUIET * pause_s):
            return False
        ready = {e.group for e in self.ready if e.stage == wait.stage}
        return {put.group for put in self.puts} <= ready

    # what it comes to

    def _shares(self, pieces: Sequence[_Piece], workers: int) -> list[Share]:
        by = defaultdict[tuple[str, str, str], list[_Piece]](list)
        for piece in pieces:
            key = {
                "work": ("work", piece.stage, ""),
                "put": ("put", "", ""),
                "pull": ("pull", piece.by, piece.host),
                "room": ("room", piece.host, piece.by),
                "stall": ("stall", piece.host, ""),
                "held": ("held", piece.stage, piece.worker),
            }.get(piece.what, (piece.what, "", ""))
            by[key].append(piece)
        shares = [
            Share(cause, sum(piece.seconds for piece in same) / workers, text)
            for same in by.values()
            for cause, text in [self._named(same)]
        ]
        least_s = NAMED_SHARE * sum(share.seconds for share in shares)

        def rank(share: Share) -> tuple[bool, float]:
            is_wrong = share.cause not in HEALTHY and share.cause is not Cause.UNKNOWN
            return not (is_wrong and share.seconds >= least_s), -share.seconds

        return sorted(shares, key=rank)

    def _named(self, same: Sequence[_Piece]) -> tuple[Cause, str]:
        longest = max(same, key=lambda piece: piece.seconds)
        match longest.what:
            case "work":
                return self._of_stage(same)
            case "put":
                return self._of_rollout()
            case "pull":
                return self._of_link(longest)
            case "room":
                holds = f"; most of it: {longest.by}" if longest.by else ""
                text = f"because {longest.worker or 'a worker'} waited for room in the arena of "
                return Cause.FULL_ARENA, f"{text}{longest.host}{holds}"
            case "admit":
                return Cause.ADMIT, "because admit held rollout back: its max_lag is too small"
            case "stall":
                text = f"because peer {longest.host} got no processor time"
                return Cause.STARVED_PEER, text
            case "held":
                held = max(
                    [one for one in self.leases if one.worker == longest.worker],
                    key=lambda one: one.seconds,
                )
                groups = _groups(len(held.groups - {""}), held.rows)
                text = f"because {longest.worker or 'a worker'} holds {groups} of stage "
                text += f"{longest.stage}, leased for {duration(held.seconds)} and not acked"
                return Cause.UNACKED_LEASE, text
            case "seal":
                quiet = duration(self.now - max(put.at for put in self.puts))
                text = f"because no row has come for {quiet} and the partition is not sealed"
                return Cause.NOT_SEALED, text
            case "filter":
                text = f"because the filter of {longest.worker} excludes all rows that are ready"
                return Cause.FILTER, text
        return Cause.UNKNOWN, "for a reason that the events do not show"

    def _of_stage(self, same: Sequence[_Piece]) -> tuple[Cause, str]:
        """Of a stage that worked: whether one of its workers is slow, or they are too few."""
        stage = same[0].stage
        lacked = {e.group for e in self.ready if e.stage == self.last and e.by == stage}
        since = min(piece.begin for piece in same)
        late = {e.group for e in self.ready if e.stage == self.last and e.at > since} & lacked
        field = next((e.field for e in self.ready if e.by == stage and e.field), "")
        leases = [one for one in self.leases if one.stage == stage]
        for kind in ("host", "worker"):
            spent = Counter[str]()
            for piece in same:
                spent[getattr(piece, kind)] += piece.seconds  # type: ignore[assignment]
            most = max(spent, key=lambda one: spent[one])
            rates = _rates(leases, kind)
            others = [rate for one, rate in rates.items() if one != most]
            if others and most in rates and rates[most] < SLOW * median(others):
                mine = [one.groups for one in leases if getattr(one, kind) == most]
                because = _because(late & set[Name]().union(*mine), field)
                where = f"on {kind} {most}" if kind == "host" else f"in {most}"
                ran = _ran(rates[most] / median(others))
                return Cause.SLOW_WORKER, f"{because}{stage} {where} {ran}"
        if (one := _outlier(leases, same)) is not None:
            groups = _groups(len(one.groups - {""}), one.rows)
            text = f"because {one.worker or 'a worker'} acked {groups} of stage {stage} only after "
            return Cause.UNACKED_LEASE, f"{text}{duration(one.seconds)}, far later than others"
        workers = {one.worker for one in leases}
        queued = sum(piece.seconds for piece in same if piece.queued)
        if 2 * queued >= sum(piece.seconds for piece in same):
            busy = "its only worker was busy"
            if len(workers) > 1:
                busy = f"all its {len(workers)} workers were busy"
            text = f"{_because(late, field)}rows queued for {stage}, and {busy}"
            return Cause.TOO_FEW_WORKERS, text
        return Cause.STAGE, f"while {stage} worked (nothing queued for it)"

    def _of_rollout(self) -> tuple[Cause, str]:
        """Of producers that worked: whether one is slow, or a single group came late."""
        took = defaultdict[str, list[float]](list)
        came = dict[Name, float]()
        for put, worked_s, since_s in self._made_by_rollout():
            took[put.host].append(worked_s)
            came[put.group] = since_s
        pace = {host: median(each) for host, each in took.items() if len(each) > 2}
        if len(pace) > 1:
            slow = max(pace, key=lambda host: pace[host])
            ratio = median(pace[host] for host in pace if host != slow) / max(pace[slow], 1e-9)
            if ratio < SLOW:
                return Cause.SLOW_WORKER, f"because rollout on host {slow} {_ran(ratio)}"
        last = max(came, key=lambda group: came[group], default="")
        times = sorted(came.values())
        if len(times) >= 4:
            most = times[(3 * len(times)) // 4 - 1]
            if times[-1] - most > SKEWED * most:
                text = f"because group {last!r} came {duration(times[-1] - most)} after three"
                return Cause.STRAGGLER, f"{text} quarters of the groups"
        return Cause.GENERATION, "while rollout generated"

    def _made_by_rollout(self) -> Iterator[tuple[Event, float, float]]:
        """(put, seconds that its producer worked for it, and has worked in this step until then):
        without what the producer waited."""
        before, worked = dict[str, float](), defaultdict[str, float](float)
        waits = [e for e in self.other if e.kind is not Kind.PULL]
        for put in self.puts:
            rest = _Piece(before.get(put.worker, self.begin), put.at, "put")
            mine = [
                _Piece(e.began, e.at)
                for e in waits
                if e.worker == put.worker or (e.kind is Kind.STALL and e.peer == put.host)
            ]
            worked_s = sum(one.seconds for one in _carved(rest, mine) if one.what == "put")
            before[put.worker] = put.at
            worked[put.worker] += worked_s
            yield put, worked_s, worked[put.worker]

    def _of_link(self, longest: _Piece) -> tuple[Cause, str]:
        speeds = defaultdict[tuple[str, str], list[float]](lambda: [0.0, 0.0])
        for e in self.other:
            if e.kind is Kind.PULL and e.seconds:
                sums = speeds[e.by, e.peer]
                sums[0] += e.nbytes
                sums[1] += e.seconds
        link = longest.by, longest.host
        nbytes, took = speeds[link]
        text = f"because {sized(int(nbytes))} came from {link[0]} to {link[1]} at "
        text += f"{sized(int(nbytes / took))}/s"
        others = [n / s for of, (n, s) in speeds.items() if of != link and s]
        if others and nbytes / took < SLOW * median(others):
            text += f", {_times(nbytes / took / median(others))} the speed of other links"
        return Cause.SLOW_LINK, text


def _leases(events: Iterable[Event], now: float) -> list[_Lease]:
    """The leases of which these events say that they began."""
    found = dict[tuple[str, int, str], _Lease]()
    for e in events:
        key = e.stage, e.lease, e.partition
        if e.kind is Kind.LEASE_BEGIN and not e.going_on:
            lease = found.setdefault(
                key, _Lease(e.stage, e.worker, e.host, e.lease, e.at, now, groups=set())
            )
            lease.groups.add(e.group)
            lease.rows += e.rows
            lease.left += e.rows
        elif e.kind is Kind.LEASE_END and key in found:
            lease = found[key]
            lease.left -= e.rows
            lease.reason = e.reason
            if lease.left <= 0:
                lease.ended = e.at
    return list(found.values())


def _carved(rest: _Piece, taken: Iterable[_Piece]) -> list[_Piece]:
    """A piece without what others take of it, and those parts of the others, without overlap."""
    pieces, at = list[_Piece](), rest.begin
    for one in sorted(taken, key=lambda one: one.begin):
        begin, end = max(at, one.begin), min(one.end, rest.end)
        if end <= begin:
            continue
        if begin > at:
            pieces.append(msgspec.structs.replace(rest, begin=at, end=begin))
        pieces.append(msgspec.structs.replace(one, begin=begin, end=end))
        at = end
    if rest.end > at:
        pieces.append(msgspec.structs.replace(rest, begin=at))
    return pieces


def _rates(leases: Iterable[_Lease], kind: str) -> dict[str, float]:
    """Rows a second under lease, by host or worker."""
    sums = defaultdict[str, list[float]](lambda: [0.0, 0.0])
    for lease in leases:
        of = sums[getattr(lease, kind)]
        of[0] += lease.rows - max(0, lease.left)
        of[1] += lease.seconds
    return {name: rows / took for name, (rows, took) in sums.items() if took}


def _outlier(leases: Iterable[_Lease], pieces: Iterable[_Piece]) -> _Lease | None:
    """A lease under which most of this was spent and that took far longer a row than all others."""
    total_s = sum(piece.seconds for piece in pieces)
    ended = [one for one in leases if not one.is_open and one.rows]
    longest = max(ended, key=lambda one: one.seconds / one.rows, default=None)
    if longest is None or len(ended) < 2:
        return None
    usual_s = max(one.seconds / one.rows for one in ended if one is not longest) * longest.rows
    is_far = longest.seconds > max(LEAST_S, UNACKED * usual_s)
    return longest if is_far and 2 * longest.seconds > total_s else None


def _because(groups: set[Name], field: str) -> str:
    return f"because {_groups(len(groups - {''}), 0)} lacked `{field}`: " if field else "because "


def _groups(many: int, rows: int) -> str:
    if many:
        return counted(many, "group")
    return counted(rows, "row") if rows else "rows"


def _ran(ratio: float) -> str:
    return f"ran at {_times(ratio)} its peers"


def _times(ratio: float) -> str:
    return f"{ratio:.1f} ×" if ratio >= 0.095 else f"{ratio:.1g} ×"


def _no_event(at: float) -> Event:
    return Event(Kind.READY, at)
