"""Moving bytes between hosts: the seam, TCP, and the worker processes that do it.

| idea | file |
|---|---|
| what a transport must be able to do | seam |
| the peer's door to bulk transfer; one worker process and its restart | engine, link, limiter |
| the worker process; which transports there are | worker, registry |
| TCP: both sides, its connections, one stream | tcp, tcp_reader, tcp_owner, connections, stream |
| other engines: the reader holds, reads and confirms; the owner holds | holding, holds |
| a region as engines register it; two ranks, also of NCCL | stretches, communicators, nccl_gpu |
| frames and records, tickets, what may be asked, cutting | bulk_frames, tickets, asked, slices |
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
