"""Why a call waits, in one line for people, and when to log it.

Facts in, one line out; nothing here does I/O. What a shard knows comes from
`inspection.missing`, as a dict with these names. Each clause states one fact, and the last one
says what to do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dataplane.errors import counted, duration, few, joined, sized
from dataplane.metadata.shard.inspection import is_idle
from dataplane.wire.events import Reason
from dataplane.wire.peering import StoredRows

FIRST_S = 10.0
"""A call that has waited for this long logs what it waits for."""
SOON_S = 1.0
"""The same for a call that perhaps only its own process can end."""
MOST_S = 600.0
"""The longest pause between two lines about one wait. The pause doubles each time."""
LONG_S = 1e8
"""A producer's `gone_s` above this means that the time is unknown."""
SHOWN_LEASES = 3
SHOWN_PRODUCERS = 3
SHOWN_OTHERS = 3


class Producer(NamedTuple):
    """A client that put rows. idle_s: seconds since its last put, None if unknown. gone_s:
    seconds since it disconnected, 0 if it is connected, None if unknown."""

    who: str
    rows: int
    idle_s: float | None = None
    gone_s: float | None = None


@dataclass(slots=True)
class Facts:
    """What keeps a stage's units (`rows` or `groups`) from a call.

    - ready: units that match. units: units that are neither leased nor done. leased: units.
    - needed: units that the call needs at least, 0 if it counts none.
    - excluded: ready units that the filter excludes. unknown_tags: tags of the filter that no row
      has → one with a similar name. unknown_values: (tag, values of the filter that no row has,
      values that rows have, how many more).
    - alone: rows without a group. split: groups of which rows were claimed individually.
    - open_groups: how many. short: the first of them as (name, rows, rows that it needs or -1, a
      similar name if it has no rows).
    - missing: field → rows without it. adders: field → the stage that has added it to other rows.
      near_fields: field → a similar one that rows have.
    - idle: stages that no client claims and that have rows ready: this stage, or those whose rows
      this stage waits for; see `inspection.Idle`.
    - leases: [(who, stage, rows, seconds)].
    - put_rows: rows that were ever put. groups_wanted: the number of closed groups that seals the
      partition, 0 if none does; groups_closed: so far. producers: the most recent first.
    - lost: rows of the stage that were lost with a peer.
    - waiting_puts: puts that wait for space, in an arena or in a shard. before: older claims that
      want the same units.
    - weightless: for a claim by budget, how many rows have no weight, its tag, one of these rows.
    - plan: why a rank waits for its part of a plan, if not for rows.
    - reason: all of that in one word, a `wire.events.Reason`.
    - silent: the peer that should know all this, if it does not answer.
    - near_partitions, elsewhere: partitions with a similar name in this run, and other runs of
      this host that have a partition with this name.
    """

    unit: str = "rows"
    ready: int = 0
    units: int = 0
    leased: int = 0
    needed: int = 0
    excluded: int = 0
    unknown_tags: dict[str, str] = field(default_factory=dict)
    unknown_values: Sequence[tuple[str, str, Sequence[str], int]] = ()
    alone: int = 0
    split: int = 0
    open_groups: int = 0
    short: Sequence[tuple[Any, int, int, Any]] = ()
    missing: dict[str, int] = field(default_factory=dict)
    adders: dict[str, str] = field(default_factory=dict)
    near_fields: dict[str, str] = field(default_factory=dict)
    idle: Sequence[tuple[str, int, float | None]] = ()
    leases: Sequence[tuple[str, str, int, float]] = ()
    sealed: bool = False
    put_rows: int = 0
    groups_wanted: int = 0
    groups_closed: int = 0
    producers: Sequence[Producer] = ()
    waiting_puts: int = 0
    before: int = 0
    plan: str = ""
    weightless: list[Any] = field(default_factory=list)
    reason: str = ""
    lost: int = 0
    silent: str = ""
    near_partitions: Sequence[str] = ()
    elsewhere: Sequence[str] = ()

    @property
    def details(self) -> dict[str, Any]:
        """The same facts as figures, for a program."""
        return {
            "reason": self.reason,
            "ready": self.ready,
            "units": self.units,
            "excluded": self.excluded,
            "missing": self.missing,
            "leases": [[who, rows, age] for who, _, rows, age in self.leases],
            "sealed": self.sealed,
            "put_rows": self.put_rows,
            "open_groups": self.open_groups,
            "producers": [list(one) for one in self.producers],
        }

    @property
    def needs_more(self) -> bool:
        """Whether the call needs more units than the partition has, so that new ones must come."""
        return self.needed > self.units + self.leased

    @property
    def reasons_here(self) -> bool:
        """Whether something in the partition already keeps the call waiting, rather than rows
        that have yet to be put."""
        whole = self.unit == "groups" and (self.open_groups or self.alone or self.split)
        here = self.leases or self.missing or self.excluded or whole
        return bool(here) and not self.needs_more


