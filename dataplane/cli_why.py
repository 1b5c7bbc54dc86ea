"""`dataplane why`: one sentence for each of the last steps, from the events of all peers."""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec

from dataplane.cli_events import gathered
from dataplane.launch.rundir import LivingPeer
from dataplane.timeline.step import Step
from dataplane.timeline.why import Why, explain


def why(peer: LivingPeer, step: str | None, last: int) -> list[Why]:
    """Explain one step, or the last steps, earliest first. Raise InvalidCall for an unknown
    step."""
    events, names = gathered(peer, step, last)
    return [explain(Step(events, name)) for name in names]


def show(found: Sequence[Why], as_json: bool) -> int:
    if as_json:
        told = [{**msgspec.to_builtins(one), "sentence": one.sentence} for one in found]
        print(json.dumps({"steps": told}), flush=True)
    else:
        print("\n".join(one.sentence for one in found) or "no rows have been put yet", flush=True)
    return 0
