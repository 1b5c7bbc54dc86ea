"""`GRPOGroupNSampler` under its name in TransferQueue."""

from dataplane_transfer_queue.sampler import GRPOGroupNSampler

__all__ = ["GRPOGroupNSampler"]
