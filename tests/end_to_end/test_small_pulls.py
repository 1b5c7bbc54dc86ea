"""Few bytes of another host come on the link between the peers, in one exchange with each owner.
The smallest columns came with the claim."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dataplane.wire.limits import INLINE_ROW_BYTES
from tests.end_to_end.conftest import Cluster, until


def test_rows_of_short_texts_and_numbers_need_no_bulk_read(pair: Cluster) -> None:
    with pair.connect("a") as here, pair.connect("b") as there:
        part = here.partition("p", stages={"s": ["text", "reward"]})
        far = there.partition("p")
        text = [f"{i}: " + "é" * (i * 17) for i in range(63)] + [""]
        meta: list[dict[str, Any]] = [
            {"n": i, "a": np.arange(i, dtype=np.int16)} for i in range(64)
        ]
        part.put({"text": text, "reward": np.arange(64.0), "meta": meta})
        before = there.stats()
        batch = far.claim("s", rows=64, fields=["text", "reward", "meta"], timeout=20)
        assert there.stats()["pulled_bytes"] == before["pulled_bytes"]
        assert there.stats()["carried_bytes"] - before["carried_bytes"] >= sum(
            len(one.encode()) for one in text if len(one.encode()) > INLINE_ROW_BYTES
        )
        assert list(batch["text"]) == text
        assert np.array_equal(batch.numpy("reward"), np.arange(64.0))
        for got, sent in zip(batch["meta"], meta, strict=True):
            assert got["n"] == sent["n"] and np.array_equal(got["a"], sent["a"])
        batch.ack()
        del batch, got
        arena = there.stats()["arena"]
        assert arena["used_bytes"] == arena["cached_bytes"]


def test_small_and_large_values_of_one_row_and_more_than_a_grant_carries(pair: Cluster) -> None:
    with pair.connect("a") as here, pair.connect("b") as there:
        part = here.partition("p", stages={"s": ["text", "image"]})
        far = there.partition("p")
        for rows in (16, 400):
            text = [f"{i} " * 400 for i in range(rows)]
            images = [np.full(5000, i % 256, np.uint8) for i in range(rows)]
            part.put({"text": text, "image": images})
            batch = far.claim("s", rows=rows, timeout=20)
            assert list(batch["text"]) == text
            assert all(np.array_equal(a, b) for a, b in zip(batch["image"], images, strict=True))
            batch.ack()
            del batch


@pytest.mark.parametrize("nbytes", [8192, 1 << 20], ids=["on the link", "in bulk"])
def test_copies_of_what_was_freed_make_room_before_anybody_needs_it(
    cluster: Cluster, nbytes: int
) -> None:
    """They filled the arena, step after step on pages that nobody had touched before."""
    cluster.start("a", "b")
    with cluster.connect("a") as here, cluster.connect("b") as there:
        part = here.partition("p", stages={"s": ["x"], "late": ["x"]})
        far = there.partition("p")

        def cached() -> int:
            return int(there.stats()["arena"]["cached_bytes"])

        values = np.repeat(np.arange(4, dtype=np.uint8), nbytes).reshape(4, nbytes)
        part.put({"x": values}, group=[*"abcd"])
        with far.claim("s", rows=4, timeout=20) as batch:
            assert [int(one[0]) for one in batch["x"]] == [0, 1, 2, 3]
        with here.partition("p").claim("late", rows=3, timeout=20):
            assert cached() == 4 * nbytes
        part.put({"x": np.full((1, nbytes), 4, np.uint8)})
        with far.claim("s", rows=1, timeout=20) as batch:
            assert int(batch["x"][0][0]) == 4
        until(lambda: cached() == 2 * nbytes, "copies of three rows went")
        hits = there.stats()["pull_hits"]
        with far.claim("late", rows=2, timeout=20) as batch:
            assert [int(one[0]) for one in batch["x"]] == [3, 4]
        assert there.stats()["pull_hits"] == hits + 2