def reason(facts: Facts, stage: str, wanted: str, me: str = "", for_rows: bool = True) -> str:
    """All facts in one line.

    wanted: what the call asks for, or "". me: the name of the calling process in `leases`.
    for_rows: the call waits for rows to come, not to leave.
    """
    if facts.silent:
        return _silent(facts)
    parts = [_figures(facts, wanted)]
    if facts.plan:
        parts.append(facts.plan)
    if facts.before:
        one, many = "older claim waits", "older claims wait"
        parts.append(f"{counted(facts.before, one, many)} for the same {facts.unit}")
    if facts.reason == Reason.BEHIND:
        parts.append(
            f"ready {facts.unit} are kept for an older claim, which has waited for over 1 s"
        )
    parts += _filtered(facts)
    if facts.weightless:
        rows, tag, such = facts.weightless
        parts.append(
            f"{counted(rows, 'row has', 'rows have')} no valid weight (a finite, non-negative "
            f"number) in the tag `{tag}`, for example row {such!r}"
        )
    parts += [_lacking(facts, name, stage) for name in facts.missing]
    parts += [_nobody_claims(*one) for one in facts.idle if one[0] != stage or not for_rows]
    if facts.unit == "groups":
        parts += _open(facts)
        if facts.alone:
            one, many = "row has no group, so a claim", "rows have no group, so a claim"
            them = "it" if facts.alone == 1 else "them"
            parts.append(f"{counted(facts.alone, one, many)} of groups cannot include {them}")
        if facts.split:
            parts.append(
                f"rows of {counted(facts.split, 'group')} were claimed individually, so a claim of "
                "groups cannot include them"
            )
    parts += _leases(facts.leases, stage, me)
    if facts.waiting_puts:
        parts.append(f"{counted(facts.waiting_puts, 'put waits', 'puts wait')} for space")
    if facts.lost:
        one, many = "row was", "rows were"
        parts.append(f"{counted(facts.lost, one, many)} lost with a peer: part.lost() lists them")
    parts += _seal(facts, for_rows)
    return "; ".join(parts)


def _silent(facts: Facts) -> str:
    return (
        f"peer {facts.silent}, which serves this partition, does not answer: check it "
        "with `dataplane status`"
    )


def _figures(facts: Facts, wanted: str) -> str:
    """ "509 of 512 groups ready, 3 leased, 512 wanted"."""
    one = facts.unit[:-1]
    said = (
        f"{facts.ready} of {facts.units} {facts.unit} ready" if facts.units else f"no {one} ready"
    )
    leased = f"{facts.leased} leased" if facts.leased else ""
    return ", ".join(filter(None, (said, leased, wanted)))


def _filtered(facts: Facts) -> list[str]:
    said = []
    if facts.excluded:
        one, many = f"ready {facts.unit[:-1]}", f"ready {facts.unit}"
        said.append(f"the filter excludes {counted(facts.excluded, one, many)}")
    for tag, near in facts.unknown_tags.items():
        question = f": did you mean {near!r}?" if near else ""
        said.append(f"no row has the tag {tag!r} of the filter{question}")
    for tag, wanted, there, more in facts.unknown_values:
        others = joined([*there, f"{more} more"] if more else there)
        said.append(f"the filter wants {wanted} in the tag {tag!r}, but rows have only {others}")
    return said


def _lacking(facts: Facts, name: str, stage: str) -> str:
    said = _lacks(facts.missing[name], name, stage)
    if name in facts.adders:
        said += f" and stage {facts.adders[name]!r} adds"
    near = facts.near_fields.get(name)
    return f"{said}; {_misspelt(name, near)}" if near else said


def _lacks(rows: int, name: str, stage: str) -> str:
    return f"{counted(rows, 'row lacks', 'rows lack')} `{name}`, which stage {stage!r} needs"


