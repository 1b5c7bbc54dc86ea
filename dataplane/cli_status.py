"""The text of `dataplane status`: stuck calls first, then hosts, then one line per stage.

The text is made only from the statistics of the peers (`plane.stats()`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dataplane.errors import counted, duration, few, reading_statistics, sized

STUCK_S = 10.0
"""Calls that have waited for at least this many seconds are shown first."""
SHOWN_HOLDERS = 3
SHOWN_DRAINED = 8
SHOWN_RANKS = 8
_BAR = 20

SHOWN_CLIENTS = 16
"""The most clients shown per host."""
SHOWN_RATES = 4

Stats = Mapping[str, Any]


def alone(stats: Stats) -> Stats:
    """Return the statistics of one peer, without the other peers of its plane."""
    if "error" in stats:
        return stats
    with reading_statistics():
        own = {name: stats[name] for name in ("partitions", "waits", "holders")}
        line = stats["peers"][stats["peer"]]
        everywhere = own | {"clients": stats["client_list"]}
        return {**stats, "peers": {stats["peer"]: line}, "everywhere": everywhere}


def lines(peers: Mapping[str, Stats]) -> list[str]:
    """Return the lines about one run. peers: the statistics of its peers on this host, by name.
    Raise ProtocolError if a peer of another release leaves out an entry."""
    with reading_statistics():
        return list(_lines(peers))


def _lines(peers: Mapping[str, Stats]) -> Iterator[str]:
    seen = _everywhere(peers)
    yield from _stuck(seen)
    for name, stats in peers.items():
        if "error" in stats:
            yield f"  ! peer {name} does not answer: {stats['error']}"
    hosts = seen["peers"]
    width = max(map(len, hosts), default=0)
    for name, host in hosts.items():
        yield f"  host {name:<{width}}  {_host(host)}"
        yield from _clients([one for one in seen["clients"] if one["peer"] == name])
    drained = []
    for name in sorted(seen["partitions"], key=_in_order):
        partition = seen["partitions"][name]
        ended = not partition["rows"] and partition["phase"] != "open"
        if not ended or partition["lost_rows"] or _waits(seen, name):
            yield from _partition(name, partition, seen)
        else:
            drained.append(name)
    if drained:
        yield f"  {counted(len(drained), 'drained partition')}: {few(drained, SHOWN_DRAINED)}"


def _everywhere(peers: Mapping[str, Stats]) -> Stats:
    """Return the whole run, as the first peer that answers knows it."""
    for stats in peers.values():
        if "error" not in stats:
            hosts = dict(stats["peers"])
            here = hosts[stats["peer"]]
            hosts[stats["peer"]] = {**here, "clients": here["clients"] - 1}  # this command is one
            return {**stats["everywhere"], "peers": hosts}
    return {"partitions": {}, "waits": [], "holders": [], "clients": [], "peers": {}}


def _stuck(seen: Stats) -> Iterator[str]:
    for wait in sorted(seen["waits"], key=lambda one: -one["for_s"]):
        if wait["for_s"] >= STUCK_S:
            calls = counted(wait["calls"], "call has", "calls have")
            why = f": {wait['why']}" if wait["why"] else ""
            waited = f"been waiting on {wait['peer']} for {duration(wait['for_s'])}"
            yield f"  ! {_named(wait)}: {calls} {waited}{why}"


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
        f"[{bar}] {part:4.0%} of {sized(size)}, {counted(host['rows'], 'row')}, "
        f"{counted(host['clients'], 'client')}{_rates(host['rates'])}"
    )


def _rates(rates: Stats) -> str:
    """Return a host's average rates, which show a slow host beside others."""
    acked = rates["acked_rows_per_s"]
    shown = [f"{name} {rate:.1f}" for name, rate in list(acked.items())[:SHOWN_RATES]]
    if rates["put_rows_per_s"]:
        shown.insert(0, f"put {rates['put_rows_per_s']:.1f}")
    return f" | rows/s: {', '.join(shown)}" if shown else ""


