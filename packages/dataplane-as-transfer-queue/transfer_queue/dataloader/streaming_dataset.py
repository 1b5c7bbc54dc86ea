"""`StreamingDataset` and its functions under their names in TransferQueue."""

from dataplane_transfer_queue.streaming import (
    StreamingDataset,
    chunk_batch_fn,
    default_fetch_batch_fn,
)

__all__ = ["StreamingDataset", "chunk_batch_fn", "default_fetch_batch_fn"]
