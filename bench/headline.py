"""`bench headline` and `bench links`: fixed sets of runs that show what a plane is for.

The headline answers four questions with one sentence each: how long a step's transfers take
through each plane, with and without separate rollout hosts; what share of a step that is; how
much memory each plane needs; and where a controller is faster.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from bench import links, outputs, report
from bench.planes import PLANES
from bench.planes.base import Job
from bench.report import Run
from bench.run_command import carry_out
from dataplane.errors import joined

HOSTS = (2, 6)
"""Numbers of hosts of the headline: few, so that each run has time for several steady steps."""
STEPS = 4
"""The first is cold; the other three are compared."""
_WIDER = (2, 4, 8)
_TRACES = ("video", "math")
OURS = "dataplane"
_PLANES = (OURS, "controller-stream", "controller")
CALLED = {
    OURS: "dataplane",
    "controller-stream": "a streaming controller",
    "controller": "a controller with barriers",
    "transfer_queue": "TransferQueue",
}
_QUEUE = "transfer_queue"
_QUEUE_HOSTS = 4
"""Each host has a Ray node with two storage units, besides its workers."""
_HARDLY = 0.02
"""Share of a step below which a transfer hardly matters."""


def register(commands: Any) -> None:
    short = "measure transfer time, its share of a step, and memory (8 minutes)"
    long = "repeat the `headline` measurements on more hosts and with dedup off (half an hour)"
    for name, what, perform in (("headline", short, _headline), ("links", long, _links)):
        parser = outputs.add_reporting(commands, name, what)
        rate = "rate of each host's link in each direction, in the notation of `run`"
        parser.add_argument("--link", type=links.rate, metavar="RATE", help=rate)
        parser.set_defaults(perform=perform)


def _headline(options: argparse.Namespace, command: str) -> int:
    plan = [*_over_links(_rate(options, max(HOSTS)), HOSTS, _TRACES), *_without_links()]
    if not PLANES[_QUEUE].missing():
        plan += _beside_transfer_queue(_rate(options, max(HOSTS)))
    return carry_out(plan, options, command, sentences)


def _links(options: argparse.Namespace, command: str) -> int:
    rate = _rate(options, max(_WIDER))
    plan = [*_over_links(rate, _WIDER, (*_TRACES, "image_open"))]
    for hosts in _WIDER[:2]:
        plan += _planned(_job("video", hosts, rate), False)
    return carry_out(plan, options, command, sentences)


def _rate(options: argparse.Namespace, hosts: int) -> str:
    """All numbers of hosts have links of one rate, that of the most hosts."""
    given = options.link not in (None, links.NONE)
    return str(options.link) if given else links.fair_rate(hosts)


def _job(trace: str, hosts: int, link: str | None = None) -> Job:
    """Every host brings as much work: one video or image prompt, or two of text, a step."""
    job = Job(plane=OURS, trace=trace, hosts=hosts, trainers=hosts, steps=STEPS, link=link)
    return replace(job, prompts=(2 if trace == "math" else 1) * hosts)


def _planned(job: Job, dedup: bool) -> list[Job]:
    return [replace(job, plane=plane, dedup=dedup) for plane in _PLANES]


def _over_links(rate: str, counts: Sequence[int], traces: Sequence[str]) -> Iterator[Job]:
    """Rollout on half of the hosts, then every stage on every host."""
    for trace in traces:
        for hosts in counts if trace == "video" else counts[-1:]:
            for apart in (True, False):
                yield from _planned(replace(_job(trace, hosts, rate), apart=apart), True)


def _beside_transfer_queue(rate: str) -> Iterator[Job]:
    """TransferQueue has no dedup, so in this comparison nobody has."""
    alike = {"dedup": False, "timeout_s": 600.0}
    for trace in _TRACES:
        for apart in (True, False):
            for plane in (OURS, "controller-stream", _QUEUE):
                job = _job(trace, _QUEUE_HOSTS, rate)
                yield replace(job, plane=plane, apart=apart, **alike)


def _without_links() -> Iterator[Job]:
    """Runs in which links do not matter: small text on two hosts, and memory under a limit."""
    yield from _planned(replace(_job("math", 2), prompts=16), True)
    # Half of the limit is the arena's: without dedup the largest group of one clip is 0.6 GB.
    limits: Any = {"memory_limit_bytes": 3 << 30, "arena_bytes": 3 << 29}
    limited = Job(plane=OURS, trace="video", prompts=16, **limits)
    for dedup in (True, False):
        for plane in (OURS, "controller"):
            yield replace(limited, plane=plane, dedup=dedup)
    # Where rollout and training share GPUs no stage overlaps: an arena holds a step.
    yield replace(limited, phased=True)


def sentences(runs: list[Run]) -> list[str]:
    """The sentences of the headline. The first trace has transfers, their share of a step,
    memory, and links of usual nodes; the others have transfers and shares. Then come runs
    without dedup, and jobs in which a controller is faster."""
    unlimited = [run for run in runs if run["memory_limit_bytes"] is None]
    traces = list(_by_trace([run for run in unlimited if run["dedup"]]))
    told = [said for mine in traces for said in (_transfers(mine), _shares(mine))]
    found = [*told[:2], _memory(runs), *map(_computed, traces[:1]), *told[2:]]
    found += map(_transfers, _by_trace([run for run in unlimited if not run["dedup"]]))
    return [sentence for sentence in (*found, _faster(runs)) if sentence]


def _by_trace(runs: list[Run]) -> Iterator[list[list[Run]]]:
    """The runs of each trace on the most hosts, in lists of one placement: apart, then together."""
    for trace in dict.fromkeys(run["trace"] for run in runs):
        hosts = max(run["hosts"] for run in runs if run["trace"] == trace)
        here = [run for run in runs if (run["trace"], run["hosts"]) == (trace, hosts)]
        placements = ([run for run in here if run["apart"] is apart] for apart in (True, False))
        yield list(filter(None, placements))


def _transfers(placements: list[list[Run]]) -> str:
    """The transfer time of a steady step through each plane, and why a plane has no figure."""
    first = placements[0][0]
    link = f"with {links.rated(first['link'])} links" if first["link"] else "over loopback"
    dedup = "" if first["dedup"] else ", without dedup"
    said = f"The benchmark runs one {first['trace']} step on {first['hosts']} hosts {link}{dedup}."
    timed = [[run for run in same if _steady(run)] for same in placements]
    figures = _figures(timed, lambda run: _seconds(_steady(run)), "{} through {}")
    for same, (told, are_named) in zip(placements, figures, strict=True):
        takes = ", the step's data takes " if are_named else ": "
        said += f" If {_placed(same[0])}{takes + told if told else ', no plane has a figure'}."
    for run in (run for same in placements for run in same if not _steady(run)):
        said += f" {_called(run).capitalize()} has no figure if {_placed(run)}: {_why(run)}."
    return said


def _figures(
    placements: Iterable[list[Run]], figure: Callable[[Run], str], form: str
) -> Iterator[tuple[str, bool]]:
    """The figures of each placement, and whether they name the planes, which they do if the planes
    change."""
    before: list[str] = []
    for same in placements:
        names = [_called(run) for run in same]
        are_named = names != before
        told = [(form if are_named else "{}").format(figure(r), _called(r)) for r in same]
        yield joined(told), are_named
        before = names


def _placed(run: Run) -> str:
    return "rollout has its own hosts" if run["apart"] else "every host runs every stage"


def _shares(placements: list[list[Run]]) -> str:
    timed = ([run for run in same if _steady(run)] for same in placements)
    if not (finished := list(filter(None, timed))):
        return ""
    recorded = finished[0][0]["recorded_step_seconds"]

    def share(run: Run) -> float:
        return float(_steady(run) / (_steady(run) + recorded))

    said = f"In the trace, rollout and training of the step take {_seconds(recorded)}."
    said += " Moving data is"
    if (most := max(share(run) for same in finished for run in same)) < _HARDLY:
        return f"{said} at most {most:.1%} of the step and hardly matters."
    return f"{said} {_by_case(finished, lambda run: f'{share(run):.0%}', ' of the step')}."


def _by_case(placements: list[list[Run]], figure: Callable[[Run], str], what: str = "") -> str:
    """Figures of each placement. With two, the sentence before named both."""
    first, *others = _figures(placements, figure, "{} ({})")
    if others:
        return f"{first[0]}{what}. If {_placed(placements[1][0])}: {others[0][0]}"
    return f"{first[0]}{what} if {_placed(placements[0][0])}"


def _computed(placements: list[list[Run]]) -> str:
    """What the busiest link alone would take on nodes of a usual size, with all prompts."""
    timed = ([r for r in same if _steady(r) and r["full_step"]] for same in placements)
    if not (full := list(filter(None, timed))):
        return ""
    one = full[0][0]["full_step"]
    rate, prompts = one["link_bits_per_second"] / 1e9, one["prompts"]

    def busy(run: Run) -> float:
        return float(run["full_step"]["link_seconds"])

    said = (
        f"Computed for {prompts} prompts a step and {rate:g} Gbit/s links: the busiest link is "
        f"busy for {_by_case(full, lambda run: _seconds(busy(run)))}. "
        f"Rollout and training take {_seconds(one['recorded_seconds'])}."
    )
    if max(busy(run) for some in full for run in some) < _HARDLY * one["recorded_seconds"]:
        said += " At that rate links alone are no reason to choose a plane."
    return said


def _called(run: Run) -> str:
    plane: str = run["plane"]
    return CALLED.get(plane, plane)


def _steady(run: Run) -> float:
    took = report.steady(run) if run["status"] == "ok" else None
    return took.median if took else 0.0


def _seconds(value: float) -> str:
    if value < 0.01:
        return "under 0.01 s"
    return f"{value:.2g} s" if value < 10 else f"{value:.0f} s"


def _why(run: Run) -> str:
    said = report.first_line(run["error"])
    twice = " twice" if run.get("failed_before") else ""
    return f"its run ended with {run['status']!r}{twice}" + (f" ({said})" if said else "")


def _memory(runs: list[Run]) -> str:
    limited = [run for run in runs if run["memory_limit_bytes"]]
    if not limited:
        return ""
    if any(run["status"] == "not run" for run in limited):
        return f"Memory was not measured: {limited[0]['error']}."
    prompts, limit = limited[0]["prompts"], report.gib(limited[0]["memory_limit_bytes"])
    said = f"A step of {prompts} video prompts runs with {limit} of memory a host."
    for dedup in (True, False):
        same = [run for run in limited if run["dedup"] is dedup]
        phased = {run["plane"]: _fate(run).removeprefix("needed ") for run in same if run["phased"]}
        told = []
        for run in (run for run in same if not run["phased"]):
            fate = phased.get(run["plane"])
            when = f" ({fate} if no stage overlaps rollout)" if fate else ""
            told.append(f"{_called(run)} {_fate(run)}{when}")
        if told:
            said += f" {'With' if dedup else 'Without'} dedup, {joined(told)}."
    return said


def _fate(run: Run) -> str:
    if run["status"] == "oom":
        return "was killed by the kernel"
    if run["status"] != "ok":
        return f"ended with {run['status']!r}"
    return f"needed {report.gib(max(run['peak_host_bytes']))}"


def _faster(runs: list[Run]) -> str:
    """The jobs in which a controller's steady step was faster than dataplane's."""
    told = []
    timed = [run for run in runs if _steady(run) and not run["memory_limit_bytes"]]
    for same in report.grouped(timed, ("trace", "hosts", "link", "apart", "dedup")):
        ours = next((r for r in same if r["plane"] == OURS), None)
        others = [r for r in same if r["plane"] != OURS]
        if ours is None or not others:
            continue
        best = min(others, key=_steady)
        if _steady(ours) > _steady(best):
            link = f"{links.rated(ours['link'])} links" if ours["link"] else "unlimited links"
            told.append(
                f"{ours['trace']} on {ours['hosts']} hosts with {link} if {_placed(ours)} "
                f"({_seconds(_steady(ours))}, {_called(best)} {_seconds(_steady(best))})"
            )
    if not told:
        return "No controller was faster in any job of this set."
    return f"Where dataplane is slower: {'; '.join(told)}."
