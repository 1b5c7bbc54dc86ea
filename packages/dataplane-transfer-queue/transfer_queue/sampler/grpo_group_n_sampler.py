"""`GRPOGroupNSampler` where TransferQueue has it."""

from dataplane.integrations.transfer_queue.sampler import GRPOGroupNSampler

__all__ = ["GRPOGroupNSampler"]
