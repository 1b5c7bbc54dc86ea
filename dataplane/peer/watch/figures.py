"""The metrics of one peer: their names, and what they are now, read in one go on the peer's loop.

Added up over partitions: a partition's name is never a label, or a long run would make a series
for every step. What it costs grows with partitions, clients and pins, never with rows. Nothing here
knows how metrics are shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from dataplane.memory.admission import Admission
from dataplane.memory.host_memory import HostMemory
from dataplane.peer.host import Host
from dataplane.peer.meters import OTHER, ByLabel, Histogram, Meters
from dataplane.transport.registry import TCP
from dataplane.version import __version__

if TYPE_CHECKING:
    from dataplane.peer.peer import Peer

MAX_CLIENTS = 20
"""Clients that hold most are named one by one, the others together."""
MAX_LETTERS = 64
"""of a label that a user chose"""

Values = Mapping[Any, float]
"""by the values of the labels, a tuple"""


@dataclass(frozen=True, slots=True)
class Family:
    """One metric, whole. values: by the values of its labels. A histogram has `histograms`."""

    kind: Literal["gauge", "counter", "histogram"]
    name: str
    help: str
    labels: tuple[str, ...]
    values: Values
    histograms: Mapping[str, Histogram] | None = None


def families_of(peer: Peer, meters: Meters) -> list[Family]:
    """On the peer's loop."""
    parts = (_identity, _arena, _devices, _clients, _rows, _roster, _waits, _moved, _refused)
    return [*_calls(meters), *(family for part in parts for family in part(peer))]


def serves(peer: Peer) -> bool:
    """Whether calls of clients are answered here now: what `/readyz` says."""
    return peer.door.is_open and peer.door.serving.is_sure()


def gauge(name: str, help: str, value: float | Values, *labels: str) -> Family:
    return Family("gauge", name, help, labels, _values(value))


def counter(name: str, help: str, value: float | Values, *labels: str) -> Family:
    return Family("counter", name, help, labels, _values(value))


def _values(value: float | Values) -> Values:
    return {(): value} if isinstance(value, int | float) else value


def _by(sums: ByLabel) -> Values:
    values: Counter[tuple[str, ...]] = Counter()
    for label, amount in sums.sums.items():
        values[_short(label),] += amount
    return values


def _short(label: str) -> str:
    return label if len(label) <= MAX_LETTERS else label[: MAX_LETTERS - 1] + "…"


def _calls(meters: Meters) -> Iterator[Family]:
    yield Family(
        "histogram",
        "dataplane_call_seconds",
        "How long calls of this host's clients took in the peer; a claim, its wait for rows too.",
        ("call",),
        {},
        meters.calls,
    )
    failures = _by(meters.failures)
    yield counter("dataplane_call_failures", "Calls that ended in an error.", failures, "error")
    yield counter("dataplane_put_rows", "Rows that clients here put.", meters.put_rows)
    yield counter("dataplane_put_bytes", "Bytes of values that clients here put.", meters.put_bytes)
    rows, nbytes = _by(meters.claimed_rows), _by(meters.claimed_bytes)
    yield counter("dataplane_stage_rows", "Rows that claims here were handed.", rows, "stage")
    yield counter(
        "dataplane_stage_bytes", "Bytes of the rows that claims here were handed.", nbytes, "stage"
    )


def _identity(peer: Peer) -> Iterator[Family]:
    host = peer.host
    labels = {"plane": host.plane, "peer": host.name, "address": host.address}
    who = (*map(_short, labels.values()), __version__)
    yield gauge("dataplane_info", "Who this is.", {who: 1}, *labels, "version")
    yield gauge("dataplane_ready", "1 while calls of clients are answered.", serves(peer))
    yield gauge("dataplane_clients", "Client processes that are attached.", len(peer.sessions))
    yield gauge("dataplane_connections", "Connections of clients.", len(peer.door.connections))


def _arena(peer: Peer) -> Iterator[Family]:
    space = peer.host.space.figures()
    told = {
        "size": "Memory for rows: used, granted and free together.",
        "used": "Bytes of rows and of cached copies.",
        "granted": "Bytes that clients may write into, not yet part of a row.",
        "free": "Bytes that nobody has.",
        "largest_free": "The longest free stretch.",
        "touched": "Bytes below the highest one ever granted: what the kernel counts.",
        "pinned": "Bytes in view of clients, or being read by other peers.",
        "quarantined": "Bytes that processes hold whose client was lost and which still live.",
    }
    for name, help in told.items():
        yield gauge(f"dataplane_arena_{name}_bytes", help, space[f"{name}_bytes"])
    classes = space["classes"].items()
    room = {(name,): figures["room_bytes"] for name, figures in classes}
    yield gauge(
        "dataplane_arena_room_bytes", "Bytes that an admission class may still take.", room, "class"
    )
    yield gauge(
        "dataplane_cached_bytes",
        "Bytes of cached copies of other hosts' values.",
        space["cached_bytes"],
    )
    yield gauge("dataplane_spill_bytes", "Bytes of rows in the spill file.", space["spilled_bytes"])
    yield gauge(
        "dataplane_spill_size_bytes", "The most that the spill file may take.", space["spill_bytes"]
    )
    spilling = peer.spilling
    written, read = (spilling.written_bytes, spilling.read_bytes) if spilling else (0, 0)
    yield counter("dataplane_spill_written_bytes", "Bytes written to the spill file.", written)
    yield counter("dataplane_spill_read_bytes", "Bytes read back from the spill file.", read)


