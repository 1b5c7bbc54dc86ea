"""`BaseSampler` under its name in TransferQueue."""

from dataplane_transfer_queue.sampler import BaseSampler

__all__ = ["BaseSampler"]
