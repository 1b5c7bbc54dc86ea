"""torch tensors in and out. torch is an extra of the tests only."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from dataplane.client.read.column_view import ColumnView
from dataplane.client.read.convert import to_numpy
from dataplane.client.read.ragged import Padding, padding_value
from dataplane.client.read.tensors import to_torch
from dataplane.errors import InvalidCall, InvalidValue
from dataplane.gpu.client.columns import GpuRows
from dataplane.gpu.torch_devices import place_named

DTYPES = [
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex32, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
    torch.float8_e8m0fnu,
]


def tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Any bytes, so that nothing may be rounded on the way."""
    count = int(np.prod(shape, dtype=int))
    raw = torch.arange(count * dtype.itemsize, dtype=torch.int64) * 37 % 251
    raw = raw % 2 if dtype == torch.bool else raw
    return raw.to(torch.uint8).view(dtype).reshape(shape)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    one, other = one.contiguous().reshape(-1), other.contiguous().reshape(-1)
    return bool((one.view(torch.uint8) == other.view(torch.uint8)).all())


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_goes_through_exactly(arena: Any, dtype: torch.dtype) -> None:
    dense, numbers = tensor(dtype, 4, 3, 2), tensor(dtype, 4)
    rows = [tensor(dtype, n, 2) for n in (3, 0, 5, 1)]
    for view in (False, True):
        assert same_bits(to_torch(arena.view(dense), view=view), dense)
        assert same_bits(to_torch(arena.view(numbers), view=view), numbers)
        listed = to_torch(arena.view(rows), view=view)
        assert all(map(same_bits, listed, rows))
        (leaf, *_), *_ = to_torch(arena.view([[row] for row in rows]), view=view)
        assert same_bits(leaf, rows[0])


def test_tensors_of_all_kinds_are_taken(arena: Any) -> None:
    weight = torch.nn.Parameter(torch.ones(2, 3))
    strided = torch.arange(12).reshape(3, 4).T[::2]
    conjugated = torch.tensor([[1 + 2j]]).conj()
    assert to_torch(arena.view(weight)).tolist() == [[1.0] * 3] * 2
    assert to_torch(arena.view(strided)).tolist() == strided.tolist()
    assert to_torch(arena.view(conjugated)).tolist() == [[1 - 2j]]
    nested = torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)], layout=torch.jagged)
    assert [row.tolist() for row in arena.view(nested)] == [[1, 1], [0, 0, 0]]


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2, 2).to_sparse(),
        torch.ones(2, device="meta"),
    ],
    ids=["sparse", "meta"],
)
def test_tensors_without_plain_bytes_are_refused(arena: Any, value: torch.Tensor) -> None:
    with pytest.raises(InvalidValue, match=r"^x\[0\]"):
        arena.view([value])
    with pytest.raises(InvalidValue, match=r'^x\[0\]\["image"\]'):
        arena.view([{"image": value}])


@pytest.mark.parametrize("layout", ["auto", "padded", "jagged", "list"])
def test_an_operation_in_place_changes_no_stored_row(arena: Any, layout: Any) -> None:
    for values in (np.ones((3, 4), np.float32), [np.ones(2, np.float32), np.ones(3, np.float32)]):
        view = arena.view(values)
        before = arena.memory.copy()
        got = to_torch(view, layout)
        for part in got if isinstance(got, list) else [got]:
            (part.values() if part.is_nested else part).add_(1)
        assert (arena.memory == before).all()


def test_a_complex_padding_is_exact_too() -> None:
    assert padding_value("x", Padding(16777216), np.dtype("complex64")) == 16777216
    with pytest.raises(InvalidValue, match="complex64.*cannot represent padding=16777217"):
        padding_value("x", Padding(16777217), np.dtype("complex64"))


def test_a_float_dtype_of_another_library_holds_large_ints_too() -> None:
    bfloat16, powers = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e8m0fnu)
    assert padding_value("x", Padding(2**64), bfloat16).item() == 2**64
    with pytest.raises(InvalidValue, match="cannot represent padding=18446744073709551615"):
        padding_value("x", Padding(2**64 - 1), bfloat16)
    with pytest.raises(
        InvalidValue, match=r"padding=0: .* example padding={'x': 1}"
    ):  # the dtype has no 0
        padding_value("x", Padding(), powers)


