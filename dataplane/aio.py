"""The public surface with `await`: `async with dataplane.aio.connect() as plane: …`."""

from dataplane.client.aio import Plane, connect
from dataplane.client.aio_batch import Batch, Rows
from dataplane.client.aio_partition import Partition
from dataplane.client.stream import AsyncStream as Stream

__all__ = ["Batch", "Partition", "Plane", "Rows", "Stream", "connect"]
