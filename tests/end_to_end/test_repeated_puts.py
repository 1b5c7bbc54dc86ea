"""A put that is repeated, however late, makes no row twice; names are used again if one says so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import dataplane
from dataplane import Partition
from tests.end_to_end.conftest import Cluster, until
from tests.end_to_end.hosts import Hosts, one_and_two


@pytest.fixture(scope="module")
def hosts() -> Iterator[dict[str, Hosts]]:
    with one_and_two() as running:
        yield running


@pytest.fixture(params=["one", "two"])
def at(hosts: dict[str, Hosts], request: pytest.FixtureRequest) -> Iterator[Hosts]:
    yield hosts[request.param]
    hosts[request.param].drop_everything()


def rows(count: int) -> dict[str, Any]:
    return {"x": [np.full(3000, number) for number in range(count)], "n": list(range(count))}


def consume(part: Partition, groups: int) -> None:
    with part.claim("s", groups=groups, timeout=20):
        pass


def test_rows_that_were_consumed_are_passed_over_and_counted(at: Hosts) -> None:
    here, there = at.partition({"s": ["x"]}, group_size=2, groups=3, free="acked")
    first = here.put(rows(4), key=list("abcd"), group=[1, 1, 2, 2])
    assert first.kept == 0
    consume(there, 2)
    with pytest.raises(dataplane.RowsGone, match="reuse=True") as caught:
        here.put(rows(4), key=list("abcd"), group=[1, 1, 2, 2])
    assert caught.value.details["keys"] == list("abcd")
    with pytest.raises(dataplane.RowsGone):  # whatever its rows are called
        there.put(rows(2), group=1)
    again = there.put(rows(6), key=list("abcdef"), group=[1, 1, 2, 2, 3, 3])
    assert again.kept == 4 and len(again) == 6
    found = [number for batch in here.stream("s", groups=1, timeout=20) for number in batch["n"]]
    assert found == [4, 5]  # sealed by three groups, none of which was counted twice
    assert here.stats()["tombstones"] == 6 + 3


def test_a_put_of_many_messages_is_gone_only_where_all_of_it_is(at: Hosts) -> None:
    here, there = at.partition({"s": ["x"]}, free="acked")
    large = {"x": [np.zeros(4 << 20, np.uint8) for _ in range(12)]}
    here.put(large, key=range(12))
    for _ in range(12):
        with there.claim("s", rows=1, timeout=20):
            pass
    with pytest.raises(dataplane.RowsGone, match="12 rows"):
        here.put(large, key=range(12))
    assert here.put(large, key=range(1, 13)).kept == 11
    with there.claim("s", rows=1, timeout=20) as batch:
        assert batch.keys == [12]


def test_old_names_are_used_again_where_one_says_so(at: Hosts) -> None:
    here, there = at.partition({"s": ["x"]}, free="acked")
    here.put(rows(2), key=["a", "b"])
    with there.claim("s", rows=1, timeout=20):
        pass
    there.drop(keys=["b", "c"])
    with pytest.raises(dataplane.RowsDropped):
        here.put(rows(3), key=["a", "b", "c"])
    assert here.put(rows(3), key=["a", "b", "c"], reuse=True).kept == 0
    assert sorted(there.get(keys=["a", "b", "c"])["n"]) == [0, 1, 2]
    with pytest.raises(dataplane.FieldExists):  # they are there again
        here.put(rows(1), key=["a"], reuse=True)


def test_groups_that_are_short_at_the_seal_are_dropped_or_kept(at: Hosts) -> None:
    for short in ("drop", "keep"):
        here, there = at.partition({"s": ["x"]}, group_size=2, free="acked")
        here.put(rows(3), key=list("abc"), group=[1, 1, 2])
        there.seal(short=short)
        sizes = [len(batch) for batch in here.stream("s", groups=1, timeout=20)]
        assert sizes == ([2] if short == "drop" else [2, 1])
        assert here.stats()["short_groups"] == (1 if short == "drop" else 0)
        late = dataplane.RowsDropped if short == "drop" else dataplane.RowsGone
        with pytest.raises(late):
            there.put(rows(1), key=["d"], group=2)
    with pytest.raises(dataplane.InvalidCall, match="short="):
        here.seal(short="both")


MIDWAY = """
    import dataplane, numpy as np
    part = dataplane.connect("a").partition("p")
    rows = [np.full(3 << 19, number, np.uint8) for number in range(8)]
    part.put({{"x": rows}}, key=range(8), timeout=60, {how})
"""


@pytest.mark.parametrize("group", [None, list("aabbccdd")], ids=["rows", "groups"])
def test_a_put_that_a_killed_worker_began_is_completed_by_repeating_it(
    cluster: Cluster, group: list[str] | None
) -> None:
    """Its rows go with several messages, of which one waits for room."""
    cluster.start("a", arena="32MiB")
    with cluster.connect("a") as plane:
        part = plane.partition("p", {"s": ["x"]}, free="drop")
        filler = plane.partition("filler", free="drop")
        filler.put({"x": [np.zeros(13 << 20, np.uint8)]}, key=["f"])
        worker = cluster.worker(MIDWAY.format(how=f"group={group}" if group else ""))
        until(lambda: plane.stats()["waiting_puts"] == 1, "the put waits for room")
        was_there = len(part.rows())
        assert 0 < was_there < 8
        worker.kill()
        worker.wait()
        filler.drop()
        columns = {"x": [np.full(3 << 19, number, np.uint8) for number in range(8)]}
        assert part.put(columns, key=range(8), group=group).kept == was_there
        with pytest.raises(dataplane.FieldExists, match="nothing was put: .*all 8 rows"):
            part.put(columns, key=range(8), group=group)
        found = part.get(keys=list(range(8)))
        assert [value[0] for value in found["x"]] == list(range(8))
        del found
        part.drop()


def test_a_repeated_put_of_a_cancelled_one_enters_what_is_missing(at: Hosts) -> None:
    here, there = at.partition({"s": ["x"]}, free="acked")
    here.put(rows(2), key=["a", "b"], tags={"v": 1})
    consume_rows(there, 1)
    again = there.put(rows(4), key=list("abcd"), tags={"v": 2})
    assert again.kept == 2 and len(again) == 4
    left = here.rows()
    assert dict(zip(left.keys, left.tags["v"], strict=True)) == {"b": 1, "c": 2, "d": 2}
    with pytest.raises(dataplane.FieldExists, match="all 2 rows.*freed since"):
        here.put(rows(2), key=["a", "b"])
    with pytest.raises(dataplane.FieldExists, match="some, but not all, of the fields of this put"):
        here.put({**rows(2), "more": [1, 2]}, key=["b", "e"])
    assert here.put({"more": [1]}, key=["b"]).kept == 0
    assert here.put({"more": [1, 2]}, key=["b", "c"]).kept == 1
    assert here.put(rows(2), key=["b", "c"], replace=True).kept == 0


def consume_rows(part: Partition, count: int) -> None:
    with part.claim("s", rows=count, timeout=20):
        pass
