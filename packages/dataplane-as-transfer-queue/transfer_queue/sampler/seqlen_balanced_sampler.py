"""`SeqlenBalancedSampler` where TransferQueue has it, and how it balances."""

from dataplane_transfer_queue.sampler import (
    SeqlenBalancedSampler,
    get_seqlen_balanced_partitions,
)

__all__ = ["SeqlenBalancedSampler", "get_seqlen_balanced_partitions"]
