"""The test suite that every transport must pass, and hosts to run it on, for authors of transports.

Needs pytest and pytest-asyncio. Neither the library nor the peer imports this.

    from dataplane.testing import TransportConformance

    class TestMine(TransportConformance):
        transport = "mine"  # its name in the entry point group `dataplane.transports`
"""

from __future__ import annotations

from dataplane.testing.conformance import TransportConformance
from dataplane.testing.hosts import Host, hosts

__all__ = ["Host", "TransportConformance", "hosts"]