def _misspelt(field: str, near: str) -> str:
    return f"rows have `{near}`: is `{near}` or `{field}` misspelt?"


def _nobody_claims(stage: str, rows: int, asked_s: float | None) -> str:
    when = "ever claimed from it" if asked_s is None else f"claimed from it for {duration(asked_s)}"
    ready = counted(rows, "row is", "rows are")
    return f"{ready} ready for stage {stage!r}, but no client has {when}"


def _open(facts: Facts) -> list[str]:
    if not facts.open_groups:
        return []
    said = counted(facts.open_groups, "group is", "groups are")
    shown = few([_size_of(*one) for one in facts.short], SHOWN_OTHERS)
    more = facts.open_groups - len(facts.short)
    if shown and more > 0:
        shown += f", and {more} more"
    return [f"{said} still open" + (f": {shown}" if shown else "")]


def _size_of(name: object, rows: int, needed: int, near: object) -> str:
    if not rows:
        question = f" (did you mean {near!r}?)" if near != "" else ""
        return f"{name!r} was closed with {counted(needed, 'row')}, but has none{question}"
    if needed < 0:
        return f"{name!r} has {counted(rows, 'row')}, and part.close() has not been called for it"
    return f"{name!r} has {rows} of {counted(needed, 'row')}"


def _seal(facts: Facts, for_rows: bool) -> list[str]:
    """Whether new rows can come, from whom, and what to do where nothing else explains the wait."""
    if facts.sealed:
        return [
            "the partition is sealed, so no new rows can arrive"
            if facts.ready + len(facts.leases) + len(facts.missing)
            else "the partition is sealed, and none of its remaining rows can satisfy this call"
        ]
    if not for_rows:
        return []
    said = [] if facts.plan else ["the partition is not sealed"]
    if facts.groups_wanted:
        have = "has" if facts.groups_closed == 1 else "have"
        said.append(
            f"{facts.groups_closed} of its {counted(facts.groups_wanted, 'group')} {have} been "
            "closed (groups=)"
        )
    said += [_elsewhere(facts)] if not facts.put_rows else _produced(facts)
    return said


def _elsewhere(facts: Facts, it: str = "it") -> str:
    said = f"no rows have been put into {it}"
    if facts.near_partitions:
        names = [repr(name) for name in facts.near_partitions[:SHOWN_OTHERS]]
        some = f"a partition {names[0]}" if len(names) == 1 else f"partitions {joined(names)}"
        said += f"; this run also has {some}: is one of the names misspelt?"
    elif facts.elsewhere:
        said += f"; a partition with this name also exists in {few(facts.elsewhere, SHOWN_OTHERS)}"
        said += ": connect both sides to the same run with connect(run=…)"
    else:
        said += ": start its producer in this run, with this partition name"
    return said


def _produced(facts: Facts) -> list[str]:
    """Which clients put rows, and what to do."""
    said, advice = _put(facts), _advice(facts)
    return [f"{said}: {advice}" if advice else said]


def _put(facts: Facts) -> str:
    """Which clients put rows, when, and whether they are still connected."""
    said = f"{counted(facts.put_rows, 'row has been', 'rows have been')} put so far"
    known = facts.producers
    if known and known[0].idle_s is not None:
        said += f", the last {duration(known[0].idle_s)} ago"
    if known:
        shown = [_producer(one) for one in known[:SHOWN_PRODUCERS]]
        more = len(known) - len(shown)
        said += f", by {', '.join(shown)}{f', and {more} more' if more > 0 else ''}"
    if facts.put_rows > sum([one.rows for one in known]):
        said += ", and by clients that this peer no longer remembers" if known else ""
    return said


def _producer(one: Producer) -> str:
    if one.gone_s is None:
        return one.who
    if one.gone_s > LONG_S:
        return f"{one.who} (disconnected)"
    state = "connected" if one.gone_s == 0 else f"disconnected {duration(one.gone_s)} ago"
    return f"{one.who} ({state})"


SEAL = "call part.seal() if no more rows will come"


def _all_gone(facts: Facts) -> bool:
    return bool(facts.producers) and all(one.gone_s for one in facts.producers)


