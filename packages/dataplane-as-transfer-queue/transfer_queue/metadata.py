"""`dataplane_transfer_queue.metadata` under TransferQueue's name."""

from dataplane_transfer_queue.metadata import *  # noqa: F403
