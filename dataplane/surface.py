"""The public names of the blocking client. `dataplane` exports them on first use."""

import dataplane.aio as aio
from dataplane.client._sync.batch import Batch, Rows
from dataplane.client._sync.loader import Loader
from dataplane.client._sync.partition import Partition
from dataplane.client._sync.plan import Micro, Mini, Plan
from dataplane.client._sync.plane import Plane, connect
from dataplane.client._sync.stream import Stream
from dataplane.client.read.selection import Group
from dataplane.client.ref import Dropped, Ref
from dataplane.client.write.columns import ObjectValue as object
from dataplane.events.merge import Event
from dataplane.metadata.tables.where import Tag, Where, tag

__all__ = [
    "Batch",
    "Dropped",
    "Event",
    "Group",
    "Loader",
    "Micro",
    "Mini",
    "Partition",
    "Plan",
    "Plane",
    "Ref",
    "Rows",
    "Stream",
    "Tag",
    "Where",
    "aio",
    "connect",
    "object",
    "tag",
]
