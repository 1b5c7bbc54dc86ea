"""The asynchronous client: `async with dataplane.aio.connect() as plane: …`."""

from dataplane.client._async.batch import Batch, Rows
from dataplane.client._async.loader import Loader
from dataplane.client._async.partition import Partition
from dataplane.client._async.plan import Micro, Mini, Plan
from dataplane.client._async.plane import Plane, connect
from dataplane.client._async.stream import Stream

__all__ = [
    "Batch",
    "Loader",
    "Micro",
    "Mini",
    "Partition",
    "Plan",
    "Plane",
    "Rows",
    "Stream",
    "connect",
]
