"""`dataplane why`: one sentence for each of the last steps, from the events of all peers."""

from __future__ import annotations

import argparse
import json
import time

import msgspec

from dataplane.cli_events import gathered
from dataplane.launch.rundir import Find
from dataplane.timeline.step import Step
from dataplane.timeline.why import explain


def why(arguments: argparse.Namespace, find: Find) -> int:
    events, names = gathered(arguments, find)
    now = time.monotonic()
    found = [explain(Step(events, name, now)) for name in names]
    if arguments.json:
        told = [{**msgspec.to_builtins(one), "sentence": one.sentence} for one in found]
        print(json.dumps({"steps": told}), flush=True)
    else:
        print("\n".join(one.sentence for one in found) or "no rows have been put yet", flush=True)
    return 0
