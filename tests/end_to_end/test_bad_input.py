"""Calls that are wrong: each its own typed error that says what to do, and nothing is disturbed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import dataplane
from dataplane import Partition, Plane, tag
from tests.end_to_end.hosts import held, running, warm

BIG = 2000
cyclic: list[Any] = []
cyclic.append(cyclic)


@pytest.fixture(scope="module")
def plane() -> Iterator[Plane]:
    with running("a", arena="16MiB") as cluster, cluster.connect("a") as connected:
        warm(connected)
        yield connected


@pytest.fixture
def part(plane: Plane) -> Iterator[Partition]:
    """A partition with the rows a and b, of group g, claimable by s; the same after the test."""
    part = plane.partition("p", {"s": ["x"]}, free="drop")
    x = np.arange(2 * BIG).reshape(2, BIG)
    part.put({"x": x}, key=["a", "b"], group="g", tags={"n": [1, 2]})
    yield part
    rows = part.get()
    assert rows.keys == ["a", "b"] and rows.fields == ["x"] and rows.tags == {"n": [1, 2]}
    assert np.array_equal(rows.numpy("x"), x)
    part.claim("s", rows=2, timeout=5).ack()
    del rows
    part.drop()
    assert plane.stats()["clients"] == 1 and not set(held(plane)) - {"pinned_bytes", "used_bytes"}


def own_code(_: object) -> Any:
    raise RuntimeError("my own code")


Classless: Any = type("Classless", (), {"__class__": property(own_code)})
"""Any look at the class of its objects raises."""


class Unhashable(str):
    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]


Wrong = Callable[[Partition], object]

PUTS: dict[str, tuple[Wrong, type[Exception], str]] = {
    "columns of different lengths": (
        lambda p: p.put({"x": [1, 2], "y": [1]}),
        dataplane.InvalidRows,
        r"x: 2, y: 1\): pass one entry per row for each field",
    ),
    "keys of another length": (
        lambda p: p.put({"x": [1, 2]}, key=["c"]),
        dataplane.InvalidRows,
        "key= names 1 row, but not every column has 1 entry .x: 2.",
    ),
    "groups of another length": (
        lambda p: p.put({"x": [1, 2]}, group=["g"]),
        dataplane.InvalidRows,
        "1 group id for 2 rows: pass one group id per row, or a single one for all rows",
    ),
    "tags of another length": (
        lambda p: p.put({"x": [1, 2]}, tags={"n": [1, 2, 3]}),
        dataplane.InvalidRows,
        "tag 'n' has 3 values for 2 rows: pass one value per row",
    ),
    "tags without values": (
        lambda p: p.put({"x": [1, 2]}, tags={"n": torch.zeros(2, device="meta")}),
        dataplane.InvalidRows,
        "tag 'n' is a torch.Tensor, which cannot be read: NotImplementedError: .*Pass a list",
    ),
    "a tag without a value": (
        lambda p: p.put({"x": [1, 2]}, tags={"n": [1, torch.zeros((), device="meta")]}),
        dataplane.InvalidRows,
        "tag 'n' at index 1 is a torch.Tensor, which cannot be read: .*: .*Pass a list",
    ),
    "sparse groups": (
        lambda p: p.put({"x": [1, 2]}, group=torch.ones(2).to_sparse()),  # type: ignore[arg-type]
        dataplane.InvalidRows,
        "group is a torch.Tensor, which cannot be read: RuntimeError: .*Pass a list",
    ),
    "keys without values": (
        lambda p: p.put({"x": [1, 2]}, key=torch.zeros(2, dtype=torch.int64, device="meta")),  # type: ignore[arg-type]
        dataplane.InvalidRows,
        "key is a torch.Tensor, which cannot be read: .*: .*Pass a list",
    ),
    "no column": (
        lambda p: p.put({}),
        dataplane.InvalidRows,
        "no fields to write: pass at least one field",
    ),
    "no row": (
        lambda p: p.put({"x": []}),
        dataplane.InvalidRows,
        r"the columns \('x'\) have no rows to write",
    ),
    "neither yes nor no": (
        lambda p: p.put({"x": [1]}, replace="no"),  # type: ignore[arg-type]
        dataplane.InvalidCall,
        "replace='no': expected True or False",
    ),
    "an array of one as a number": (
        lambda p: p.close("g", np.array([1])),  # type: ignore[arg-type]
        dataplane.InvalidCall,
        r"n=array\(\[1\]\): expected a positive int",
    ),
    "no mapping": (lambda p: p.put([1]), dataplane.InvalidRows, "mapping of field names"),  # type: ignore[arg-type]
    "one number": (
        lambda p: p.put({"x": 5}),
        dataplane.InvalidRows,
        "'x': expected a list or an array",
    ),
    "a text as column": (lambda p: p.put({"x": "ab"}), dataplane.InvalidRows, "one entry per row"),
    "half a character as field": (
        lambda p: p.put({"\ud800": [1]}),
        dataplane.InvalidRows,
        r"invalid field name '\\ud800': expected a str of 1 to 512 bytes",
    ),
    "an object": (lambda p: p.put({"x": [object()]}), dataplane.InvalidValue, r"x\[0\]: an object"),
    "a set inside": (
        lambda p: p.put({"x": [1, {"a": [{1}]}]}),
        dataplane.InvalidValue,
        r'x\[1\]\["a"\]\[0\]: a set cannot be stored: pass None, bool',
    ),
    "a dtype of text": (lambda p: p.put({"x": np.array(["a"])}), dataplane.InvalidValue, "tolist"),
    "a dtype with fields": (
        lambda p: p.put({"x": np.zeros(2, [("a", "i4")])}),
        dataplane.InvalidValue,
        "pass its parts as separate fields",
    ),
    "a sparse tensor": (
        lambda p: p.put({"x": torch.eye(3).to_sparse()}),
        dataplane.InvalidValue,
        "to_dense",
    ),
    "a value in itself": (lambda p: p.put({"x": [cyclic]}), dataplane.LimitExceeded, "limit of 64"),
    "too many fields": (
        lambda p: p.put({f"f{i}": [1] for i in range(65)}),
        dataplane.LimitExceeded,
        "65 fields, but a partition can have at most 64",
    ),
    "a field twice": (
        lambda p: p.put({"x": [1]}, key=["a"]),
        dataplane.FieldExists,
        "'a'.*replace=True",
    ),
    "a row in two groups": (
        lambda p: p.put({"y": [1]}, key=["a"], group="h"),
        dataplane.InvalidRows,
        "a row cannot change its group",
    ),
    "a key twice": (lambda p: p.put({"x": [1, 2]}, key=["c", "c"]), dataplane.InvalidRows, "'c'"),
    "a key of no type": (
        lambda p: p.put({"x": [1]}, key=[1.5]),  # type: ignore[list-item]
        dataplane.InvalidRows,
        "str or",
    ),
    "a bool as key": (
        lambda p: p.put({"x": [1]}, key=[True]),
        dataplane.InvalidRows,
        "a str or an int",
    ),
    "no key": (lambda p: p.put({"x": [1]}, key=1.5), dataplane.InvalidRows, "expected one id"),  # type: ignore[arg-type]
    "a large key": (lambda p: p.put({"x": [1]}, key=[2**70]), dataplane.InvalidRows, "as a str"),
    "a long key": (lambda p: p.put({"x": [1]}, key=["k" * 999]), dataplane.LimitExceeded, "512"),
    "a minted key": (lambda p: p.put({"x": [1]}, key=["~a"]), dataplane.InvalidRows, "another"),
    "a group of no type": (
        lambda p: p.put({"x": [1]}, group=[[1]]),  # type: ignore[list-item]
        dataplane.InvalidRows,
        "a str or an int",
    ),
    "a tag of no type": (
        lambda p: p.put({"x": [1]}, tags={"n": [[1]]}),
        dataplane.InvalidRows,
        "or store it in a field",
    ),
    "a large tag": (
        lambda p: p.put({"x": [1]}, tags={"n": 2**70}),
        dataplane.InvalidValue,
        "a 64-bit int",
    ),
    "a tag's name": (
        lambda p: p.put({"x": [1]}, tags={5: 1}),  # type: ignore[dict-item]
        dataplane.InvalidRows,
        "invalid tag name 5: expected a str",
    ),
    "dedup of nothing": (lambda p: p.put({"x": [1]}, dedup=["y"]), dataplane.FieldUnknown, "'y'"),
    "more than its share": (
        lambda p: p.put({"x": np.zeros((1, 12 << 20), np.uint8)}),
        dataplane.ValueTooLarge,
        "of this host's 16.0 MiB arena: split the group across several put",
    ),
    "more than the arena": (
        lambda p: p.put({"x": np.zeros((8, 8 << 20), np.uint8)}, group="large"),
        dataplane.ValueTooLarge,
        "needs 64.0 MiB at once",
    ),
    "a time-out of no type": (lambda p: p.put({"x": [1]}, timeout="3"), dataplane.InvalidCall, "s"),  # type: ignore[arg-type]
    "a time-out that is over": (
        lambda p: p.put({"x": [1]}, timeout=0),
        dataplane.DeadlineExceeded,
        "longer timeout=",
    ),
}

OTHERS: dict[str, tuple[Wrong, type[Exception], str]] = {
    "a field without a class": (
        lambda p: p.get()[Classless()],
        dataplane.InvalidCall,
        "cannot be read: RuntimeError: my own code",
    ),
    "an array without a class": (
        lambda p: p.get().numpy(Classless()),
        dataplane.InvalidCall,
        "cannot be read: RuntimeError: my own code",
    ),
    "a list without a class": (
        lambda p: p.get().get(Classless()),
        dataplane.InvalidCall,
        "cannot be read: RuntimeError: my own code",
    ),
    "a fetch without a class": (
        lambda p: p.get().fetch(Classless()),
        dataplane.InvalidCall,
        "cannot be read: RuntimeError: my own code",
    ),
    "a layout without a class": (
        lambda p: p.get().torch("x", Classless()),
        dataplane.InvalidCall,
        "layout is .* cannot be read: RuntimeError: my own code",
    ),
    "a slice of texts": (
        lambda p: p.get()["a":"b"],
        dataplane.InvalidCall,
        "cannot be read: TypeError: slice indices must be integers",
    ),
    "an unknown key": (
        lambda p: p.get(keys=["a", "nope"]),
        dataplane.RowsGone,
        r"1 of the 2 rows.*'nope'",
    ),
    "an unknown field": (
        lambda p: p.get(fields=["y"]),
        dataplane.FieldUnknown,
        "use one of the fields .'x'.",
    ),
    "a text as fields": (lambda p: p.get(fields="x"), dataplane.InvalidCall, "a list of names"),
    "keys and a filter": (
        lambda p: p.get(keys=["a"], where=tag("n") == 1),
        dataplane.InvalidCall,
        "only one of them",
    ),
    "no filter": (lambda p: p.get(where=True), dataplane.InvalidCall, r"dataplane.tag\("),  # type: ignore[arg-type]
    "a list in a filter": (
        lambda p: tag("n") == [1],
        dataplane.InvalidValue,
        r"cannot compare a tag with \[1\] of type list",
    ),
    "a claim of nothing": (lambda p: p.claim("s"), dataplane.InvalidCall, "exactly one of rows="),
    "a claim of both": (lambda p: p.claim("s", rows=1, groups=1), dataplane.InvalidCall, "exactly"),
    "a claim of no rows": (lambda p: p.claim("s", rows=0), dataplane.InvalidCall, "positive int"),
    "a claim of half": (lambda p: p.claim("s", rows=0.5), dataplane.InvalidCall, "positive int"),  # type: ignore[arg-type]
    "a claim of True": (lambda p: p.claim("s", rows=True), dataplane.InvalidCall, "positive int"),
    "min over rows": (lambda p: p.claim("s", rows=1, min=2), dataplane.InvalidCall, "from 1 to"),
    "two budgets": (
        lambda p: p.claim("s", budget={"n": 1, "m": 1}),
        dataplane.InvalidCall,
        "one tag",
    ),
    "a budget of text": (lambda p: p.claim("s", budget={"n": "1"}), dataplane.InvalidCall, "num"),  # type: ignore[dict-item]
    "a budget that no float holds": (
        lambda p: p.claim("s", budget={"n": 10**400}),
        dataplane.InvalidCall,
        "finite number above 0",
    ),
    "a numpy budget without a limit": (
        lambda p: p.claim("s", budget={"n": np.float32("inf")}),  # type: ignore[dict-item]
        dataplane.InvalidCall,
        "finite number above 0",
    ),
    "no budget": (lambda p: p.claim("s", budget=5), dataplane.InvalidCall, "mapping {tag: limit}"),  # type: ignore[arg-type]
    "an order": (lambda p: p.claim("s", rows=1, in_order=1), dataplane.InvalidCall, "True or F"),  # type: ignore[arg-type]
    "a lease of no time": (lambda p: p.claim("s", rows=1, lease=0), dataplane.InvalidCall, "posit"),
    "a collate that is no function": (
        lambda p: p.loader("s", rows=1, collate=5),  # type: ignore[arg-type]
        dataplane.InvalidCall,
        "collate=5: expected a function",
    ),
    "time that is no number": (
        lambda p: p.claim("s", rows=1, timeout=float("nan")),
        dataplane.InvalidCall,
        "number of seconds",
    ),
    "an unknown stage": (
        lambda p: p.claim("t", rows=1, timeout=5),
        dataplane.StageUndefined,
        r"declare the new stage in plane.partition\(stages=…\), or claim with fields=",
    ),
    "a field that no row has": (
        lambda p: p.claim("s", rows=1, fields=["y"], timeout=5),
        dataplane.FieldUnknown,
        "no row has a field 'y': use one of the fields .'x'.",
    ),
    "a claim that is not met": (
        lambda p: p.claim("s", rows=3, timeout=0),
        dataplane.ClaimTimeout,
        "2 of 2 rows ready, 3 wanted",
    ),
    "a wait for nothing": (lambda p: p.wait("s"), dataplane.InvalidCall, "exactly one of"),
    "a wait for no rows": (lambda p: p.wait("s", rows=0), dataplane.InvalidCall, "positive int"),
    "a wait for no stage": (
        lambda p: p.wait("t", rows=1, timeout=5),
        dataplane.StageUndefined,
        r"has no stage 't': use one of its stages \('s'\)",
    ),
    "a wait for a long key": (
        lambda p: p.wait(key="k" * 999, timeout=5),
        dataplane.LimitExceeded,
        "999 bytes long, over the limit of 512",
    ),
    "a wait for a reserved key": (
        lambda p: p.wait(key="~k", timeout=5),
        dataplane.InvalidRows,
        "reserved for generated keys",
    ),
    "a reset of no stage": (
        lambda p: p.reset("t"),
        dataplane.StageUndefined,
        r"has no stage 't': use one of its stages \('s'\)",
    ),
    "a group too small": (lambda p: p.close("g", 1), dataplane.InvalidRows, "already has 2 rows"),
    "a group of no rows": (lambda p: p.close("g", 0), dataplane.InvalidCall, "positive int"),
    "a group of no type": (lambda p: p.close([1], 1), dataplane.InvalidRows, "a str or an int"),  # type: ignore[arg-type]
    "tags of an unknown row": (lambda p: p.tag(["c"], {"n": 1}), dataplane.RowsGone, "'c'"),
    "two ways to drop": (
        lambda p: p.drop(keys=["a"], groups=["g"]),
        dataplane.InvalidCall,
        "got more than one of",
    ),
}


@pytest.mark.parametrize("wrong", [*PUTS, *OTHERS])
def test_a_wrong_call_says_what_to_do(part: Partition, wrong: str) -> None:
    call, error, says = (PUTS | OTHERS)[wrong]
    began = time.monotonic()
    with pytest.raises(error, match=says) as failure:
        call(part)
    assert time.monotonic() - began < 3
    assert isinstance(failure.value, dataplane.DataplaneError)


@pytest.mark.parametrize(
    ("definition", "error", "says"),
    [
        (("",), dataplane.InvalidCall, "non-empty"),
        ((5,), dataplane.InvalidCall, "is 5: expected"),
        (("x" * 600,), dataplane.LimitExceeded, "512 bytes"),
        (("q", ["s"]), dataplane.InvalidCall, "mapping of stage names to lists of fields"),
        (("q", {"s": "x"}), dataplane.InvalidCall, "a list of names"),
        (
            ("q", {5: ["x"]}),
            dataplane.InvalidCall,
            "the name of a stage is .*expected a non-empty str",
        ),
        (("q", {f"s{i}": ["x"] for i in range(17)}), dataplane.LimitExceeded, "16 stages"),
        (("q", {"s": ["x"]}, 0), dataplane.InvalidCall, "group_size=0"),
        (("q", {"s": ["x"]}, None, -1), dataplane.InvalidCall, "groups=-1"),
        (("q", {"s": ["x"]}, None, None, "soon"), dataplane.InvalidCall, "'acked' or 'drop'"),
        (("q", None, None, None, None, 3), dataplane.InvalidCall, "replicas=3"),
        (("q", {"s": ["x"]}, None, None, None, True), dataplane.InvalidCall, "replicas=True"),
        (("q", {"s": ["x"]}, None, None, None, 2.0), dataplane.InvalidCall, "replicas=2.0"),
        (
            ("q", {"s": ["x"]}, None, None, None, np.timedelta64(1, "s")),
            dataplane.InvalidCall,
            "expected 1, or 2",
        ),
    ],
)
def test_a_wrong_definition_says_what_to_do(
    plane: Plane, definition: tuple[Any, ...], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        plane.partition(*definition)
    assert plane.stats()["partitions"] == {}


def test_an_unknown_partition_is_waited_for_no_longer_than_asked(plane: Plane) -> None:
    nobody = plane.partition("nobody")
    for call in (
        lambda: nobody.put({"x": [1]}, timeout=0.2),
        lambda: nobody.claim("s", rows=1, timeout=0),
        lambda: nobody.wait("s", rows=1, timeout=0.2),
        lambda: nobody.stats(timeout=0.2),
    ):
        began = time.monotonic()
        with pytest.raises(dataplane.PartitionUndefined, match="stages="):
            call()
        assert time.monotonic() - began < 3
    with pytest.raises(dataplane.InvalidCall, match="expected a ref returned by put"):
        plane.get(None)  # type: ignore[arg-type]


def test_a_duration_of_numpy_is_no_number_of_seconds(plane: Plane, part: Partition) -> None:
    duration: Any = np.timedelta64(1, "s")
    for call in (
        lambda: plane.partitions(timeout=duration),
        lambda: part.put({"x": [1]}, timeout=duration),
        lambda: part.claim("s", rows=1, lease=duration),
        lambda: plane.events(since=duration),
    ):
        with pytest.raises(dataplane.InvalidCall, match="seconds"):
            call()


def test_a_call_whose_time_is_over_is_named_as_its_caller_knows_it(
    plane: Plane, part: Partition
) -> None:
    for call, name in (
        (lambda: plane.partitions(timeout=0), "partitions"),
        (lambda: part.get(timeout=0), "reading rows"),
        (lambda: part.rows().fetch("x", timeout=0), "reading rows"),
    ):
        with pytest.raises(dataplane.DeadlineExceeded, match=f"^{name} did not finish within"):
            call()
    part.seal()
    plan = part.plan("s", rank=0, ranks=1, timeout=20)
    minis = iter(plan)
    for micro in next(minis):
        with pytest.raises(dataplane.DeadlineExceeded, match="^add did not finish"):
            micro.add(y=[1] * len(micro), timeout=0)
    plan.release()


def test_a_wrong_call_for_events_says_what_to_do(plane: Plane) -> None:
    for wrong in ("now", float("nan"), True):
        with pytest.raises(dataplane.InvalidCall, match=f"since={wrong!r}: expected a time in"):
            plane.events(since=wrong)  # type: ignore[arg-type]
    assert plane.events(since=10**400) == [] and plane.events(since=-(10**400))
    with pytest.raises(
        dataplane.InvalidCall, match="the name of a step is .*expected a non-empty str"
    ):
        plane.metrics(5)  # type: ignore[arg-type]
    plane.partition("step-of-tests", {"s": ["x"]}, free="drop").put({"x": [1]})
    found = plane.metrics("stpe-of-tests")
    plane.partition("step-of-tests").drop()
    assert {name for name in found if name.startswith("step/")} == {"step/why"}
    assert "'stpe-of-tests': did you mean 'step-of-tests'?" in found["step/why"]


def test_a_wrong_call_on_a_batch_leaves_it_leased(part: Partition) -> None:
    batch = part.claim("s", rows=2, timeout=5)
    wrong: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: batch.add(y=[1]), dataplane.InvalidRows, "the batch has 2 rows, but .* .y: 1.:"),
        (lambda: batch.add(y=[1, object()]), dataplane.InvalidValue, r"y\[1\]: an object"),
        (lambda: batch.add(), dataplane.InvalidRows, "pass at least one"),
        (
            lambda: batch.add({"y": [1, 2]}, y=[3, 4]),
            dataplane.InvalidCall,
            "field 'y' was passed both in the mapping and as a keyword argument",
        ),
        (
            lambda: batch.torch("x", device="cuad"),
            dataplane.InvalidCall,
            "invalid device='cuad': expected a torch device",
        ),
        (
            lambda: batch.tensordict(["x"], device="cuda:99"),
            dataplane.InvalidCall,
            "device='cuda:99': torch sees [0-9]+ CUDA GPU",
        ),
        (lambda: batch["y"], dataplane.FieldUnknown, "use one of the fields .'x'."),
        (lambda: list(batch), dataplane.InvalidCall, r"batch\[0\]: expected a field name"),  # type: ignore[call-overload]
        (lambda: batch.drop(rows=[7]), dataplane.InvalidRows, "0 to 1"),
        (lambda: batch.drop(groups=["h"]), dataplane.InvalidRows, "'h' is not in this batch"),
        (lambda: batch.release(tags={"n": [1, 2, 3]}), dataplane.InvalidRows, "3 values"),
        (lambda: batch.torch("x", layout="round"), dataplane.InvalidCall, "padded"),  # type: ignore[arg-type]
    ]
    for call, error, says in wrong:
        with pytest.raises(error, match=says):
            call()
        assert batch.state == "leased"
    huge = np.array([2**64 - 1], np.uint64)  # as a signed int it would be the last row
    intervals = pa.array([(1, 2, 3)], pa.month_day_nano_interval())  # NumPy crashes on these
    for rows in (
        [0.0],
        [True, False],
        True,
        1,
        "0",
        ["0"],
        [[0, 1]],
        [[0], [1, 2]],
        {0},
        huge,
        intervals,
    ):
        with pytest.raises(dataplane.InvalidRows, match="expected a list of int positions from 0"):
            batch.drop(rows=rows)  # type: ignore[arg-type]
    for rows in ([0.0], True, 1, "0", ["0"], [[0, 1]], [[0], [1, 2]], {0}, huge, intervals):
        with pytest.raises(dataplane.InvalidRows, match="expected .*positions from 0 to 1"):
            batch.rows(rows)  # type: ignore[arg-type]
    assert len(batch) == 2 and "left" not in repr(batch)
    batch.add(z=[1, 2])
    with pytest.raises(dataplane.FieldExists, match="field .z. was already added to this batch"):
        batch.add(z=[1, 2])
    batch.release()
    with pytest.raises(dataplane.LeaseExpired, match="is already released"):
        batch.ack()


@pytest.mark.parametrize("seconds", [1e300, 10**400, float("inf")], ids=["float", "int", "inf"])
def test_centuries_are_no_limit(part: Partition, seconds: float) -> None:
    part.claim("s", rows=1, timeout=seconds, lease=seconds).release()
    part.wait("s", rows=1, timeout=seconds)
    part.seal(timeout=seconds)


def test_a_text_of_another_class_names_a_field(part: Partition) -> None:
    rows, name = part.get(), Unhashable("x")
    for values in (rows[name], rows.get(name), rows.numpy(name), rows.torch(name)):
        assert np.array_equal(np.asarray(values), rows.numpy("x"))


@pytest.mark.parametrize("value", [10**5_000, [10**5_000, "a"], {10**5_000: 1}], ids=[*"abc"])
def test_an_int_that_python_does_not_print_is_read_back(plane: Plane, value: Any) -> None:
    stored = plane.partition("digits", {"s": ["x"]}, free="drop")
    rows = plane.get(stored.put({"x": [value]}))
    assert rows["x"][0] == value
    assert repr(rows).startswith("<Rows 1 row of 'digits': x: ")
    stored.drop()


def test_a_ref_whose_class_cannot_be_read_is_no_ref(plane: Plane) -> None:
    with pytest.raises(dataplane.InvalidCall, match=r"expected a ref returned by put\(\)"):
        plane.get(Classless())


def test_a_set_of_keys_is_no_order_of_rows(part: Partition) -> None:
    with pytest.raises(dataplane.InvalidRows, match="no order"):
        part.put({"x": [1, 2]}, key={"m", "n"})  # type: ignore[arg-type]
    with pytest.raises(dataplane.InvalidRows, match="no order"):
        part.put({"x": [1, 2]}, group={"m", "n"})  # type: ignore[arg-type]
    with pytest.raises(dataplane.InvalidRows, match="no order"):
        part.get(keys={"m", "n"})  # type: ignore[arg-type]
    part.put({"x": [1, 2]}, key={"m": 0, "n": 1}.keys())  # type: ignore[arg-type]
    assert part.drop(keys={"m", "n"}).rows == 2  # type: ignore[arg-type]


def test_one_row_is_counted_as_one(part: Partition) -> None:
    with pytest.raises(dataplane.RowsGone, match="^partition 'p' does not contain row "):
        part.get(keys=["never"])
    with pytest.raises(dataplane.InvalidRows, match="2 group ids for 1 row:"):
        part.put({"x": [1]}, group=["m", "n"])


def freed() -> torch.Tensor:
    """Return a tensor like a parameter of FSDP between two steps: its memory is freed."""
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def cut() -> torch.Tensor:
    tensor = torch.arange(4.0)[2:]
    tensor.untyped_storage().resize_(8)
    return tensor


@pytest.mark.parametrize("make", [freed, cut])
@pytest.mark.parametrize("place", ["column", "value", "object"])
def test_a_tensor_whose_memory_was_freed_is_refused(
    part: Partition, make: Callable[[], torch.Tensor], place: str
) -> None:
    odd = make()
    columns = {"column": odd, "value": [1, odd], "object": [1, {"a": odd}]}
    with pytest.raises(dataplane.InvalidValue, match=r"\bx\b.* was freed"):
        part.put({"x": columns[place]})
    with pytest.raises(dataplane.InvalidRows, match=r"tag 't'.*torch.Tensor"):
        part.put({"x": [1, 2]}, tags={"t": [1, odd]})


def test_a_tensor_without_memory_of_its_own_is_refused(part: Partition) -> None:
    seen: list[str] = []

    def put(value: torch.Tensor) -> torch.Tensor:
        with pytest.raises(dataplane.InvalidValue, match="pass a plain CPU tensor") as caught:
            part.put({"x": [1, value]})
        seen.append(caught.value.details["field"])
        return value

    torch.vmap(put)(torch.ones(2, 2))
    torch.func.functionalize(put)(torch.ones(2))
    assert seen == ["x", "x"]
