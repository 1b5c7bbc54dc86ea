"""A made-up plane of many hosts and steps, as a watcher is told of it."""

from __future__ import annotations

import re
from typing import Any
from zlib import crc32

import msgspec

from dataplane.events.merge import Event
from tests.timeline.steps import Steps

HOSTILE = "step-1</script><img src=x onerror=\"document.title='run'\">"
STEP_S = 40.0


def named(host: str) -> str:
    return f"host-{ord(host) - ord('a')}" if len(host) == 1 else host


def step(name: str, begin: float, number: int = 0, **how: Any) -> list[Event]:
    """The events of one step. number: of the first event at each peer."""
    events, counts = [], dict[str, int]()
    for event in Steps(begin=begin, **how).play():
        peer = named(event.peer)
        counts[peer] = counts.get(peer, number) + 1
        events.append(
            msgspec.structs.replace(
                event,
                partition=name if event.partition else "",
                peer=peer,
                host=named(event.host),
                by=named(event.by),
                number=0 if event.going_on else counts[peer],
                incarnation=crc32(peer.encode()),
                worker=re.sub(r" (.)(\d*)$", lambda m: f" {named(m[1])} {m[2]}", event.worker),
            )
        )
    return events


def stats(hosts: int, partition: str = "step-99") -> dict[str, Any]:
    """What `plane.stats()` says, as far as it is shown."""
    names = [f"host-{n}" for n in range(hosts)]
    figures = {"ready_rows": 64, "leased_rows": 8, "acked_rows_per_s": 12.5}
    return {
        "peers": {
            name: {
                "address": f"tcp://{name}:1",
                "used_bytes": (n + 1) << 26, "size_bytes": 4 << 30, "spilled_bytes": 0,
                "clients": 2, "rates": {"put_rows_per_s": 3.0, "acked_rows_per_s": {}},
            }
            for n, name in enumerate(names)
        },
        "everywhere": {
            "partitions": {partition: {"stages": {"reward": figures, "train": figures}}},
            "waits": [
                {
                    "kind": "claim", "partition": partition, "stage": "train", "calls": 1,
                    "for_s": 31.0, "why": "8 rows lack `reward`", "peer": "host-0",
                }
            ],
            "holders": [],
            "clients": [
                {
                    "peer": name, "host": name, "client": f"pid 7 on host {name}",
                    "granted_bytes": 1 << 20, "pinned_bytes": 1 << 22,
                }
                for name in names
            ],
        },
    }  # fmt: skip
