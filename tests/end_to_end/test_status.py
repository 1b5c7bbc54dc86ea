"""`dataplane status` beside real peers: who holds what, how fast, on which host."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tests.end_to_end.conftest import PLANE, Cluster, line, until

HOLDING = """
    import dataplane
    part = dataplane.connect("b").partition("p")
    with part.claim("s", rows=2, timeout=30):
        pass
    held = part.claim("s", rows=3, timeout=30)
    print("holds", flush=True)
    input()
"""


def status(*arguments: str) -> str:
    command = [sys.executable, "-m", "dataplane", "status", "--run", PLANE, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_status_tells_who_holds_rows_and_how_fast_each_host_goes(cluster: Cluster) -> None:
    cluster.start("a", "b")
    with cluster.connect("a") as plane:
        part = plane.partition("p", stages={"s": ["x"]}, free="drop")
        part.put({"x": list(range(10))})
        part.claim("s", rows=1, timeout=20)  # nothing keeps the batch
        until(lambda: part.stats()["stages"]["s"]["released_rows"] == 1, "it is back")
        worker = cluster.worker(HOLDING, RANK="3")
        assert line(worker) == "holds"
        shown = status()
        holder = f"pid {worker.pid} on host b, rank 3 (python"
        (stage,) = [one for one in shown.splitlines() if one.startswith("    s ")]
        assert f"3 leased: 3 by {holder}" in stage and "rows/s" in stage
        assert "1 released, 1 redelivered" in stage
        hosts = {one.split()[1]: one for one in shown.splitlines() if one.startswith("  host ")}
        assert "rows/s: s " in hosts["b"] and "rows/s: put " in hosts["a"]
        assert f"    {holder}" in shown and "3 rows leased" in shown

        alone = status("--peer", "b")
        assert "host b" in alone and "host a" not in alone.replace("on host a", "")
        (run,) = json.loads(status("--peer", "b", "--json"))["runs"]
        seen: dict[str, Any] = run["peers"]["b"]
        assert list(run["peers"]) == list(seen["peers"]) == ["b"]
        (client,) = seen["client_list"]
        assert (client["rank"], client["host"], client["leased_rows"]) == (3, "b", 3)
        (held,) = json.loads(status("--json"))["runs"][0]["peers"]["a"]["everywhere"]["holders"]
        assert (held["rank"], held["host"], held["rows"]) == (3, "b", 3)
        worker.communicate("\n")


def test_status_shows_who_answers_behind_many_silent_peers(cluster: Cluster) -> None:
    """Each of them has 2 s to answer, and the whole call 30."""
    absent = [f"absent-{n}" for n in range(40)]
    cluster.seed("a", *absent, "b")
    for name in ("a", "b"):
        cluster.launch(name)
    for name in ("a", "b"):
        cluster.await_up(name)
    hosts = [one for one in status().splitlines() if one.startswith("  host ")]
    silent = [one for one in hosts if "does not answer" in one]
    assert len(silent) == len(absent)
    assert {one.split()[1] for one in hosts if one not in silent} == {"a", "b"}
