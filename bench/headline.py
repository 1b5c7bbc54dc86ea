"""`bench headline` and `bench links`: fixed sets of runs that show what a plane is for.

Headline: does the controller's link fill up as hosts are added while ours do not; who dies under a
memory limit; where we lose. Its first screen says so in three sentences, made from the runs alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from bench import links, outputs, report
from bench.report import Run
from bench.run import Settings
from bench.run_command import Planned, carry_out, with_link

MOST_HOSTS = 8
_PLANES = ("dataplane", "controller")
_LIMIT_BYTES = 3 << 30
_LIMITED_PROMPTS = 16
_GB = 1e9


def register(commands: Any) -> None:
    """Add both commands to the bench's parser."""
    for name, (what, perform) in {
        "headline": ("the bottleneck, the memory and where we lose, in five minutes", _headline),
        "links": ("dataplane and controller on 2, 4 and 8 hosts, one cold step", _links),
    }.items():
        parser = commands.add_parser(name, help=what, description=f"{what}: a table, JSON, a page.")
        parser.add_argument(
            "--link", type=links.rate, metavar="RATE", help="of each host, each way, as for `run`"
        )
        parser.add_argument(
            "--json", type=outputs.report, default=None, help="the report; the page (.html) beside"
        )
        parser.set_defaults(perform=perform)


def _headline(options: argparse.Namespace, command: str) -> int:
    rate = _rate(options, links.fair_rate(MOST_HOSTS))
    plan = [*_over_links(rate, options.no_links), *_without_links()]
    return carry_out(plan, options.json, command, options.no_links, sentences)


def _links(options: argparse.Namespace, command: str) -> int:
    """The wider table: more prompts, a media group's rows by themselves too, 1 Gbit/s; and what
    becomes of it where those who read share no host with those who write."""
    rate = _rate(options, "1gbit")
    plan: list[Planned] = []
    for trace, prompts, ways in (("video", 4, (True, False)), ("math", 8, (True,))):
        for dedup in ways:
            for hosts in (2, 4, 8):
                job = _job(trace, hosts, prompts * hosts)
                plan += _planned(with_link(job, rate, options.no_links), dedup)
    apart = replace(_job("video", MOST_HOSTS, 4 * MOST_HOSTS), apart=True)
    plan += _planned(with_link(apart, rate, options.no_links), True)
    return carry_out(plan, options.json, command, options.no_links)


def _rate(options: argparse.Namespace, default: str) -> str:
    return default if options.link in (None, links.NONE) else str(options.link)


def _job(trace: str, hosts: int, prompts: int, steps: int = 1) -> Settings:
    """prompts: of all hosts, of each step."""
    return Settings(
        trace=trace,
        planes=_PLANES,
        hosts=hosts,
        prompts=prompts,
        trainers=hosts,
        steps=steps,
    )


def _planned(job: Settings, dedup: bool) -> list[Planned]:
    return [(job, plane, dedup) for plane in _PLANES]


def _over_links(rate: str, no_links: str | None) -> Iterator[Planned]:
    for hosts in (2, 4, MOST_HOSTS):
        yield from _planned(with_link(_job("video", hosts, hosts, steps=2), rate, no_links), True)
    yield from _planned(with_link(_job("video", 2, 2), rate, no_links), False)
    for hosts in (2, MOST_HOSTS):
        yield from _planned(
            with_link(_job("math", hosts, 2 * hosts, steps=2), rate, no_links), True
        )


def _without_links() -> Iterator[Planned]:
    """What links have no part in: where we lose, and memory."""
    yield from _planned(_job("math", 2, 16, steps=5), True)
    limited = Settings(
        trace="video",
        planes=_PLANES,
        prompts=_LIMITED_PROMPTS,
        memory_limit_bytes=_LIMIT_BYTES,
    )
    yield limited, "controller", False
    yield limited, "controller", True
    yield limited, "dataplane", True


def sentences(runs: list[Run]) -> list[str]:
    """The headline: of the bottleneck, of memory, of where we lose."""
    found = [_bottleneck(runs), _memory(runs), _lost(runs)]
    return [sentence for sentence in found if sentence]


