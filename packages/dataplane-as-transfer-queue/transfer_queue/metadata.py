"""The module `dataplane_transfer_queue.metadata` under its name in TransferQueue."""

from dataplane_transfer_queue.metadata import *  # noqa: F403