def _advice(facts: Facts) -> str:
    """What to do where only new rows, or the seal, can end the wait."""
    gone = _all_gone(facts)
    if facts.open_groups and facts.unit == "groups":
        if gone:
            return "no producer is connected, so restart one to complete the open groups"
        if not (facts.leases or facts.missing or facts.excluded):
            return f"complete the open groups, or {SEAL}"
    if facts.reasons_here:
        return ""
    if gone:
        return f"no producer is connected, so restart one, or {SEAL}"
    return SEAL


def of_key(key: object, near: int | str, facts: Facts) -> str:
    """Why a call waits for a row with this key. near: a similar key, or ""."""
    if facts.silent:
        return _silent(facts)
    said = f"no row has the key {key!r}"
    if near != "":
        said += f", but one has {near!r}: is one of the keys misspelt?"
    if not facts.put_rows:
        return f"{said}; {_elsewhere(facts, 'the partition')}"
    gone = ": no producer is connected, so restart one" if _all_gone(facts) else ""
    return f"{said}; {_put(facts)}{gone}"


@dataclass(slots=True)
class FullArena:
    """Why a call gets no space in an arena. doing: what the space is for. free_bytes: what is
    available for that. kept: partitions whose rows keep values here, the most bytes first; more:
    how many others do. silent: peers that did not say which of their partitions do, as (name,
    values here). elsewhere: values of partitions whose peers were not asked. holders: clients with
    reservations or views, as (who, bytes), the largest first. claims: claims wait at this host.
    remarks: further facts about free space."""

    peer: str
    doing: str
    needed_bytes: int
    free_bytes: int
    used_bytes: int
    size_bytes: int
    kept: Sequence[StoredRows] = ()
    more: int = 0
    silent: Sequence[tuple[str, int]] = ()
    elsewhere: int = 0
    holders: Sequence[tuple[str, int]] = ()
    claims: bool = False
    remarks: Sequence[str] = ()


def of_full_arena(full: FullArena, why: str = "") -> str:
    """What is needed, what is available, which clients hold it, and what to do. why: what ended
    the wait."""
    parts = [
        f"{full.doing} needs {sized(full.needed_bytes)}, but the arena of peer {full.peer!r} "
        f"has only {sized(full.free_bytes)} available for it ({sized(full.used_bytes)} of "
        f"{sized(full.size_bytes)} are used)"
    ]
    parts += [why] if why else []
    parts += full.remarks
    for kept in full.kept[:SHOWN_OTHERS]:
        parts.append(_kept(kept))
    if (more := full.more + len(full.kept) - SHOWN_OTHERS) > 0:
        them = counted(more, "more partition has", "more partitions have")
        parts.append(f"{them} values on this host")
    one, many = "value on this host belongs", "values on this host belong"
    for peer, values in full.silent:
        parts.append(
            f"{counted(values, one, many)} to partitions that peer {peer!r} serves, but that peer "
            "did not answer which stages still need them"
        )
    if full.elsewhere:
        parts.append(f"{counted(full.elsewhere, one, many)} to partitions that other peers serve")
    parts += [
        f"{who} holds {sized(nbytes)} in reservations and views"
        for who, nbytes in full.holders[:SHOWN_OTHERS]
    ]
    return f"{'; '.join(parts)}. {_make_room(full)}"


def _kept(one: StoredRows) -> str:
    said = f"partition {one.partition!r} has {counted(one.rows, 'row')} with {sized(one.nbytes)} "
    said += "on this host"
    if one.until_dropped:
        return f"{said}, which stay until they are dropped"
    idle = idle_stages(one)
    clauses: list[str] = []
    for stage, rows, asked_s in one.ready:
        ready = f"{counted(rows, 'row is', 'rows are')} ready for stage {stage!r}"
        clauses.append(_nobody_claims(stage, rows, asked_s) if stage in idle else ready)
    clauses += [_lacks(rows, name, stage) for stage, name, rows in one.lacks[:SHOWN_OTHERS]]
    clauses += _leases(one.leases, "", "")
    return f"{said}: {', '.join(clauses)}" if clauses else said


def idle_stages(one: StoredRows) -> list[str]:
    """The stages that have rows ready and that no client claims from."""
    return [stage for stage, _, asked_s in one.ready if is_idle(asked_s)]


