"""Large log records on a slow link between two hosts."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataplane.metadata.roster.roster import Roster
from tests.chaos.hosts import Hosts
from tests.chaos.network import FAIR, Weather

NAMES = "ab"
ROWS, KEY_CHARS = 32_768, 500
"""One group, whose record is 16 MB: the names of its rows are in the shard."""
SLOW = Weather(bytes_per_s=6e6, queued=64)
"""A record takes 2.7 s alone. What is queued on the link takes 0.1 s, as on switches."""
CALL_S = 120.0


@pytest.fixture
def hosts(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    monkeypatch.setenv("DATAPLANE_TOKEN_FILE", "")
    running = Hosts(run_dir, "--arena", "1GiB")
    try:
        running.start_all(*NAMES)
    except PermissionError as exc:
        running.switch.close()
        pytest.skip(str(exc))
    yield running
    running.stop()


def _roster(hosts: Hosts, name: str) -> Any:
    return hosts.planes[name].stats()["roster"]


@pytest.mark.needs("ip")
@pytest.mark.timeout(300)
def test_records_that_take_seconds_on_their_way_leave_the_backups_in_sync(hosts: Hosts) -> None:
    """Each host puts one group at its own shard and one at the other's. A backup that was asked
    behind such records whether it still confirms its primary was removed from the in-sync set,
    which refused the puts in flight, and these came again in whole."""
    homes = Roster.from_seeds(list(hosts.seeds))
    numbers = [f"p{number}" for number in range(100)]
    shards = [
        next(name for name in numbers if homes.home(name) == hosts.addresses[primary])
        for primary in NAMES
    ]

    def put(host: str, shard: str) -> int:
        part = hosts.planes[host].partition(shard, {"s": ["x"]}, free="drop")
        keys = [f"{host}{row}".ljust(KEY_CHARS, ".") for row in range(ROWS)]
        return len(part.put({"x": np.arange(ROWS)}, key=keys, group=host, timeout=CALL_S))

    before = _roster(hosts, "a")
    assert not before["unprotected"]
    try:
        for name in NAMES:
            hosts.switch.set(hosts.address(name), SLOW)
        with hosts.logs_of_a_failure(), ThreadPoolExecutor(4) as pool:
            puts = [pool.submit(put, host, shard) for host in NAMES for shard in shards]
            assert [one.result() for one in puts] == [ROWS] * 4
            for name in NAMES:
                assert _roster(hosts, name)["epoch"] == before["epoch"]
                assert "removed from the in-sync set" not in hosts.log(name)
    finally:
        for name in NAMES:
            hosts.switch.set(hosts.address(name), FAIR)
