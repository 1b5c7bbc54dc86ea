"""`RankAwareSampler` where TransferQueue has it."""

from dataplane.integrations.transfer_queue.sampler import RankAwareSampler

__all__ = ["RankAwareSampler"]
