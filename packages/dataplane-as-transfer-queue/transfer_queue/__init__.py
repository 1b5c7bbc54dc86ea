"""TransferQueue's module: `dataplane_transfer_queue` under this name."""

from dataplane_transfer_queue import *  # noqa: F403
from dataplane_transfer_queue import __all__, __version__

__all__ = [*__all__, "__version__"]