def _devices(peer: Peer) -> Iterator[Family]:
    space = peer.host.space
    devices = space.device_figures() if isinstance(space, HostMemory) else []
    told = {
        "size": "Memory of a device for rows: used, granted and free together.",
        "used": "Bytes of rows on a device.",
        "granted": "Bytes of a device that clients may write into, not yet part of a row.",
        "free": "Bytes of a device that nobody has.",
        "pinned": "Bytes of a device in view of clients.",
    }
    for name, help in told.items():
        values = {(device["device"],): device[f"{name}_bytes"] for device in devices}
        yield gauge(f"dataplane_device_{name}_bytes", help, values, "device")
    staged = {(device["device"],): device["staged_bytes"] for device in devices}
    help = "Bytes of a device that were copied to the host arena for whoever does not read it."
    yield counter("dataplane_device_staged_bytes", help, staged, "device")
    overflowed = {(device["device"],): device["overflowed_bytes"] for device in devices}
    help = "Bytes that were put from a device and went to the host arena, because its own was full."
    yield counter("dataplane_device_overflowed_bytes", help, overflowed, "device")


def _clients(peer: Peer) -> Iterator[Family]:
    held: Counter[tuple[str, ...]] = Counter()
    for nth, (holder, granted, pinned) in enumerate(peer.host.space.holders()):
        named = nth < MAX_CLIENTS
        label = _short(_label(peer.host, holder)) if named else OTHER
        held[label, "granted"] += granted
        held[label, "pinned"] += pinned
    help = "Bytes granted to a client, or in its view; the 20 that hold most, and the others."
    yield gauge("dataplane_client_held_bytes", help, held, "client", "how")
    abandoned, expired = peer.finishing.abandoned_leases, peer.janitor.expired_leases
    yield gauge("dataplane_leases", "Claims that clients here hold.", len(peer.claims.leases))
    help = "Leases that clients held when they ended; their rows went back."
    yield counter("dataplane_leases_abandoned", help, abandoned)
    help = "Leases that were over their limit (lease=); their rows went back."
    yield counter("dataplane_leases_expired", help, expired)


def _label(host: Host, holder: int) -> str:
    return "transfers" if holder == 0 else host.labels.get(holder, "a client that left")


def _rows(peer: Peer) -> Iterator[Family]:
    stages: Counter[tuple[str, ...]] = Counter()
    names = ByLabel()
    stores = [entry.store.figures() for entry in peer.host.entries.values()]
    for store in stores:
        for stage, states in store.stages.items():
            names.add(stage, 0)
            label = _short(stage) if stage in names.sums else OTHER
            for state, count in states.items():
                stages[label, state] += count
    help = "Rows of this peer's shards by what they are for a stage."
    yield gauge("dataplane_rows_by_stage", help, stages, "stage", "state")
    yield gauge(
        "dataplane_partitions", "Partitions whose metadata is here.", len(peer.host.entries)
    )
    yield gauge("dataplane_rows", "Rows of this peer's shards.", sum(s.rows for s in stores))
    yield gauge("dataplane_groups", "Groups of this peer's shards.", sum(s.groups for s in stores))
    yield gauge(
        "dataplane_metadata_bytes",
        "Memory that the metadata of rows takes.",
        sum(s.metadata_bytes for s in stores),
    )
    help = "Small values that live with the rows of this peer's shards, of the metadata's share."
    yield gauge("dataplane_inline_bytes", help, peer.share.figures()["values_bytes"])
    yield gauge(
        "dataplane_tombstones",
        "Names remembered of rows and groups that were dropped or freed.",
        sum(s.tombstones for s in stores),
    )
    version = max((s.admission[0] for s in stores), default=0)
    help = "The trainer's version that advance() named last, of the partition that is furthest."
    yield gauge("dataplane_admission_version", help, version)
    help = "How many versions the slowest group or permit of this peer's shards is behind."
    lag = max((s.admission[1] for s in stores), default=0)
    yield gauge("dataplane_admission_lag", help, lag)
    help = "Rows whose only bytes were on a peer that died, as far as this one has heard."
    yield counter("dataplane_lost_rows", help, peer.host.lost_rows)


