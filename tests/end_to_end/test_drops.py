"""What a drop says that it took."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dataplane import LeaseExpired, tag
from tests.end_to_end.conftest import Cluster


def took(found: tuple[int, int], rows: int) -> None:
    """So many rows of 5,008 bytes, each with its part of what their chunks have besides."""
    assert found[0] == rows and 5_008 * rows <= found[1] <= 5_100 * rows, found


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_drop_says_what_it_took_wherever_its_shard_is(pair: Cluster, replicas: int) -> None:
    with pair.connect("a") as a, pair.connect("b") as b:
        for n in range(4):  # shards of both hosts
            here = a.partition(f"p{n}", stages={"s": ["x"], "t": ["x"]}, replicas=replicas)
            there = b.partition(f"p{n}")
            for part, group in ((here, "a"), (there, "b")):
                keys: list[str | int] = [f"{group}{i}" for i in range(4)]
                x = [np.zeros(5_000, np.uint8)] * 4
                part.put({"x": x, "r": [0.5] * 4}, key=keys, group=group, tags={"n": [0, 1, 2, 3]})
                part.close(group, 4)
            held = there.claim("s", rows=2, timeout=20)
            took(here.drop(keys=["a0", "b0", "never"]), 2)
            assert here.drop(keys=["a0", "b0", "never"]) == (0, 0)
            took(there.drop(groups=["b", "never"]), 3)
            took(here.drop(where=tag("n") == 3), 1)
            assert here.stats()["bytes"] == pytest.approx(4 * 5_050, rel=0.01)  # a whole chunk
            took(there.drop(), 2)
            assert here.drop() == (0, 0)
            del held


def test_a_part_without_rows_can_be_finished_like_any_other(pair: Cluster) -> None:
    """A filter that matches no row makes one: `batch.rows(np.flatnonzero(is_bad)).drop()`."""
    with pair.connect("a") as a, pair.connect("b") as b:
        a.partition("p", stages={"s": ["x"]}).put({"x": [1, 2], "y": [3, 4]})
        batch = b.partition("p").claim("s", rows=2, timeout=20)
        nothing: list[Any] = [[], np.flatnonzero(np.zeros(2))]
        for at in nothing:
            for finish in ("ack", "drop", "release"):
                none = batch.rows(at)
                assert none.state == "leased" and list(none["y"]) == []
                getattr(none, finish)()
                getattr(none, finish)()
            with batch.rows(at) as none:
                none.release(tags={"n": []}, values={"so_far": []})
        assert batch.state == "leased"
        batch.ack()
        with pytest.raises(LeaseExpired, match="this batch is already acked"):
            batch.rows([]).ack()
        assert a.partition("p").stats()["stages"]["s"]["acked_rows"] == 2


def test_the_names_of_a_drop_may_be_an_array(pair: Cluster) -> None:
    with pair.connect("a") as a, pair.connect("b") as b:
        part = a.partition("p-arrays", stages={"s": ["x"]})
        part.put({"x": list(range(6))}, key=list(range(6)), group=[0, 0, 1, 1, 2, 2])
        there = b.partition("p-arrays")
        assert there.drop(keys=np.array([0, 2, 9])).rows == 2
        assert there.drop(groups=np.array([2])).rows == 2
        assert part.get().keys == [1, 3]
        part.drop()
