"""Reading: refs, keys, filters, views that outlive their rows, and what trainers ask for."""

from __future__ import annotations

import json
import pickle  # noqa: S403 - a user may pickle a ref
from collections.abc import Iterator
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import dataplane
from dataplane import tag
from tests.end_to_end.conftest import line, until
from tests.end_to_end.hosts import Hosts, one_and_two, running
from tests.same import dense

BIG = 2000


@pytest.fixture(scope="module")
def both() -> Iterator[dict[str, Hosts]]:
    with one_and_two() as running_hosts:
        yield running_hosts


@pytest.fixture(params=["one", "two"])
def hosts(both: dict[str, Hosts], request: pytest.FixtureRequest) -> Iterator[Hosts]:
    shared = both[request.param]
    yield shared
    shared.drop_everything()


def test_rows_are_read_by_ref_by_key_by_filter_and_all(hosts: Hosts) -> None:
    here, there = hosts.partition(free="drop")
    x = np.arange(4 * BIG).reshape(4, BIG)
    ref = here.put({"x": x, "s": list("abcd")}, key=list("abcd"), tags={"n": [0, 1, 2, 3]})
    assert ref.keys == list("abcd") and len(ref) == 4 and ref.fields == ("x", "s")
    by_ref = hosts.there.get(ref)
    assert sorted(by_ref.fields) == ["s", "x"] and np.array_equal(by_ref.numpy("x"), x)
    by_key = there.get(keys=["d", "a"], fields=["s"])
    assert list(by_key["s"]) == ["d", "a"] and by_key.fields == ["s"]
    assert np.array_equal(by_key["x"][0], x[3])
    assert sorted(there.get(where=tag("n") >= 2)["s"]) == ["c", "d"]
    assert sorted(there.get()["s"]) == list("abcd")
    rows = there.rows()
    assert rows.fields == [] and dict(zip(rows.keys, rows.tags["n"], strict=True))["c"] == 2


def test_no_rows_are_read_as_rows_are(hosts: Hosts) -> None:
    here, there = hosts.partition(free="drop")
    here.put({"x": [1, 2], "y": [3, 4]}, key=["a", "b"], tags={"n": [0, 1]})
    for none in (
        there.get(keys=[]),
        there.get(where=tag("n") == 5),
        there.get(where=tag("n") == 5, fields=["x"]),
        there.rows(where=tag("n") == 5),
        there.get()[0:0],
    ):
        again = hosts.there.get(none.ref)
        assert len(none) == len(again) == 0 and none.keys == again.keys == []
        none.fetch("y")
        assert {"x", "y"} >= {*none.fields} >= {"y"}
        assert list(none["x"]) == none.numpy("x") == none.torch("x") == [] and none.nbytes("x") == 0
        assert none.arrow(["x"])["x"].to_pylist() == [] and not len(none.tensordict(["x"]))


READER = """
    import dataplane, json, pickle, sys
    ref = pickle.loads(bytes.fromhex(sys.stdin.readline().strip()))
    with dataplane.connect() as plane:
        rows = plane.get(ref)
        print(json.dumps([rows.keys, [int(x.sum()) for x in rows["x"]]]), flush=True)
"""


def test_what_came_before_a_part_that_failed_is_let_go(hosts: Hosts) -> None:
    here, there = hosts.partition({"s": ["x"]})
    here.put({"x": [np.arange(2000)]}, key=["k"])
    with pytest.raises(dataplane.RowsGone):  # the second message's
        there.get(keys=["k"] * 70_000 + ["gone"], fields=["x"])
    until(lambda: hosts.there.stats()["arena"]["pinned_bytes"] == 0, "no pin is left")


def test_a_ref_is_read_in_another_process_of_another_host() -> None:
    with running("a", "b") as cluster, cluster.connect("a") as plane:
        part = plane.partition("p", free="drop")
        ref = part.put({"x": np.ones((3, BIG), np.int64)}, group="g")
        again = pickle.loads(pickle.dumps(ref))  # noqa: S301
        assert again == ref and len(pickle.dumps(ref)) < 1000
        reader = cluster.worker(READER, DATAPLANE_PEER="b")
        assert reader.stdin is not None
        reader.stdin.write(pickle.dumps(ref).hex() + "\n")
        reader.stdin.flush()
        assert json.loads(line(reader)) == [ref.keys, [BIG] * 3]
        part.drop(keys=ref.keys[:1])
        with pytest.raises(dataplane.RowsGone, match="1 of the 3 rows"):
            plane.get(ref)
        part.drop()
        with pytest.raises(dataplane.PartitionGone):
            plane.get(ref)
        part = plane.partition("p", {"s": ["x"]})
        with pytest.raises(dataplane.PartitionGone):
            plane.get(ref)


