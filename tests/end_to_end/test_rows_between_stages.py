"""put, claim, add, ack through one peer: what comes out is what went in."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import dataplane
from dataplane import tag
from tests.end_to_end.conftest import until


def test_a_row_goes_through_two_stages(plane: dataplane.Plane) -> None:
    part = plane.partition("step-0", stages={"reward": ["tokens"], "train": ["tokens", "reward"]})
    tokens = [np.arange(n, dtype=np.int64) for n in (3, 5000, 0)]
    part.put({"tokens": tokens, "prompt": ["a", "b", "c"]}, key=["x", "y", "z"])
    part.seal()
    for batch in part.stream("reward", rows=2):
        batch.add(reward=[float(len(t)) for t in batch["tokens"]])
    seen = {}
    for batch in part.stream("train", rows=2):
        for key, t, reward in zip(batch.keys, batch["tokens"], batch["reward"], strict=True):
            seen[key] = (np.array(t), reward)
        del batch, t
    assert sorted(seen) == ["x", "y", "z"]
    for key, t in zip("xyz", tokens, strict=True):
        assert np.array_equal(seen[key][0], t) and seen[key][1] == float(len(t))
    until(lambda: plane.stats()["arena"]["used_bytes"] == 0, "everything was freed", 2)


@pytest.mark.parametrize("nbytes", [5_001, 3 << 20])
def test_equal_values_are_found_in_memory_that_was_used_before(
    plane: dataplane.Plane, nbytes: int
) -> None:
    """Padding is part of a chunk: what was in that memory before does not make it another one."""
    part = plane.partition("before", stages={"s": ["x"]}, free="acked")
    half = plane.stats()["arena"]["size_bytes"] // 2
    for _ in range(8):
        part.put({"x": [np.full(half // 8, 255, np.uint8)]})
    part.claim("s", rows=8).ack()
    until(lambda: plane.stats()["arena"]["used_bytes"] == 0, "the memory was freed", 2)
    image = np.random.default_rng(0).integers(0, 9, nbytes, np.uint8)
    part = plane.partition("images", stages={"s": ["image"]})
    for _ in range(3):
        part.put({"image": [image.copy(), image.copy()]}, dedup=["image"])
    batch = part.claim("s", rows=6)
    assert len({value.__array_interface__["data"] for value in batch["image"]}) == 1
    batch.ack()


def test_values_come_back_exactly(plane: dataplane.Plane) -> None:
    part = plane.partition("values", stages={"all": ["bf16"]})
    columns: dict[str, Any] = {
        "bf16": np.arange(12, dtype=np.float32).astype(ml_dtypes.bfloat16).reshape(2, 6),
        "fp8": [np.ones(5000, ml_dtypes.float8_e4m3fn), np.zeros(3, ml_dtypes.float8_e4m3fn)],
        "ragged": [np.zeros((0, 4), np.float32), np.ones((2000, 4), np.float32)],
        "images": [[np.full((3, 64, 64), 7, np.uint8)], []],
        "chat": [[{"role": "user", "content": ("a", 1, 2.0, None)}], {"missing": b"x", 5: [True]}],
    }
    part.put(columns)
    batch = part.claim("all", rows=2, timeout=10)
    assert batch["bf16"][1].dtype == ml_dtypes.bfloat16
    assert np.array_equal(batch["bf16"][1], columns["bf16"][1])
    for name in ("fp8", "ragged"):
        for got, sent in zip(batch[name], columns[name], strict=True):
            assert got.dtype == sent.dtype and got.shape == sent.shape
            assert np.array_equal(got, sent)
    assert np.array_equal(batch["images"][0][0], columns["images"][0][0])
    assert list(batch["images"][1]) == []
    assert list(batch["chat"]) == columns["chat"]
    assert type(batch["chat"][0][0]["content"]) is tuple
    with pytest.raises(ValueError, match="read-only"):
        batch["bf16"][0][0] = 1
    batch.ack()


def test_views_stay_readable_after_ack(plane: dataplane.Plane) -> None:
    part = plane.partition("p", stages={"s": ["x"]})
    part.put({"x": [np.full(10_000, 5, np.int64)]})
    batch = part.claim("s", rows=1, timeout=10)
    view = batch["x"][0]
    batch.ack()
    part.put({"x": [np.full(10_000, 6, np.int64)] * 4})
    assert (view == 5).all()


def test_groups_are_claimed_whole_and_unmixed(plane: dataplane.Plane) -> None:
    part = plane.partition("g", stages={"train": ["x"]})
    sizes = {"a": 3, "b": 1, "c": 5}
    for group, n in sizes.items():
        for i in range(n):
            part.put({"x": [i]}, group=[group])
    with pytest.raises(dataplane.ClaimTimeout, match="still open"):
        part.claim("train", groups=1, timeout=0.1)
    for group, n in sizes.items():
        part.close(group, n)
    seen = []
    for _ in sizes:
        with part.claim("train", groups=1, timeout=10) as batch:
            (whole,) = batch.groups()
            seen.append((whole.id, sorted(whole["x"])))
    assert seen == [(g, list(range(n))) for g, n in sizes.items()]


def test_tags_filter_claims(plane: dataplane.Plane) -> None:
    part = plane.partition("t", stages={"s": ["x"]})
    part.put({"x": list(range(10))}, tags={"version": [i % 3 for i in range(10)]})
    batch = part.claim("s", rows=3, where=tag("version") >= 2, timeout=10)
    assert list(batch["x"]) == [2, 5, 8]
    batch.release(tags={"version": 0})
    with pytest.raises(dataplane.ClaimTimeout):
        part.claim("s", rows=1, where=tag("version") >= 2, timeout=0.1)
    part.tag(part.rows().keys[2:3], {"version": 9}, expect={"version": 0})


def test_a_claim_by_budget_takes_what_fits(plane: dataplane.Plane) -> None:
    part = plane.partition("b", stages={"s": ["x"]})
    part.put({"x": list(range(6))}, tags={"length": [10, 20, 30, 40, 50, 60]})
    part.seal()
    sizes = [len(b) for b in part.stream("s", budget={"length": 65})]
    assert sizes == [3, 1, 1, 1]


@pytest.mark.parametrize("bad", [math.nan, "10", None, -1.0, True])
def test_a_tag_that_is_no_number_ends_a_claim_by_budget(plane: dataplane.Plane, bad: Any) -> None:
    part = plane.partition("w", stages={"s": ["x"]})
    part.put({"x": [0, 1, 2]}, key=["a", "b", "c"], tags={"n": [10, bad, 10]})
    how: dict[str, Any] = {"budget": {"n": 50}, "timeout": 20}
    for wait in (
        lambda: part.claim("s", **how),
        lambda: next(iter(part.stream("s", **how))),
        lambda: next(iter(part.loader("s", **how))),
    ):
        with pytest.raises(
            dataplane.InvalidRows, match="tag 'n' of row 'b' is .*1 row has no valid number"
        ):
            wait()
    part.tag(["b"], {"n": 10})
    part.seal()
    assert [len(batch) for batch in part.stream("s", **how)] == [3]


def test_what_waits_by_a_misspelt_tag_is_told_so(plane: dataplane.Plane) -> None:
    part = plane.partition("w", stages={"s": ["x", "y"]})
    part.put({"x": [0, 1]}, key=["a", "b"], tags={"length": 10})
    with pytest.raises(
        dataplane.ClaimTimeout, match="2 rows have no valid weight .* `lenght`.*'a'"
    ):
        part.claim("s", budget={"lenght": 50}, timeout=0.2)
    part.put({"y": [0, 1]}, key=["a", "b"])
    with pytest.raises(dataplane.InvalidRows, match="row 'a' has no tag .*Other tags .* 'length'"):
        part.claim("s", budget={"lenght": 50}, timeout=20)
    assert part.stats()["stages"]["s"]["ready_rows"] == 2


def test_dropping_fifteen_of_sixteen_groups_of_a_put_frees_their_bytes(
    plane: dataplane.Plane,
) -> None:
    part = plane.partition("d", group_size=2, free="drop")
    groups = [f"g{row // 2}" for row in range(32)]
    large, small = np.zeros((32, 1 << 16), np.uint8), np.zeros((32, 1200), np.uint8)
    part.put({"x": large, "y": small, "z": small}, key=list(range(32)), group=groups)
    full = plane.stats()["arena"]["used_bytes"]
    part.drop(keys=list(range(30)))
    assert plane.stats()["arena"]["used_bytes"] <= full // 10
    with pytest.raises(dataplane.RowsDropped):
        part.put({"y": [1]}, key=[0])
    assert np.array_equal(part.get(keys=[31])["x"][0], np.zeros(1 << 16, np.uint8))
    with pytest.raises(dataplane.RowsGone):
        part.get(keys=[1])


def test_the_bytes_of_a_chunk_are_free_when_its_last_row_is(plane: dataplane.Plane) -> None:
    part = plane.partition("d", free="drop")
    part.put({"x": np.zeros((40, 1 << 12), np.uint8)}, key=list(range(40)))
    full = plane.stats()["arena"]["used_bytes"]
    part.drop(keys=list(range(31)))
    assert plane.stats()["arena"]["used_bytes"] == full
    part.drop(keys=[31])  # rows without a group share a chunk by 32
    assert plane.stats()["arena"]["used_bytes"] == full * 8 // 40


def test_the_images_of_a_prompt_are_stored_once(plane: dataplane.Plane) -> None:
    part = plane.partition("i", stages={"s": ["image"]}, group_size=8)
    image = np.random.default_rng(0).integers(0, 255, (256, 1176), np.uint8)
    for _ in range(8):
        part.put({"image": [image.copy()], "n": [1]}, group=["p"], dedup=["image"])
    used = plane.stats()["arena"]["used_bytes"]
    assert used < 1.2 * image.nbytes
    batch = part.claim("s", groups=1, timeout=10)
    assert all(np.array_equal(got, image) for got in batch["image"])


@pytest.mark.parametrize("value", [np.ones(5001, np.int8), "x" * 5001, [1.5, "x" * 5001]])
def test_equal_values_of_any_size_are_stored_once(plane: dataplane.Plane, value: Any) -> None:
    part = plane.partition("i", stages={"s": ["x"]})
    for _ in range(4):
        part.put({"x": [value]}, dedup=["x"])
    assert plane.stats()["arena"]["used_bytes"] < 2 * 5001
    batch = part.claim("s", rows=4, timeout=10)
    assert all(np.array_equal(got, value) for got in batch["x"])


def test_a_hundred_thousand_rows_in_one_put(plane: dataplane.Plane) -> None:
    part = plane.partition("many", stages={"s": ["x", "y"]})
    n = 100_000
    part.put({"x": np.arange(n), "y": [str(i) for i in range(n)]})
    part.seal()
    total = 0
    for batch in part.stream("s", rows=10_000):
        assert batch.numpy("x")[0] == int(batch["y"][0])
        total += len(batch)
    assert total == n


def test_dead_values_in_living_blocks_are_counted_as_waste(plane: dataplane.Plane) -> None:
    part = plane.partition("w", free="drop")
    part.put({"x": np.zeros((8, 2048), np.uint8)}, key=list("abcdefgh"), group="g")
    assert plane.stats()["arena"]["waste_bytes"] == 0
    part.drop(keys=list("abc"))
    arena = plane.stats()["arena"]
    assert (arena["waste_bytes"], arena["used_bytes"]) == (3 * 2048, 8 * 2048)
    part.drop(keys=list("defgh"))
    assert plane.stats()["arena"]["used_bytes"] == 0
