"""Peers with --bulk-tls: values between them, with peers that have it not, and what is told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dataplane
from dataplane.errors import TransportMissing
from tests.end_to_end.conftest import PLANE, Cluster

ROOT = Path(__file__).parents[2]
THEIRS = ROOT / "tests" / "transport" / "third_party"
SIZES = (1, 4096, 65_537, 1 << 20, (8 << 20) + 1)


def put(plane: dataplane.Plane, name: str) -> list[np.ndarray]:
    values = [np.random.default_rng(n).integers(0, 256, n, np.uint8) for n in SIZES]
    plane.partition(name, stages={"s": ["x"]}, free="acked").put({"x": values})
    return values


def check(plane: dataplane.Plane, name: str, values: list[np.ndarray]) -> None:
    with plane.partition(name).claim("s", rows=len(values), timeout=30) as batch:
        got = sorted(batch["x"], key=len)
        assert all(np.array_equal(a, b) for a, b in zip(got, values, strict=True))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dataplane", *arguments, "--run", PLANE]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)


def bulk(plane: dataplane.Plane) -> dict[str, Any]:
    figures: dict[str, Any] = plane.stats()["bulk"]
    return figures


def test_values_of_all_sizes_arrive_and_everybody_says_how(cluster: Cluster) -> None:
    cluster.start("a", "b", tls=("a", "b"))
    with cluster.connect("a") as a, cluster.connect("b") as b:
        check(b, "to b", put(a, "to b"))
        check(a, "to a", put(b, "to a"))
        assert bulk(a)["tls"] is True and bulk(a)["transport"] == "tcp"
        assert bulk(b)["bytes_in_over"]["tcp"] >= SIZES[-1]
    report = json.loads(run("probe", "--json", "--require", "tcp").stdout)
    for peer in report["peers"]:
        (way,) = peer["from"]
        assert peer["tls"] and way["tls"] and way["tried"]["tcp"]["exact"]
    shown = run("probe").stdout
    assert shown.count("using tcp+tls") == 2 and "from b: tcp+tls, because" in shown
    (shown_run,) = json.loads(run("status", "--json").stdout)["runs"]
    assert '"tls": true' in json.dumps(shown_run)


def test_in_a_mixed_plane_only_the_peer_with_tls_insists_on_it(cluster: Cluster) -> None:
    cluster.start("a", "b", tls=("a",))
    with cluster.connect("a") as a, cluster.connect("b") as b:
        check(b, "to b", put(a, "to b"))
        put(b, "to a")
        with (
            pytest.raises(TransportMissing, match="start every peer of the run with --bulk-tls"),
            a.partition("to a").claim("s", rows=len(SIZES), timeout=20) as batch,
        ):
            list(batch["x"])
        assert (bulk(a)["tls"], bulk(b)["tls"]) == (True, False)


def test_other_engines_are_left_out_and_that_is_said(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = [str(THEIRS), *(path for path in sys.path if path)]
    monkeypatch.setenv("PYTHONPATH", ":".join(packages))
    monkeypatch.setenv("DATAPLANE_BULK_TLS", "1")
    monkeypatch.setenv("DATAPLANE_TRANSPORT", "off:post,stranger,twin_ipc")
    cluster.start("a", "b")
    with cluster.connect("a") as a, cluster.connect("b") as b:
        check(b, "to b", put(a, "to b"))
        paths = bulk(b)["paths"]
        assert (paths["runs"], paths["tls"]) == ("tcp", True)
        assert paths["missing"] == "--bulk-tls is set, and shelf cannot encrypt values"
    assert "using only tcp, because --bulk-tls is set" in cluster.log("b")


def test_a_required_engine_and_tls_exclude_each_other(cluster: Cluster) -> None:
    refused = run("peer", "--name", "a", "--bulk-tls", "--transport", "required:nixl")
    assert refused.returncode == 2
    assert "transport nixl cannot encrypt values" in refused.stderr