def _make_room(full: FullArena) -> str:
    """What to do, the likeliest first."""
    waiting = [one for one in full.kept if not one.until_dropped]
    stages = list(dict.fromkeys(stage for one in waiting for stage in idle_stages(one)))
    fields = list(dict.fromkeys(name for one in waiting for _, name, _ in one.lacks))
    said = []
    if stages:
        names = joined([repr(stage) for stage in stages[:SHOWN_OTHERS]])
        those, it = ("stage", "it") if len(stages) == 1 else ("stages", "them")
        said.append(f"run the {those} {names}, or leave {it} out of stages= if nobody needs {it}")
    elif fields:
        names = joined([f"`{name}`" for name in fields[:SHOWN_OTHERS]])
        said.append(f"add the missing {'field' if len(fields) == 1 else 'fields'} {names}")
    said += [f"check peer {peer!r} with `dataplane status`" for peer, _ in full.silent]
    if any(one.until_dropped for one in full.kept):
        said.append("drop rows that are no longer needed (part.drop)")
    if full.claims:
        said.append(
            "claim fewer rows at a time (or pass min=), if claims wait for more rows than fit"
        )
    if sum(nbytes for _, nbytes in full.holders) > full.used_bytes // 2:
        said.append("delete batches and arrays that you no longer need")
    said = said or ["consume or drop rows"]
    said.append(
        "give the peer a larger arena (--arena, DATAPLANE_ARENA) or a spill directory (--spill "
        "DIR:SIZE)"
    )
    text = "; or ".join(said)
    return text[0].upper() + text[1:]


def of_admission(
    told: Mapping[str, Any],
    wanted: int,
    holders: Mapping[str, int],
    me: str = "",
    slow: Sequence[Mapping[str, Any]] = (),
    idle: Sequence[tuple[str, int, float | None]] = (),
    leases: Sequence[tuple[str, str, int, float]] = (),
) -> str:
    """Why groups may not be started: from `Permits.stats`, with the number of calls that wait
    `before` this one.

    holders: how many groups each client may still open; `me` is the caller. slow: incomplete
    groups that hold slots, from `inspection.unfinished`. idle: of the whole partition. idle,
    leases: as in `Facts`.
    """
    version = told["version"]
    taken = f"{told['unfinished_groups']} by unfinished groups"
    for who, n in list(holders.items())[:SHOWN_LEASES]:
        taken += f", {n} by permits of {_named(who, me)}"
    more = sum(list(holders.values())[SHOWN_LEASES:])
    taken += f", {more} by permits of others" if more else ""
    if told["finished_groups"]:
        taken += f", {told['finished_groups']} by groups finished at version {version}"
    if told["held_groups"]:
        taken += f", {told['held_groups']} by groups finished at earlier versions"
    parts = [f"this call wants {wanted} of {counted(told['slots'], 'slot')}; taken: {taken}"]
    if told["before"]:
        parts.append(f"{counted(told['before'], 'call waits', 'calls wait')} ahead of this one")
    if told["held_groups"]:
        begun = version - told["lag"]
        parts.append(f"groups started at version {begun} are not complete yet")
    parts += _incomplete([one for one in slow if not one["of"]])
    parts += [_short(one) for one in slow if one["of"]]
    near_fields = {field: near for one in slow for field, (_, _, near) in one["lacks"].items()}
    parts += [_misspelt(field, near) for field, near in near_fields.items() if near]
    parts += [_nobody_claims(*one) for one in idle]
    parts += _leases(leases, "", me)
    if told["finished_groups"]:
        parts.append("finished groups free their slots at the next part.advance(version)")
    if told.get("only_own"):
        parts.append(OWN_PERMITS)
    return "; ".join(parts)


def _short(group: Mapping[str, Any]) -> str:
    """What to do about an open group."""
    name = f"group {group['group']!r}"
    if group["of"] < 0:
        return f"{name} has {counted(group['rows'], 'row')} and is not closed: close or drop it"
    size = f"{group['rows']} of {counted(group['of'], 'row')}"
    return f"{name} has {size}: put the missing rows, or drop the group"


