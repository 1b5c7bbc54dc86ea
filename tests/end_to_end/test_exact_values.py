"""What goes in comes out, to the last bit, or a typed error says which field and row do not fit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from datetime import date
from decimal import Decimal
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dataplane
from dataplane import Partition, Plane, Rows
from tests.end_to_end.hosts import running, warm
from tests.same import dense

EXAMPLES = settings(
    max_examples=150,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
NAMES = itertools.count()

EXTENSIONS = [
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e5m2,
    ml_dtypes.float8_e8m0fnu,
    ml_dtypes.float4_e2m1fn,
    ml_dtypes.int4,
    ml_dtypes.uint2,
]
BUILTIN = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]
UNITS = ["Y", "M", "W", "D", "h", "25s", "s", "10ms", "ms", "us", "ns", "ps", "as"]
TIMES = [f"{kind}8[{unit}]" for kind in "Mm" for unit in UNITS]
DTYPES = [
    np.dtype(name)
    for name in (*BUILTIN, *EXTENSIONS, *TIMES, "m8", ">i4", ">f8", ">M8[ns]", np.longdouble)
]


@pytest.fixture(scope="module")
def plane() -> Iterator[Plane]:
    with running("a", arena="64MiB") as cluster, cluster.connect("a") as connected:
        warm(connected)
        yield connected


@st.composite
def arrays(draw: st.DrawFn, dtype: np.dtype | None = None) -> np.ndarray:
    """An array of any dtype, byte order, shape and strides; small numbers and extreme ones."""
    dtype = dtype or draw(st.sampled_from(DTYPES))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    native = dtype.newbyteorder("=")
    seed = np.random.default_rng(draw(st.integers(0, 99)))
    count = math.prod(shape)
    if dtype == np.bool_ or "int" in dtype.name and dtype.itemsize == 1 or dtype == np.longdouble:
        made = seed.integers(0, 2, count).astype(native)
    elif draw(st.booleans()) or dtype.name.startswith("float4"):
        made = seed.integers(0, 4, count).astype(np.int64).astype(native)
    else:
        raw = seed.integers(0, 256, count * dtype.itemsize, dtype=np.uint8)
        made = raw.view(native) if count else np.zeros(0, native)
    made = made.astype(dtype).reshape(shape)
    order = draw(st.sampled_from(["C", "F", "strided"]))
    if order == "strided" and made.ndim:
        return np.repeat(made, 2, axis=0)[::2]
    return np.asarray(made, order="F" if order == "F" else "C")


TEXTS = st.text(st.characters(exclude_categories=()), max_size=4)
"""Half of a surrogate pair and NUL among the characters."""
INTS = st.one_of(
    st.integers(-9, 9),
    st.integers(),
    st.sampled_from([2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1]),
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    INTS,
    st.floats(),
    TEXTS,
    st.binary(max_size=4),
    arrays().filter(lambda array: array.size > 0).map(lambda array: array.reshape(-1)[0]),
    st.sampled_from([Decimal(1), 1j, date(2020, 1, 2), object(), np.str_("a"), np.bytes_(b"a")]),
)
VALUES = st.recursive(
    st.one_of(SCALARS, arrays(), arrays(np.dtype("f4")).map(torch.from_numpy)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.one_of(INTS, TEXTS, st.none(), st.binary(max_size=2)), inner),
    ),
    max_leaves=5,
)
BUFFERS: list[Callable[[bytes], object]] = [
    bytearray,
    memoryview,
    lambda raw: memoryview(raw).cast("h"),
]
COLUMNS = st.one_of(
    st.lists(VALUES, min_size=1, max_size=4),
    st.lists(INTS, min_size=1, max_size=4),
    st.lists(st.lists(st.one_of(INTS, st.floats()), max_size=3), min_size=1, max_size=4),
    st.sampled_from(DTYPES).flatmap(lambda one: st.lists(arrays(one), min_size=1, max_size=4)),
    arrays().filter(lambda array: array.ndim > 0 and len(array) > 0),
    st.just(memoryview(b"ab")),
    st.lists(
        st.sampled_from(BUFFERS).map(lambda make: make(b"abcd")),
        min_size=1,
        max_size=2,
    ),
)


def rows_of(plane: Plane, columns: dict[str, Any], **more: Any) -> Rows:
    part = plane.partition(f"p{next(NAMES)}", {"s": ["x"]}, free="drop")
    try:
        part.put(columns, **more)
        return part.get()
    finally:
        part.drop()


def told(error: dataplane.DataplaneError) -> None:
    """What every refusal of a value says, and that it can be printed."""
    error.message.encode()
    if isinstance(error, dataplane.InvalidValue):
        assert error.details.get("field") == "x" or "tag" in error.details or "key" in str(error)
        assert isinstance(error.details.get("row", 0), int)


def same(given: Any, got: Any) -> bool:
    """Whether a value came back. Documented changes: native byte order; a flat list of numbers of
    one kind is an array; bytearray is bytes; an array of objects is a list."""
    if isinstance(given, torch.Tensor):
        return same(given.numpy(), got.numpy() if isinstance(got, torch.Tensor) else got)
    if isinstance(given, np.ndarray | np.generic):
        native = given.dtype.newbyteorder("=")
        return (
            isinstance(got, np.ndarray) == isinstance(given, np.ndarray)
            and got.dtype == native
            and got.shape == given.shape
            and got.tobytes() == given.astype(native).tobytes()
        )
    if type(given) is list and isinstance(got, np.ndarray):
        numbers = [one.item() if got.dtype.kind not in "mM" else one for one in got]
        kinds = {type(one) for one in given}
        if kinds <= {bool, int, float}:
            return len(kinds) < 2 and same(given, numbers)
        return len(given) == len(got) and all(map(same, given, got))
    if isinstance(given, bytearray | memoryview):
        return bool(got == bytes(given)) and getattr(given, "format", "B") == "B"
    if type(given) is not type(got):
        return False
    if isinstance(given, list | tuple):
        return len(given) == len(got) and all(map(same, given, got))
    if isinstance(given, dict):
        return same(list(given), list(got)) and same(list(given.values()), list(got.values()))
    return repr(given) == repr(got) if isinstance(given, float) else bool(given == got)


@given(COLUMNS)
@EXAMPLES
def test_a_column_comes_out_as_it_went_in(plane: Plane, column: Any) -> None:
    try:
        rows = rows_of(plane, {"x": column})
    except dataplane.DataplaneError as error:
        told(error)
        return
    given = list(column)
    if isinstance(column, np.ndarray) and column.ndim == 1 and column.dtype != object:
        given = [column[index, ...] for index in range(len(column))]
    assert len(rows) == len(given) and all(map(same, given, rows["x"]))


def number(value: Any) -> Any:
    """What a value says, by which forms of several libraries can be compared exactly."""
    if isinstance(value, torch.Tensor):
        value = value.unbind() if value.is_nested else value
    if isinstance(value, pa.Scalar) and not value.is_valid:
        return None
    if isinstance(value, pa.Scalar) and pa.types.is_temporal(value.type):
        scale = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[value.type.unit]
        return ("time", Fraction(value.value, scale))
    if isinstance(value, pa.ListScalar | pa.FixedSizeListScalar | pa.LargeListScalar):
        return [number(item) for item in value]
    if isinstance(value, pa.FixedShapeTensorScalar):
        return number(value.to_numpy())
    if isinstance(value, pa.StructScalar):
        return {name: number(item) for name, item in value.items() if item.is_valid}
    if isinstance(value, pa.Scalar):
        return number(value.as_py())
    if isinstance(value, np.ndarray | torch.Tensor) and value.ndim:
        return [number(item) for item in value]
    if (
        isinstance(value, np.datetime64 | np.timedelta64)
        or getattr(value, "dtype", None) is not (None)
        and getattr(value.dtype, "kind", "") in ("m", "M")
    ):
        return time(value)
    if isinstance(value, np.ndarray | np.generic | torch.Tensor):
        value = value.item()
    if isinstance(value, list | tuple):
        return [number(item) for item in value]
    if isinstance(value, dict):
        # In Arrow a key that a dict lacks is null, as is None.
        return {key: number(item) for key, item in value.items() if number(item) is not None}
    if value != value:
        return "nan"
    return (isinstance(value, bool), value) if isinstance(value, bool | int | float) else value


def time(value: Any) -> Any:
    unit, count = np.datetime_data(value.dtype)
    if np.isnat(value):
        return None
    ticks = int(value.astype(np.int64)) * count
    if value.dtype.kind == "M" and unit in ("Y", "M"):
        months = ticks * (12 if unit == "Y" else 1)
        years, month = divmod(months, 12)
        if not 1 <= 1970 + years <= 9999:
            return ("time", unit, ticks)
        days = date(1970 + years, month + 1, 1).toordinal() - date(1970, 1, 1).toordinal()
        return ("time", Fraction(days * 86400))
    seconds = {"W": 604800, "D": 86400, "h": 3600, "m": 60, "s": 1}
    parts = {"ms": 10**3, "us": 10**6, "ns": 10**9, "ps": 10**12, "fs": 10**15, "as": 10**18}
    if unit in seconds:
        return ("time", Fraction(ticks * seconds[unit]))
    return ("time", Fraction(ticks, parts[unit])) if unit in parts else ("time", unit, ticks)


OUTPUTS = {
    "numpy": lambda rows: rows.numpy("x"),
    "torch": lambda rows: rows.torch("x"),
    "list": lambda rows: rows.torch("x", layout="list"),
    "padded": lambda rows: rows.torch("x", layout="padded"),
    "jagged": lambda rows: rows.torch("x", layout="jagged"),
    "tensordict": lambda rows: rows.tensordict()["x"],
    "arrow": lambda rows: rows.arrow(["x"])["x"],
}


@pytest.mark.parametrize("output", OUTPUTS)
@given(column=COLUMNS)
@settings(EXAMPLES, max_examples=60)
def test_a_column_says_the_same_in_every_form(plane: Plane, output: str, column: Any) -> None:
    try:
        rows = rows_of(plane, {"x": column})
        got = OUTPUTS[output](rows)
    except dataplane.DataplaneError as error:
        told(error)
        return
    if output == "padded":
        shapes = map(np.shape, rows["x"])
        got = [row[tuple(map(slice, shape))] for row, shape in zip(got, shapes, strict=True)]
    if isinstance(got, torch.Tensor) and got.is_nested:
        got = got.unbind()
    assert [number(one) for one in got] == [number(one) for one in rows["x"]]


TAGS = st.one_of(
    st.lists(SCALARS, min_size=2, max_size=2),
    arrays().filter(lambda array: array.shape == (2,)),
    st.sampled_from([[1, "1"], [True, 1], ["\0", "a\0b"], [np.float32(0.1), 0.1]]),
)


@pytest.mark.parametrize("values", [{"a", "b"}, frozenset([1, 2])])
def test_a_set_of_tags_is_no_order_of_rows(plane: Plane, values: Any) -> None:
    with pytest.raises(dataplane.InvalidRows, match="tag 't' is a set, which has no order"):
        rows_of(plane, {"x": [1, 2]}, tags={"t": values})
    assert rows_of(plane, {"x": [1, 2]}, tags={"t": dict(a=1, b=2).keys()}).tags["t"] == ["a", "b"]


def plain(value: Any) -> Any:
    """The scalar of Python that stands for one of numpy."""
    return value.item() if isinstance(value, np.generic | np.ndarray) else value


@given(TAGS)
@EXAMPLES
def test_a_tag_comes_out_as_it_went_in(plane: Plane, tags: Any) -> None:
    try:
        rows = rows_of(plane, {"x": [1, 2]}, tags={"t": tags})
    except dataplane.DataplaneError as error:
        told(error)
        assert "'t'" in error.message
        return
    given = list(map(plain, tags))
    assert not any(getattr(one, "dtype", np.dtype("i8")).kind in "mM" for one in tags)
    found = rows.tags.get("t", [None, None])
    assert same(given, found)


@given(TAGS, st.sampled_from(["key", "group"]))
@EXAMPLES
def test_an_id_comes_out_as_it_went_in(plane: Plane, ids: Any, what: str) -> None:
    try:
        rows = rows_of(plane, {"x": [1, 2]}, **{what: ids})
    except dataplane.DataplaneError as error:
        told(error)
        return
    assert not any(getattr(one, "dtype", np.dtype("i8")).kind in "mM" for one in ids)
    assert same(list(map(plain, ids)), rows.keys if what == "key" else rows.group_ids)


FLOATS = ["f2", "f4", "f8", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]


@given(
    st.sampled_from([np.dtype(one) for one in ("?", "i1", "i8", "u1", "u8", *FLOATS)]),
    st.one_of(INTS, st.floats(), st.booleans(), st.sampled_from([-100, 0.5, 1e9, "3", None, 1j])),
)
@EXAMPLES
def test_padding_is_the_number_that_was_asked_for(plane: Plane, dtype: Any, padding: Any) -> None:
    rows = rows_of(plane, {"x": [np.zeros(1, dtype), np.zeros(2, dtype)]})
    try:
        got = rows.torch("x", layout="padded", padding=padding)[0, 1].item()
    except dataplane.InvalidValue as error:
        told(error)
        assert f"{padding!r:.40}" in error.message and dtype.name in error.message
        held = isinstance(padding, bool | int) and dtype in (np.dtype("i8"), np.dtype("u8"))
        low = 0 if dtype == np.dtype("u8") else -(2**63)
        assert not held or not low <= padding < 2**64 + low
        return
    if isinstance(padding, float) and math.isfinite(padding) and dtype.kind in "fV":
        limits: Any = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
        near = max(float(limits.eps) * abs(padding), float(limits.smallest_subnormal))
        assert abs(got - padding) <= near and bool(got) == bool(padding)
    else:
        assert got == padding or (got != got and padding != padding)


def test_one_padding_for_all_fields_leaves_bools_alone(plane: Plane) -> None:
    columns = {
        "ids": [[1, 2], [3]],
        "mask": [[True, True], [True]],
        "logp": [np.array(row, np.float32) for row in ([0.5, 1], [1.5])],
    }
    rows = rows_of(plane, columns)
    made = rows.tensordict(layout="padded", padding=-100)
    assert made["ids"][1].tolist() == [3, -100] and made["logp"][1].tolist() == [1.5, -100]
    assert made["mask"][1].tolist() == [True, False]
    with pytest.raises(
        dataplane.InvalidValue, match=r"'mask' has dtype bool.* cannot represent padding=-100"
    ):
        rows.tensordict(layout="padded", padding={"mask": -100})
    with pytest.raises(
        dataplane.InvalidValue, match=r"'ids' has dtype int64.* cannot represent padding=nan"
    ):
        rows.tensordict(layout="padded", padding=float("nan"))


class Odd:
    """Of a user or of another library: what it raises while it is read is not ours."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise KeyError("boom")


