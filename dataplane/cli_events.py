"""Read the events of a run for the commands about steps, and select the steps."""

from __future__ import annotations

import argparse

from dataplane.client._sync.plane import Plane
from dataplane.client.session.opening import visit
from dataplane.errors import InvalidCall, few
from dataplane.events.merge import Event
from dataplane.launch.rundir import Find
from dataplane.timeline.why import steps

SHOWN = 8


def gathered(arguments: argparse.Namespace, find: Find) -> tuple[list[Event], list[str]]:
    """Return the events of the whole plane, and the names of the selected steps, earliest first.
    Raise InvalidCall if `--last` is below 1, or if no peer has events of `--step`."""
    step, last = arguments.step, arguments.last
    if last < 1:
        raise InvalidCall(f"--last {last} is out of range: use a value of at least 1")
    with Plane(visit(find()[1])) as plane:
        events = plane.events()
    known = steps(events)
    if step is None:
        return events, known[-last:]
    if step not in known and not any(e.partition == step for e in events):
        shown = few([repr(name) for name in known[::-1]], SHOWN)
        raise InvalidCall(
            f"--step {step!r}: no peer has recorded events for a partition with this name. "
            + (
                f"Choose a partition that has events: {shown}"
                if known
                else "No partition has events yet: put some rows first"
            )
        )
    return events, [step]