def test_rows_are_padded_behind(arena: Any) -> None:
    rows = [np.arange(1, n + 1, dtype=np.int32) for n in (2, 0, 3)]
    padded = to_torch(arena.view(rows), "padded", padding=Padding(-1))
    assert padded.tolist() == [[1, 2, -1], [-1, -1, -1], [1, 2, 3]] and padded.dtype == torch.int32
    images = [np.ones((1, 3), np.uint8), np.ones((2, 1), np.uint8)]
    assert to_torch(arena.view(images), "padded").tolist() == [
        [[1, 1, 1], [0, 0, 0]],
        [[1, 0, 0], [1, 0, 0]],
    ]
    halves = [torch.ones(n, dtype=torch.bfloat16) for n in (1, 2)]
    padded = to_torch(arena.view(halves), "padded", padding=Padding(0.5))
    assert padded.dtype == torch.bfloat16 and padded.tolist() == [[1, 0.5], [1, 1]]
    with pytest.raises(InvalidValue, match="uint8.*cannot represent padding=-1"):
        to_torch(arena.view(images), "padded", padding=Padding(-1))
    with pytest.raises(InvalidValue, match=r"row 1 is float64 \[2, 2\] and row 0 is float64 \[2\]"):
        to_torch(arena.view([np.ones(2), np.ones((2, 2))]), "padded")


def test_nested_tensors_are_padded_to_their_longest_row(arena: Any) -> None:
    """torch pads to the sum of all lengths where it was not told the longest."""
    rows = [torch.arange(n) for n in (2, 0, 3)]
    own = torch.nested.nested_tensor_from_jagged(torch.arange(5), torch.tensor([0, 2, 2, 5]))
    read = (to_torch(arena.view(rows), "jagged"), arena.view([{"x": own}])[0]["x"])
    for jagged in read:
        padded = torch.nested.to_padded_tensor(jagged, -1)
        assert padded.shape == (3, 3) and padded[2].tolist() == jagged.unbind()[2].tolist()


def test_rows_are_jagged_in_their_first_length(arena: Any) -> None:
    rows = [torch.full((n, 2), n, dtype=torch.bfloat16) for n in (2, 0, 3)]
    jagged = to_torch(arena.view(rows), "jagged")
    assert jagged.is_nested and jagged.dtype == torch.bfloat16
    assert all(map(same_bits, jagged.unbind(), rows))
    with pytest.raises(InvalidValue, match=r"row 1 .* differ along several axes.*'padded'"):
        to_torch(arena.view([np.ones((2, 1)), np.ones((1, 2))]), "jagged")


def test_no_rows_make_an_empty_list_and_no_tensor(arena: Any) -> None:
    for values in ([np.ones(2), np.ones(3)], np.ones((2, 3)), [1, 2], ["a", "b"]):
        none = arena.view(values)[0:0]
        assert to_torch(none) == to_torch(none, "list") == []
        for layout in ("dense", "padded", "jagged"):
            with pytest.raises(InvalidValue, match=f"no rows, so a {layout} tensor would have no"):
                to_torch(none, layout)


def test_an_error_advises_only_layouts_that_fit(arena: Any) -> None:
    along_two_axes = arena.view([np.ones((2, 1)), np.ones((1, 2))])
    with pytest.raises(InvalidValue, match="several axes, .* use layout='padded', or use") as told:
        to_torch(along_two_axes, "dense")
    assert "jagged" not in str(told.value)
    assert to_torch(along_two_axes, "padded").shape == (2, 2, 2)
    with pytest.raises(InvalidValue, match="do not form a list of tensors: put numbers of one"):
        to_torch(arena.view([1, 2.5, True]), "list")


def test_packed_rows_lie_in_one_piece(arena: Any) -> None:
    first, second = to_torch(arena.view([np.ones(3), np.ones(5)]))
    assert second.data_ptr() == first.data_ptr() + 3 * 8
    one, other = to_torch(arena.view([np.ones(3), np.ones(5, np.float32)]))
    assert (one.dtype, other.dtype) == (torch.float64, torch.float32)


def test_views_lie_in_the_arena_and_keep_it_pinned(arena: Any) -> None:
    for values in (np.ones((3, 4)), [np.ones(2), np.ones(3)], [{"a": np.ones(2)}, {}]):
        view = arena.view(values)
        gone = weakref.ref(view.runs[0][0].memory.base.base)
        tensors = to_torch(view, view=True)
        first = tensors[0]["a"] if isinstance(tensors[0], dict) else tensors[0]
        address = arena.memory.__array_interface__["data"][0]
        assert address <= first.data_ptr() < address + arena.memory.nbytes
        del view, tensors
        gc.collect()
        assert gone() is not None
        del first
        gc.collect()
        assert gone() is None
    with pytest.raises(InvalidValue, match="are not stored as a padded tensor"):
        to_torch(arena.view([np.ones(2), np.ones(3)]), "padded", view=True)


def test_numbers_and_objects(arena: Any) -> None:
    rewards = to_torch(arena.view([1, 0.5, 0]))
    assert rewards.dtype == torch.float64 and rewards.tolist() == [1, 0.5, 0]
    assert [int(t) for t in to_torch(arena.view([1, 2]), "list")] == [1, 2]
    chat = to_torch(arena.view([{"image": (np.ones(2),), "text": "a"}, {"text": "b"}]))
    assert chat[0]["image"][0].tolist() == [1, 1] and chat[1] == {"text": "b"}
    with pytest.raises(
        InvalidValue, match=r"row 0 is a str \('a'\), so the rows do not form a tensor"
    ):
        to_torch(arena.view(["a", "b"]))
    with pytest.raises(InvalidValue, match="row 0 is a list .* do not form a padded tensor"):
        to_torch(arena.view([[np.ones(2)]]), "padded")


