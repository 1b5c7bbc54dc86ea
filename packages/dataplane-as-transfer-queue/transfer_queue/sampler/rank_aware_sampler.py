"""`RankAwareSampler` where TransferQueue has it."""

from dataplane_transfer_queue.sampler import RankAwareSampler

__all__ = ["RankAwareSampler"]
