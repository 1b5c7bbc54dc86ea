"""`StreamingDataLoader` where TransferQueue has it."""

from dataplane.integrations.transfer_queue.streaming import StreamingDataLoader

__all__ = ["StreamingDataLoader"]
