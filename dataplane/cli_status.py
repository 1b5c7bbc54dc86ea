"""`dataplane status` as people read it: what is stuck first, then hosts, then a line a stage.

Made of what peers say of themselves (`plane.stats()`), and nothing else; two looks give rates.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from dataplane.errors import counted, few

STUCK_S = 10.0
"""A call that waits for so long is shown first."""
SHOWN_HOLDERS = 3
SHOWN_DRAINED = 8
SHOWN_RANKS = 8
_BAR = 20

Stats = Mapping[str, Any]
Acked = dict[tuple[str, str], int]


def acked(peers: Mapping[str, Stats]) -> Acked:
    """Rows that each stage of each partition has acked so far, for rates."""
    return {
        (name, stage): figures["acked_rows"]
        for name, partition in _everywhere(peers)["partitions"].items()
        for stage, figures in partition["stages"].items()
    }


def lines(peers: Mapping[str, Stats], rates: Mapping[tuple[str, str], float]) -> Iterator[str]:
    """One run. peers: the stats of its peers on this host, by name. rates: rows a second."""
    seen = _everywhere(peers)
    yield from _stuck(seen)
    for name, stats in peers.items():
        if "error" in stats:
            yield f"  ! peer {name} does not answer: {stats['error']}"
    hosts = seen["peers"]
    width = max(map(len, hosts), default=0)
    for name, host in hosts.items():
        yield f"  host {name:<{width}}  {_host(host)}"
    drained = []
    for name in sorted(seen["partitions"], key=_in_order):
        partition = seen["partitions"][name]
        if partition["rows"] or partition["phase"] == "open" or _waits(seen, name):
            yield from _partition(name, partition, seen, rates)
        else:
            drained.append(name)
    if drained:
        yield f"  {counted(len(drained), 'drained partition')}: {few(drained, SHOWN_DRAINED)}"


def _everywhere(peers: Mapping[str, Stats]) -> Stats:
    """The whole run, as the first peer that answers knows it."""
    for stats in peers.values():
        if "error" not in stats:
            hosts = dict(stats["peers"])
            here = hosts[stats["peer"]]
            hosts[stats["peer"]] = {**here, "clients": here["clients"] - 1}  # who looks is one
            return {**stats["everywhere"], "peers": hosts}
    return {"partitions": {}, "waits": [], "holders": [], "peers": {}}


def _stuck(seen: Stats) -> Iterator[str]:
    for wait in sorted(seen["waits"], key=lambda one: -one["for_s"]):
        if wait["for_s"] >= STUCK_S:
            calls = counted(wait["calls"], "call waits", "calls wait")
            why = f": {wait['why']}" if wait["why"] else ""
            yield f"  ! {_named(wait)}: {calls} on {wait['peer']}, {_age(wait['for_s'])}{why}"


def _named(wait: Stats) -> str:
    stage = f", stage {wait['stage']!r}" if wait["stage"] else ""
    return f"{wait['kind']} of {wait['partition']!r}{stage}" if wait["partition"] else wait["kind"]


def _host(host: Stats) -> str:
    if "error" in host:
        return f"does not answer: {host['error']}"
    used, size = host["used_bytes"], host["size_bytes"]
    part = used / size if size else 0.0
    full = min(_BAR, round(part * _BAR))
    bar = "#" * full + "." * (_BAR - full)
    return (
        f"[{bar}] {part:4.0%} of {size_text(size)}, {counted(host['rows'], 'row')}, "
        f"{counted(host['clients'], 'client')}"
    )


def _partition(
    name: str, partition: Stats, seen: Stats, rates: Mapping[tuple[str, str], float]
) -> Iterator[str]:
    groups = f", {counted(partition['groups'], 'group')}" if partition["groups"] else ""
    yield (
        f"  partition {name}  {partition['phase']}, {counted(partition['rows'], 'row')}{groups}, "
        f"{size_text(partition['bytes'])}"
    )
    if told := partition.get("admission"):
        taken = told["permits"] + told["unfinished_groups"] + told["finished_groups"]
        yield (
            f"    admit: version {told['version']}, lag {told['lag']} | "
            f"{taken + told['held_groups']} of {counted(told['places'], 'place')} taken, "
            f"{told['permits']} of them by permits"
        )
    stages = partition["stages"]
    width = max(map(len, stages), default=0)
    for stage, figures in stages.items():
        yield f"    {stage:<{width}}  {_stage(name, stage, figures, seen, rates)}"


def _stage(
    name: str,
    stage: str,
    figures: Stats,
    seen: Stats,
    rates: Mapping[tuple[str, str], float],
) -> str:
    def ours(one: Stats) -> bool:
        return bool(one["partition"] == name and one["stage"] == stage)

    ready = f"{figures['ready_rows']} ready"
    if figures["ready_groups"]:
        ready += f" ({counted(figures['ready_groups'], 'whole group')})"
    parts = [ready, f"{figures['leased_rows']} leased"]
    holders = sorted(filter(ours, seen["holders"]), key=lambda one: -one["for_s"])
    if holders:
        shown = [f"{h['rows']} by {h['holder']} for {_age(h['for_s'])}" for h in holders]
        parts[-1] += f": {few(shown, SHOWN_HOLDERS)}"
    if plan := figures.get("plan"):
        parts.append(f"plan: {_plan(plan)}")
    waits = list(filter(ours, seen["waits"]))
    if waits:
        oldest = max(wait["for_s"] for wait in waits)
        calls = sum(wait["calls"] for wait in waits)
        parts.append(f"{counted(calls, 'call waits', 'calls wait')}, the oldest {_age(oldest)}")
    if (name, stage) in rates:
        parts.append(f"{rates[name, stage]:.1f} rows/s")
    return " | ".join(parts)


def _plan(plan: Stats) -> str:
    """Ranks that are behind are named, the first ones."""
    said = f"{plan['acked']} of {counted(plan['ranks'], 'rank')} acked"
    for word, many, ranks in (
        ("working", plan["came"] - plan["acked"], plan["working"]),
        ("not come", plan["ranks"] - plan["came"], plan["absent"]),
    ):
        shown = ranks[:SHOWN_RANKS]
        more = " …" if many > len(shown) else ""
        said += f", {word}: {', '.join(map(str, shown))}{more}" if many else ""
    return said


def _in_order(name: str) -> list[str | int]:
    """step-2 before step-10, wherever they live."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def _waits(seen: Stats, name: str) -> bool:
    return any(wait["partition"] == name for wait in seen["waits"])


def _age(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def size_text(nbytes: int) -> str:
    """Bytes as people read them."""
    size, units, unit = float(nbytes), iter(("KiB", "MiB", "GiB", "TiB")), "B"
    while size >= 1024 and (larger := next(units, None)):
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
