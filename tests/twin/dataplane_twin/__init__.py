"""A kind of device for tests: host memory that behaves like a GPU's, where there is none.

Peers, clients and bulk workers find it by the entry point in the folder beside this one, which
`tests/conftest.py` puts where they look for packages.
"""

from __future__ import annotations

from dataplane.transport.engines.communicators import RANKS
from dataplane_twin.device import TwinArray, TwinDevice
from dataplane_twin.ranks import HostRanks

__all__ = ["HostRanks", "TwinArray", "TwinDevice"]

RANKS[TwinDevice.kind] = lambda device: HostRanks()