def _incomplete(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """What closed groups lack: one clause for all groups that lack the same fields."""
    alike: dict[str, list[str]] = {}
    for group in groups:
        fields: dict[tuple[str, str], list[str]] = {}
        for name, (stage, by, _) in group["lacks"].items():
            fields.setdefault((stage, by), []).append(f"`{name}`")
        lacks = [
            f"{joined(names)}, which stage {stage!r} needs"
            + (f" and stage {by!r} adds" if by else "")
            for (stage, by), names in fields.items()
        ]
        alike.setdefault(joined(lacks, ", and "), []).append(repr(group["group"]))
    return [
        f"group {names[0]} has all its rows, but lacks {lacks}"
        if len(names) == 1
        else f"groups {joined(names)} have all their rows, but lack {lacks}"
        for lacks, names in alike.items()
    ]


def _named(who: str, me: str) -> str:
    return f"this process ({who})" if who == me else who


def seen_by_others(why: str) -> str:
    """Return a reason for one process, reworded for other readers."""
    return re.sub(r"this process \((.+?)\)", r"\1", why).replace("this process", "it")


def _leases(leases: Sequence[tuple[str, str, int, float]], stage: str, me: str) -> list[str]:
    said = []
    for who, of, rows, age in sorted(leases, key=lambda one: -one[3])[:SHOWN_LEASES]:
        where = "" if of == stage else f" for stage {of!r}"
        them = counted(rows, "row has been", "rows have been")
        said.append(f"{them} leased by {_named(who, me)}{where} for {duration(age)}")
    more = len(leases) - len(said)
    if more > 0:
        one, many = "more client holds leases", "more clients hold leases"
        said.append(counted(more, one, many))
    return said


def only_own(facts: Facts, stage: str, me: str, alone: bool) -> bool:
    """Whether only the calling process could end its wait: it holds rows that the call waits
    for, no other client holds any, and no other client puts rows. alone: no other client uses
    the partition."""
    mine = {of for who, of, _, _ in facts.leases if who == me}
    others = any(who != me for who, _, _, _ in facts.leases) or facts.waiting_puts or facts.silent
    if others or not mine:
        return False
    if facts.sealed:
        return stage in mine or alone
    return alone and not facts.needs_more


def only_permits(told: Mapping[str, Any], holders: Mapping[str, int], me: str) -> bool:
    """Whether permits of the calling process use all slots."""
    others = told["unfinished_groups"] + told["finished_groups"] + told["held_groups"]
    return set(holders) == {me} and not others


OWN = "only this process can end this wait: ack, release or drop its batch first"
OWN_PERMITS = (
    "only this process can end this wait: start the groups that it has permits for, or "
    "leave their `with` blocks first"
)


class Subject(NamedTuple):
    """What calls wait for. Calls with equal subjects share one log line."""

    kind: str
    partition: str = ""
    stage: str = ""
    more: tuple[Any, ...] = ()


class Notices:
    """Decides when a host logs what its calls wait for: one line per subject."""

    def __init__(self) -> None:
        self._subjects: dict[Subject, _Known] = {}

    def begin(self, subject: Subject, now: float) -> None:
        known = self._subjects.setdefault(subject, _Known(now, now + FIRST_S))
        known.waiting += 1

    def end(self, subject: Subject) -> None:
        known = self._subjects[subject]
        known.waiting -= 1
        if not known.waiting:
            del self._subjects[subject]

    def wait_s(self, subject: Subject, now: float) -> float:
        """Seconds until the next line is due."""
        return max(0.0, self._subjects[subject].due - now)

    def take(self, subject: Subject, now: float) -> int:
        """The number of waiting calls if the caller must log it now, else 0."""
        known = self._subjects[subject]
        if now < known.due:
            return 0
        known.gap_s = min(MOST_S, 2 * known.gap_s)
        known.due = now + known.gap_s
        return known.waiting

    def set_reason(self, subject: Subject, why: str, reason: str = "") -> None:
        """Remember the reason of a wait, as a sentence and as one word."""
        if subject in self._subjects:
            self._subjects[subject].why = why
            self._subjects[subject].reason = reason

    def why(self, subject: Subject) -> str:
        """The last reason found; "" if none was looked for yet."""
        return self._subjects[subject].why

    def waits(self, now: float) -> list[tuple[Subject, int, float, str, str]]:
        """Every subject with the number of waiting calls, the longest wait, and its reason as a
        sentence and as one word, if known."""
        known = self._subjects.items()
        return [(s, one.waiting, now - one.since, one.why, one.reason) for s, one in known]

    def __len__(self) -> int:
        return len(self._subjects)


@dataclass(slots=True)
class _Known:
    since: float
    due: float
    gap_s: float = FIRST_S
    waiting: int = 0
    why: str = ""
    reason: str = ""
