"""Rows come out as a TensorDict as they went in: dense, jagged, padded, or no tensor at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict

import dataplane
from dataplane.client.read.column_view import ColumnView, cut
from dataplane.client.read.ragged import Offsets, Padding
from dataplane.client.read.tensors import TensorDictForm, padding_mask, to_tensordict, to_torch
from dataplane.client.write.columns import by_name
from dataplane.errors import FieldUnknown, InvalidCall, InvalidValue
from tests.same import same

DTYPES = [torch.int64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.uint8]


def jagged(*rows: torch.Tensor) -> torch.Tensor:
    nested: torch.Tensor = torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)
    return nested


def tensordict(arena: Any, columns: Any, device: str = "cpu", **form: Any) -> Any:
    views = {name: named(arena.view(column), name) for name, column in by_name(columns).items()}
    n = len(next(iter(views.values())))
    return to_tensordict(views, n, TensorDictForm(**form), device)


def named(view: Any, field: str) -> Any:
    view.field = field
    return view


def bits(tensor: torch.Tensor) -> list[int]:
    raw: list[int] = tensor.contiguous().reshape(-1).view(torch.uint8).tolist()
    return raw


def same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.is_nested:
        ragged = (one.dtype, one._ragged_idx) == (other.dtype, other._ragged_idx)  # type: ignore[attr-defined]
        rows = zip(one.unbind(), other.unbind(), strict=True)
        return other.is_nested and ragged and all(same_tensor(*pair) for pair in rows)
    return (one.dtype, one.shape, bits(one)) == (other.dtype, other.shape, bits(other))


def same_tensordict(one: Any, other: Any) -> bool:
    if one.batch_size != other.batch_size or set(one.keys()) != set(other.keys()):
        return False
    for name in one.keys():  # noqa: SIM118
        mine, theirs = one.get(name), other.get(name)
        if isinstance(mine, NonTensorStack):
            equal = same(mine.tolist(), theirs.tolist())
        elif isinstance(mine, TensorDict):
            equal = same_tensordict(mine, theirs)
        else:
            equal = same_tensor(mine, theirs)
        if not equal:
            return False
    return True


def values_of(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    if 0 in shape:
        return torch.zeros(shape, dtype=dtype)
    raw = np.random.default_rng(seed).integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    tensor = torch.from_numpy(raw % 2 if dtype == torch.bool else raw)
    return tensor.view(dtype).reshape(shape)


OBJECTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.tuples(inner)
        | st.sampled_from(DTYPES).map(lambda dtype: values_of(dtype, (2, 3), 0))
    ),
    max_leaves=6,
)


@st.composite
def tensordicts(draw: st.DrawFn) -> Any:
    n = draw(st.integers(1, 6))
    found: dict[str, Any] = {}
    for index in range(draw(st.integers(1, 5))):
        dtype, seed = draw(st.sampled_from(DTYPES)), draw(st.integers(0, 99))
        tail = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
        kind = draw(st.sampled_from(["dense", "jagged", "second", "data", "nested"]))
        lengths = draw(st.lists(st.integers(0, 5), min_size=n, max_size=n))
        if kind == "dense":
            found[f"{index}"] = values_of(dtype, (n, *tail), seed)
        elif kind == "nested":
            found[f"{index}"] = TensorDict({"x": values_of(dtype, (n, *tail), seed)}, [n])
        elif kind == "data":
            found[f"{index}"] = NonTensorStack(*draw(st.lists(OBJECTS, min_size=n, max_size=n)))
        else:
            head = (3,) if kind == "second" else ()
            total = sum(lengths)
            found[f"{index}"] = torch.nested.nested_tensor_from_jagged(
                values_of(dtype, (*head, total, *tail), seed),
                torch.tensor([0, *np.cumsum(lengths)]),
                jagged_dim=1 + len(head),
            )
    return TensorDict(found, batch_size=[n])


@given(tensordicts())
@settings(max_examples=150)
def test_a_tensordict_comes_out_as_it_went_in(new_arena: Any, data: Any) -> None:
    assert same_tensordict(data, tensordict(new_arena(), data))


def test_position_ids_keep_their_ragged_dimension_in_any_batch(arena: Any) -> None:
    rows = [torch.arange(3 * n).reshape(3, n) for n in (4, 4, 2)]
    view = arena.view(jagged(*rows))
    for chosen in ([0], [0, 1], [0, 1, 2], [2, 0]):
        taken = to_tensordict({"p": view.take(chosen)}, len(chosen), TensorDictForm())["p"]
        assert taken._ragged_idx == 2 and taken.shape[:2] == (len(chosen), 3)
        assert [row.tolist() for row in taken.unbind()] == [rows[i].tolist() for i in chosen]


def test_fields_of_equal_lengths_share_their_offsets(arena: Any) -> None:
    lengths = (3, 0, 5)
    columns = {
        "ids": [torch.arange(n) for n in lengths],
        "logp": [torch.ones(n) for n in lengths],
        "hidden": [torch.ones(n, 2, dtype=torch.bfloat16) for n in lengths],
        "prompt": [[1, 2]] * 3,
    }
    made = tensordict(arena, columns)
    assert (made["ids"] * made["logp"]).values().tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert made["ids"].offsets() is made["hidden"].offsets()
    assert made["prompt"].is_nested and made["prompt"].offsets() is not made["ids"].offsets()
    offsets = Offsets()
    one, other = (
        to_torch(arena.view(columns[name]), "jagged", offsets=offsets) for name in ("ids", "logp")
    )
    assert (one * other).shape == one.shape


def test_what_was_put_row_by_row_is_jagged_whatever_its_lengths(arena: Any) -> None:
    made = tensordict(arena, {"list": [[1, 2], [3, 4]], "array": np.ones((2, 2)), "n": [1, 2.5]})
    assert made["list"].is_nested and not made["array"].is_nested
    assert made["n"].tolist() == [1, 2.5] and made["n"].dtype == torch.float64
    made = tensordict(arena, {"list": [[1, 2], [3, 4]]}, layout={"list": "dense"})
    assert made["list"].tolist() == [[1, 2], [3, 4]]


def test_what_is_no_tensor_keeps_its_order_and_types(arena: Any) -> None:
    images = [torch.ones(2, 3), torch.ones(3, 2)]
    columns = {
        "text": ["a", "b"],
        "kept": dataplane.object([1, 2]),
        "images": images,
        "mixed": [None, {"x": 1}],
    }
    made = tensordict(arena, columns)
    assert made.get("text").tolist() == ["a", "b"] and made.get("kept").tolist() == [1, 2]
    assert same(made.get("images").tolist(), images)
    assert made.get("mixed").tolist() == [None, {"x": 1}]


def test_rows_are_padded_as_asked(arena: Any) -> None:
    columns = {"ids": [[1, 2, 3], [4]], "features": np.ones((2, 2)), "text": ["a", "b"]}

    def padded(**form: Any) -> Any:
        return tensordict(arena, columns, layout="padded", **form)

    made = padded(padding={"ids": -1}, mask="mask")
    assert made["ids"].tolist() == [[1, 2, 3], [4, -1, -1]]
    assert made["mask"].tolist() == [[True] * 3, [True, False, False]]
    assert made["features"].shape == (2, 2) and made.get("text").tolist() == ["a", "b"]
    made = padded(side="left", multiple=4, mask={"ids": "m"})
    assert made["ids"].tolist() == [[0, 1, 2, 3], [0, 0, 0, 4]]
    assert made["m"].tolist() == [[False, True, True, True], [False, False, False, True]]
    assert padded(length=5)["ids"].tolist() == [[1, 2, 3, 0, 0], [4, 0, 0, 0, 0]]
    position_ids = tensordict(
        arena,
        {"p": jagged(torch.ones(3, 2), torch.ones(3, 1))},
        layout="padded",
        length=4,
        mask="m",
    )
    assert position_ids["p"].shape == (2, 3, 4) and position_ids["m"].sum(1).tolist() == [2, 1]
    with pytest.raises(InvalidValue, match=r"row 0 has length 3, more than length=2"):
        padded(length=2)


def test_a_mask_is_of_fields_of_equal_lengths(arena: Any) -> None:
    columns = {"prompt": [[1], [2, 3]], "response": [[1, 2], [3]]}
    with pytest.raises(InvalidCall, match="mask='m' covers fields 'prompt' and 'response'"):
        tensordict(arena, columns, layout="padded", mask="m")
    made = tensordict(arena, columns, layout="padded", mask={"prompt": "pm", "response": "rm"})
    assert made["pm"].tolist() == [[True, False], [True, True]]
    assert made["rm"].tolist() == [[True, True], [True, False]]
    with pytest.raises(InvalidCall, match="a field already has this name"):
        tensordict(arena, {"m": [[1], [2]]}, layout="padded", mask="m")


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ({"layout": "thin"}, "layout='thin': expected"),
        ({"layout": {"y": "dense"}}, "layout= names field 'y', which this call does not convert"),
        ({"length": 2, "multiple": 3}, "only one of them"),
        ({"side": "top"}, "side='top'"),
        ({"length": 0}, "length=0: expected a positive int"),
    ],
)
def test_a_wrong_form_is_named(arena: Any, form: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidCall, match=reason):
        tensordict(arena, {"x": [[1, 2], [3]]}, **form)


def test_rows_that_make_no_dense_tensor_are_named(arena: Any) -> None:
    with pytest.raises(InvalidValue, match=r"'x': row 2 is int64 \[1\] and row 0 is int64 \[2\]"):
        tensordict(arena, {"x": [[1, 2], [1, 2], [3]]}, layout="dense")
    with pytest.raises(InvalidValue, match="along several axes"):
        tensordict(arena, {"x": [np.ones((1, 2)), np.ones((2, 1))]}, layout={"x": "jagged"})


MIXED = [np.zeros(2, np.float32), np.zeros(3, np.float32), np.zeros(2)]


@pytest.mark.parametrize("layout", ["dense", "padded", "jagged"])
def test_rows_of_two_dtypes_are_one_error_in_every_layout(arena: Any, layout: Any) -> None:
    says = (
        r"field 'logp': row 2 is float64 \[2\] and row 0 is float32 \[2\], which differ in dtype, "
        rf"so the rows do not form a {layout} tensor: give all rows the same dtype "
        r"\(a partition declared with fields={'logp': 'float32\[\*\]'} rejects other dtypes\), "
        r".*layout='list'"
    )
    calls: list[Callable[[], object]] = [
        lambda: tensordict(arena, {"logp": MIXED}, layout=layout),
        lambda: to_torch(named(arena.view(MIXED), "logp"), layout),
    ]
    for call in calls:
        with pytest.raises(InvalidValue, match=says) as caught:
            call()
        assert caught.value.details == {"field": "logp", "row": 2}


def test_a_field_that_becomes_no_tensor_is_told_once(
    arena: Any, caplog: pytest.LogCaptureFixture
) -> None:
    columns = {
        "mixed": MIXED,
        "ranks": [np.ones(1), np.ones((1, 1))],
        "n": [1, True],
        "t": ["a"] * 2,
    }
    for _ in range(2):
        made = tensordict(arena, {"mixed dtypes": MIXED[1:]})
        assert isinstance(made.get("mixed dtypes"), NonTensorStack)
    assert len(caplog.records) == 1 and "row 1 is float64" in caplog.text
    columns.pop("mixed")
    tensordict(arena, columns)
    assert [tuple(one.args or ())[0] for one in caplog.records[1:]] == ["ranks", "n"]
    caplog.clear()
    tensordict(arena, {"other": MIXED}, layout="list")
    assert not caplog.records


def test_tensors_are_private(arena: Any) -> None:
    columns = {"dense": np.ones((2, 3)), "ragged": [[1, 2], [3]]}
    made = tensordict(arena, columns)
    before = arena.memory.copy()
    made["dense"].add_(1)
    made["ragged"].values().add_(1)
    assert (arena.memory == before).all()


def test_a_device_is_where_torch_puts_it(arena: Any) -> None:
    made = tensordict(arena, {"x": [[1, 2], [3]], "y": np.ones((2, 2)), "t": ["a", "b"]}, "meta")
    assert made["x"].device.type == made["y"].device.type == "meta"
    assert made.get("t").tolist() == ["a", "b"]


def test_a_padded_tensor_and_its_mask(arena: Any) -> None:
    view, padding = arena.view([[1, 2], [3]]), Padding(side="left")
    assert to_torch(view, "padded", padding).tolist() == [[1, 2], [0, 3]]
    assert padding_mask(view, padding, "cpu").tolist() == [[True, True], [False, True]]
    with pytest.raises(
        InvalidValue, match="cannot make a mask, because the rows are single numbers"
    ):
        padding_mask(arena.view(np.ones(2)), padding, "cpu")


def test_no_row_is_without_the_field(arena: Any) -> None:
    whole = arena.view([[1], [2]])
    view = ColumnView("x", cut(whole.runs, [(0, 1), (-1, 0)]))
    with pytest.raises(FieldUnknown, match="row 1 has no field 'x'"):
        to_tensordict({"x": view}, 2, TensorDictForm())
