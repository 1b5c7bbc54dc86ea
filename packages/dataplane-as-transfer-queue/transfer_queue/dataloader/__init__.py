"""The module `dataplane_transfer_queue.streaming` under its name in TransferQueue."""

from dataplane_transfer_queue.streaming import *  # noqa: F403
