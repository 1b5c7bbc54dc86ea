"""`GRPOGroupNSampler` where TransferQueue has it."""

from dataplane_transfer_queue.sampler import GRPOGroupNSampler

__all__ = ["GRPOGroupNSampler"]
