"""The functions of `dataplane_transfer_queue` under TransferQueue's name."""

from dataplane_transfer_queue import *  # noqa: F403
