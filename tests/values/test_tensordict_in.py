"""What trainers hold goes in: TensorDicts, nested tensors, lists of numbers, models of classes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import BaseModel
from tensordict import NonTensorData, NonTensorStack, TensorDict, lazy_stack, tensorclass

import dataplane
from dataplane.client.write.columns import by_name, prepare
from dataplane.errors import InvalidRows, InvalidValue, ValueCorrupt
from dataplane.wire import objects
from dataplane.wire.layouts import ColumnSpec
from tests.same import same


def jagged(*rows: torch.Tensor) -> torch.Tensor:
    nested: torch.Tensor = torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)
    return nested


def test_a_tensordict_is_a_field_a_key(arena: Any) -> None:
    position_ids = jagged(torch.arange(12).reshape(3, 4), torch.arange(3).reshape(3, 1))
    data = TensorDict(
        {
            "dense": torch.arange(6.0).reshape(2, 3),
            "tokens": jagged(torch.arange(3), torch.arange(5)),
            "position_ids": position_ids,
            "chat": NonTensorStack({"role": "user", "image": torch.ones(2)}, ["a", 1]),
            "source": "gsm8k",
            "of": {"inner": torch.ones(2, dtype=torch.bfloat16)},
        },
        batch_size=[2],
    )
    put = arena.put(by_name(data))
    assert set(put) == {"dense", "tokens", "position_ids", "chat", "source", "of.inner"}
    assert put["dense"][1].tolist() == [3, 4, 5]
    assert [len(row) for row in put["tokens"]] == [3, 5]
    assert [row.shape for row in put["position_ids"]] == [(3, 4), (3, 1)]
    assert same(put["chat"], [{"role": "user", "image": torch.ones(2)}, ["a", 1]])
    assert put["source"] == ["gsm8k", "gsm8k"]
    assert put["of.inner"][0].dtype.name == "bfloat16"


def test_a_lazy_stack_of_unequal_rows_is_taken(arena: Any) -> None:
    rows = [TensorDict({"tokens": torch.arange(n), "text": str(n)}, []) for n in (2, 4)]
    put = arena.put(by_name(lazy_stack(rows)))
    assert [row.tolist() for row in put["tokens"]] == [[0, 1], [0, 1, 2, 3]]
    assert put["text"] == ["2", "4"]


@tensorclass
class Sample:
    tokens: torch.Tensor
    grid: Any = None
    label: str = "a"


def sample(*fields: Any, batch_size: list[int] | None = None) -> Any:
    return Sample(*fields, batch_size=batch_size or [])  # type: ignore[call-arg]


FULL = TensorDict({"x": torch.zeros(2), "y": torch.ones(3)}, [])
PART = TensorDict({"x": torch.ones(2)}, [])


@pytest.mark.parametrize(
    ("stack", "key", "row"),
    [
        (lambda: lazy_stack([FULL, PART]), "y", 1),
        (lambda: lazy_stack([PART, FULL, FULL]), "y", 0),
        (lambda: lazy_stack([TensorDict({"a": one}, []) for one in (FULL, PART)]), "a.y", 1),
        (lambda: TensorDict({"a": lazy_stack([FULL, PART])}, [2]), "a.y", 1),
        (lambda: TensorDict({"a": {"b": {"c": lazy_stack([FULL, PART])}}}, [2]), "a.b.c.y", 1),
        (lambda: lazy_stack([lazy_stack([FULL, PART]), lazy_stack([FULL, PART])]), "y", 1),
        (lambda: lazy_stack([one.expand(2) for one in (FULL, PART)], 1), "y", 1),
        (lambda: lazy_stack([sample(torch.ones(2), 1), sample(torch.ones(2))]), "grid", 1),
    ],
)
def test_a_key_that_only_some_rows_have_is_named(stack: Any, key: str, row: int) -> None:
    with pytest.raises(InvalidRows, match=f"key '{key}' is in .* but not in") as caught:
        by_name(stack())
    assert caught.value.details == {"field": key, "row": row}


def test_a_key_that_only_some_members_of_an_object_have_is_named() -> None:
    with pytest.raises(
        InvalidValue, match=r'^x\[0\]\["of"\]: .*has the key .y., but element 1 does not'
    ):
        prepare({"x": [{"of": lazy_stack([FULL, PART])}]})


def test_what_is_no_tensor_in_a_tensorclass_is_the_same_for_each_row(arena: Any) -> None:
    whole = sample(torch.zeros(2, 3), (224, 336), {"a": 1}, batch_size=[2])
    put = arena.put(by_name(whole))
    assert put["grid"] == [(224, 336)] * 2 and put["label"] == [{"a": 1}] * 2
    put = arena.put(by_name(TensorDict({"of": whole}, [2])))
    assert put["of.grid"] == [(224, 336)] * 2 and list(put) == ["of.tokens", "of.grid", "of.label"]
    rows = [sample(torch.zeros(n), (n, n + 1), "b", batch_size=[]) for n in (1, 2)]
    put = arena.put(by_name(lazy_stack(rows)))
    assert put["grid"] == [(1, 2), (2, 3)] and [len(row) for row in put["tokens"]] == [1, 2]
    assert "grid" not in by_name(sample(torch.zeros(2, 3), batch_size=[2]))
    assert same(
        list(arena.view([rows[1]])), [{"tokens": rows[1].tokens, "grid": (2, 3), "label": "b"}]
    )


def test_a_stack_has_in_each_row_what_was_put_there(arena: Any) -> None:
    rows = [TensorDict({"x": NonTensorData([1, 2])}, []), TensorDict({"x": torch.ones(1)}, [])]
    assert same(arena.put(by_name(lazy_stack(rows)))["x"], [[1, 2], torch.ones(1)])
    stack = NonTensorStack(NonTensorStack("a", "b"), NonTensorStack("c", "d"))
    assert arena.put(by_name(TensorDict({"s": stack}, [2])))["s"] == [["a", "b"], ["c", "d"]]
    rows = [TensorDict({"x": torch.ones(1)}, []), TensorDict({"x": {"y": torch.ones(1)}}, [])]
    with pytest.raises(InvalidRows, match="key 'x' holds a TensorDict in some rows"):
        by_name(lazy_stack(rows))


def test_what_a_tensordict_cannot_say_is_refused() -> None:
    with pytest.raises(InvalidRows, match=r"batch_size \[\]"):
        by_name(TensorDict({"x": torch.ones(2)}, batch_size=[]))
    with pytest.raises(InvalidRows, match=r"key 'a\.b' contains '\.'"):
        by_name(TensorDict({"a.b": torch.ones(2)}, batch_size=[2]))


def test_data_that_are_no_tensor_are_the_same_for_all_rows_and_a_stack_has_one_a_row(
    arena: Any,
) -> None:
    pair, objects_ = np.arange(2), np.array([{"a": np.ones(2)}, None], object)
    columns = {
        "one": NonTensorData(pair),
        "of_dict": NonTensorData({"x": pair, "y": torch.ones(1)}),
        "each": NonTensorStack(pair, np.ones((1, 2), np.float32)),
        "objects": objects_,
        "inner": {"one": NonTensorData(b"x")},
    }
    put = arena.put(by_name(TensorDict(columns, batch_size=[2])))
    assert same(put["one"], [pair, pair])
    assert same(put["of_dict"], [{"x": pair, "y": torch.ones(1)}] * 2)
    assert same(put["each"], [pair, np.ones((1, 2), np.float32)])
    assert same(put["objects"], [{"a": np.ones(2)}, None])
    assert put["inner.one"] == [b"x", b"x"]
    for odd in (np.array(["a", "b"]), NonTensorData({"x": object()})):
        with pytest.raises(InvalidValue, match=r"^x\[0\].* cannot be stored"):
            prepare(by_name(TensorDict({"x": odd}, batch_size=[2])))


def test_rows_of_a_nested_tensor_are_no_copies_and_of_one_form() -> None:
    values = torch.arange(8)
    nested = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 3, 8]))
    prepared = prepare({"x": nested})
    assert np.shares_memory(prepared[0].source[1], values.numpy())
    wide = prepare({"x": jagged(torch.zeros(3, 4), torch.zeros(3, 1), torch.zeros(3, 9))})
    assert wide[0].spec == ColumnSpec("array", "float32", (3, -1), loose=True)


def test_rows_of_a_nested_tensor_with_gaps_are_moved_together(arena: Any) -> None:
    nested = torch.nested.narrow(
        torch.arange(20).reshape(2, 10), 1, torch.tensor([1, 4]), torch.tensor([2, 3]), torch.jagged
    )
    assert [row.tolist() for row in arena.view(nested)] == [[1, 2], [14, 15, 16]]


def test_a_flat_list_of_numbers_of_one_kind_is_an_array(arena: Any) -> None:
    for given, wanted in [
        ([[1, 2], [3]], [np.array([1, 2]), np.array([3])]),
        ([[0.5], [1.5, 2]], [np.array([0.5]), [1.5, 2]]),
        ([[True], [False, True]], [np.array([True]), np.array([False, True])]),
        ([[1.5], []], [np.array([1.5]), np.zeros(0)]),
        ([np.zeros(1, np.int8), []], [np.zeros(1, np.int8), np.zeros(0, np.int8)]),
        ([[], []], [np.zeros(0, np.int64)] * 2),
        ([[np.float32(1)], []], [np.ones(1, np.float32), np.zeros(0, np.float32)]),
        ([[1 << 64], [2]], [[1 << 64], np.array([2])]),
        ([["a"], []], [["a"], []]),
        ([[[1, 2]], [None, 1]], [[[1, 2]], [None, 1]]),
        ([{"ids": [1, 2]}, (1, 2)], [{"ids": [1, 2]}, (1, 2)]),
    ]:
        assert same(list(arena.view(given)), wanted), given


def test_an_object_is_kept_as_it_is(arena: Any) -> None:
    assert same(list(arena.view([dataplane.object([1, 2]), [3]])), [[1, 2], [3]])
    assert same(list(arena.view(dataplane.object([[1], [2.5], "a"]))), [[1], [2.5], "a"])
    assert same(list(arena.view(dataplane.object(np.array([[1], None], object)))), [[1], None])
    assert repr(dataplane.object([1])) == "dataplane.object([1])"


def test_arrays_of_objects_are_their_items(arena: Any) -> None:
    column = np.array([{"a": np.ones(2)}, None, "x"], object)
    assert same(list(arena.view(column)), [{"a": np.ones(2)}, None, "x"])
    assert list(arena.view([{"x": np.array([[1, None]], object)}])) == [{"x": [[1, None]]}]


@dataclass
class Turn:
    role: str
    image: Any
    ids: list[int]


class Call(BaseModel):
    name: str
    turns: list[Turn]


def test_dataclasses_and_models_are_dicts(arena: Any) -> None:
    turn = Turn("user", torch.ones(2), [1, 2])
    plain = {"role": "user", "image": torch.ones(2), "ids": [1, 2]}
    assert same(list(arena.view([turn, [turn]])), [plain, [plain]])
    call = Call(name="f", turns=[Turn("user", None, [])])
    assert list(arena.view([call])) == [
        {"name": "f", "turns": [{"role": "user", "image": None, "ids": []}]}
    ]
    with pytest.raises(InvalidValue, match=r'^x\[0\]\["image"\]'):
        arena.view([Turn("user", object(), [])])


def test_tensors_in_objects_come_back_as_private_tensors(arena: Any) -> None:
    nested = jagged(torch.zeros(3, 4), torch.ones(3, 1))
    weights = torch.ones(2, dtype=torch.float8_e4m3fn)
    given = {"of": (weights, [np.ones(2)]), "nested": nested, "alone": torch.tensor(1.5)}
    (got,) = arena.view([given])
    assert same(got["of"], given["of"]) and same(got["alone"], given["alone"])
    assert got["nested"].shape[1] == 3 and got["nested"]._ragged_idx == 2
    assert same(got["nested"], nested)
    got["of"][0].zero_()
    (again,) = arena.view([given])
    assert same(again["of"], given["of"])
    listed = arena.view([nested, nested])
    assert same(list(listed), [nested, nested])


def test_offsets_that_fit_no_values_are_refused() -> None:
    row = objects.encode(jagged(torch.zeros(2), torch.ones(3)))
    objects.decode(b"".join(row))
    offsets = row[-1]
    assert offsets.tolist() == [0, 2, 5]
    for wrong in ([5, 2, 0], [0, 2, 4], [1, 2, 5]):
        row[-1] = np.array(wrong)
        with pytest.raises(ValueCorrupt, match="offsets"):
            objects.decode(b"".join(row))


def test_whoever_does_not_use_torch_does_not_import_it(run_dir: Any) -> None:
    code = """
import sys, numpy, dataplane
with dataplane.connect() as plane:
    part = plane.partition("p", stages={"s": ["x", "y"]})
    part.put({"x": [[1, 2], [3]], "y": [{"a": numpy.ones(2)}, "text"]})
    part.seal()
    for batch in part.stream("s", rows=2):
        batch.numpy("x"), list(batch["y"])
        batch.add(z=[0.5, 1])
print(sorted({"torch", "tensordict", "pydantic", "pyarrow"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"
