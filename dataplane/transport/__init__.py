"""Moving bytes between hosts: the seam, TCP, and the worker processes that do it.

| idea | file |
|---|---|
| what a transport must be able to do | seam |
| the peer's door to bulk transfer; one worker process and its restart | engine, link, limiter |
| the worker process | worker |
| TCP: both sides, its connections, one stream | tcp, tcp_reader, tcp_owner, connections, stream |
| frames and records, tickets, cutting | bulk_frames, tickets, slices |
"""

from __future__ import annotations

from dataplane.transport.bulk_frames import COPY, GONE
from dataplane.transport.seam import (
    Capabilities,
    ReadOutcome,
    ReadRequest,
    Region,
    Remote,
    Transport,
)
from dataplane.transport.tickets import plane_key

__all__ = [
    "COPY",
    "GONE",
    "Capabilities",
    "ReadOutcome",
    "ReadRequest",
    "Region",
    "Remote",
    "Transport",
    "plane_key",
]
