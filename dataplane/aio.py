"""The public surface with `await`: `async with dataplane.aio.connect() as plane: …`."""

from dataplane.client.aio.batch import Batch, Rows
from dataplane.client.aio.partition import Partition
from dataplane.client.aio.plan import Micro, Mini, Plan
from dataplane.client.aio.plane import Plane, connect
from dataplane.client.aio.stream import Loader, Stream

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
