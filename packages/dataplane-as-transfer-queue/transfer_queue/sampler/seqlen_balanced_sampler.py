"""`SeqlenBalancedSampler` and its balancing function under their names in TransferQueue."""

from dataplane_transfer_queue.sampler import (
    SeqlenBalancedSampler,
    get_seqlen_balanced_partitions,
)

__all__ = ["SeqlenBalancedSampler", "get_seqlen_balanced_partitions"]
