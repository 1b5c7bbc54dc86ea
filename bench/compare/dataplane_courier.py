"""This project in the comparison: a peer a host; the writer puts, the reader claims."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from bench.compare.batch import FIELDS, RAGGED, Array, Columns
from bench.compare.courier import Contender, Courier, Site
from bench.planes.base import Service
from bench.ports import free_ports
from bench.processes import leashed

_ARENA_BATCHES = 4  # so many of the largest batch fit into an arena
_SMALLEST_ARENA = 256 << 20
_CLAIM_S = 60.0


class Dataplane(Contender):
    """One peer a host, in the settings that it comes with."""

    name = "dataplane"
    packages = ("dataplane-rl", "numpy")
    two_hosts = "two peers with an arena each; bytes cross over TCP on loopback"

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self._plane = f"compare-{site.parent}"
        self._addresses = [f"tcp://127.0.0.1:{port}" for port in free_ports(site.hosts)]
        self._up: list[Any] = []

    def settings(self) -> dict[str, Any]:
        return {"arena_bytes": self._arena_bytes(), "peers": self.site.hosts, "token": None}

    def _arena_bytes(self) -> int:
        return max(_SMALLEST_ARENA, _ARENA_BATCHES * self.site.largest)

    def services(self) -> list[Service]:
        return [self._peer(host) for host in range(self.site.hosts)]

    def _peer(self, host: int) -> Service:
        argv = [sys.executable, "-m", "dataplane", "peer", "--run", self._plane]
        argv += ["--name", f"host{host}", "--listen", self._addresses[host]]
        argv += ["--seeds", ",".join(self._addresses), "--arena", str(self._arena_bytes())]
        env = {"DATAPLANE_RUN_DIR": self.site.folder}
        return Service(f"peer-host{host}", leashed(argv), env)

    def reachable(self, ready: Mapping[str, dict[str, Any]]) -> bool:
        from dataplane.errors import ConnectError

        while len(self._up) < self.site.hosts:
            try:
                _connect(self.address(len(self._up))).close()
            except ConnectError:
                return False
            self._up.append(True)
        return True

    def address(self, host: int) -> dict[str, Any]:
        return {"peer": f"host{host}", "plane": self._plane, "run_dir": self.site.folder}

    @classmethod
    def courier(cls, role: str, address: dict[str, Any]) -> Courier:
        return DataplaneCourier(address)


def _connect(address: dict[str, Any]) -> Any:
    import dataplane

    os.environ["DATAPLANE_RUN_DIR"] = address["run_dir"]
    return dataplane.connect(address["peer"], run=address["plane"])


class DataplaneCourier(Courier):
    """A client of the peer of its host."""

    def __init__(self, address: dict[str, Any]) -> None:
        self._plane = _connect(address)
        self._part = self._plane.partition("compare", stages={"read": list(FIELDS)}, free="acked")
        self._columns: Columns = {}
        self._rows = 0

    def load(self, columns: Columns) -> None:
        self._columns = columns

    def put(self) -> None:
        self._part.put(self._columns)

    def expect(self, rows: int, puts: int) -> None:
        self._rows = rows

    def get(self) -> Any:
        return self._part.claim("read", rows=self._rows, timeout=_CLAIM_S)

    def buffers(self, held: Any) -> Iterator[Array]:
        for name in FIELDS:
            column = held.numpy(name, view=True)
            if isinstance(column, list):
                yield from column
            else:  # small values of rows lie row by row, at equal distances
                yield np.ascontiguousarray(column)

    def rows(self, held: Any) -> Columns:
        return {name: list(held[name]) for name in FIELDS}

    def tensordict(self, held: Any) -> Any:
        from tensordict import TensorDict

        layouts = {name: "jagged" if name in RAGGED else "auto" for name in FIELDS}
        columns = {name: held.torch(name, layout=layout) for name, layout in layouts.items()}
        return TensorDict(columns, batch_size=[len(held)])

    def settle(self, held: Any) -> None:
        held.ack()

    def free(self, held: Any) -> None:
        if held.state == "leased":
            held.ack()

    def forget(self) -> None:
        """Acked rows are freed: the writer holds nothing of them."""

    def close(self) -> None:
        self._plane.close()
