"""Moving bytes between hosts: the seam, TCP, engines, and the worker process that runs them.

| idea | file |
|---|---|
| the peer's side, and its limit on bytes in flight | engine, link, limiter |
| the worker process, which may crash alone; the witness | worker, control, witness |
| the reader: asks the owner for pieces, which a transport moves | reader |
| the owner: pins the pieces while a transport moves them | owner |
| cutting a read into one request a part | slices |
| one read, its connections and streams | reading, connections, stream, secure_stream |
| frames and records; how a reader joins; proofs and tickets | bulk_frames, joining, tickets |
| the interface of a transport; the transports by name | seam, registry |
| TCP, which every worker for host memory runs | tcp |
| the engines; a region as they register it; NCCL's two ranks | engines/ |
| apart from bulk transfer: the calls to etcd that a roster needs | etcd |
"""

from __future__ import annotations

from dataplane.transport.bulk_frames import COPY, GONE
from dataplane.transport.seam import (
    ReadOutcome,
    ReadRequest,
    Region,
    Remote,
    SendRequest,
    Transport,
)
from dataplane.transport.tickets import plane_key

__all__ = [
    "COPY",
    "GONE",
    "ReadOutcome",
    "ReadRequest",
    "Region",
    "Remote",
    "SendRequest",
    "Transport",
    "plane_key",
]
