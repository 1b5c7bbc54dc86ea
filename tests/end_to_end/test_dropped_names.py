"""Names that were dropped before anybody put them: refused afterwards, and forgotten one day."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

import dataplane
from tests.end_to_end.conftest import Cluster

LIMIT = 5_000
FORGETFUL = f"""
import sys
from dataplane.metadata.tables.remembered import Tombstones
Tombstones.__init__.__defaults__ = ({LIMIT},)
from dataplane.cli import main
sys.exit(main(sys.argv[1:]))
"""


class Forgetful(Cluster):
    """Peers that remember fewer drops."""

    def spawn(self, name: str, command: list[str]) -> None:
        assert command[1:3] == ["-m", "dataplane"]
        super().spawn(name, [sys.executable, "-c", FORGETFUL, *command[3:]])


@pytest.fixture
def planes(run_dir: object) -> Iterator[dict[str, dataplane.Plane]]:
    running = Forgetful(run_dir)  # type: ignore[arg-type]
    running.start("a", "b", arena="32MiB")
    with running.connect("a") as a, running.connect("b") as b:
        yield {"a": a, "b": b}
    running.stop()


def test_drops_of_names_that_nobody_puts_take_bounded_memory(
    planes: dict[str, dataplane.Plane],
) -> None:
    part = planes["a"].partition("p", free="drop")
    far = planes["b"].partition("p")
    far.put({"x": [7]}, key=["stays"])
    for turn in range(6):
        part.drop(keys=[f"{turn}-{number}" for number in range(LIMIT)])
    assert part.stats()["tombstones"] == LIMIT
    assert part.stats()["tombstones_forgotten"] == 5 * LIMIT
    with pytest.raises(dataplane.RowsDropped):
        far.put({"x": [1]}, key=[f"5-{LIMIT - 1}"])
    far.put({"x": [8]}, key=["0-0"])
    assert list(part.get(keys=["0-0", "stays"])["x"]) == [8, 7]
