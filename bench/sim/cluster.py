"""Carried to cluster sizes: fitted costs, hosts of their own, links. A model, with bands.

The jobs grow with the cluster, and recorded time has its own speed. A band is what comes out
between a kind and an unkind place: processor seconds by the spread of what was measured, and incast
by what links lose. TCP into one port keeps 40-90 % of its speed when dozens send at once; the
middle is what a fabric with shallow buffers and ECN is set up for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from bench.pace import ideal_seconds
from bench.planes.base import Job
from bench.sim.fit import DESIGNS
from bench.sim.model import Costs, Model, Outcome, Place, Plan

VARIANTS = (("dataplane", True), ("controller", True), ("controller", False))


def assume(
    trace: str,
    groups_per_host: int,
    link_gbps: float,
    cost_factors: Mapping[str, tuple[float, float]],
) -> dict[str, Any]:
    """What a host has and does, as the report says it. cost_factors: by plane, for the band."""
    return {
        "cost_factors": cost_factors,
        "trace": trace,
        "groups_per_host": groups_per_host,
        "link_gbps": link_gbps,
        "pace": 1.0,
        "round_trip_s": 50e-6,
        "copy_cores_per_host": 8,  # that move a host's bytes
        "incast_from_senders": 16,
        "incast_share_left": {"low": 0.9, "middle": 0.7, "high": 0.4},
    }


def carry(
    assumed: Mapping[str, Any], hosts: int, costs: Mapping[str, Costs]
) -> Iterator[dict[str, Any]]:
    """A result for each variant."""
    place = Place(
        cores=1,
        one_machine=False,
        link_bytes_s=assumed["link_gbps"] * 1e9 / 8,
        round_trip_s=assumed["round_trip_s"],
        copiers=assumed["copy_cores_per_host"],
        crowd=assumed["incast_from_senders"],
    )
    settings = {"trace": assumed["trace"], "prompts": hosts * assumed["groups_per_host"]}
    for plane, dedup in VARIANTS:
        counts = {"hosts": hosts, "trainers": hosts, "pace": assumed["pace"]}
        job = Job(plane=plane, dedup=dedup, **settings, **counts)
        plan, (low, high) = Plan(job), assumed["cost_factors"][plane]
        runs = {}
        for kind, factor in (("low", low), ("middle", 1.0), ("high", high)):
            there = replace(place, factor=factor, crowded=assumed["incast_share_left"][kind])
            runs[kind] = Model(plan, costs[plane], there, DESIGNS[plane]).run()
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
