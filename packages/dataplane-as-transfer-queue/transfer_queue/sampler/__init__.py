"""`dataplane_transfer_queue.sampler` under TransferQueue's name."""

from dataplane_transfer_queue.sampler import *  # noqa: F403
