"""Peers on a real Ray cluster of several raylets, each of which stands for a host."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.conftest import line, until
from tests.processes import all_ending, ending

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None,
        reason="ray is not installed: `make test-ray` does it",
    ),
    pytest.mark.timeout(300),
]

HERE = Path(__file__).parent
RAYLETS = 2
"""... and one more later."""


@dataclass
class Ray:
    address: str
    process: subprocess.Popen[str]
    environment: dict[str, str]

    drivers: list[subprocess.Popen[str]] = field(default_factory=list)

    def driver(self, what: str) -> subprocess.Popen[str]:
        self.drivers.append(python("ray_driver.py", self.environment, what, self.address))
        return self.drivers[-1]

    def add_a_node(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        assert line(self.process) == "added"


def python(script: str, environment: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(HERE / script), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


@pytest.fixture(scope="module")
def cluster() -> Iterator[Ray]:
    # Ray's agents may still write their last line.
    with tempfile.TemporaryDirectory(prefix="dp-", ignore_cleanup_errors=True) as folder:
        settings = {
            "DATAPLANE_RUN_DIR": f"{folder}/run",
            "DATAPLANE_LINGER": "2",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "disabled",  # or it would leave a token in the user's home
            "PYTHONPATH": os.pathsep.join(
                filter(None, [str(HERE.parents[1]), os.environ.get("PYTHONPATH")])
            ),
        }
        environment = {name: value for name, value in os.environ.items() if "DATAPLANE" not in name}
        environment |= settings
        process = python("ray_cluster.py", environment, folder, str(RAYLETS))
        with ending(process):
            running = Ray(line(process), process, environment)
            with all_ending(running.drivers):
                yield running
            process.communicate(timeout=100)


def hear(driver: subprocess.Popen[str], start: str) -> str:
    """The next line that begins so. Ray writes news of its workers among them."""
    while not (said := line(driver)).startswith(start):
        pass
    return said


def told(driver: subprocess.Popen[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(hear(driver, "{"))
    return found


def test_every_node_has_a_peer_that_outlives_its_starter_and_refs_travel_by_ray(
    cluster: Ray,
) -> None:
    driver = cluster.driver("whole")
    hear(driver, "add a node")
    cluster.add_a_node()
    assert driver.stdin is not None
    driver.stdin.write("\n")
    driver.stdin.flush()
    found = told(driver)
    driver.communicate(timeout=60)
    assert driver.returncode == 0
    assert len({peer for peer, _ in found["places"]}) == RAYLETS
    assert all(peer == of_node for peer, of_node in found["places"])
    assert found["read"] == [list(range(RAYLETS))] * (RAYLETS + 1)
    assert found["killed"] == found["members"] == RAYLETS
    assert found["before"] == found["after"] and found["encrypted"]
    assert (found["nodes"], found["left"]) == (RAYLETS + 1, {})


def test_peers_of_a_driver_that_was_killed_leave(cluster: Ray) -> None:
    driver = cluster.driver("abandon")
    pids = told(driver)["pids"]
    assert len(pids) >= RAYLETS
    driver.kill()
    driver.communicate()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids.values()), "they left", 60)


def test_a_queue_that_actors_of_several_nodes_begin_at_once_is_one(cluster: Ray) -> None:
    driver = cluster.driver("queue")
    found = told(driver)
    driver.communicate(timeout=60)
    assert driver.returncode == 0
    names = [f"k{number}" for number in range(found["peers"])]
    assert found["peers"] >= RAYLETS
    assert found["got"] == [{name: name for name in names}] * found["peers"]
    assert found["child"] == names and found["left"] == {}
