"""`dataplane_transfer_queue.streaming` under TransferQueue's name."""

from dataplane_transfer_queue.streaming import *  # noqa: F403
