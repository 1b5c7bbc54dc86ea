"""`RankAwareSampler` under its name in TransferQueue."""

from dataplane_transfer_queue.sampler import RankAwareSampler

__all__ = ["RankAwareSampler"]
