"""`StreamingDataLoader` where TransferQueue has it."""

from dataplane_transfer_queue.streaming import StreamingDataLoader

__all__ = ["StreamingDataLoader"]
