"""`dataplane.integrations.transfer_queue.metadata` under TransferQueue's name."""

from dataplane.integrations.transfer_queue.metadata import *  # noqa: F403
