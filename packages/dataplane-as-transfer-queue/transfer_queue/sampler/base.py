"""`BaseSampler` where TransferQueue has it."""

from dataplane_transfer_queue.sampler import BaseSampler

__all__ = ["BaseSampler"]
