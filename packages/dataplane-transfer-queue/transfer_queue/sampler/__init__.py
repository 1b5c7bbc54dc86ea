"""`dataplane.integrations.transfer_queue.sampler` under TransferQueue's name."""

from dataplane.integrations.transfer_queue.sampler import *  # noqa: F403
