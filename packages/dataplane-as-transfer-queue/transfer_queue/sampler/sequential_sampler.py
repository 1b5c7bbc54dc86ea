"""`SequentialSampler` under its name in TransferQueue."""

from dataplane_transfer_queue.sampler import SequentialSampler

__all__ = ["SequentialSampler"]
