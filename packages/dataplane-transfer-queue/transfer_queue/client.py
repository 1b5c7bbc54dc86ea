"""`dataplane.integrations.transfer_queue.client` under TransferQueue's name."""

from dataplane.integrations.transfer_queue.client import *  # noqa: F403
