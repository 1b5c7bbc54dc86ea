"""Peers that run another transport than TCP, chosen, required or off; `dataplane probe`."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dataplane
from dataplane.errors import TransportMissing
from tests.end_to_end.conftest import PLANE, Cluster, peer_command, until
from tests.end_to_end.scrape import free_address, scrape

ROOT = Path(__file__).parents[2]
THEIRS = ROOT / "tests" / "transport" / "third_party"
MIB = 1 << 20


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another package's transports, found by their entry points."""
    monkeypatch.setenv("PYTHONPATH", f"{THEIRS}:{ROOT}")


def move(here: dataplane.Plane, there: dataplane.Plane, fill: int) -> None:
    """Two values of 1 MiB from one host to the other, compared."""
    name = f"p{fill}"
    part = here.partition(name, stages={"s": ["x"]}, free="acked")
    part.put({"x": np.full((2, MIB), fill, np.uint8)})
    with there.partition(name).claim("s", rows=2, timeout=30) as batch:
        assert np.all(batch.numpy("x") == fill)


def bulk(plane: dataplane.Plane) -> dict[str, Any]:
    figures: dict[str, Any] = plane.stats()["bulk"]
    return figures


def probe(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dataplane", "probe", "--run", PLANE, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)


def test_auto_checks_a_transport_and_says_what_it_uses_and_why(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATAPLANE_TRANSPORT", "off:post,stranger")
    cluster.start("a", "b")
    with cluster.connect("a") as here, cluster.connect("b") as there:
        move(here, there, 1)
        until(lambda: bool(bulk(there)["paths"]["peers"]), "the transport was checked")
        paths = bulk(there)["paths"]
        assert (paths["requested"], paths["runs"]) == ("off:post,stranger", "shelf")
        (path,) = paths["peers"].values()
        assert (path["transport"], path["why"]) == ("shelf", "self-test passed")
        assert set(path["tried"]) == {"shelf"}, "it was compared with TCP"
        move(here, there, 2)
        over = bulk(there)["bytes_in_over"]
        assert over["tcp"] >= 2 * MIB and over["shelf"] >= 2 * MIB
    assert "reading values over shelf" in cluster.log("b")


def test_auto_reads_over_tcp_where_the_owner_does_not_run_the_transport(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATAPLANE_TRANSPORT", "off:post,stranger")
    cluster.start("a", "b")
    monkeypatch.setenv("DATAPLANE_TRANSPORT", "off")
    cluster.restart("a")
    with cluster.connect("a") as here, cluster.connect("b") as there:
        move(here, there, 1)
        until(lambda: bool(bulk(there)["paths"]["peers"]), "the transport was checked")
        move(here, there, 2)
        (path,) = bulk(there)["paths"]["peers"].values()
        assert path["why"] == "this peer runs shelf, but the other peer runs tcp"
        assert bulk(there)["bytes_in_over"] == {"tcp": 4 * MIB}


@pytest.mark.parametrize("name", ["shelf", "post"])
def test_a_required_transport_carries_every_value(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("DATAPLANE_TRANSPORT", f"required:{name}")
    metrics = free_address()
    cluster.start("a", "b", metrics={"b": metrics})
    with cluster.connect("a") as here, cluster.connect("b") as there:
        move(here, there, 1)
        move(here, there, 2)
        shown = scrape(metrics)
        (path,) = bulk(there)["paths"]["peers"].values()
        assert path["transport"] == name
        assert bulk(there)["bytes_in_over"][name] >= 4 * MIB
    asked = f"required:{name}"
    assert shown.value("dataplane_transport_peers", requested=asked, transport=name) == 1
    by_stage = "dataplane_stage_transport_bytes_total"
    assert shown.value(by_stage, stage="s", transport=name) >= 4 * MIB
    everywhere = probe("--require", name, "--json")
    assert everywhere.returncode == 0, everywhere.stdout + everywhere.stderr
    for peer in json.loads(everywhere.stdout)["peers"]:
        assert peer["arena_bytes"] == 256 * MIB and peer["runs"] == name
        (way,) = peer["from"]
        assert way["transport"] == name and way["tried"][name]["exact"]
    elsewhere = probe("--require", "nixl")
    assert elsewhere.returncode == 1 and "required transport nixl does not work" in elsewhere.stdout


def test_a_required_transport_that_is_not_there_ends_the_peer_within_seconds(
    cluster: Cluster,
) -> None:
    for name, what in (("carrier-pigeon", "no installed package"), ("stranger", "not a subclass")):
        began = time.monotonic()
        addresses = ["tcp://127.0.0.1:1", "tcp://127.0.0.1:2"]
        command = peer_command("a", PLANE, "--listen", addresses[0], "--arena", "8MiB")
        command += ["--seeds", ",".join(addresses)]
        refused = subprocess.run(
            [*command, "--transport", f"required:{name}"],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert refused.returncode == 2 and what in refused.stderr, refused.stderr
        assert time.monotonic() - began < 30


def test_a_required_transport_that_the_owner_does_not_run_is_an_error_of_the_call(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATAPLANE_TRANSPORT", "required:shelf")
    cluster.start("a", "b")
    monkeypatch.setenv("DATAPLANE_TRANSPORT", "off")
    cluster.restart("a")
    with cluster.connect("a") as here, cluster.connect("b") as there:
        part = here.partition("p", stages={"s": ["x"]}, free="acked")
        part.put({"x": np.ones((2, MIB), np.uint8)})
        with pytest.raises(TransportMissing, match="required:shelf.*the other peer runs tcp"):
            there.partition("p").claim("s", rows=2, timeout=30)
