"""Several peers side by side, as hosts that share no memory."""

from __future__ import annotations

import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import dataplane
from tests.end_to_end.conftest import Cluster, line, until


def test_rows_of_one_host_are_read_on_another(pair: Cluster) -> None:
    with pair.connect("a") as here, pair.connect("b") as there:
        stages = {"train": ["x", "obj"]}
        part = here.partition("p", stages=stages)
        far = there.partition("p", stages=stages)
        x = [np.full((n, 3), n, ml_dtypes.bfloat16) for n in (5000, 1, 0, 70_000)]
        objects: list[dict[str, Any]] = [
            {"image": np.arange(9000, dtype=np.uint8), "n": i} for i in range(4)
        ]
        part.put({"x": x, "obj": objects}, key=list("abcd"))
        batch = far.claim("train", rows=4, timeout=20)
        assert batch.keys == list("abcd")
        for got, sent in zip(batch["x"], x, strict=True):
            assert got.dtype == sent.dtype and np.array_equal(got, sent)
        for got, made in zip(batch["obj"], objects, strict=True):
            assert got["n"] == made["n"] and np.array_equal(got["image"], made["image"])
        batch.ack()
        del batch, got
        part.seal()
        with pytest.raises(dataplane.StreamEnd):
            part.claim("train", rows=1, timeout=20)
        until(lambda: here.stats()["arena"]["used_bytes"] == 0, "rows are freed at their owner", 5)


def test_a_reward_written_on_another_host_completes_the_row(pair: Cluster) -> None:
    with pair.connect("a") as here, pair.connect("b") as there:
        part = here.partition(
            "p", stages={"reward": ["x"], "train": ["x", "reward"]}, group_size=4, groups=6
        )
        far = there.partition("p")
        for g in range(6):
            producer = (part, far)[g % 2]
            producer.put({"x": np.full((4, 2000), g, np.int64)}, group=f"g{g}")
        for batch in far.stream("reward", rows=3):
            batch.add(reward=[float(x[0]) for x in batch["x"]], dense=batch.numpy("x") * 2)
        seen = []
        for batch in part.stream("train", groups=1):
            (group,) = batch.groups()
            seen.append(group.id)
            assert len(group) == 4
            assert set(group["reward"]) == {float(group["x"][0][0])}
            assert np.array_equal(group.numpy("dense"), group.numpy("x") * 2)
        assert sorted(map(str, seen)) == [f"g{g}" for g in range(6)]


def test_keyed_calls_find_rows_wherever_they_are(cluster: Cluster) -> None:
    cluster.start("a", "b", "c")
    planes = [cluster.connect(name) for name in "abc"]
    parts = [p.partition("eval", free="drop") for p in planes]
    for i, part in enumerate(parts):
        part.put({"x": [i * 10 + j for j in range(4)]}, key=[f"{i}-{j}" for j in range(4)])
    ref = parts[1].put({"m": [np.ones(5000)]})
    for part in parts:
        keys = [f"{i}-{j}" for j in (3, 0) for i in range(3)]
        assert list(part.get(keys=keys)["x"]) == [3, 13, 23, 0, 10, 20]
        assert len(part.rows()) == 13
    assert planes[2].get(ref, fields=["m"])["m"][0].sum() == 5000
    parts[2].put({"y": [7]}, key=["0-0"])
    assert list(parts[1].get(keys=["0-0"])["y"]) == [7]
    parts[0].tag(["2-2"], {"seen": True})
    assert parts[1].get(where=dataplane.tag("seen") == True).keys == ["2-2"]  # noqa: E712
    parts[1].drop(keys=["2-2", "0-1"])
    assert len(parts[0].rows()) == 11
    parts[0].drop()
    with pytest.raises(dataplane.PartitionGone):
        parts[2].put({"x": [1]})
    for plane in planes:
        plane.close()


def test_one_group_is_put_from_two_hosts(pair: Cluster) -> None:
    with pair.connect("a") as here, pair.connect("b") as there:
        stages = {"train": ["x"]}
        parts = [p.partition("p", stages=stages, group_size=4) for p in (here, there)]
        for i in range(4):
            parts[i % 2].put({"x": [i]}, group=["g"])
        batch = parts[1].claim("train", groups=1, timeout=20)
        assert sorted(batch["x"]) == [0, 1, 2, 3]


CONSUMER = """
    import dataplane, json, os
    part = dataplane.connect().partition("p", stages={"s": ["x"]})
    print("ready", flush=True)
    mine = []
    for batch in part.stream("s", rows=3):
        mine += [int(x[0]) for x in batch["x"]]
    print(json.dumps(mine), flush=True)
"""


def test_eight_racing_consumers_get_every_row_once(pair: Cluster) -> None:
    racers = [pair.worker(CONSUMER, DATAPLANE_PEER="ab"[i % 2]) for i in range(8)]
    assert [line(r) for r in racers] == ["ready"] * 8
    with pair.connect("a") as here, pair.connect("b") as there:
        parts = [p.partition("p", stages={"s": ["x"]}) for p in (here, there)]
        for i in range(100):
            parts[i % 2].put({"x": np.full((10, 700), i * 10, np.int64) + np.arange(10)[:, None]})
        parts[0].seal()
        got = [row for r in racers for row in json.loads(line(r))]
    assert sorted(got) == list(range(1000))


def test_a_peer_that_was_started_anew_is_greeted_anew(cluster: Cluster) -> None:
    cluster.start("a", "b")
    with cluster.connect("a") as here:
        part = here.partition("p", free="drop")
        with cluster.connect("b") as there:
            there.partition("p", free="drop").put({"x": [np.ones(5000)]}, key=["k"])
        assert part.get(keys=["k"])["x"][0].sum() == 5000
        cluster.restart("b")
        with pytest.raises(dataplane.DataplaneError):
            part.get(keys=["k"])
        until(lambda: "error" not in here.stats()["peers"].get("b", {"error": 1}), "b is back")
        with cluster.connect("b") as there:
            fresh = there.partition("q", free="drop")
            fresh.put({"x": [np.full(5000, 2.0)]}, key=["k"])
            assert here.partition("q").get(keys=["k"], fields=["x"])["x"][0].sum() == 10_000


def test_rows_have_no_clients_only_if_no_host_has_any(
    pair: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """Clients of other hosts count as well, and so do rows that other hosts serve."""

    def said(peer: str) -> str:
        caplog.clear()
        with caplog.at_level("INFO", logger="dataplane"), pair.connect(peer):
            return next(one for one in caplog.messages if one.startswith("joined run"))

    with pair.connect("a") as here:
        with pair.connect("b") as there:
            for n in range(6):  # of both primaries
                there.partition(f"p{n}", stages={"train": ["x"]}).put({"x": [1]})
        assert len(here.partitions()) == 6
        assert "no clients" not in said("b")
    for peer in ("a", "b"):
        assert "the run has 6 rows but no clients" in said(peer)
