"""NIXL over its CPU paths, in real bulk workers. `make test-ucx` installs it and runs this."""

from __future__ import annotations

import pytest

from dataplane.testing import TransportConformance
from dataplane.transport import registry

pytestmark = pytest.mark.skipif(bool(registry.missing("nixl")), reason=registry.missing("nixl"))


class TestNixl(TransportConformance):
    transport = "nixl"


class TestNixlBetweenDevices(TransportConformance):
    """Device arenas of the twin, which NIXL takes for what they are: host memory."""

    transport = "nixl"
    device = True
