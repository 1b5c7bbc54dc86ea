"""`SequentialSampler` where TransferQueue has it."""

from dataplane_transfer_queue.sampler import SequentialSampler

__all__ = ["SequentialSampler"]
