"""A schema refuses values of another dtype or rank, and says which row has what."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import dataplane
from dataplane.client.write.columns import prepare
from dataplane.client.write.schema import canonical


def put(value: Any, form: str) -> None:
    prepare({"x": value}, fields=canonical({"x": form}))


@pytest.mark.parametrize(
    ("form", "column"),
    [
        ("int64[*]", [[1, 2], [3]]),
        ("int64[*]", [[], []]),
        ("float32[*]", [[], []]),
        ("float32[*]", [np.zeros(3, np.float32), []]),
        ("float32[*]", np.zeros((2, 5), np.float32)),
        ("float32[5]", np.zeros((2, 5), np.float32)),
        ("float32[5]", [np.zeros(5, np.float32)] * 2),
        ("float32", np.zeros(2, np.float32)),
        ("float32[]", torch.zeros(2)),
        ("float64", [0.5, 1.0]),
        ("int64", (1, 2)),
        ("bool", [True, False]),
        ("int64[3, *]", [np.zeros((3, 2), np.int64), np.zeros((3, 7), np.int64)]),
        ("bfloat16[...]", [np.zeros((1, 2), ml_dtypes.bfloat16), np.zeros(3, ml_dtypes.bfloat16)]),
        ("bfloat16[*]", torch.zeros(2, 4, dtype=torch.bfloat16)),
        ("datetime64[ns][*]", np.zeros((2, 3), "datetime64[ns]")),
        ("int64[*]", torch.nested.nested_tensor([[1, 2], [3]], layout=torch.jagged)),
        ("object", ["a", {"b": [1, np.zeros(2)]}]),
        ("object", [dataplane.object([1, 2])]),
    ],
)
def test_what_is_as_the_schema_says_goes_in(form: str, column: Any) -> None:
    put(column, form)


@pytest.mark.parametrize(
    ("form", "column", "row", "found"),
    [
        ("int64[*]", [np.zeros(2, np.int64), np.zeros(17, np.int32)], 1, "int32[17]"),
        ("int64[*]", [np.zeros(2, np.int64), np.zeros((2, 2), np.int64)], 1, "int64[2,2]"),
        ("int64[*]", [[1], [1.5]], 1, "float64[1]"),
        ("int64[*]", ["a", "b"], 0, "a Python object"),
        ("float32", [0.5, 1.0], 0, "float64"),
        ("float64", [0.5, 1], 0, "a Python object"),
        ("float32", np.zeros(2), 0, "float64"),
        ("float32[*]", np.zeros(2, np.float32), 0, "float32"),
        ("float32[4]", [np.zeros(4, np.float32), np.zeros(5, np.float32)], 1, "float32[5]"),
        ("float32[4]", np.zeros((2, 5), np.float32), 0, "float32[5]"),
        ("int64[3,*]", [np.zeros((4, 2), np.int64)], 0, "int64[4,2]"),
        ("bfloat16[...]", torch.zeros(2, 4), 0, "float32[4]"),
        ("object", [np.zeros(2)], 0, "float64[2]"),
    ],
)
def test_what_is_not_is_refused_by_row(form: str, column: Any, row: int, found: str) -> None:
    with pytest.raises(dataplane.InvalidValue) as caught:
        put(column, form)
    declares = f"but this partition declares 'x' as {form}: pass "
    assert str(caught.value).startswith(f"nothing was stored: x[{row}] is {found}, {declares}")
    if form.startswith("bfloat16"):  # NumPy does not know this name
        assert "np.asarray(value, ml_dtypes.bfloat16)" in str(caught.value)
    assert caught.value.details == {"field": "x", "row": row, "expected": form, "found": found}


@pytest.mark.parametrize(
    "form", ["", "int", "int64[", "int64[n]", "int64[-1]", "int64[*]x", "Int64", "text", 8, None]
)
def test_a_form_that_is_none_is_told_with_examples(form: Any) -> None:
    with pytest.raises(dataplane.InvalidCall, match=r"fields\['x'\].*'int64\[\*\]'"):
        canonical({"x": form})
    with pytest.raises(dataplane.InvalidCall, match="expected a mapping of field names to forms"):
        canonical("tokens")


def test_forms_that_say_the_same_are_one() -> None:
    assert canonical({"x": " float32 [3 , *]", "y": "int64[ ]"}) == {
        "x": "float32[3,*]",
        "y": "int64",
    }
