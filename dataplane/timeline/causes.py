"""The causes of a step's idle time, in seconds and in words, the largest first.

A cause is named only if the events show it. A worker, host or link is slow in comparison with
others. A stage has too few workers if rows queue for them.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from statistics import median
from typing import TypeVar

import msgspec

from dataplane.errors import counted, duration, sized
from dataplane.events.merge import Event
from dataplane.timeline.backtrack import LEAST_S, UNACKED, produced, under
from dataplane.timeline.spent import Spent, busy, carved
from dataplane.timeline.step import LeaseSpan, Step
from dataplane.wire.events import Kind, Reason
from dataplane.wire.tables import Name

NameT = TypeVar("NameT")

SLOW = 0.7
"""A worker below this share of the other workers' rate is slow."""
SLOW_LINK, SLOW_LINK_BYTES_PER_S = 0.5, 125e6
"""A link below this share of other links' rate is slow, and one below 1 Gbit/s for a second."""
FEW_BYTES = 1 << 18
"""Fewer bytes in a step say nothing about a link, because the hosts' own work takes as long."""
SKEWED = 1.0
"""The last group is a straggler if it comes late: after three quarters of the groups, it takes
this many times longer than they took."""
HELD_BACK = 0.5
"""`admit` is the cause if it holds back this share of the other producers."""
NAMED_SHARE = 0.2
"""A cause is named if it explains this share of the idle time."""


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
    """A stage worked, without slow workers or a queue: nothing is wrong."""
    GENERATION = "generation"
    """Rollout worked: nothing is wrong."""
    TRANSFER = "transfer"
    """Bytes arrived from another host at the usual speed of a link: nothing is wrong."""
    LAST_STAGE = "last_stage"
    """The last stage was busy: nothing is wrong."""
    UNKNOWN = "unknown"


HEALTHY = {Cause.STAGE, Cause.GENERATION, Cause.TRANSFER, Cause.LAST_STAGE}


class Share(msgspec.Struct, frozen=True):
    """A cause, in words, and how many seconds of the last stage's idle time it explains."""

    cause: Cause
    seconds: float
    text: str


def shares(step: Step, spent: Iterable[Spent], workers: int) -> list[Share]:
    """Return the causes. Causes that are wrong and explain much of the idle time are first, then
    the others, each sorted by size."""
    by = defaultdict[tuple[str, str, str], list[Spent]](list)
    for one in spent:
        key = {
            "work": (one.stage, ""),
            "absent": (one.stage, ""),
            "other": (one.stage, ""),
            "pull": (one.by, one.host),
            "room": (one.host, one.by),
            "stall": (one.host, ""),
            "held": (one.stage, one.worker),
        }.get(one.what, ("", ""))
        by[one.what, *key].append(one)
    causes = _Causes(step)
    found = [
        Share(cause, _seconds(same) / workers, text)
        for same in by.values()
        for cause, text in [causes.named(same)]
    ]
    least_s = NAMED_SHARE * sum(share.seconds for share in found)

    def rank(share: Share) -> tuple[bool, float]:
        is_wrong = share.cause not in HEALTHY and share.cause is not Cause.UNKNOWN
        return not (is_wrong and share.seconds >= least_s), -share.seconds

    return sorted(found, key=rank)


