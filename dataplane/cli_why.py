"""`dataplane why`: one sentence for each of the last steps, from the events of all peers."""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec

from dataplane.client.session.opening import visit
from dataplane.client.sync.plane import Plane
from dataplane.errors import InvalidCall, few
from dataplane.launch.rundir import LivingPeer
from dataplane.timeline.why import Why, explain, steps

SHOWN = 8


def why(peer: LivingPeer, step: str | None, last: int) -> list[Why]:
    """What is known of one step, or of the last ones, the earliest first. InvalidCall."""
    with Plane(visit(peer)) as plane:
        events = plane.events()
    known = steps(events)
    if step is not None and step not in known:
        shown = few([repr(name) for name in known[::-1]], SHOWN) or "none"
        raise InvalidCall(
            f"--step {step!r}: no peer has events of this partition; there are events of: {shown}"
        )
    return [explain(events, name) for name in ([step] if step is not None else known[-last:])]


def show(found: Sequence[Why], as_json: bool) -> int:
    if as_json:
        told = [{**msgspec.to_builtins(one), "sentence": one.sentence} for one in found]
        print(json.dumps({"steps": told}), flush=True)
    else:
        print("\n".join(one.sentence for one in found) or "no rows have been put yet", flush=True)
    return 0