@pytest.mark.parametrize("column", [[0, Odd()], [0, {"a": [Odd()]}], Odd()])
def test_what_fails_while_it_is_read_is_named(plane: Plane, column: Any) -> None:
    with pytest.raises(dataplane.InvalidValue, match=r"x.*Odd.*KeyError: 'boom'") as caught:
        rows_of(plane, {"x": column})
    assert caught.value.details["field"] == "x"
    assert caught.value.details.get("row", 1) == 1


def test_names_that_are_no_text_are_refused_where_they_are_given(plane: Plane) -> None:
    half = "\ud800"
    part: Partition = plane.partition("names", {"s": ["x"]}, free="drop")
    part.put({"x": [1]}, key=["a"], tags={"t": 1})
    for call in (
        lambda: plane.partition(half, {"s": ["x"]}),
        lambda: plane.partition("other", {half: ["x"]}),
        lambda: plane.partition("other", {"s": [half]}),
        lambda: part.put({"x": [1]}, tags={half: 1}),
        lambda: part.get([half]),
        lambda: part.get(fields=[half]),
        lambda: part.claim(half, rows=1),
        lambda: part.close(half, 1),
        lambda: part.close(2**70, 1),
        lambda: part.drop(groups=[half]),
        lambda: part.tag("a", {"t": half}),
        lambda: part.tag("a", {"t": 1}, expect={"t": 2**70}),
        lambda: part.rows(where=dataplane.tag(half) == 1),
        lambda: part.rows(where=dataplane.tag("t") == half),
        lambda: part.rows(where=dataplane.tag("t") == 2**70),
        lambda: part.rows(where=dataplane.tag("t") == np.datetime64(1, "ns")),
    ):
        with pytest.raises(dataplane.DataplaneError) as caught:
            call()
        assert "cannot encode the" not in caught.value.message
        caught.value.message.encode()
    names = part.rows(where=dataplane.tag(np.str_("t")) == np.str_("b")).keys
    assert names == [] and part.get(fields=[np.str_("x")]).fields == ["x"]


def test_a_longlong_is_an_int64(plane: Plane) -> None:
    """NumPy has two dtypes of 64-bit ints here, `l` and `q`, which are equal: the values, and all
    that numpy does with them, are the same. Values come back as the one that `np.int64` names."""
    assert np.dtype("q") == np.dtype("l") == np.dtype(np.int64)
    part = plane.partition(f"n{next(NAMES)}", {"s": ["x"]}, free="drop")
    part.put({"x": np.array([-1, 2**63 - 1], "q")}, key=["a", "b"])
    found = dense(part.get(keys=["a", "b"]).numpy("x"))
    assert found.dtype == np.dtype("q") and found.tolist() == [-1, 2**63 - 1]
