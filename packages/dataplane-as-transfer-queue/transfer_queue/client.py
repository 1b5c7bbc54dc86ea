"""`dataplane_transfer_queue.client` under TransferQueue's name."""

from dataplane_transfer_queue.client import *  # noqa: F403
