from __future__ import annotations

import operator
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.errors import InvalidRows, InvalidValue, LimitExceeded, ProtocolError
from dataplane.metadata.tables.tags import MISSING, Tags, check
from dataplane.metadata.tables.where import Where, checked, tag
from dataplane.metadata.tables.where import test as holds

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=3)
)
NUMBERS = st.integers(-3, 3) | st.sampled_from([-0.5, 1.0, 2.5])


def selected(where: Where, values: list[Any], missing: list[int] | None = None) -> list[bool]:
    """Which of these values of tag "t" pass, after a journey over the wire."""
    tags = Tags(len(values))
    for row, value in enumerate(values):
        if row not in (missing or []):
            tags.set([row], {"t": [value]})
    wire = msgspec.msgpack.decode(msgspec.msgpack.encode(where.to_wire()))
    found = holds(checked(wire), tags)
    return [bool(found >> row & 1) for row in range(len(values))]


@given(
    st.lists(NUMBERS, min_size=1, max_size=8),
    NUMBERS,
    st.sampled_from(["lt", "le", "gt", "ge", "eq", "ne"]),
)
def test_numbers_compare_as_python_does(values: list[Any], other: Any, how: str) -> None:
    compare = getattr(operator, how)
    assert selected(compare(tag("t"), other), values) == [compare(one, other) for one in values]


def test_a_missing_tag_makes_every_comparison_false() -> None:
    for where in (
        tag("t") == 1,
        tag("t") != 1,
        tag("t") < 1,
        tag("t").isin([1]),
        tag("t").exists(),
    ):
        assert selected(where, [1, 1], missing=[0, 1]) == [False, False]
    assert selected(~(tag("t") == 1), [1, 1], missing=[0]) == [True, False]
    assert selected(tag("other") >= 0, [1]) == [False]


def test_values_without_an_order_are_neither_smaller_nor_greater() -> None:
    values = ["x", 1, None, 2.5, True]
    assert selected(tag("t") < "y", values) == [True, False, False, False, False]
    assert selected(tag("t") >= 1, values) == [False, True, False, True, True]
    assert selected(tag("t") == None, values) == [False, False, True, False, False]  # noqa: E711
    assert selected(tag("t") != "x", values) == [False, True, True, True, True]
    assert selected(tag("t") < "y", [1, 2]) == [False, False]


@given(st.lists(SCALARS, min_size=1, max_size=6), SCALARS)
def test_testing_never_raises(values: list[Any], other: Any) -> None:
    for how in ("lt", "le", "gt", "ge", "eq", "ne"):
        selected(getattr(operator, how)(tag("t"), other), values)
    selected(tag("t").isin([other]), values)


def test_filters_combine() -> None:
    values = list(range(6))
    assert selected((tag("t") >= 2) & (tag("t") < 5) & (tag("t") != 3), values) == [
        False, False, True, False, True, False,
    ]  # fmt: skip
    assert selected((tag("t") == 0) | (tag("t") == 5), values)[::5] == [True, True]
    assert selected(~tag("t").isin([1, "x", None]), values)[:2] == [True, False]


def test_a_filter_has_no_truth_value() -> None:
    with pytest.raises(TypeError, match="&"):
        bool((tag("a") == 1) and (tag("b") == 2))
    with pytest.raises(TypeError, match="exists"):
        bool(tag("a"))


def test_a_long_chain_does_not_nest() -> None:
    where = tag("t") == 0
    for i in range(100):
        where = where | (tag("t") == i)
    assert len(where.to_wire()) == 102
    for i in range(200):
        where = where | (tag("t") == i)
    with pytest.raises(LimitExceeded):
        where.to_wire()


def test_a_filter_compares_with_scalars_only() -> None:
    assert (tag("t") == np.int64(3)).to_wire() == ["eq", "t", 3]
    assert repr(~(tag("t") >= 3)) == "Where(~(t ge 3))"
    for value in ([1], object(), b"x"):
        with pytest.raises(InvalidValue):
            tag("t") == value  # noqa: B015


def deep() -> list[Any]:
    wire: list[Any] = ["exists", "t"]
    for _ in range(70):
        wire = ["not", wire]
    return wire


@pytest.mark.parametrize(
    "wire",
    [
        [],
        "eq",
        ["eq"],
        ["eq", "t"],
        ["eq", 1, 1],
        ["eq", "t", [1]],
        ["eq", "t", {}],
        ["and"],
        ["not", ["exists", "t"], ["exists", "t"]],
        ["in", "t", 1],
        ["in", "t", [[]]],
        ["in", "t", [0] * 300],
        ["or", ["exists"]],
        ["import", "os"],
        ["eq", "t" * 600, 1],
        [["eq"], "t", 1],
        deep(),
    ],
)
def test_what_is_no_filter_is_a_protocol_error(wire: Any) -> None:
    with pytest.raises(ProtocolError):
        checked(wire)


@pytest.mark.parametrize(
    ("wire", "message"),
    [
        (["import", "os"], "unknown filter operator 'import'"),
        (["in", "t", 1], "the second operand of filter operator 'in' must be a list, not int"),
        (["eq", "t"], "filter operator 'eq' takes 2 operands, got 1"),
        (["and"], "filter operator 'and' takes at least 1 operand, got 0"),
    ],
)
def test_a_wrong_use_of_an_operator_is_named(wire: Any, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        checked(wire)


@given(st.lists(SCALARS, min_size=1, max_size=12))
def test_tags_come_back_with_their_very_type(values: list[Any]) -> None:
    tags, half = Tags(len(values)), len(values) // 2
    tags.set(range(half), {"t": values[:half]} if half else {})
    tags.set(range(half, len(values)), {"t": values[half:]})
    ((_, found),) = tags.items(range(len(values)))
    assert list(map(repr, found)) == list(map(repr, values))


def test_a_tag_has_one_value_a_row_or_one_for_all() -> None:
    with pytest.raises(InvalidRows, match="2 values for 3 rows"):
        check({"t": [1, 2]}, 3, ())
    with pytest.raises(InvalidValue):
        check({"t": [b"x"]}, 1, ())  # type: ignore[list-item]
    with pytest.raises(LimitExceeded):
        check({f"t{i}": [1] for i in range(65)}, 1, ())
    tags = Tags(4)
    tags.set(range(3), {"t": [5]})
    assert tags.items(range(4)) == [("t", [5, 5, 5, MISSING])]
    assert [tags.get("t", row) for row in range(4)] == [5, 5, 5, MISSING]
    tags.set([1], {"t": ["word"]})
    assert [tags.get("t", row) for row in range(3)] == [5, "word", 5]
