"""For those who write a transport: a suite that it must pass, and hosts to try it on.

Needs pytest and pytest-asyncio. Nothing of the library or the peer imports this.

    from dataplane.testing import TransportConformance

    class TestMine(TransportConformance):
        transport = "mine"  # its name in the entry point group `dataplane.transports`
"""

from __future__ import annotations

from dataplane.testing.conformance import TransportConformance
from dataplane.testing.hosts import Host, hosts

__all__ = ["Host", "TransportConformance", "hosts"]
