"""A view as text for a terminal. It has the figures of the page, in the same order. No I/O."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from dataplane.errors import counted, duration, sized
from dataplane.timeline.causes import SLOW
from dataplane.timeline.waits import PRODUCER
from dataplane.watch.history import View
from dataplane.watch.picture import Picture

LEGEND = {
    "w": "working",
    "r": "waiting for rows",
    "f": "waiting for space",
    "a": "held back by admit",
    "m": "moving bytes",
    "s": "no processor time",
}
_COLOURS = {"w": 42, "r": 43, "f": 41, "a": 45, "m": 44, "s": 47}
_LABEL = 24
SHOWN = 12
"""The most lanes of a stage, and lines of each other list, that are shown."""


def lines(view: View, width: int, is_colour: bool) -> Iterator[str]:
    """Return lines of at most `width` columns. The sentence and the troubles may be longer."""
    yield printable(view.sentence)
    for one in view.trouble:
        yield f"! {printable(one)}"
    for stuck in view.stuck:
        why = f": {printable(stuck.why)}" if stuck.why else ""
        what = printable(f"{stuck.what}, on {stuck.peer}")
        yield f"! {what}, has waited {duration(stuck.for_s)}{why}"
    if view.picture is not None:
        yield from _lanes(view.picture, width, is_colour)
        yield from _waits(view.picture)
        for pace in view.picture.paces[:3]:
            if pace.ratio < SLOW:
                rate = f"{pace.per_s:.3g} rows/s, {pace.ratio:.2g} × the speed of the others"
                yield f"slow: {printable(f'{pace.stage} on {pace.host}')}, {rate}"
    yield ""
    for queue in view.queues[:SHOWN]:
        waits = f", {counted(queue.calls, 'call waits', 'calls wait')}" if queue.calls else ""
        name = printable(f"{queue.partition} {queue.stage}")
        yield f"{_fit(name, _LABEL)} {queue.ready} ready, {queue.leased} leased{waits}"
    for host in sorted(view.hosts, key=lambda one: -one.used_bytes)[:SHOWN]:
        told = "does not answer"
        if not host.error:
            told = f"arena {sized(host.used_bytes)} of {sized(host.size_bytes)}"
        yield f"{_fit(printable(host.name), _LABEL)} {told}"
    known = f"known {duration(view.age_s)} ago, asked every {duration(view.every_s)}"
    yield f"run {printable(view.run)}: {counted(len(view.hosts), 'host')}, {known}"


def _lanes(picture: Picture, width: int, is_colour: bool) -> Iterator[str]:
    stages = defaultdict[str, list[tuple[str, str]]](list)
    for lane in picture.lanes:
        stages[lane.stage].append((lane.host, lane.cells))
    yield ""
    for stage, lanes in stages.items():
        for host, cells in lanes[:SHOWN]:
            name = printable(f"{stage or 'rollout'} {host}")
            yield f"{_fit(name, _LABEL)} {_cells(cells, width - _LABEL - 1, is_colour)}"
        if len(lanes) > SHOWN:
            yield f"  and {counted(len(lanes) - SHOWN, 'host')} more"
    said = [
        f"{_cells(state, 1, is_colour)} {meaning}"
        for state, meaning in LEGEND.items()
        if any(state in lane.cells for lane in picture.lanes)
    ]
    yield "  ".join(said)


def _cells(cells: str, room: int, is_colour: bool) -> str:
    room = max(1, min(room, len(cells)))
    shown = "".join(cells[at * len(cells) // room] for at in range(room))
    if not is_colour:
        return shown
    return "".join(f"\x1b[{_COLOURS[one]}m \x1b[0m" if one in _COLOURS else " " for one in shown)


def _waits(picture: Picture) -> Iterator[str]:
    stages = defaultdict[str, list[str]](list)
    for wait in picture.waits:
        stages[wait.stage].append(f"{wait.reason} {duration(wait.seconds)}")
    for stage, reasons in stages.items():
        name = printable(stage) if stage != PRODUCER else "rollout"
        yield f"{_fit(name, _LABEL)} waited: {', '.join(reasons)}"


def _fit(name: str, room: int) -> str:
    return f"{name:<{room}}" if len(name) <= room else name[: room - 1] + "…"


def printable(text: str) -> str:
    """Remove characters that a terminal would interpret."""
    return "".join(one if one.isprintable() else "�" for one in text)
