"""Why a call waits, as people are told it, and when they are told.

Plain facts in, one sentence out; nothing here asks anybody. What a shard knows of them comes from
`inspection.missing`, as a dict of these very names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dataplane.errors import counted

FIRST_S = 10.0
"""A call that has waited for so long says what it waits for."""
SOON_S = 1.0
"""The same for a call that perhaps nobody but its own process can end."""
MOST_S = 600.0
"""Between two lines about the same wait, at most; each time it is twice as long."""
SHOWN_LEASES = 3


@dataclass(slots=True)
class Facts:
    """What keeps a stage's units (`rows` or `groups`) from a call.

    ready: that match. units: that are neither leased nor done. excluded: ready, but the filter
    leaves them out. alone: rows without a group. missing: field → rows without it. adders: field →
    the stage that has added it to other rows. leases: [(who, stage, rows, seconds)]. producers:
    puts that wait for room, in an arena or in a shard. before: claims of its kind that wait for
    longer. weightless: for a claim by budget, how many rows have no weight, its tag, one of these
    rows. plan: why a rank waits for its part in a plan, where rows are not the reason. silent:
    the peer that should know all this, where it says nothing.
    """

    unit: str = "rows"
    ready: int = 0
    units: int = 0
    excluded: int = 0
    alone: int = 0
    open_groups: int = 0
    missing: dict[str, int] = field(default_factory=dict)
    adders: dict[str, str] = field(default_factory=dict)
    leases: list[tuple[str, str, int, float]] = field(default_factory=list)
    sealed: bool = False
    producers: int = 0
    before: int = 0
    plan: str = ""
    weightless: list[Any] = field(default_factory=list)
    silent: str = ""

    @property
    def details(self) -> dict[str, Any]:
        """The same in figures, for a program."""
        return {
            "ready": self.ready,
            "units": self.units,
            "excluded": self.excluded,
            "missing": self.missing,
            "leases": [[who, rows, age] for who, _, rows, age in self.leases],
            "sealed": self.sealed,
        }


def reason(facts: Facts, stage: str, wanted: str, me: str = "") -> str:
    """All of it in one sentence. wanted: what is asked for, "" where that is all there is. me: how
    `leases` call the process that asks."""
    if facts.silent:
        return f"peer {facts.silent}, which has the partition's shard, does not answer"
    said = f"{facts.ready} of {facts.units} {facts.unit} ready"
    parts = [f"{said}, {wanted}" if wanted else said]
    if facts.plan:
        parts.append(facts.plan)
    if facts.before:
        one, many = "claim of its kind waits", "claims of its kind wait"
        parts.append(f"{counted(facts.before, one, many)} before it")
    if facts.excluded:
        one, many = f"ready {facts.unit[:-1]} is", f"ready {facts.unit} are"
        parts.append(f"{counted(facts.excluded, one, many)} excluded by the filter")
    if facts.weightless:
        rows, tag, such = facts.weightless
        parts.append(
            f"{counted(rows, 'row has', 'rows have')} no number of 0 or more as tag `{tag}`, such "
            f"as {such!r}"
        )
    parts += [_lacking(facts, name, stage) for name in facts.missing]
    if facts.unit == "groups":
        if facts.open_groups:
            parts.append(f"{counted(facts.open_groups, 'group is', 'groups are')} still open")
        if facts.alone:
            parts.append(f"{counted(facts.alone, 'row has', 'rows have')} no group")
    parts += _leases(facts, stage, me)
    if facts.producers:
        parts.append(f"{counted(facts.producers, 'put waits', 'puts wait')} for room")
    if facts.sealed:
        left = facts.ready + len(facts.leases) + len(facts.missing)
        parts.append(
            "the partition is sealed, so no new row comes"
            if left
            else "the partition is sealed and nothing that is left can come to this call"
        )
    return "; ".join(parts)


def of_admission(
    told: Mapping[str, Any], wanted: int, holders: Mapping[str, int], me: str = ""
) -> str:
    """Why groups may not be begun: of `Permits.stats`, with how many wait `before` it. holders: how
    many groups each may still open, of whom `me` is who asks."""
    version = told["version"]
    taken = f"{counted(told['unfinished_groups'], 'group')} unfinished"
    for who, n in list(holders.items())[:SHOWN_LEASES]:
        taken += f", {n} permitted to {_named(who, me)}"
    more = sum(list(holders.values())[SHOWN_LEASES:])
    taken += f", and {more} to others" if more else ""
    if told["finished_groups"]:
        taken += f", {told['finished_groups']} finished at version {version}"
    if told["held_groups"]:
        taken += f", {told['held_groups']} finished before it"
    parts = [f"{wanted} of {counted(told['places'], 'place')} wanted; taken: {taken}"]
    if told["before"]:
        parts.append(f"{counted(told['before'], 'call waits', 'calls wait')} before it")
    if told["held_groups"]:
        begun, such = version - told["lag"], ", ".join(map(repr, told["slowest"]))
        such = f" (such as {such}: put its rows, or drop it)" if such else ""
        parts.append(f"what was begun at version {begun} is not all there yet{such}")
    if told["finished_groups"]:
        parts.append("what is finished gives its places back at the next part.advance(version)")
    if told.get("only_own"):
        parts.append(OWN_PERMITS)
    return "; ".join(parts)


def _named(who: str, me: str) -> str:
    return f"this process ({who})" if who == me else who


def seen_by_others(why: str) -> str:
    """A reason that a process was told, for who is another one."""
    return re.sub(r"this process \((.+?)\)", r"\1", why).replace("this process itself", "it")


def _lacking(facts: Facts, name: str, stage: str) -> str:
    said = (
        f"{counted(facts.missing[name], 'row lacks', 'rows lack')} `{name}`, a field of {stage!r}"
    )
    return f"{said} that stage {facts.adders[name]!r} adds" if name in facts.adders else said


def _leases(facts: Facts, stage: str, me: str) -> list[str]:
    said = []
    for who, of, rows, age in sorted(facts.leases, key=lambda one: -one[3])[:SHOWN_LEASES]:
        where = "" if of == stage else f" for stage {of!r}"
        said.append(f"{counted(rows, 'row')} leased by {_named(who, me)}{where} for {age:.0f} s")
    more = len(facts.leases) - len(said)
    return [*said, f"and by {more} more"] if more > 0 else said


def only_own(facts: Facts, stage: str, me: str, alone: bool) -> bool:
    """Whether nobody but the process that asks could end its wait: it holds rows that are waited
    for, nobody else holds any, and nobody else puts some. alone: no other client has anything to do
    with the partition."""
    mine = {of for who, of, _, _ in facts.leases if who == me}
    others = any(who != me for who, _, _, _ in facts.leases) or facts.producers or facts.silent
    return not others and (stage in mine and facts.sealed or bool(mine) and alone)


def only_permits(told: Mapping[str, Any], holders: Mapping[str, int], me: str) -> bool:
    """Whether all places are taken by permits of the process that asks for more."""
    others = told["unfinished_groups"] + told["finished_groups"] + told["held_groups"]
    return set(holders) == {me} and not others


OWN = "only this process itself could end this wait: ack, release or drop the batch it holds first"
OWN_PERMITS = (
    "only this process itself could end this wait: open the groups that it has permits for, or "
    "leave their `with` first"
)


class Subject(NamedTuple):
    """What calls wait for; those of equal ones are told in one line."""

    kind: str
    partition: str = ""
    stage: str = ""
    more: tuple[Any, ...] = ()


class Notices:
    """When a host says what its calls wait for: one line a subject, however many of them wait."""

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
        """Until the next line is due."""
        return max(0.0, self._subjects[subject].due - now)

    def take(self, subject: Subject, now: float) -> int:
        """How many wait, for the one of them that is to say it now; 0 for all others."""
        known = self._subjects[subject]
        if now < known.due:
            return 0
        known.gap_s = min(MOST_S, 2 * known.gap_s)
        known.due = now + known.gap_s
        return known.waiting

    def said(self, subject: Subject, why: str) -> None:
        """What the wait was found to be for."""
        if subject in self._subjects:
            self._subjects[subject].why = why

    def why(self, subject: Subject) -> str:
        """The last that was found; "" where nothing was looked for yet."""
        return self._subjects[subject].why

    def waits(self, now: float) -> list[tuple[Subject, int, float, str]]:
        """Every subject with how many wait, for how long somebody has, and why, where that was
        looked for."""
        return [(s, one.waiting, now - one.since, one.why) for s, one in self._subjects.items()]

    def __len__(self) -> int:
        return len(self._subjects)


@dataclass(slots=True)
class _Known:
    since: float
    due: float
    gap_s: float = FIRST_S
    waiting: int = 0
    why: str = ""
