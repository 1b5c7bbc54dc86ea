"""`BaseSampler` where TransferQueue has it."""

from dataplane.integrations.transfer_queue.sampler import BaseSampler

__all__ = ["BaseSampler"]