def _roster(peer: Peer) -> Iterator[Family]:
    host, roster = peer.host, peer.host.roster
    _, in_sync = roster.backup_of(host.address)
    shards = len(roster.shards_of(host.address))
    hosts = [member for member in roster.members if len(roster.shards_of(member))]
    unprotected = sum(not roster.backup_of(member)[1] for member in hosts)
    yield gauge("dataplane_roster_epoch", "Number of the roster in force.", roster.epoch[1])
    yield gauge("dataplane_roster_members", "Members of the roster in force.", len(roster.members))
    yield gauge(
        "dataplane_roster_leaving", "Members that hand over what they have.", len(roster.leaving)
    )
    help = "Members with shards of which no backup is in sync; a lone peer has none to have."
    yield gauge("dataplane_roster_unprotected", help, 0 if host.solo else unprotected)
    yield gauge("dataplane_shards", "Shards that are served here.", shards)
    yield gauge("dataplane_backup_in_sync", "1 where another peer could take over.", in_sync)
    behind = host.progress.done - host.progress.confirmed
    yield gauge("dataplane_backup_behind", "Operations that the backup has yet to confirm.", behind)


def _waits(peer: Peer) -> Iterator[Family]:
    room = peer.room
    classes = {(admission.name.lower(),): admission for admission in Admission}
    now = {name: room.waiting(which) for name, which in classes.items()}
    yield gauge("dataplane_backpressure_waiting", "Who waits for room now.", now, "class")
    waits = {name: room.waited[which] for name, which in classes.items()}
    yield counter("dataplane_backpressure_waits", "Who had to wait for room.", waits, "class")
    seconds = {name: room.waited_s[which] for name, which in classes.items()}
    help = "How long they waited, those that are done."
    yield counter("dataplane_backpressure_wait_seconds", help, seconds, "class")
    refused = {name: room.refused[which] for name, which in classes.items()}
    help = "Waits for room that ended in BackPressure."
    yield counter("dataplane_backpressure_refused", help, refused, "class")
    waiting, starved = peer.claims.waiting, len(peer.claims.credit)
    yield gauge("dataplane_waiting_claims", "Claims that wait for rows.", waiting)
    yield gauge("dataplane_starved_claims", "Claims that wait for room to pull into.", starved)


def _moved(peer: Peer) -> Iterator[Family]:
    pulls = peer.pulls
    far = _by(peer.claims.far_bytes)
    help = "Bytes granted to claims here that lay at other hosts, or in a cached copy of them."
    yield counter("dataplane_stage_remote_bytes", help, far, "stage")
    help = "Bytes of other hosts' values read in bulk; few together come on the link between peers."
    yield counter("dataplane_pulled_bytes", help, pulls.pulled_bytes)
    yield counter("dataplane_pull_hits", "Values found in a cached copy.", pulls.hits)
    copies = [len(e.copies) for e in peer.host.entries.values() if e.copies is not None]
    help = "Values of other peers of which the second copy lies here (replicas=2)."
    yield gauge("dataplane_second_copies", help, sum(copies))
    bulk = [pulls.engine.stats()] if pulls.engine is not None else []
    by = {(name, "in"): count for b in bulk for name, count in b["bytes_in_over"].items()}
    # Who reads here with another engine does not say so: then out is both together.
    out = {b["transport"]: b["bytes_out"] for b in bulk}
    by |= {(TCP if name == TCP else "any", "out"): count for name, count in out.items()}
    help = "Bytes that moved between arenas."
    yield counter("dataplane_transport_bytes", help, by, "transport", "direction")
    brought: Counter[tuple[str, ...]] = Counter()
    for carrier, by_stage in pulls.brought.items():
        for stage, nbytes in by_stage.sums.items():
            brought[_short(stage), carrier] += nbytes
    help = "Bytes brought here from other hosts for claims of a stage, by what carried them."
    yield counter("dataplane_stage_transport_bytes", help, brought, "stage", "transport")
    ways = pulls.paths.stats()
    used = Counter((ways["requested"], way["transport"]) for way in ways["peers"].values())
    help = "Peers whose values come over a transport, once that was tried; what was asked for."
    yield gauge("dataplane_transport_peers", help, used, "requested", "transport")
    ways = peer.device_pulls.stats()
    used = Counter((ways["requested"], way["transport"]) for way in ways["peers"].values())
    help = "Peers whose devices are read over a transport, once that was tried; what was asked for."
    yield gauge("dataplane_device_transport_peers", help, used, "requested", "transport")
    jobs = {(b["transport"], how): b[f"jobs_{how}"] for b in bulk for how in ("done", "failed")}
    help = "Transfers into this arena."
    yield counter("dataplane_transport_jobs", help, jobs, "transport", "outcome")
    restarts = {(b["transport"],): b["restarts"] for b in bulk}
    help = "Bulk workers that died and were started anew."
    yield counter("dataplane_transport_restarts", help, restarts, "transport")


def _refused(peer: Peer) -> Iterator[Family]:
    doors = {("local",): peer.door.refusals.total, ("peer",): peer.mesh.refused}
    help = "Strangers and bad frames that were turned away."
    yield counter("dataplane_refused", help, doors, "door")
