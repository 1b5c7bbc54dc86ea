"""`dataplane probe`: which transport carries values between each pair of hosts, and why.

The command asks one peer of this host. All peers of the plane then test their transports to each
other, one after another. The exit code is 1 if `--require` names a transport that does not work
between every pair.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from dataplane import progress
from dataplane.client._sync import queries
from dataplane.client._sync.plane import Plane
from dataplane.client.session.opening import visit
from dataplane.launch.rundir import Find
from dataplane.transport import registry

PROBE_S = 300.0
Report = dict[str, Any]


def probe(arguments: argparse.Namespace, find: Find) -> int:
    require = arguments.require
    with progress.bar("probe"), Plane(visit(find()[1])) as connected:
        report: Report = queries.probe(connected._session, PROBE_S)
    missing = lacking(report, require) if require else []
    if arguments.json:
        required = {"required": require, "lacking": missing} if require else {}
        print(json.dumps(report | required), flush=True)
    else:
        print("\n".join(lines(report)), flush=True)
        for what in missing:
            print(f"required transport {require} does not work: {what}", flush=True)
    return 1 if missing else 0


def lacking(report: Report, transport: str) -> list[str]:
    """Return one text per peer, or pair of peers, where the transport does not work, with the
    reason."""
    found = []
    for peer in report["peers"]:
        here = peer["peer"]
        devices = transport in registry.POOLS_ONLY
        if "error" in peer:
            found.append(f"{here}: {peer['error']}")
        elif devices:
            if transport not in peer["devices"]["runs"]:
                why = peer["devices"]["missing"].get(transport, "it has no device arena")
                found.append(f"{here}: {why}")
        elif transport not in ("tcp", peer["runs"]):
            why = peer["missing"] or (
                f"it uses {peer['runs']} (set by --transport {peer['requested']})"
            )
            found.append(f"{here}: {why}")
        for way in peer.get("from", []):
            tried_on = (way.get("devices") or {}) if devices else way
            tried = tried_on.get("tried", {}).get(transport, {})
            if not tried.get("exact"):
                why = (
                    way.get("error")
                    or tried.get("error")
                    or tried_on.get("why", "there is no device arena")
                )
                found.append(f"{way['peer']} → {here}: {why}")
    return found


def lines(report: Report) -> Iterator[str]:
    """Yield the lines of the report: a block for each peer, a line for each pair and transport."""
    versions = {peer["peer"]: peer["version"] for peer in report["peers"] if "error" not in peer}
    if len({*versions.values()}) > 1:
        shown = ", ".join(f"{version} on {peer}" for peer, version in versions.items())
        yield f"versions differ: {shown}; install the same dataplane release everywhere"
    for peer in report["peers"]:
        if "error" in peer:
            yield f"peer {peer['peer']}: {peer['error']}"
            continue
        missing = f" ({peer['missing']})" if peer["missing"] else ""
        address = f" at {peer['address']}" if peer["address"] else ""  # none on a single host
        yield (
            f"peer {peer['peer']}{address}: dataplane {peer['version']}, arena "
            f"{peer['arena_bytes'] / (1 << 30):.2f} GiB, requested transport {peer['requested']}, "
            f"using {_carrier(peer['runs'], peer)}{missing}"
        )
        if runs := peer["devices"]["runs"]:
            yield f"  device transports: {', '.join(runs)}"
        for name, why in peer["devices"]["missing"].items():
            yield f"  device transport {name} is not available: {why}"
        for way in peer["from"]:
            yield from _way(way)
        if not peer["from"]:
            yield "   this run has no other peers to test"


def _way(way: Report) -> Iterator[str]:
    if "error" in way:
        yield f"  from {way['peer']}: {way['error']}"
        return
    yield f"  from {way['peer']}: {_carrier(way['transport'], way)}, because {way['why']}"
    yield from _tried(way["tried"])
    if devices := way["devices"]:
        yield f"    device values: {devices['transport']}, because {devices['why']}"
        yield from _tried(devices["tried"], "device ")


def _tried(trials: Report, kind: str = "") -> Iterator[str]:
    for name, tried in trials.items():
        if "error" in tried:
            yield f"    {kind}{name}: failed: {tried['error']}"
        else:
            yield (
                f"    {kind}{name}: {tried['GBps']:.2f} GB/s, {tried['latency_us']:.0f} µs, "
                f"self-test {('passed' if tried['exact'] else 'failed')}"
            )


def _carrier(transport: str, said: Report) -> str:
    return f"{transport}+tls" if said["tls"] and transport == "tcp" else transport