def _bottleneck(runs: list[Run]) -> str:
    told = []
    for trace in ("math", "video"):
        pair = _pair(r for r in runs if r["trace"] == trace and r["hosts"] == MOST_HOSTS)
        if pair:
            told.append(f"a {trace} step {_compared(*pair)}")
            ours, controller = pair
    if not told:
        return ""
    link = ours["link"]
    where = f"{MOST_HOSTS} hosts with links of {link}" if link else f"{MOST_HOSTS} hosts"
    return f"On {where}, {' and '.join(told)}; {_fullest(ours, controller)}."


def _fullest(ours: Run, controller: Run) -> str:
    """Whose link was full, from the links' own counters, or what one would need."""
    trace = controller["trace"]
    if computed := controller["computed_link"]:
        return (
            "which is loopback, for hosts have no links here: computed, what the controller's host "
            f"sends and gets for {trace} takes {computed['seconds']:.0f} s at {computed['rate']}"
        )
    fullest, rest = controller["busiest_link"], ours["busiest_link"]
    return (
        f"of {trace} the controller's link carried {fullest['bytes'] / _GB:.1f} GB and was full "
        f"{fullest['busy_share']:.0%} of the time, dataplane's busiest "
        f"{rest['bytes'] / _GB:.1f} GB and {rest['busy_share']:.0%}"
    )


def _compared(ours: Run, controller: Run) -> str:
    fast, slow = _steady(ours), _steady(controller)
    ratio = f"{slow / fast:.1f} × as fast" if slow >= fast else f"{fast / slow:.1f} × as slow"
    return f"takes {fast:.2g} s through dataplane and {slow:.2g} s through a controller ({ratio})"


def _steady(run: Run) -> float:
    return report.steady_seconds(run) or 0.0


def _pair(runs: Iterable[Run]) -> tuple[Run, Run] | None:
    """Ours and the controller's, of steady steps with dedup, without a memory limit."""
    found = {
        run["plane"]: run
        for run in runs
        if run["status"] == "ok" and run["dedup"] and not run["memory_limit_bytes"] and _steady(run)
    }
    return (found["dataplane"], found["controller"]) if len(found) == len(_PLANES) else None


def _memory(runs: list[Run]) -> str:
    limited = [run for run in runs if run["memory_limit_bytes"]]
    if not limited:
        return ""
    if any(run["status"] == "not run" for run in limited):
        return f"Memory was not measured: {limited[0]['error']}."
    told = [f"{_name(run)} {_fate(run)}" for run in limited]
    limit = limited[0]["memory_limit_bytes"] / (1 << 30)
    prompts = limited[0]["prompts"]
    return f"Under {limit:g} GiB a host, with {prompts} video prompts: {', '.join(told)}."


def _name(run: Run) -> str:
    whose = "dataplane" if run["plane"] == "dataplane" else "the controller"
    return f"{whose} {'with' if run['dedup'] else 'without'} dedup"


def _fate(run: Run) -> str:
    if run["status"] == "oom":
        return "was killed by the kernel"
    if run["status"] != "ok":
        return f"ended with {run['status']}"
    return f"needed {max(run['peak_host_bytes']) / (1 << 30):.2g} GiB"


def _lost(runs: list[Run]) -> str:
    """Every job in which a steady step of the controller's took less time than ours."""
    jobs = {(run["trace"], run["hosts"], run["link"]) for run in runs}
    told = []
    for trace, hosts, link in sorted(jobs, key=str):
        same = (r for r in runs if (r["trace"], r["hosts"], r["link"]) == (trace, hosts, link))
        pair = _pair(same)
        if pair and _steady(pair[0]) > _steady(pair[1]):
            where = f"{link} links" if link else "no limit on links"
            told.append(f"{trace} on {hosts} hosts with {where} {_compared(*pair)}")
    if not told:
        return "In no job of this set was the controller faster."
    return f"Where we lose: a step of {'; of '.join(told)}."
