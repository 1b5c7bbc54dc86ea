"""The functions of `dataplane.integrations.transfer_queue` under TransferQueue's name."""

from dataplane.integrations.transfer_queue import *  # noqa: F403
