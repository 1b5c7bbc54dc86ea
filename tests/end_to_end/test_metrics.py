"""What operators see of a peer: its metrics, whether it is well, and to whom it shows them."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dataplane.errors import InvalidConfig, TokenMissing
from dataplane.launch.token import Token, new_token, read_token
from dataplane.launch.values import check_visible, parse_http
from dataplane.peer.host import MAX_SUMS, OTHER, ByLabel
from dataplane.peer.watch import metrics
from tests.end_to_end.conftest import PLANE, Cluster, free_addresses, peer_command, until
from tests.end_to_end.scrape import free_address, page, scrape

ROOT = Path(__file__).parents[2]
PEER = peer_command("a", PLANE, "--arena", "16MiB")


def test_bytes_rows_and_calls_are_counted_by_stage(cluster: Cluster) -> None:
    address = free_address()
    cluster.start("a", metrics={"a": address})
    with cluster.connect("a") as plane:
        part = plane.partition("p", stages={"reward": ["x"], "train": ["x"]})
        part.put({"x": np.zeros((4, 3000), np.uint8)})
        part.put({"x": np.zeros((1, 500), np.uint8)})
        before = scrape(address)
        with part.claim("reward", rows=3):
            during = scrape(address)
        with pytest.raises(TimeoutError):
            part.claim("train", rows=100, timeout=0.01)
        after = scrape(address)
    assert before.value("dataplane_put_rows_total") == 5
    assert before.value("dataplane_put_bytes_total") == 12_500
    assert before.value("dataplane_rows_by_stage", stage="reward", state="ready") == 5
    assert during.value("dataplane_rows_by_stage", stage="reward", state="leased") == 3
    assert during.value("dataplane_stage_rows_total", stage="reward") == 3
    assert during.value("dataplane_stage_bytes_total", stage="reward") == 9000
    assert during.value("dataplane_arena_pinned_bytes") >= 9000
    (client,) = (
        labels
        for name, labels in during.values
        if name.endswith("client_held_bytes")
        if labels[1] == ("how", "pinned")
    )
    assert during.values["dataplane_client_held_bytes", client] >= 9000
    assert after.value("dataplane_rows_by_stage", stage="reward", state="acked") == 3
    assert after.value("dataplane_rows_by_stage", stage="train", state="ready") == 5
    assert after.value("dataplane_call_seconds_count", call="put") == 2
    assert after.value("dataplane_call_seconds_count", call="claim") == 2
    assert after.value("dataplane_call_failures_total", error="ClaimTimeout") == 1


def test_bytes_of_other_hosts_and_the_roster_are_shown(cluster: Cluster) -> None:
    addresses = {"a": free_address(), "b": free_address()}
    cluster.start("a", "b", metrics=addresses)
    with cluster.connect("a") as here, cluster.connect("b") as there:
        part = here.partition("p", stages={"s": ["x"]}, free="acked")
        part.put({"x": np.zeros((2, 1 << 20), np.uint8)})
        here.partition("q", stages={}).put({"x": [np.zeros(1 << 20, np.uint8)]}, key=["k"])
        there.partition("q").get(keys=["k"])
        with there.partition("p").claim("s", rows=2, timeout=30):
            near, far = scrape(addresses["a"]), scrape(addresses["b"])
    assert far.value("dataplane_pulled_bytes_total") >= 2 << 20
    assert far.value("dataplane_stage_remote_bytes_total", stage="s") >= 2 << 20
    moved = "dataplane_transport_bytes_total"
    assert far.value(moved, transport="tcp", direction="in") >= 2 << 20
    assert near.value(moved, transport="tcp", direction="out") >= 2 << 20
    by_stage = "dataplane_stage_transport_bytes_total"
    assert far.value(by_stage, stage="s", transport="tcp") >= 2 << 20
    assert far.value(by_stage, stage="", transport="tcp") >= 1 << 20, "the read by key"
    assert far.value("dataplane_cached_bytes") >= 2 << 20
    for one in (near, far):
        assert one.value("dataplane_roster_members") == 2
        assert one.value("dataplane_ready") == 1


def test_a_peer_that_is_told_nothing_shows_nothing_and_needs_no_library(cluster: Cluster) -> None:
    without = "import sys; sys.modules['prometheus_client'] = None; from dataplane.cli import main;"
    command = [sys.executable, "-c", f"{without} sys.exit(main(sys.argv[1:]))", *PEER[3:]]
    refused = subprocess.run(
        [*command, "--metrics", free_address()], capture_output=True, text=True, check=False
    )
    assert refused.returncode == 2
    assert "pip install 'dataplane-rl[metrics]'" in refused.stderr
    cluster.spawn("a", command)
    cluster.await_up("a")
    with cluster.connect("a") as plane:
        assert plane.stats()["peer"] == "a"


def test_what_is_well_and_what_is_ready(cluster: Cluster) -> None:
    address, (seed, own) = free_address(), free_addresses(2)
    alone = ["--name", "b", "--listen", own, "--seeds", f"{seed},{own}", "--metrics", address]
    cluster.spawn("b", [*PEER, *alone])
    until(lambda: page(address, "/healthz")[0] == 200, "its loop answers")
    assert page(address, "/readyz")[0] == 503, "it waits for the first seed"
    assert scrape(address).value("dataplane_ready") == 0
    assert page(address, "/")[0] == 404
    cluster.spawn("a", [*PEER, "--listen", seed, "--seeds", f"{seed},{own}"])
    until(lambda: page(address, "/readyz")[0] == 200, "it serves clients")


def test_connections_that_ask_nothing_do_not_keep_others_out(cluster: Cluster) -> None:
    address = free_address()
    cluster.start("a", metrics={"a": address})
    host, _, port = address.rpartition(":")
    idle = [socket.create_connection((host, int(port))) for _ in range(40)]
    try:
        until(lambda: page(address, "/metrics")[0] == 200, "the idle ones were let go")
    finally:
        for one in idle:
            one.close()


def test_an_address_that_somebody_has_is_refused(run_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = subprocess.run(
            [*PEER, "--metrics", address], capture_output=True, text=True, check=False
        )
    assert done.returncode == 2
    assert f"cannot serve metrics at {address}" in done.stderr and "--metrics" in done.stderr


@pytest.fixture
def token(tmp_path: Path) -> Token:
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_text(new_token())
    return read_token(str(path))


def test_without_a_token_metrics_stay_on_loopback(token: Token) -> None:
    for text in ("0.0.0.0:9464", "node1:9464", "[::]:9464"):
        with pytest.raises(TokenMissing, match="no cluster token"):
            check_visible("metrics", parse_http(text), None)
        check_visible("metrics", parse_http(text), token)
        assert str(parse_http(text)) == text
    assert parse_http("127.0.0.1:9464").port == 9464
    assert parse_http("[::1]:9464").host == "::1"
    check_visible("metrics", parse_http("[::1]:9464"), None)


@pytest.mark.parametrize("text", ["9464", "host", "host:99999", "http://host:1"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfig, match="HOST:PORT"):
        parse_http(text)


def test_names_that_users_choose_are_labels_up_to_a_bound() -> None:
    sums = ByLabel()
    for nth in range(10 * MAX_SUMS):
        sums.add(f"stage-{nth}", 1)
    assert len(sums.sums) == MAX_SUMS + 1
    assert sums.sums[OTHER] == 9 * MAX_SUMS


def test_metrics_grow_with_stages_up_to_a_bound_and_never_with_partitions(cluster: Cluster) -> None:
    address = free_address()
    cluster.start("a", metrics={"a": address})
    with cluster.connect("a") as plane:
        before = len(scrape(address).values)
        for nth in range(12):
            stages = {f"s-{nth}-{k}-{'long' * 30}": ["x"] for k in range(10)}
            plane.partition(f"p-{nth}", stages=stages).put({"x": [1]})
        after = scrape(address)
    assert len(after.values) - before < 5 * (MAX_SUMS + 1) + 10
    assert all(len(value) <= 64 for _, labels in after.values for _, value in labels)
    states = ("pending", "ready", "leased", "acked")
    rows = "dataplane_rows_by_stage"
    assert sum(after.value(rows, stage=OTHER, state=state) for state in states) > 0


def _table_of_docs() -> str:
    lines = ["| about | metrics |", "|---|---|"]
    for about, group in metrics.GROUPS.items():
        names = ["call_seconds{call}", *group] if about == "calls" else list(group)
        lines.append(f"| {about} | {', '.join(f'`{name}`' for name in names)} |")
    return "\n".join(lines) + "\n"


def test_every_metric_is_described_with_its_kind_and_labels(cluster: Cluster) -> None:
    address = free_address()
    cluster.start("a", metrics={"a": address})
    shown = {name for name in scrape(address).kinds if name.startswith("dataplane_")}
    table = _table_of_docs()
    assert table in (ROOT / "docs/observe.md").read_text(), table
    kinds = {
        name: "histogram" if name == "call_seconds" else "gauge"
        for name in re.findall(r"`(\w+)", table)
    }
    kinds |= {name: "counter" for name in kinds if name.endswith("_total")}
    assert {f"dataplane_{name.removesuffix('_total')}": kind for name, kind in kinds.items()} == {
        name: kind for name, kind in scrape(address).kinds.items() if name in shown
    }
