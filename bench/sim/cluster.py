"""Carried to cluster sizes: fitted costs, hosts of their own, links. A model, with bands.

The jobs grow with the cluster: so many groups for each host, one worker of each stage and one
trainer on each, recorded time at its own speed. A band is what comes out between a kind and an
unkind place: processor seconds by the spread of what was measured, links that lose more or less of
their speed when many senders meet at one receiver (incast).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from bench.pace import ideal_seconds
from bench.planes.base import Job
from bench.sim.fit import DESIGNS
from bench.sim.model import Costs, Model, Outcome, Place, Plan

# Assumed, as no test machine has them. Incast: TCP into one port keeps 40-90 % of its speed when
# dozens send at once; the middle is what a fabric with shallow buffers and ECN is set up for.
_ROUND_TRIP_S = 50e-6
_COPIERS = 8  # cores that move a host's bytes
_CROWD = 16
_INCAST = {"low": 0.9, "middle": 0.7, "high": 0.4}
_PACE = 1.0
VARIANTS = (("dataplane", True), ("controller", True), ("controller", False))


@dataclass(frozen=True, slots=True)
class Cluster:
    """What a host has and does."""

    trace: str
    groups_per_host: int
    link_gbps: float

    def job(self, plane: str, hosts: int, dedup: bool) -> Job:
        prompts = hosts * self.groups_per_host
        return Job(
            plane=plane,
            trace=self.trace,
            dedup=dedup,
            prompts=prompts,
            hosts=hosts,
            trainers=hosts,
            pace=_PACE,
        )

    def place(self, kind: str) -> Place:
        return Place(
            cores=1,
            one_machine=False,
            link_bytes_s=self.link_gbps * 1e9 / 8,
            round_trip_s=_ROUND_TRIP_S,
            copiers=_COPIERS,
            crowd=_CROWD,
            crowded=_INCAST[kind],
        )

    def assumed(self) -> dict[str, Any]:
        """For the report."""
        return {
            "trace": self.trace,
            "groups_per_host": self.groups_per_host,
            "link_gbps": self.link_gbps,
            "pace": _PACE,
            "round_trip_s": _ROUND_TRIP_S,
            "copy_cores_per_host": _COPIERS,
            "incast_from_senders": _CROWD,
            "incast_share_left": _INCAST,
        }


def carry(
    cluster: Cluster,
    hosts: int,
    costs: Mapping[str, Costs],
    spread: Mapping[str, tuple[float, float]],
) -> Iterator[dict[str, Any]]:
    """A result for each variant; `spread`: by plane, factors on costs for the band."""
    for plane, dedup in VARIANTS:
        job = cluster.job(plane, hosts, dedup)
        plan, (low, high) = Plan(job), spread[plane]
        runs = {}
        for kind, factor in (("low", low), ("middle", 1.0), ("high", high)):
            prices = msgspec.structs.replace(costs[plane], factor=factor)
            runs[kind] = Model(plan, prices, cluster.place(kind), DESIGNS[plane]).run()
        yield _told(job, runs)


def _told(job: Job, runs: Mapping[str, Outcome]) -> dict[str, Any]:
    recorded = ideal_seconds(job) / job.steps
    middle = runs["middle"]
    claims = sum(middle.peers.values())
    return {
        "model": True,  # nobody ran this
        "plane": job.plane,
        "dedup": job.dedup,
        "hosts": job.hosts,
        "groups": job.prompts,
        "recorded_step_s": recorded,
        "stall_s": {kind: run.step_s - recorded for kind, run in runs.items()},
        "claim_ms": {
            kind: {
                name: float(np.percentile(run.claim_s, share)) * 1e3
                for name, share in (("p50", 50), ("p99", 99))
            }
            for kind, run in runs.items()
        },
        "service_peak_bytes": {kind: max(run.peak_bytes) for kind, run in runs.items()},
        "peers_per_claim": {
            "mean": sum(count * times for count, times in middle.peers.items()) / claims,
            "max": max(middle.peers),
        },
    }
