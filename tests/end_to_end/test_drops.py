"""What a drop says that it took."""

from __future__ import annotations

import numpy as np
import pytest

from dataplane import tag
from tests.end_to_end.conftest import Cluster


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_drop_says_what_it_took_wherever_its_shard_is(cluster: Cluster, replicas: int) -> None:
    cluster.start("a", "b")
    with cluster.connect("a") as a, cluster.connect("b") as b:
        for n in range(4):  # shards of both hosts
            here = a.partition(f"p{n}", stages={"s": ["x"], "t": ["x"]}, replicas=replicas)
            there = b.partition(f"p{n}")
            each = 5_000 + 9  # a float of a message is 9 bytes, and lives in the shard
            for part, group in ((here, "a"), (there, "b")):
                keys: list[str | int] = [f"{group}{i}" for i in range(4)]
                x = [np.zeros(5_000, np.uint8)] * 4
                part.put({"x": x, "r": [0.5] * 4}, key=keys, group=group, tags={"n": [0, 1, 2, 3]})
                part.close(group, 4)
            held = there.claim("s", rows=2, timeout=20)
            assert here.drop(keys=["a0", "b0", "never"]) == (2, 2 * each)
            assert here.drop(keys=["a0", "b0", "never"]) == (0, 0)
            assert there.drop(groups=["b", "never"]) == (3, 3 * each)
            assert here.drop(where=tag("n") == 3) == (1, each)
            assert here.stats()["bytes"] == 2 * each
            assert there.drop() == (2, 2 * each)
            assert here.drop() == (0, 0)
            del held
