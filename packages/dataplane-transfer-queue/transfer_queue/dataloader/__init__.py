"""`dataplane.integrations.transfer_queue.streaming` under TransferQueue's name."""

from dataplane.integrations.transfer_queue.streaming import *  # noqa: F403