def test_what_makes_no_tensor_comes_with_advice_that_helps(arena: Any) -> None:
    days = [np.datetime64("2026-01-01"), np.datetime64("2026-01-01T00:00", "ns")]
    with pytest.raises(InvalidValue, match=r"datetime64\[ns\]'\).astype\('int64'\)") as told:
        to_torch(arena.view(days))
    assert "float64" not in told.value.message
    as_put = "use batch['x'] to get the original objects"
    for layout in ("auto", "list", "padded"):
        with pytest.raises(InvalidValue) as told:
            to_torch(arena.view(["a", "b"]), layout)
        assert told.value.message.endswith(f": {as_put}")  # a text has no tensor at all
    with pytest.raises(InvalidValue) as told:
        to_torch(arena.view([[np.ones(2)]]), "padded")
    assert told.value.message.endswith(
        f"{as_put}, or layout='list' to get the arrays in them as tensors"
    )


def test_dtypes_that_torch_lacks_are_named(arena: Any) -> None:
    for dtype in ("M8[s]", np.longdouble, "float8_e3m4"):
        values = np.zeros(2, np.uint8 if dtype == "float8_e3m4" else dtype)
        if dtype == "float8_e3m4":
            import ml_dtypes

            values = values.view(ml_dtypes.float8_e3m4)
        with pytest.raises(
            InvalidValue, match="'x': row 0 has dtype .* which torch does not support"
        ):
            to_torch(arena.view(values))
    with pytest.raises(InvalidCall, match="layout='thin': expected"):
        to_torch(arena.view([1]), "thin")  # type: ignore[arg-type]


def test_a_device_is_where_torch_puts_it(arena: Any) -> None:
    assert to_torch(arena.view(np.ones((2, 3))), device="meta").device.type == "meta"
    rows = to_torch(arena.view([np.ones(2), np.ones(1)]), device="meta")
    assert {row.device.type for row in rows} == {"meta"}


def test_bfloat16_is_read_by_numpy_too(arena: Any) -> None:
    values = to_numpy(arena.view(torch.tensor([[1.5], [2.5]], dtype=torch.bfloat16)))
    assert isinstance(values, np.ndarray)
    assert values.dtype.name == "bfloat16" and values.astype(float).tolist() == [[1.5], [2.5]]


def test_cuda_is_the_gpu_of_the_thread_that_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [place_named(device) for device in ("cpu", "cuda", "cuda:1")] == [
        "cpu",
        "cuda",
        "cuda:1",
    ]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert [place_named(device) for device in ("cpu", "cuda", "cuda:1")] == [
        "cpu",
        "cuda:3",
        "cuda:1",
    ]


class _OnGpu(ColumnView):
    """A view whose rows pass for rows on a GPU: tensors of the host have the same operations."""

    def on_gpu(self, device: str) -> GpuRows:
        runs = []
        for column, first, last in self.runs:
            assert column is not None
            span = column.span(first, last)
            items = np.ndarray(len(span) // column.spec.items.itemsize, column.spec.items, span)
            runs.append(torch.from_numpy(items.copy()))
        return GpuRows(self, runs, "cpu")


@pytest.mark.parametrize("layout", ["auto", "dense", "padded", "jagged", "list"])
@pytest.mark.parametrize(
    "rows",
    [
        [np.arange(n, dtype=np.float32) for n in (3, 0, 5)],
        [np.arange(3 * n).reshape(3, n) for n in (2, 1)],
        [np.ones((2, 3)), np.ones((1, 5))],
        [np.ones(2), np.ones(2, np.float32)],
        np.arange(12).reshape(4, 3),
        np.arange(4.0),
    ],
)
def test_rows_on_a_gpu_are_laid_out_as_those_of_the_host(
    arena: Any, rows: Any, layout: Any
) -> None:
    view = arena.view(rows)
    for padding in (Padding(), Padding(-1, "left", length=6)):
        said = []
        for one in (view, _OnGpu(view.field, view.runs)):
            try:
                said.append(to_torch(one, layout, padding))
            except InvalidValue as exc:
                said.append(exc.message)
        host, gpu = said
        assert type(host) is type(gpu) and (not isinstance(host, str) or host == gpu)
        if layout == "jagged" and not isinstance(host, str):
            host, gpu = host.unbind(), gpu.unbind()
        if not isinstance(host, str):
            assert all(map(torch.equal, host, gpu)) and len(host) == len(gpu)


def test_single_numbers_are_padded_as_they_are(arena: Any) -> None:
    assert to_torch(arena.view(np.arange(3.0)), "padded", Padding(-1)).tolist() == [0, 1, 2]
