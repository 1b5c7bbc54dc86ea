"""Two "hosts" in one test, see `dataplane.testing`."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from dataplane.testing import hosts
from dataplane.testing.hosts import KEY, StartHost

__all__ = ["KEY"]


@pytest.fixture
async def start_host() -> AsyncIterator[StartHost]:
    async with hosts() as start:
        yield start
