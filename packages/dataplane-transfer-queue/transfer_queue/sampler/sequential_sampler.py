"""`SequentialSampler` where TransferQueue has it."""

from dataplane.integrations.transfer_queue.sampler import SequentialSampler

__all__ = ["SequentialSampler"]