def _clients(clients: Sequence[Stats]) -> Iterator[str]:
    for one in clients[:SHOWN_CLIENTS]:
        parts = [_who(one["client"], one), f"for {duration(one['age_s'])}"]
        if one["leased_rows"]:
            parts.append(f"{counted(one['leased_rows'], 'row')} leased")
        if one["waiting_calls"]:
            parts.append(counted(one["waiting_calls"], "waiting call"))
        if held := one["granted_bytes"] + one["pinned_bytes"]:
            parts.append(f"holds {sized(held)}")
        yield f"    {', '.join(parts)}"
    if len(clients) > SHOWN_CLIENTS:
        yield f"    and {counted(len(clients) - SHOWN_CLIENTS, 'more client')}"


def _who(label: str, client: Stats) -> str:
    """Return a client's description: `pid 7 on host b, rank 3 (python train.py)`."""
    rank, command = client.get("rank"), client.get("command")
    ranked = f", rank {rank}" if rank is not None and rank >= 0 else ""
    return f"{label}{ranked}" + (f" ({command})" if command else "")


def _partition(name: str, partition: Stats, seen: Stats) -> Iterator[str]:
    groups = f", {counted(partition['groups'], 'group')}" if partition["groups"] else ""
    yield (
        f"  partition {name}  {partition['phase']}, {counted(partition['rows'], 'row')}{groups}, "
        f"{sized(partition['bytes'])}"
    )
    if lost := partition["lost_rows"]:
        one, many = "row was", "rows were"
        yield f"    ! {counted(lost, one, many)} lost with a peer: part.lost() lists them"
    if told := partition.get("admission"):
        taken = told["permits"] + told["unfinished_groups"] + told["finished_groups"]
        yield (
            f"    admit: version {told['version']}, lag {told['lag']} | "
            f"{taken + told['held_groups']} of {counted(told['slots'], 'slot')} taken, "
            f"{told['permits']} of them by permits"
        )
    stages = partition["stages"]
    width = max(map(len, stages), default=0)
    for stage, figures in stages.items():
        yield f"    {stage:<{width}}  {_stage(name, stage, figures, seen)}"


def _stage(name: str, stage: str, figures: Stats, seen: Stats) -> str:
    def ours(one: Stats) -> bool:
        return bool(one["partition"] == name and one["stage"] == stage)

    ready = f"{figures['ready_rows']} ready"
    if figures["ready_groups"]:
        ready += f" ({counted(figures['ready_groups'], 'whole group')})"
    parts = [ready, f"{figures['leased_rows']} leased"]
    holders = sorted(filter(ours, seen["holders"]), key=lambda one: -one["for_s"])
    if holders:
        shown = [
            f"{h['rows']} by {_who(h['holder'], h)} for {duration(h['for_s'])}" for h in holders
        ]
        parts[-1] += f": {few(shown, SHOWN_HOLDERS)}"
    if plan := figures.get("plan"):
        parts.append(f"plan: {_plan(plan)}")
    waits = list(filter(ours, seen["waits"]))
    if waits:
        oldest = max(wait["for_s"] for wait in waits)
        calls = sum(wait["calls"] for wait in waits)
        parts.append(f"{counted(calls, 'waiting call')}, the oldest for {duration(oldest)}")
    if figures["released_rows"]:
        again = figures["redelivered_rows"]
        parts.append(f"{figures['released_rows']} released, {again} redelivered")
    if figures["acked_rows"]:
        parts.append(f"{figures['acked_rows_per_s']:.1f} rows/s")
    return " | ".join(parts)


def _plan(plan: Stats) -> str:
    """Return a line about a plan, with the first ranks that are behind."""
    said = f"{plan['acked']} of {counted(plan['ranks'], 'rank')} acked"
    for word, many, ranks in (
        ("working", plan["came"] - plan["acked"], plan["working"]),
        ("not joined", plan["ranks"] - plan["came"], plan["absent"]),
    ):
        shown = ranks[:SHOWN_RANKS]
        more = " …" if many > len(shown) else ""
        said += f", {word}: {', '.join(map(str, shown))}{more}" if many else ""
    return said


def _in_order(name: str) -> list[str | int]:
    """Return a sort key that puts step-2 before step-10, on any host."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def _waits(seen: Stats, name: str) -> bool:
    return any(wait["partition"] == name for wait in seen["waits"])
