"""Values of every kind and size between real peers: what comes out is what went in."""

from __future__ import annotations

import os
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import dataplane
from tests.end_to_end.conftest import Cluster, line, until
from tests.end_to_end.hosts import held
from tests.same import dense, same

NUMPY = ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16"]
NUMPY += ["g", "G", "M8[ns]", "M8[D]", "m8[us]", ">i4", ">f8"]
NAMES = [name for name in ml_dtypes.__all__ if isinstance(getattr(ml_dtypes, name), type)]
SMALL = [name for name in NAMES if name not in ("finfo", "iinfo")]
SHAPES = [(), (0,), (3,), (5000,), (0, 4), (2, 0), (3, 700)]


def random_array(dtype: np.dtype[Any], shape: tuple[int, ...], seed: int) -> np.ndarray[Any, Any]:
    """Random bytes where all patterns are values, else random numbers."""
    rng = np.random.default_rng(seed)
    if dtype.kind in "bgG" or dtype.itemsize > 8 or dtype.name.startswith(("int", "uint")):
        if dtype.kind in "iu" and dtype.isbuiltin:
            return rng.integers(0, 100, shape).astype(dtype)
        return rng.integers(0, 2, shape).astype(dtype)
    return np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)


def test_every_dtype_and_shape_goes_through_two_peers(pair: Cluster) -> None:
    dtypes = [np.dtype(d) for d in NUMPY] + [np.dtype(getattr(ml_dtypes, d)) for d in SMALL]
    assert len(SMALL) >= 12
    with pair.connect("a") as here, pair.connect("b") as there:
        part = here.partition("p", {"s": []}, free="drop")
        far = there.partition("p")
        for number, dtype in enumerate(dtypes):
            name = f"{number}-{dtype.name}"
            ragged = [random_array(dtype, shape, i) for i, shape in enumerate(SHAPES)]
            dense = random_array(dtype, (len(SHAPES), 600), 99)
            objects = [
                {"list": ragged[: i + 1], "one": dense[i], "n": i} for i in range(len(SHAPES))
            ]
            sent = {"ragged": ragged, "dense": dense, "objects": objects}
            keys = [f"{name}-{i}" for i in range(len(SHAPES))]
            part.put(sent, key=keys)
            for reader in (part, far):
                got = reader.get(keys=keys)
                native = dtype.newbyteorder("=")
                for one, other in zip(got["ragged"], ragged, strict=True):
                    assert same(one, other.astype(native)), (dtype, one, other)
                for one, other in zip(got["dense"], dense, strict=True):
                    assert same(np.asarray(one), np.asarray(other.astype(native))), dtype
                if dtype.byteorder != ">":
                    assert all(map(same, got["objects"], objects)), dtype
        del got, one
        part.drop()
        until(lambda: not held(here) and not held(there), "everything came back", 5)


def test_objects_keep_their_types_between_peers(pair: Cluster) -> None:
    values: list[Any] = [
        None, True, 0, -(2**63), 2**64 - 1, 2**200, 0.5, float("nan"), float("-inf"), -0.0,
        "", "текст", "\x00", b"", b"\xff" * 5000, [], (), {}, (1, [2, (3,)]),
        {1: "int", "1": "str", (1, 2): "tuple", None: 0, 2.5: 1, True + 1: 2},
        {"missing": None}, [{"role": "user", "content": [{"type": "text", "text": "a" * 9000}]}],
        np.float32(1.5), np.int8(-3), ml_dtypes.bfloat16(2), np.arange(3), [np.zeros((0, 2))],
    ]  # fmt: skip
    with pair.connect("a") as here, pair.connect("b") as there:
        part = here.partition("p", {"s": ["v"]}, free="drop")
        keys = list(range(len(values)))
        part.put({"v": values}, key=keys)
        got = there.partition("p").get(keys=keys)["v"]
        for one, sent in zip(got, values, strict=True):
            assert same(one, np.asarray(sent) if isinstance(sent, np.generic) else sent) or same(
                one, sent
            ), (one, sent)


