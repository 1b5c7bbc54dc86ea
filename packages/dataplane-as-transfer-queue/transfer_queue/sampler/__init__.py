"""The module `dataplane_transfer_queue.sampler` under its name in TransferQueue."""

from dataplane_transfer_queue.sampler import *  # noqa: F403
