"""`StreamingDataset` and its functions where TransferQueue has them."""

from dataplane_transfer_queue.streaming import (
    StreamingDataset,
    chunk_batch_fn,
    default_fetch_batch_fn,
)

__all__ = ["StreamingDataset", "chunk_batch_fn", "default_fetch_batch_fn"]
