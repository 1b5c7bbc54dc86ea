"""The functions of `dataplane_transfer_queue` under their names in TransferQueue."""

from dataplane_transfer_queue import *  # noqa: F403