def test_a_hundred_thousand_rows_with_keys_and_groups_on_two_hosts(pair: Cluster) -> None:
    n = 100_000
    with pair.connect("a") as here, pair.connect("b") as there:
        part = here.partition("p", {"s": ["x", "y"]}, group_size=8)
        far = there.partition("p")
        keys = [f"row-{i}" for i in range(n)]
        groups = [i // 8 for i in range(n)]
        tags = {"i": list(range(n))}
        part.put({"x": np.arange(n), "y": keys}, key=keys, group=groups, tags=tags, timeout=100)
        part.seal()
        total = 0
        for batch in far.stream("s", groups=1000):
            x = dense(batch.numpy("x"))
            assert [f"row-{i}" for i in x.tolist()] == list(batch["y"]) == batch.keys
            assert batch.group_ids == [i // 8 for i in x.tolist()]
            total += len(batch)
        assert total == n
        del batch, x
        until(lambda: not set(held(here)) - {"partitions"}, "everything came back", 5)


CONSUMER = """
    import dataplane, numpy as np
    part = dataplane.connect().partition("p")
    rows = total = 0
    for batch in part.stream("s", rows=1):
        (x,) = batch["x"]
        n = batch.tags["n"][0]
        # the ends and every page between, without summing 4 GiB
        assert x.nbytes == 64 << 20 and x[0] == n and x[-1] == n and (x[:: 1 << 16] == n).all()
        rows, total = rows + 1, total + x.nbytes
        del x, batch
    print(rows, total, flush=True)
"""


@pytest.mark.timeout(180)
def test_one_put_of_more_than_4_gib_goes_through_an_arena_of_1_gib(cluster: Cluster) -> None:
    n, size = 66, 64 << 20
    assert n * size > 4 << 30
    cluster.start("a", arena="1GiB")
    with cluster.connect("a") as plane:
        part = plane.partition("p", {"s": ["x"]})
        consumer = cluster.worker(CONSUMER)
        block = np.zeros((1, size), np.uint8)
        # rows that all lie in the same memory, but for what the consumer checks
        values = [np.full(size, i, np.uint8) if i < 2 else block[0] for i in range(n)]
        tags = {"n": [0 if i >= 2 else i for i in range(n)]}
        part.put({"x": values}, tags=tags, timeout=150)
        part.seal()
        assert line(consumer) == f"{n} {n * size}"
        arena = plane.stats()["arena"]
        assert arena["touched_bytes"] <= 1 << 30
        until(lambda: plane.stats()["arena"]["used_bytes"] == 0, "everything came back", 5)


def test_single_row_claims_leave_no_descriptor_thread_or_range(cluster: Cluster) -> None:
    cluster.start("a", arena="64MiB")
    peer, n = cluster.peers["a"].pid, 3_000
    with cluster.connect("a") as plane:
        part = plane.partition("p", {"s": ["x"]})

        def cycle(rows: int) -> None:
            part.put({"x": np.arange(rows)})
            for _ in range(rows):
                with part.claim("s", rows=1, timeout=5) as batch:
                    batch["x"][0]

        cycle(300)
        pids = (peer, os.getpid())
        before = {
            pid: [len(os.listdir(f"/proc/{pid}/{k}")) for k in ("fd", "task")] for pid in pids
        }
        cycle(n)
        until(lambda: plane.stats()["arena"]["pins"] == 0, "pins went", 5)
        stats = plane.stats()
        assert (stats["arena"]["chunks"], stats["arena"]["used_bytes"]) == (0, 0)
        assert stats["partitions"]["p"]["leases"] == 0 and stats["connections"] <= 3
        for pid in pids:
            after = [len(os.listdir(f"/proc/{pid}/{k}")) for k in ("fd", "task")]
            assert all(now <= then + 1 for now, then in zip(after, before[pid], strict=True))
        assert isinstance(plane, dataplane.Plane)


def test_rows_of_a_host_that_never_saw_a_field_lack_it(pair: Cluster) -> None:
    with pair.connect("a") as here, pair.connect("b") as there:
        part = here.partition("p", free="drop")
        part.put({"x": [1], "y": [2]}, key=["k"])
        there.partition("p").put({"x": [3]}, key=["l"])
        rows = part.get(keys=["k", "l"], fields=["x"])
        assert list(rows["x"]) == [1, 3]
        assert part.get(keys=["k", "l"], fields=["y"]).fields == ["y"]
        with pytest.raises(dataplane.FieldUnknown, match="'z'"):
            part.get(keys=["k", "l"], fields=["z"])
