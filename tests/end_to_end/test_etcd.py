"""The roster in a real etcd: any peer may die, the one that runs the authority too."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dataplane import Plane
from tests.end_to_end.conftest import PLANE, free_addresses, until
from tests.end_to_end.test_attacks_peers import Addressed, in_sync
from tests.end_to_end.test_succession import check, put, rows

pytestmark = pytest.mark.needs("etcd")

GO_ON_S = 15.0
"""Generous: five seconds are what it takes on a machine that is not busy with other tests."""


class Etcd:
    """A server of its own, which can be stopped and started with what it kept."""

    def __init__(self, folder: Path) -> None:
        client, peer = (a.replace("tcp://", "http://") for a in free_addresses(2))
        self.server = client.removeprefix("http://")
        self._log = folder / "etcd.log"
        self._command = ["etcd", "--name", "e", "--data-dir", str(folder / "etcd")]
        self._command += ["--listen-client-urls", client, "--advertise-client-urls", client]
        self._command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        self._command += ["--initial-cluster", f"e={peer}"]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()


class Kept(Addressed):
    """Peers whose roster etcd keeps."""

    server = ""

    def start_all(self, names: str) -> None:
        self.launch(names)
        for name in names:
            command = [sys.executable, "-m", "dataplane", "peer", "--name", name]
            command += ["--run", PLANE, "--arena", "64MiB", "--listen", self.addresses[name]]
            command += ["--seeds", ",".join(self.addresses.values())]
            self._run(name, [*command, "--roster", f"etcd://{self.server}"])
        for name in names:
            self._await(name)

    def terms(self) -> int:
        return sum(self.log(name).count("is now the roster keeper") for name in self.peers)

    def authority(self) -> str:
        """Who opened the office last."""
        found = {
            match[1]: name
            for name in self.peers
            for match in re.finditer(r"^(\S+ \S+) .*is now the roster keeper", self.log(name), re.M)
        }
        return found[max(found)] if found else ""


@pytest.fixture
def etcd(run_dir: Path) -> Iterator[Etcd]:
    made = Etcd(run_dir)
    made.start()
    yield made
    made.stop()


@pytest.fixture
def hosts(run_dir: Path, etcd: Etcd) -> Iterator[Kept]:
    running = Kept(run_dir)
    running.server = etcd.server
    yield running
    running.stop()


@pytest.fixture
def planes(hosts: Kept) -> Iterator[dict[str, Plane]]:
    hosts.start_all("abc")
    found = {name: hosts.connect(name) for name in "abc"}
    until(lambda: len(found["a"].stats()["peers"]) == 3, "all are members")
    in_sync(found["a"])
    yield found
    for plane in found.values():
        plane.close()


def test_the_authoritys_host_may_die_under_load(hosts: Kept, planes: dict[str, Plane]) -> None:
    assert all(len(planes[n].stats()["partitions"]) == 0 for n in "abc")
    assert all(plane.stats()["shards"] for plane in planes.values())
    dead = hosts.authority()
    one, other = sorted(set("abc") - {dead})
    part = planes[one].partition("p", stages={"s": ["x"]}, replicas=2)
    for name in "abc":
        put(planes[name].partition("p"), name)
    begun = threading.Event()

    def produce() -> None:
        mine = planes[other].partition("p")
        for number in range(10, 60):
            mine.put({"x": [np.full(5000, number, np.int32)]}, key=[f"{other}{number}"])
            if number == 20:
                begun.set()

    producer = threading.Thread(target=produce)
    producer.start()
    assert begun.wait(20)
    hosts.kill(dead)
    died = time.monotonic()
    first = part.claim("s", rows=30, timeout=GO_ON_S)
    assert time.monotonic() - died < GO_ON_S
    check(first)
    producer.join(60)
    assert not producer.is_alive()
    rest = part.claim("s", rows=50, timeout=GO_ON_S)
    check(rest)
    wanted = [key for name in "abc" for key in rows(name)["key"]]
    wanted += [f"{other}{number}" for number in range(10, 60)]
    assert sorted([*first.keys, *rest.keys]) == sorted(wanted)
    assert hosts.authority() in (one, other)
    assert len(planes[one].stats()["roster"]["members"]) == 2


def test_while_etcd_is_away_all_goes_on_and_afterwards_peers_are_replaced(
    hosts: Kept, planes: dict[str, Plane], etcd: Etcd
) -> None:
    part = planes["a"].partition("p", stages={"s": ["x"]}, replicas=2)
    put(planes["b"].partition("p"), "b")
    etcd.stop()
    before = hosts.authority()
    until(lambda: "authority no more" in hosts.log(before), "the authority gave up", 20)
    put(planes["c"].partition("p"), "c")
    batch = part.claim("s", rows=20, timeout=GO_ON_S)
    check(batch)
    batch.release()
    terms = hosts.terms()
    etcd.start()
    until(lambda: hosts.terms() > terms, "somebody keeps the roster again")
    hosts.kill("c")
    left = planes["b"].partition("p").claim("s", rows=20, timeout=2 * GO_ON_S)
    check(left)


def test_the_authority_itself_may_leave(hosts: Kept, planes: dict[str, Plane]) -> None:
    leaver = hosts.authority()
    put(planes[leaver].partition("p", stages={"s": ["x"]}), "p")
    hosts.peers[leaver].terminate()
    assert hosts.peers[leaver].wait(70) == 0, hosts.log(leaver)
    (one, other) = sorted(set("abc") - {leaver})
    check(planes[one].partition("p").claim("s", rows=10, timeout=GO_ON_S))
    until(lambda: hosts.authority() in (one, other), "another keeps the roster")
