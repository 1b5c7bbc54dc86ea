"""`StreamingDataLoader` under its name in TransferQueue."""

from dataplane_transfer_queue.streaming import StreamingDataLoader

__all__ = ["StreamingDataLoader"]