class _Causes:
    def __init__(self, step: Step) -> None:
        self.step = step

    def named(self, same: Sequence[Spent]) -> tuple[Cause, str]:
        """Return the cause, in words, of times that were spent on the same activity."""
        longest = max(same, key=lambda one: one.seconds)
        match longest.what:
            case "work":
                return self._of_stage(same)
            case "put":
                return self._of_rollout(same)
            case "pull":
                return self._of_link(longest)
            case "room":
                holds = f"; most of it: {longest.by}" if longest.by else ""
                text = f"because {longest.worker or 'a worker'} waited for room in the arena of "
                return Cause.FULL_ARENA, f"{text}{longest.host}{holds}"
            case "admit":
                return Cause.ADMIT, "because admit held rollout back: its max_lag is too small"
            case "stall":
                role = ", which holds the backup of this partition," if longest.by else ""
                text = f"because peer {longest.host}{role} got no processor time"
                return Cause.STARVED_PEER, text
            case "held":
                return Cause.UNACKED_LEASE, self._held(longest)
            case "seal":
                return Cause.NOT_SEALED, self._not_sealed()
            case "absent":
                return Cause.TOO_FEW_WORKERS, self._absent(longest)
            case "other":
                return Cause.STAGE, f"while {longest.stage} had rows of other steps"
            case "unput":
                return Cause.GENERATION, "while rollout had no more rows ready"
            case "filter":
                text = f"because the filter of {longest.worker} excludes all rows that are ready"
                return Cause.FILTER, text
        return Cause.UNKNOWN, "for a reason that the events do not show"

    def _held(self, longest: Spent) -> str:
        mine = self.step.by_worker[longest.stage, longest.worker]
        held = max(mine, key=lambda one: one.seconds)
        who = longest.worker or "a worker"
        what = f"{_groups(len(held.groups - {''}), held.rows)} of stage {longest.stage}"
        match held.reason:
            case Reason.DIED:
                return f"because {who} ended with {what}, leased for {duration(held.seconds)}"
            case Reason.EXPIRED:
                return f"because {who} held {what} until lease={held.seconds:.3g} s was over"
            case Reason.RELEASE:
                return f"because {who} released {what} after {duration(held.seconds)}"
        return f"because {who} holds {what}, leased for {duration(held.seconds)} and not acked"

    def _not_sealed(self) -> str:
        last = max(put.at for put in self.step.puts)
        if self.step.seals:
            late = duration(self.step.seals[0].at - last)
            return f"because the partition was sealed {late} after its last row"
        because = f"because no row has come for {duration(self.step.now - last)}"
        if short := self.step.open_groups:
            group, rows = next(iter(short.items()))
            because += f", {counted(len(short), 'group is', 'groups are')} incomplete "
            because += f"({group!r} has {counted(rows, 'row')})"
        return f"{because} and the partition is not sealed"

    def _absent(self, longest: Spent) -> str:
        """Explain why nobody claimed the rows that were ready for a stage."""
        step, stage = self.step, longest.stage
        done, ended = set[Name](), list[LeaseSpan]()
        for one in step.leases:
            if one.stage == stage and one.ended <= longest.begin + step.near_s:
                ended.append(one)
                done |= one.groups if one.reason is Reason.ACK else set()
        came = {e.group for e in step.ready if e.stage == stage and e.at <= longest.end}
        many = len(came - done - step.gone - {""})
        because = f"because {_groups(many, 0)} waited for {stage}, and "
        if not ended:
            return f"{because}no worker had claimed from it"
        last = max(ended, key=lambda one: one.ended)
        how = "died" if last.reason is Reason.DIED else "stopped claiming"
        return f"{because}no worker claimed from it after {last.worker or 'its last one'} {how}"

    # a stage

    def _of_stage(self, same: Sequence[Spent]) -> tuple[Cause, str]:
        """Explain the work of a stage: one of its workers is slow, or there are too few."""
        step, stage = self.step, same[0].stage
        lacked = {e.group for e in step.ready if e.stage == step.last and e.by == stage}
        since = min(one.begin for one in same)
        late = {e.group for e in step.ready if e.stage == step.last and e.at > since} & lacked
        field = next((e.field for e in step.ready if e.by == stage and e.field), "")
        leases = [one for one in step.leases if one.stage == stage]
        outlier = _outlier(leases, same)
        if outlier is not None and self._is_usually_faster(outlier):
            groups = _groups(len(outlier.groups - {""}), outlier.rows)
            text = f"because {outlier.worker or 'a worker'} acked {groups} of stage {stage} only "
            text += f"after {duration(outlier.seconds)}, far later than others"
            return Cause.UNACKED_LEASE, text
        for kind in ("host", "worker"):
            most = _most(same, kind)
            ratio = compared(rates(step, leases, kind), most)
            if ratio is not None and ratio < SLOW:
                mine = [one.groups for one in leases if getattr(one, kind) == most]
                because = _because(late & set[Name]().union(*mine), field)
                where = f"on {kind} {most}" if kind == "host" else f"in {most}"
                return Cause.SLOW_WORKER, f"{because}{stage} {where} {_ran(ratio, stage)}"
        workers = {one.worker for one in leases}
        queued = _seconds(one for one in same if one.queued)
        if 2 * queued >= _seconds(same):
            at_work = "its only worker was busy"
            if len(workers) > 1:
                at_work = f"all its {len(workers)} workers were busy"
            text = f"{_because(late, field)}rows queued for {stage}, and {at_work}"
            return Cause.TOO_FEW_WORKERS, text
        return Cause.STAGE, f"while {stage} worked (nothing queued for it)"

    def _is_usually_faster(self, lease: LeaseSpan) -> bool:
        """Return whether the worker had another lease of the stage, in any step, that took far
        less time per row. If not, the worker itself may be slow."""
        return any(
            UNACKED * one.seconds * lease.rows < lease.seconds * one.rows
            for one in self.step.all_leases
            if (one.stage, one.worker) == (lease.stage, lease.worker) and not one.is_open
        )

    # rollout

    def _of_rollout(self, same: Sequence[Spent]) -> tuple[Cause, str]:
        """Explain the work of producers: one is slow, `admit` let too few of them work, or a
        single group came late."""
        hosts, workers = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
        came = dict[Name, float]()
        for put, worked_s, since_s in self._puts():
            hosts[put.host].append(worked_s)
            workers[put.worker].append(worked_s)
            came[put.group] = since_s
        for kind, took in (("host", hosts), ("worker", workers)):
            most = _most(same, kind)
            pace = {name: median(each) for name, each in took.items() if len(each) > 2}
            if kind == "worker" and most in pace:
                pace[most] = min(took[most])  # few groups: check whether it was slow with each
            longer = compared(pace, most)
            if longer is not None and longer * SLOW > 1:
                where = f"on host {most}" if kind == "host" else f"in {most}"
                text = f"because rollout {where} {_ran(1 / longer, 'rollout')}"
                return Cause.SLOW_WORKER, text
        if (held_back := self._held_back(same)) >= HELD_BACK:
            text = f"because admit held {held_back:.0%} of the other rollout workers back"
            return Cause.ADMIT, f"{text}: its max_lag is too small"
        last = max(came, key=lambda group: came[group], default="")
        times = sorted(came.values())
        if len(times) >= 4:
            usual = times[(3 * len(times)) // 4 - 1]
            if times[-1] - usual > SKEWED * usual:
                text = f"because group {last!r} came {duration(times[-1] - usual)} after three"
                return Cause.STRAGGLER, f"{text} quarters of the groups"
        return Cause.GENERATION, "while rollout generated"

    def _puts(self) -> Iterator[tuple[Event, float, float]]:
        """Return (put, seconds that its producer worked for it, seconds that the producer has
        worked in this step so far). Waits are not counted."""
        before, worked = dict[str, float](), defaultdict[str, float](float)
        for put in self.step.puts:
            begin = before.get(put.worker, self.step.begin)
            rest = Spent(begin, put.at, "put", worker=put.worker, host=put.host)
            worked_s = _seconds(one for one in produced(self.step, rest) if one.what == "put")
            before[put.worker] = put.at
            worked[put.worker] += worked_s
            yield put, worked_s, worked[put.worker]

    def _held_back(self, same: Sequence[Spent]) -> float:
        """Return the share of the other producers that waited for `admit` while the late rows
        were made."""
        step = self.step
        waits = [e for e in step.events if e.kind is Kind.ADMIT_WAIT]
        producers = {put.worker for put in step.puts} | {e.worker for e in waits}
        waited_s = sum(
            max(0.0, min(one.end, e.at) - max(one.begin, e.began))
            for one in same
            for e in waits
            if e.worker != one.worker
        )
        return waited_s / max(1e-9, (len(producers) - 1) * _seconds(same))

    # a link

    @cached_property
    def _links(self) -> Links:
        return Links(self.step)

    def _of_link(self, longest: Spent) -> tuple[Cause, str]:
        """Explain a transfer: whether the link was slow."""
        link = longest.by, longest.host
        nbytes, speed = self._links.nbytes[link], self._links.per_s[link]
        text = f"{sized(nbytes)} came from {link[0]} to {link[1]} at {sized(int(speed))}/s"
        if nbytes < FEW_BYTES:
            return Cause.TRANSFER, f"while {text}"
        ratio = self._links.compared(link)
        if ratio is not None and ratio < SLOW_LINK:
            return Cause.SLOW_LINK, f"because {text}, {_times(ratio)} the speed of other links"
        if speed < SLOW_LINK_BYTES_PER_S and nbytes > LEAST_S * speed:
            return Cause.SLOW_LINK, f"because {text}"
        return Cause.TRANSFER, f"while {text}"


class Links:
    """The bytes that each host pulled from each other one in pulls of a step's time, by (from, to):
    the number, and the bytes per second while at least one pull was in flight."""

    def __init__(self, step: Step) -> None:
        pulls = defaultdict[tuple[str, str], list[Event]](list)
        for e in step.other:
            if e.kind is Kind.PULL and e.seconds and step.overlaps(e):
                pulls[e.by, e.peer].append(e)
        self.nbytes = {link: sum(e.nbytes for e in mine) for link, mine in pulls.items()}
        self.per_s = {
            link: self.nbytes[link] / _seconds(_moving(mine)) for link, mine in pulls.items()
        }

    def compared(self, link: tuple[str, str]) -> float | None:
        """Return its speed relative to the median of comparable links, None if there are none.
        Links with few bytes do not count."""
        enough = {of: speed for of, speed in self.per_s.items() if self._tells(of, link)}
        return compared(enough, link)

    def _tells(self, of: tuple[str, str], link: tuple[str, str]) -> bool:
        return of == link or 10 * self.nbytes[of] >= self.nbytes[link]


def slow_at_the_end(step: Step) -> Share | None:
    """Return the host or worker of the last stage that was slow and worked after all others of the
    stage were done."""
    leases = [one for one in step.leases if one.stage == step.last]
    for kind in ("host", "worker"):
        speeds = rates(step, leases, kind)
        slowest = min(speeds, key=lambda name: speeds[name], default="")
        ratio = compared(speeds, slowest)
        if ratio is None or ratio >= SLOW:
            continue
        ends = dict[bool, float]()
        for one in leases:
            mine = getattr(one, kind) == slowest
            ends[mine] = max(one.ended, ends.get(mine, one.ended))
        alone_s = ends[True] - ends[False]
        where = f"on host {slowest}" if kind == "host" else f"in {slowest}"
        text = f"because {step.last} {where} {_ran(ratio, step.last)}"
        return Share(Cause.SLOW_WORKER, alone_s, text)
    return None


def rates(step: Step, leases: Iterable[LeaseSpan], kind: str) -> dict[str, float]:
    """Rows per second of work under these leases, by "host" or "worker". An open lease counts as if
    it ended now, so a host that has just begun is not slow. Leases whose rows were released, or
    whose worker died, do not count, because their work is incomplete."""
    rows, took = defaultdict[str, float](float), defaultdict[str, float](float)
    for lease in leases:
        if not lease.is_open and lease.reason not in (Reason.ACK, Reason.DROP):
            continue
        of = getattr(lease, kind)
        rows[of] += lease.rows
        done = busy(step.hindrances, under(lease, lease.began, lease.ended))
        took[of] += _seconds(one for one in done if one.what == "work")
    return {name: rows[name] / took[name] for name in rows if took[name]}


def compared(rates: Mapping[NameT, float], name: NameT) -> float | None:
    """Return a rate relative to the median of the others; None if there are no others."""
    others = [rate for other, rate in rates.items() if other != name]
    if name not in rates or not others or not (usual := median(others)):
        return None
    return rates[name] / usual


def _moving(pulls: Iterable[Event]) -> list[Spent]:
    """Return the times in which at least one pull was in flight."""
    pulls = list(pulls)
    whole = Spent(min(e.began for e in pulls), max(e.at for e in pulls))
    parts = carved(whole, [Spent(e.began, e.at, "pull") for e in pulls])
    return [one for one in parts if one.what]


def _outlier(leases: Iterable[LeaseSpan], spent: Iterable[Spent]) -> LeaseSpan | None:
    """Return a lease that took most of this time and far longer per row than all others."""
    total_s = _seconds(spent)
    ended = [one for one in leases if not one.is_open and one.rows]
    longest = max(ended, key=lambda one: one.seconds / one.rows, default=None)
    if longest is None or len(ended) < 2:
        return None
    usual_s = max(one.seconds / one.rows for one in ended if one is not longest) * longest.rows
    is_far = longest.seconds > max(LEAST_S, UNACKED * usual_s)
    return longest if is_far and 2 * longest.seconds > total_s else None


def _most(spent: Iterable[Spent], kind: str) -> str:
    """Return the host or worker that spent most of this time."""
    took = defaultdict[str, float](float)
    for one in spent:
        took[getattr(one, kind)] += one.seconds
    return max(took, key=lambda name: took[name])


def _seconds(spent: Iterable[Spent]) -> float:
    return sum(one.seconds for one in spent)


def _because(groups: set[Name], field: str) -> str:
    return f"because {_groups(len(groups - {''}), 0)} lacked `{field}`: " if field else "because "


def _groups(many: int, rows: int) -> str:
    if many:
        return counted(many, "group")
    return counted(rows, "row") if rows else "rows"


def _ran(ratio: float, stage: str) -> str:
    return f"ran at {_times(ratio)} the speed of the other {stage} workers"


def _times(ratio: float) -> str:
    return f"{ratio:.1f} ×" if ratio >= 0.095 else f"{ratio:.1g} ×"