def test_a_torch_operation_in_place_leaves_the_stored_row_alone(hosts: Hosts) -> None:
    here, there = hosts.partition({"s": ["x"]}, free="drop")
    x = np.arange(2 * BIG, dtype=np.float32).reshape(2, BIG)
    here.put({"x": x, "bf": x.astype(ml_dtypes.bfloat16)}, key=["a", "b"])
    batch = there.claim("s", rows=2, timeout=20)
    tensor = batch.torch("x").mul_(0).add_(7)
    assert tensor.shape == (2, BIG) and bool((tensor == 7).all())
    assert batch.torch("bf").dtype == torch.bfloat16
    batch.torch("bf").zero_()
    assert np.array_equal(batch.numpy("x"), x)
    assert np.array_equal(here.get(keys=["a", "b"]).numpy("x"), x)
    view = batch.torch("x", view=True)
    assert torch.equal(view, torch.from_numpy(x))
    with pytest.raises(ValueError, match="read-only"):
        batch["x"][0][0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        batch["x"][0].flags.writeable = True


def test_ragged_columns_as_trainers_want_them(hosts: Hosts) -> None:
    here, there = hosts.partition({"s": ["t"]})
    tokens = [np.arange(n) for n in (3, 0, 2)]
    here.put({"t": tokens}, key=list("abc"), tags={"n": [3, 0, 2]})
    batch = there.claim("s", rows=3, timeout=20)
    padded = batch.torch("t", layout="padded", padding=-1)
    assert padded.tolist() == [[0, 1, 2], [-1, -1, -1], [0, 1, -1]]
    jagged = batch.torch("t", layout="jagged")
    assert [len(row) for row in jagged.unbind()] == [3, 0, 2]
    assert [t.tolist() for t in batch.torch("t", layout="list")] == [[0, 1, 2], [], [0, 1]]
    table = batch.arrow()
    assert table.column_names == ["key", "t", "n"]
    assert table.to_pydict() == {"key": list("abc"), "t": [[0, 1, 2], [], [0, 1]], "n": [3, 0, 2]}
    (first, *_) = batch.groups()
    assert first.id is None and len(first) == 1


def test_a_padding_keeps_its_sign_and_a_length_of_any_size_is_answered(hosts: Hosts) -> None:
    here, _ = hosts.partition(None, free="drop")
    here.put({"x": [[1.0, 2.0], [3.0]], "z": [np.ones(2, np.complex64), np.ones(1, np.complex64)]})
    rows = here.get(timeout=20)
    zeros: tuple[Any, ...] = (-0.0, np.float32(-0.0), torch.tensor(-0.0))
    for zero in zeros:
        assert torch.signbit(rows.torch("x", layout="padded", padding=zero)[1, 1])
    assert not torch.signbit(rows.torch("x", layout="padded", padding=0.0)[1, 1])
    nought: Any = complex(-0.0, -0.0)
    filled = rows.torch("z", layout="padded", padding=nought)[1, 1]
    assert torch.signbit(torch.view_as_real(filled)).all()
    calls = [partial(rows.torch, "x"), partial(rows.tensordict, ["x"])]
    for wide in ({"length": 2**40}, {"length": 2**60}, {"multiple": 2**70}):
        for convert in calls:
            with pytest.raises(
                dataplane.InvalidValue,
                match="'x': padded to shape .* take [0-9.]+ TiB, but this process can use at most "
                "[0-9.]+ GiB of memory: pass a smaller length=",
            ):
                convert(layout="padded", **wide)
    own: Any = np.int64(3)  # as ints are that numpy computes
    made, mask = rows.torch("x", layout="padded", length=own, side="left", mask=True)
    assert made.shape == (2, 3)
    assert mask.tolist() == [[False, True, True], [False, False, True]]


def test_groups_of_a_batch_have_their_own_columns(hosts: Hosts) -> None:
    here, there = hosts.partition({"s": ["x"]}, group_size=2)
    here.put({"x": np.arange(4)}, group=["g", "h", "g", "h"], tags={"n": [0, 1, 2, 3]})
    batch = there.claim("s", groups=2, timeout=20)
    found = {group.id: group for group in batch.groups()}
    assert dense(found["g"].numpy("x")).tolist() == [0, 2] and found["h"].tags == {"n": [1, 3]}
    assert found["h"].torch("x").tolist() == [1, 3] and len(found["g"].keys) == 2


def test_views_outlive_the_batch_the_row_and_the_client(hosts: Hosts) -> None:
    here, there = hosts.partition({"s": ["x"]})
    here.put({"x": np.full((1, BIG), 7)})
    with there.claim("s", rows=1, timeout=20) as batch:
        view = batch["x"][0]
    assert batch.state == "acked"
    del batch
    here.put({"x": np.full((50, BIG), 8)})
    assert (view == 7).all()


def test_a_view_outlives_its_client() -> None:
    with running("a") as cluster:
        with cluster.connect("a") as plane:
            part = plane.partition("p", free="drop")
            part.put({"x": np.full((1, BIG), 7)}, key=["k"])
            view = part.get(keys=["k"])["x"][0]
        with cluster.connect("a") as other:
            other.partition("p").drop()
            other.partition("q", free="drop").put({"x": np.full((50, BIG), 8)})
            assert (view == 7).all()
            assert other.stats()["arena"]["pinned_bytes"] == BIG * 8
            del view
            until(lambda: other.stats()["arena"]["pinned_bytes"] == 0, "the pin went", 3)


def test_stats_tell_what_is_here_and_what_a_partition_has(hosts: Hosts) -> None:
    here, there = hosts.partition({"s": ["x"], "t": ["x", "y"]}, group_size=2)
    here.put({"x": np.zeros((4, BIG))}, group=["g", "g", "h", "h"])
    batch = there.claim("s", groups=1, timeout=20)
    for part in (here, there):
        stats = part.stats()
        assert (stats["rows"], stats["groups"], stats["closed_groups"]) == (4, 2, 2)
        assert stats["bytes"] == 4 * BIG * 8 and stats["phase"] == "open"
        stage = stats["stages"]["s"]
        assert (stage["ready_groups"], stage["leased_groups"]) == (1, 1)
        assert stats["stages"]["t"]["ready_rows"] == 0
    batch.ack()
    stats = hosts.here.stats()
    assert stats["arena"]["used_bytes"] >= 4 * BIG * 8
    assert stats["peer"] == hosts.here.peer and stats["plane"] == hosts.here.name == "test"
    assert set(stats["peers"]) == {hosts.here.peer, hosts.there.peer}


def test_stats_list_the_open_groups_with_their_rows(hosts: Hosts) -> None:
    here, there = hosts.partition({"s": ["x"]})
    here.put({"x": [1, 2, 3]}, group=["g", "g", 7])
    here.close("done", 1)
    here.put({"x": [4]}, group="done")
    here.close(7, 2)
    left = [{"group": "g", "rows": 2, "of": None}, {"group": 7, "rows": 1, "of": 2}]
    for part in (here, there):
        assert part.stats()["open_groups"] == left
    there.claim("s", rows=1, timeout=20).ack()  # what is read was put all the same
    assert here.stats()["open_groups"] == left
    here.put({"x": [5]}, group=7)
    here.close("g", 2)
    assert there.stats()["open_groups"] == []


def test_reprs_tell_the_state(hosts: Hosts) -> None:
    here, there = hosts.partition({"s": ["x"]})
    ref = here.put({"x": [1, 2]})
    assert repr(ref) == f"<Ref 2 rows of {hosts.name!r}, fields x>"
    batch = there.claim("s", rows=2, timeout=20)
    batch.add(y=[1, 2])
    x = f"x: int, first {batch['x'][0]}"
    assert repr(batch) == f"<Batch 2 rows of {hosts.name!r} for 's', leased: {x}, added y>"
    with pytest.raises(dataplane.NotFetched, match="Ack the batch first"):
        batch["y"]
    batch.ack()
    assert f"acked: {x}" in repr(batch)
    assert repr(there).startswith(f"<Partition {hosts.name!r} of plane 'test', generation")
    mixed, _ = hosts.partition(None, free="drop")
    mixed.put({"y": [1, 2.5], "z": [None, "a"]})
    assert "y: float and int, first 1; z: NoneType and str, first None" in repr(mixed.get())
    times, _ = hosts.partition(None, free="drop")
    at = np.array(["2030-01-02T03:04:05", "NaT"], "M8[ns]")
    times.put({"at": at[:1], "all": [at], "took": np.array([5], "m8[ms]")})
    shown = "2030-01-02T03:04:05.000000000"
    for one in (
        f"at: datetime64[ns], first {shown}",
        f"all: datetime64[ns][2], first [{shown}, NaT]",
        "took: timedelta64[ms], first 5 milliseconds",
    ):
        assert one in repr(times.get())
