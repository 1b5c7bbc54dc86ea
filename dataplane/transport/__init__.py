"""Moving bytes between hosts: the seam, TCP, engines, and the worker process that runs them.

| idea | file |
|---|---|
| the peer's door to bulk transfer; the process that may crash alone | engine, link, worker |
| who reads: pulls over TCP, or holds, reads by an engine and confirms | reader, slices |
| who is read from: sends what is pulled, or holds it for an engine | owner |
| their connections, one stream, the same inside TLS | connections, stream, secure_stream |
| frames and records, proofs and tickets | bulk_frames, tickets |
| what an engine must be able to do, which there are | seam, registry |
| the engines; a region as they register it; NCCL's two ranks | engines/ |
"""

from __future__ import annotations

from dataplane.transport.bulk_frames import COPY, GONE
from dataplane.transport.seam import (
    Capabilities,
    Held,
    ReadOutcome,
    ReadRequest,
    Region,
    RegionKey,
    Remote,
    SendRequest,
    Transport,
)
from dataplane.transport.tickets import plane_key

__all__ = [
    "COPY",
    "GONE",
    "Capabilities",
    "Held",
    "ReadOutcome",
    "ReadRequest",
    "Region",
    "RegionKey",
    "Remote",
    "SendRequest",
    "Transport",
    "plane_key",
]
