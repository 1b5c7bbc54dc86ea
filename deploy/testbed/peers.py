"""Peers on the hosts of a network, one each, with a cluster token, for as long as a body runs."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.links import Network, address
from bench.peers import token_file
from bench.processes import leashed
from dataplane import Plane
from tests.cluster import Cluster, environment, in_sync

PORT = 7101
ARENA = "64MiB"


class Peers(Cluster):
    """Peer `host0` keeps the roster. Clients reach them through files, whatever is cut."""

    def __init__(self, network: Network, run_dir: Path) -> None:
        super().__init__(run_dir, "testbed", ARENA)
        self._hosts = {name(host): host for host in range(network.hosts)}
        self._network = network

    def seed(self, *names: str) -> None:
        self.seeds = [f"tcp://{address(self._hosts[n])}:{PORT}" for n in names]
        self.addresses = dict(zip(names, self.seeds, strict=True))

    def spawn(self, name: str, command: list[str]) -> None:
        argv = self._network.wrap(self._hosts[name], leashed(command))
        with (self.run_dir / f"{name}.log").open("wb") as log:
            self.peers[name] = subprocess.Popen(argv, stdout=log, stderr=log)

    def of(self, host: int) -> Plane:
        """A client of this host's peer."""
        return self.connect(name(host))


def name(host: int) -> str:
    return f"host{host}"


@contextmanager
def peers(network: Network) -> Iterator[Peers]:
    """A peer on every host, with every backup in sync."""
    with tempfile.TemporaryDirectory(prefix="dp-") as name_of:
        folder = Path(name_of)
        variables = {"DATAPLANE_RUN_DIR": name_of, "DATAPLANE_TOKEN_FILE": str(token_file(folder))}
        running = Peers(network, folder)
        with environment(**variables):
            try:
                running.start_all(*map(name, range(network.hosts)))
                with running.of(0) as plane:
                    in_sync(plane)
                yield running
            finally:
                running.end()
