"""The module `dataplane_transfer_queue.client` under its name in TransferQueue."""

from dataplane_transfer_queue.client import *  # noqa: F403
