"""The suite that ships in `dataplane.testing`, for TCP inside TLS."""

from __future__ import annotations

import pytest

from dataplane.testing import TransportConformance

pytest.importorskip("cryptography")


class TestTcpInsideTls(TransportConformance):
    transport = "tcp"
    tls = True
