"""The suite that ships in `dataplane.testing`, for TCP inside TLS."""

from __future__ import annotations

from dataplane.testing import TransportConformance


class TestTcpInsideTls(TransportConformance):
    transport = "tcp"
    tls = True
