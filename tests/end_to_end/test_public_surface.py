"""What a stage worker can say: partitions, claims, groups, tags and the end of rows.

Every test runs with both clients at one peer, and with each at a host of its own.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import dataplane
from dataplane import Batch, Partition, Stream, tag
from dataplane.client._sync.stream import StreamLoop
from tests.end_to_end.conftest import until
from tests.end_to_end.hosts import Hosts, one_and_two

BIG = 2000
"""int64 values that make a range of their own."""


@pytest.fixture(scope="module")
def both() -> Iterator[dict[str, Hosts]]:
    with one_and_two() as running:
        yield running


@pytest.fixture(params=["one", "two"])
def hosts(both: dict[str, Hosts], request: pytest.FixtureRequest) -> Iterator[Hosts]:
    shared = both[request.param]
    yield shared
    shared.drop_everything()


def rows_of(batch: dataplane.Batch | dataplane.Rows, field: str = "x") -> list[int]:
    return sorted(int(np.asarray(v).flat[0]) for v in batch[field])


def fill(part: Partition, n: int, start: int = 0, **kwargs: object) -> dataplane.Ref:
    x = np.repeat(np.arange(start, start + n), BIG).reshape(n, BIG)
    return part.put({"x": x}, **kwargs)  # type: ignore[arg-type]


# partitions


def test_the_same_definition_attaches_and_another_conflicts(hosts: Hosts) -> None:
    stages = {"s": ["x"]}
    here, _ = hosts.partition(stages, group_size=2)
    again = hosts.there.partition(hosts.name, stages, group_size=2)
    fill(again, 2, group="g")
    assert len(here.rows()) == 2
    for other in ({"group_size": 3}, {"free": "drop", "group_size": 2}, {}):
        with pytest.raises(
            dataplane.PartitionConflict, match="drop the partition first, or attach"
        ):
            hosts.there.partition(hosts.name, stages, **other)
    with pytest.raises(dataplane.PartitionConflict):
        hosts.there.partition(hosts.name, {"s": ["y"]}, group_size=2)


def test_a_bare_partition_waits_until_somebody_defines_it(hosts: Hosts) -> None:
    name = "defined-late"
    with pytest.raises(dataplane.PartitionUndefined, match=r"plane.partition\('defined-late'"):
        hosts.there.partition(name).put({"x": [1]}, timeout=0.2)
    bare = hosts.there.partition(name)
    got: list[list[int]] = []
    waiting = threading.Thread(target=lambda: got.append(rows_of(bare.claim("s", rows=1))))
    waiting.start()
    fill(hosts.here.partition(name, {"s": ["x"]}), 1)
    waiting.join(20)
    assert got == [[0]]


def test_a_dropped_partition_is_gone_and_may_be_declared_anew(hosts: Hosts) -> None:
    here, there = hosts.partition({"s": ["x"]})
    fill(here, 3)
    assert len(there.rows()) == 3
    here.drop()
    for call in (
        lambda: fill(there, 1),
        lambda: there.claim("s", rows=1, timeout=5),
        lambda: there.rows(),
        lambda: there.seal(),
        lambda: there.wait("s", rows=1, timeout=5),
        lambda: there.stats(),
    ):
        with pytest.raises(dataplane.PartitionGone, match=r"plane.partition"):
            call()
    anew = hosts.there.partition(hosts.name, {"other": ["y"]})
    with pytest.raises(dataplane.PartitionGone):
        fill(here, 1)
    anew.put({"y": [1]})
    assert list(hosts.here.partition(hosts.name).claim("other", rows=1)["y"]) == [1]


def test_a_stage_may_be_declared_by_its_first_claim(hosts: Hosts) -> None:
    here, there = hosts.partition({"s": ["x"]}, free="drop")
    fill(here, 2, key=["a", "b"])
    here.put({"y": [5]}, key=["a"])
    batch = there.claim("late", rows=1, fields=["y"], timeout=20)
    assert batch.keys == ["a"] and list(batch["y"]) == [5]
    with pytest.raises(dataplane.ClaimTimeout, match="lacks? `y`"):
        here.claim("late", rows=1, timeout=0.2)
    with pytest.raises(dataplane.StageUndefined, match="fields="):
        here.claim("unheard", rows=1, timeout=5)


def test_a_late_stage_is_refused_where_acked_rows_are_freed(hosts: Hosts) -> None:
    here, there = hosts.partition({"s": ["x"]}, free="acked")
    fill(here, 1)
    for part in (here, there):
        with pytest.raises(dataplane.StageUndefined, match="stages cannot be added later"):
            part.claim("late", rows=1, fields=["x"], timeout=5)


def test_a_partition_seals_itself_by_its_number_of_groups(hosts: Hosts) -> None:
    here, there = hosts.partition({"s": ["x"]}, group_size=2, groups=2)
    fill(here, 2, group="a")
    fill(there, 2, group="b")
    assert sorted(len(batch) for batch in there.stream("s", groups=1)) == [2, 2]
    with pytest.raises(dataplane.PartitionSealed):
        fill(here, 1, group="c")


# claims


def test_a_tag_that_no_row_has_is_logged_once(
    hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    here, there = hosts.partition({"s": ["x"]})
    fill(here, 2, tags={"version": [1, 2]})
    for _ in range(2):
        assert there.drop(where=tag("vresion") < 2).rows == 0
        assert len(there.rows(where=(tag("vresion") < 2) | (tag("kind") == "a"))) == 0
    assert len(here.rows(where=tag("version") < 2)) == 1
    assert [r.getMessage() for r in caplog.records if "where= names tag" in r.getMessage()] == [
        f"partition {there.name!r}: where= names tag {name!r}, but no row has this tag "
        "(existing tags: 'version'). Logged once per tag"
        for name in ("vresion", "kind")
    ]


def test_groups_close_by_name_or_by_the_seal(hosts: Hosts) -> None:
    here, there = hosts.partition({"s": ["x"]})
    fill(here, 2, group="closed")
    fill(there, 1, start=5, group="open")
    there.close("closed", 2)
    batch = there.claim("s", groups=1, timeout=20)
    assert rows_of(batch) == [0, 1]
    with pytest.raises(dataplane.ClaimTimeout, match="1 group is still open"):
        here.claim("s", groups=1, timeout=0.2)
    with pytest.raises(dataplane.GroupClosed):
        fill(here, 1, group="closed")
    here.seal()
    assert rows_of(here.claim("s", groups=1, timeout=20)) == [5]


def test_a_budget_takes_groups_or_rows_as_asked(hosts: Hosts) -> None:
    here, there = hosts.partition({"s": ["x"]}, group_size=2, free="drop")
    lengths = [10, 20, 30, 40]
    fill(here, 4, group=["a", "a", "b", "b"], tags={"length": lengths})
    here.seal()
    first = there.claim("s", budget={"length": 40}, timeout=20)
    assert first.tags["length"] == [10, 20]
    batch = there.claim("s", budget={"length": 40}, unit="rows", timeout=20)
    assert batch.tags["length"] == [30]
    heavier = there.claim("s", budget={"length": 1}, unit="rows", timeout=20)
    assert heavier.tags["length"] == [40]  # at least one


def test_min_is_content_with_fewer(hosts: Hosts) -> None:
    here, there = hosts.partition({"s": ["x"]})
    fill(here, 3)
    with pytest.raises(dataplane.ClaimTimeout, match="3 of 3 rows ready, 8 wanted"):
        there.claim("s", rows=8, timeout=0.2)
    assert rows_of(there.claim("s", rows=8, min=2, timeout=20)) == [0, 1, 2]


def test_a_claim_filters_by_tags_and_for_groups_by_all_rows(hosts: Hosts) -> None:
    here, there = hosts.partition({"s": ["x"]}, group_size=2)
    fill(here, 4, group=["a", "a", "b", "b"], tags={"version": [1, 6, 6, 7]})
    fresh = tag("version") >= 6
    batch = there.claim("s", groups=1, where=fresh, timeout=20)
    assert batch.group_ids == ["b", "b"] and batch.tags == {"version": [6, 7]}
    with pytest.raises(dataplane.ClaimTimeout):
        there.claim("s", groups=1, where=fresh, timeout=0.2)
    here.tag(here.rows(where=tag("version") == 1).keys, {"version": 9})
    assert there.claim("s", groups=1, where=fresh, timeout=20).group_ids == ["a", "a"]


def test_a_stream_acks_each_batch_with_what_was_added(hosts: Hosts) -> None:
    here, there = hosts.partition({"score": ["x"], "train": ["x", "score"]})
    fill(here, 5)
    here.seal()
    with there.stream("score", rows=2) as stream:
        for batch in stream:
            batch.add(score=[float(x[0]) for x in batch["x"]])
    scored = [
        (int(x[0]), s)
        for b in here.stream("train", rows=2)
        for x, s in zip(b["x"], b["score"], strict=True)
    ]
    assert sorted(scored) == [(i, float(i)) for i in range(5)]


def _break(part: Partition, stream: Stream) -> None:
    for _batch in stream:
        break


def _return(part: Partition, stream: Stream) -> Batch:
    for batch in stream:
        return batch
    raise AssertionError


def _raise(part: Partition, stream: Stream) -> None:
    with contextlib.suppress(RuntimeError):
        for _batch in stream:
            raise RuntimeError


def _hold(part: Partition, stream: Stream) -> tuple[StreamLoop, Batch]:
    loop = iter(stream)
    return loop, next(loop)


def _islice(part: Partition, stream: Stream) -> list[Batch]:
    return list(itertools.islice(stream, 1))


@pytest.mark.parametrize("leave", [_break, _return, _raise, _hold, _islice])
def test_whatever_ends_a_loop_releases_the_batch_in_hand(
    hosts: Hosts, leave: Callable[[Partition, Stream], object]
) -> None:
    here, there = hosts.partition({"s": ["x"]})
    fill(here, 2, key=["a", "b"])
    with there.stream("s", rows=2) as stream:
        kept = leave(there, stream)
    again = here.claim("s", rows=2, timeout=20)
    assert sorted(again.keys) == ["a", "b"]
    again.release()
    if leave is not _hold:  # nobody knows that such a loop is over, but the end of a `with`
        kept = leave(there, there.stream("s", rows=2))
        assert sorted(here.claim("s", rows=2, timeout=20).keys) == ["a", "b"]
    del kept


def test_a_stream_of_so_many_batches_acks_its_last(hosts: Hosts) -> None:
    here, there = hosts.partition({"s": ["x"]})
    fill(here, 3)
    assert sum(len(batch) for batch in there.stream("s", rows=1, batches=2)) == 2
    assert len(here.rows()) == 1


def test_a_stream_that_waits_holds_nothing_of_the_batch_before(hosts: Hosts) -> None:
    here, there = hosts.partition({"s": ["x"]})
    fill(here, 1)
    loop = iter(there.stream("s", rows=1))
    batch = next(loop)
    assert rows_of(batch) == [0]
    gone = weakref.ref(batch)
    del batch
    waiting = threading.Thread(target=lambda: list(loop))
    waiting.start()
    until(lambda: gone() is None, "the batch before is nobody's")
    here.seal()
    waiting.join()


def test_a_filtered_stream_ends_where_what_is_left_can_never_match(
    hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    here, there = hosts.partition({"s": ["x"], "t": ["x"]}, group_size=1)
    fill(here, 3, group=[0, 1, 2], tags={"version": [1, 1, 2]})
    here.seal()
    fresh = tag("version") >= 2
    assert [rows_of(batch) for batch in there.stream("s", groups=1, where=fresh)] == [[2]]
    assert list(here.loader("s", groups=1, where=fresh)) == []
    assert caplog.text.count("every row that matches, but 2 other groups remain") == 2
    with pytest.raises(dataplane.StreamEnd, match="that matches, but 2 other groups remain") as e:
        there.claim("s", groups=1, where=fresh)
    assert e.value.details["remaining"] == 2
    stale = there.claim("t", rows=2, where=~fresh, timeout=20)
    here.claim("t", rows=1, where=fresh, timeout=20).ack()
    with pytest.raises(dataplane.ClaimTimeout):  # what is leased may come back with other tags
        here.claim("t", rows=1, where=fresh, timeout=0.2)
    stale.release(tags={"version": 3})
    del stale
    assert [len(batch) for batch in here.stream("t", rows=2, where=fresh)] == [2]


def test_waiting_for_few_rows_may_leave_out_stale_ones(hosts: Hosts) -> None:
    here, there = hosts.partition({"s": ["x"]})
    fill(here, 3, tags={"version": [1, 1, 2]})
    fresh = tag("version") >= 2
    with pytest.raises(dataplane.ClaimTimeout):
        here.wait("s", below=2, unit="rows", timeout=0.2)
    here.wait("s", below=2, unit="rows", where=fresh, timeout=20)
    with pytest.raises(dataplane.ClaimTimeout):
        there.wait("s", rows=2, where=fresh, timeout=0.2)
    there.wait("s", rows=1, where=fresh, timeout=20)
    here.seal()
    with pytest.raises(dataplane.StreamEnd, match="1 row left that matches"):
        there.wait("s", rows=2, where=fresh, timeout=20)


def test_what_another_writer_has_set_is_not_dropped_in_silence(hosts: Hosts) -> None:
    here, there = hosts.partition({"s": ["x"], "t": ["x"]}, free="drop")
    fill(here, 2, key=["a", "b"])
    here.put({"y": [7]}, key=["a"])
    batch = there.claim("s", rows=2, timeout=20)
    batch.add(y=[1, 2])
    with pytest.raises(
        dataplane.FieldExists,
        match=r"1 row already has a value for field 'y' from a writer other than stage 's'",
    ):
        batch.ack()
    with pytest.raises(dataplane.FieldExists, match="under another field name"):
        batch.ack()  # with the same values
    batch.release()
    assert list(here.get(keys=["a"])["y"]) == [7]
    batch = there.claim("s", rows=1, timeout=20)
    batch.add(y=[1], long=[np.full(3000, 3)])
    with pytest.raises(dataplane.FieldExists):
        batch.ack()
    batch.add(y2=[1])
    batch.ack()
    found = here.get(keys=batch.keys)
    assert (found["y"][0], found["y2"][0]) == (7, 1)
    assert np.array_equal(found["long"][0], np.full(3000, 3))
    here.reset("s")
    with there.claim("t", rows=2, timeout=20) as batch:
        batch.add(z=[1, 2])
    with pytest.raises(dataplane.FieldExists), here.claim("s", rows=2, timeout=20) as batch:
        batch.add(z=[3, 4])
    here.reset("t")
    with there.claim("t", rows=2, timeout=20) as batch:
        batch.add(z=[5, 6])  # delivered again: what is there wins
    assert sorted(here.rows().keys) == ["a", "b"] and sorted(here.get()["z"]) == [1, 2]


def test_rows_that_no_group_would_ever_take_are_refused_at_the_put(hosts: Hosts) -> None:
    here, there = hosts.partition({"s": ["x"]}, group_size=2)
    for keys in (None, ["a", "b"]):
        with pytest.raises(dataplane.InvalidRows, match="group_size=2.*pass group="):
            fill(there, 2, key=keys)
    assert len(here.rows()) == 0
    fill(here, 2, key=["a", "b"], group="g")
    there.put({"y": [1, 2]}, key=["a", "b"])  # new fields of rows that are in need none
    assert there.claim("s", groups=1, timeout=20).group_ids == ["g", "g"]


def test_a_release_may_tag_the_rows(hosts: Hosts) -> None:
    here, there = hosts.partition({"s": ["x"]})
    fill(here, 2, key=["a", "b"], tags={"tries": 0})
    there.claim("s", rows=2, timeout=20).release(tags={"tries": [1, 2]})
    again = here.claim("s", rows=2, timeout=20)
    assert dict(zip(again.keys, again.tags["tries"], strict=True)) == {"a": 1, "b": 2}


def test_a_batch_may_drop_some_of_its_rows(hosts: Hosts) -> None:
    here, there = hosts.partition({"s": ["x"], "t": ["x"]}, group_size=2)
    fill(here, 4, key=list("abcd"), group=["g", "g", "h", "h"])
    batch = there.claim("s", groups=2, timeout=20)
    batch.drop(groups=["g"])
    assert batch.state == "leased" and "2 left" in repr(batch)
    batch.drop(rows=[batch.keys.index("c")])
    batch.ack()
    assert sorted(here.rows().keys) == ["d"]
    with pytest.raises(dataplane.RowsDropped):
        fill(there, 1, key=["a"])
    assert here.claim("t", rows=1, timeout=20).keys == ["d"]


def test_dropping_all_rows_of_a_batch_ends_its_lease(hosts: Hosts) -> None:
    here, there = hosts.partition({"s": ["x"]})
    fill(here, 2)
    batch = there.claim("s", rows=2, timeout=20)
    batch.drop()
    assert batch.state == "dropped"
    with pytest.raises(dataplane.LeaseExpired, match="already dropped"):
        batch.ack()
    assert len(here.rows()) == 0


def test_a_lease_ends_at_its_limit_wherever_the_rows_are(hosts: Hosts) -> None:
    here, there = hosts.partition({"s": ["x"]})
    fill(here, 1, key=["k"])
    late = there.claim("s", rows=1, lease=0.2, timeout=20)
    assert here.claim("s", rows=1, timeout=20).keys == ["k"]
    with pytest.raises(dataplane.LeaseExpired, match="claim again"):
        late.ack()


def test_other_fields_are_fetched_when_they_are_asked_for(hosts: Hosts) -> None:
    here, there = hosts.partition({"s": ["x"]}, free="drop")
    n = 3
    fill(here, n, key=list("abc"))
    here.put({"y": np.arange(n * BIG).reshape(n, BIG), "z": ["p", "q", "r"]}, key=list("abc"))
    batch = there.claim("s", rows=n, timeout=20)
    assert batch.fields == ["x"] and "y" not in batch
    assert rows_of(batch, "y") == [0, BIG, 2 * BIG] and batch.fields == ["x", "y"]
    batch.ack()
    assert sorted(batch["z"]) == ["p", "q", "r"]
    with pytest.raises(dataplane.FieldUnknown, match="no row has a field 'w'"):
        batch["w"]


def test_a_claim_for_a_field_that_no_row_has_names_those_that_rows_have(hosts: Hosts) -> None:
    here, there = hosts.partition({"s": ["x"]})
    fill(here, 1, key=["a"])
    fill(here, 1, key=["b"])
    here.put({"y": [5]}, key=["a"])
    with there.claim("s", rows=2, fields=["x", "y"], timeout=20) as batch:
        at = batch.keys.index("b")
        with pytest.raises(dataplane.FieldUnknown, match="row 'b' has no field 'y'"):
            batch["y"][at]
        batch.release()
    with pytest.raises(
        dataplane.FieldUnknown, match="field 'yy': use one of the fields .'x', 'y'."
    ):
        there.claim("s", rows=1, fields=["x", "yy"], timeout=20)
    assert sorted(there.claim("s", rows=2, timeout=20).keys) == ["a", "b"]


def test_fields_say_what_is_fetched_and_never_what_is_ready(hosts: Hosts) -> None:
    here, there = hosts.partition({"s": ["x"]})
    fill(here, 1)
    batch = there.claim("s", rows=1, fields=[], timeout=20)
    assert batch.fields == [] and rows_of(batch) == [0]


# tags, waiting, the end of rows


def test_tags_change_only_where_they_are_as_expected(hosts: Hosts) -> None:
    here, there = hosts.partition(free="drop")
    fill(here, 2, key=["a", "b"], tags={"status": "running"})
    there.tag(["a"], {"status": "done"}, expect={"status": "running"})
    with pytest.raises(dataplane.TagConflict, match="status"):
        here.tag(["a", "b"], {"status": "lost"}, expect={"status": "running"})
    rows = there.rows()
    assert dict(zip(rows.keys, rows.tags["status"], strict=True)) == {"a": "done", "b": "running"}


def test_waiting_for_rows_and_for_room_by_count(hosts: Hosts) -> None:
    here, there = hosts.partition({"s": ["x"]}, group_size=1)
    with pytest.raises(dataplane.ClaimTimeout, match="no group ready"):
        there.wait("s", groups=1, timeout=0.2)
    waiting = threading.Thread(target=there.wait, args=("s",), kwargs={"groups": 4})
    waiting.start()
    fill(here, 4, group=list("abcd"))
    waiting.join(20)
    assert not waiting.is_alive()
    there.wait("s", rows=4, timeout=20)
    with pytest.raises(dataplane.ClaimTimeout):
        here.wait("s", below=4, timeout=0.2)
    waiting = threading.Thread(target=here.wait, args=("s",), kwargs={"below": 3, "unit": "rows"})
    waiting.start()
    there.claim("s", groups=2, timeout=20).ack()
    waiting.join(20)
    assert not waiting.is_alive()


def test_drops_by_key_group_and_filter_free_their_bytes(hosts: Hosts) -> None:
    here, there = hosts.partition(free="drop")
    before = hosts.used_bytes()
    fill(
        here,
        8,
        key=list(range(8)),
        group=["g", "g", "h", "h", None, None, None, None],
        tags={"n": list(range(8))},
    )
    each = (hosts.used_bytes() - before) // 8  # a group shares a chunk, and so do the others
    assert there.drop(groups=["g"]) == (2, 2 * BIG * 8)
    assert there.drop(keys=[4, "unheard"]).rows == 1
    assert here.drop(where=tag("n") > 5).rows == 2
    assert sorted(there.rows().keys) == [2, 3, 5]
    until(lambda: hosts.used_bytes() - before == 6 * each, "the owner was told what is free")
    with pytest.raises(dataplane.RowsDropped):
        fill(there, 1, group="g")


def test_what_was_dropped_before_it_was_put_is_refused_wherever_it_is_put(hosts: Hosts) -> None:
    here, there = hosts.partition(free="drop", group_size=2)
    assert here.drop(keys=["k", "l"]) == there.drop(groups=["g"]) == (0, 0)
    for part in (here, there):
        for late in ({"key": ["k"]}, {"key": ["l", "m"], "group": "h"}, {"group": "g"}):
            with pytest.raises(dataplane.RowsDropped, match="was dropped|were dropped"):
                fill(part, len(late.get("key", "g")), **late)
    fill(there, 2, key=["m", "n"], group="h")
    assert sorted(here.rows().keys) == ["m", "n"]


def test_rows_are_freed_when_every_stage_has_acked(hosts: Hosts) -> None:
    here, there = hosts.partition({"s": ["x"], "t": ["x"]})
    fill(here, 2)
    there.claim("s", rows=2, timeout=20).ack()
    assert len(here.rows()) == 2
    here.claim("t", rows=2, timeout=20).ack()
    assert len(there.rows()) == 0


def test_reset_makes_another_epoch(hosts: Hosts) -> None:
    here, there = hosts.partition({"s": ["x"]}, free="drop")
    fill(here, 3)
    here.seal()
    for _ in range(2):
        assert sorted(i for b in there.stream("s", rows=2) for i in rows_of(b)) == [0, 1, 2]
        with pytest.raises(dataplane.StreamEnd):
            here.claim("s", rows=1, timeout=20)
        there.reset("s")


def test_fields_are_written_once_unless_replaced(hosts: Hosts) -> None:
    here, there = hosts.partition(free="drop")
    fill(here, 1, key=["k"])
    view = there.get(keys=["k"])["x"][0]
    with pytest.raises(dataplane.FieldExists, match="replace=True"):
        fill(there, 1, start=7, key=["k"])
    fill(there, 1, start=7, key=["k"], replace=True)
    assert rows_of(here.get(keys=["k"])) == [7]
    assert (view == 0).all()


def test_keys_come_back_as_they_were_given(hosts: Hosts) -> None:
    here, there = hosts.partition(free="drop")
    keys: list[str | int] = [7, "7", -1, "ключ", 2**62]
    fill(here, 5, key=keys)
    assert there.get(keys=keys).keys == keys
    assert [type(k) for k in there.get(keys=keys).keys] == [type(k) for k in keys]
    ref = fill(there, 2)
    assert all(str(k).startswith("~") and len(str(k)) == 33 for k in ref.keys)
    assert here.get(keys=ref.keys[::-1]).keys == ref.keys[::-1]


def timed_out(part: Partition, stage: str) -> tuple[str, dict[str, object]]:
    """What a claim of two rows says that is in vain."""
    try:
        part.claim(stage, rows=2, timeout=0.3)
    except TimeoutError as exc:
        assert isinstance(exc, dataplane.ClaimTimeout)
        return str(exc), exc.details
    raise AssertionError("it was met")


def test_a_waiting_claim_says_whom_it_waits_for(hosts: Hosts) -> None:
    here, there = hosts.partition({"s": ["x"], "t": ["x", "y"]})
    fill(here, 2)
    batch = there.claim("s", rows=2, timeout=20)
    began = time.monotonic()
    message, details = timed_out(here, "t")
    assert time.monotonic() - began < 5
    assert "2 rows lack `y`, which stage 't' needs" in message
    assert (
        "2 rows have been leased by this process" in message
        or "2 rows have been leased by pid" in message
    )
    assert details["missing"] == {"y": 2}
    batch.release()


def test_two_partitions_and_two_stages_do_not_meet(hosts: Hosts) -> None:
    one, _ = hosts.partition({"s": ["x"], "t": ["x"]})
    _, other = hosts.partition({"s": ["x"]})
    fill(one, 1, key=["k"])
    fill(other, 1, start=9, key=["k"])
    assert rows_of(one.claim("s", rows=1, timeout=20)) == [0]
    assert rows_of(one.claim("t", rows=1, timeout=20)) == [0]
    assert rows_of(other.claim("s", rows=1, timeout=20)) == [9]


# schemas


def test_a_schema_refuses_another_dtype_and_nothing_of_the_put_is_there(hosts: Hosts) -> None:
    schema = {"x": "int64[*]", "reward": "float32"}
    here, there = hosts.partition({"s": ["x"]}, fields=schema)
    fill(here, 1)
    fill(there, 1)
    for part in (here, there, hosts.there.partition(hosts.name)):  # the last knows of nothing yet
        with pytest.raises(dataplane.InvalidValue, match=r"x\[1\] is float64\[2\], .* as int64"):
            part.put({"x": [[1], [0.5, 1.5]], "other": ["free", "fields"]})
    bare = hosts.there.partition(hosts.name)
    bare.put({"x": [[]], "other": [{}]})
    assert len(here.rows()) == 3
    batch = there.claim("s", rows=3, timeout=20)
    assert {value.dtype for value in batch["x"]} == {np.dtype(np.int64)}
    with pytest.raises(dataplane.InvalidValue, match=r"reward\[0\] is float64, .* as float32"):
        batch.add(reward=np.zeros(3))
    batch.add(reward=np.zeros(3, np.float32))
    batch.ack()
    with pytest.raises(dataplane.PartitionConflict, match="fields="):
        hosts.there.partition(hosts.name, {"s": ["x"]}, fields={"x": "int32[*]"})
    with pytest.raises(dataplane.PartitionConflict, match="fields="):
        hosts.there.partition(hosts.name, {"s": ["x"]})
    same = {"reward": "float32[]", "x": "int64[ * ]"}
    assert repr(hosts.there.partition(hosts.name, {"s": ["x"]}, fields=same))
