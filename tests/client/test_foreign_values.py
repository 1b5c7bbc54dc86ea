"""Code of a user's own values that raises inside a call: the error is ours, names the argument, the
field and the row, and has the original as its cause."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import dataplane
from dataplane import Partition


class Boom(Exception):
    pass


def boom(*_: object) -> Any:
    raise Boom("my own code")


def with_method(base: type, *names: str) -> type:
    return type("Mine", (base,), dict.fromkeys(names, boom))


class OddMapping(Mapping[str, Any]):
    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[str]:
        return iter(["x"])

    def __getitem__(self, name: str) -> Any:
        return boom()


def two() -> Iterator[int]:
    yield 1
    boom()


Unreadable, NoArray = with_method(object, "__iter__"), with_method(object, "__array__")
OddList, OddIndex = with_method(list, "__iter__"), with_method(object, "__index__")
NoTolist = type("Mine", (), {"tolist": property(boom)})
PUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a column": ({"columns": {"x": Unreadable()}}, {"field": "x"}),
    "a list": ({"columns": {"x": OddList([1])}}, {"field": "x"}),
    "a generator": ({"columns": {"x": two()}}, {"field": "x", "row": 1}),
    "a value": ({"columns": {"x": [[1], NoArray()]}}, {"field": "x", "row": 1}),
    "columns": ({"columns": OddMapping()}, {}),
    "keys": ({"columns": {"x": [1]}, "key": Unreadable()}, {}),
    "keys that are an array": ({"columns": {"x": [1]}, "key": NoTolist()}, {}),
    "groups": ({"columns": {"x": [1]}, "group": Unreadable()}, {}),
    "tags": ({"columns": {"x": [1]}, "tags": OddMapping()}, {}),
    "a tag": ({"columns": {"x": [1, 2]}, "tags": {"t": two()}}, {"tag": "t", "row": 1}),
    "dedup": ({"columns": {"x": [1]}, "dedup": Unreadable()}, {}),
}


def cause_of(exc: BaseException) -> BaseException:
    while exc.__cause__ is not None:
        exc = exc.__cause__
    return exc


@pytest.mark.parametrize("what", PUTS)
def test_a_put_names_what_could_not_be_read(part: Partition, what: str) -> None:
    given, details = PUTS[what]
    with pytest.raises(dataplane.DataplaneError, match="Boom: my own code") as caught:
        part.put(given["columns"], **{k: v for k, v in given.items() if k != "columns"})
    assert isinstance(cause_of(caught.value), Boom)
    assert {name: caught.value.details.get(name) for name in details} == details


CALLS: dict[str, Callable[[Partition], Any]] = {
    "get": lambda part: part.get(Unreadable()),
    "drop": lambda part: part.drop(keys=Unreadable()),
    "claim": lambda part: part.claim("s", rows=OddIndex()),
    "fields": lambda part: part.claim("s", rows=1, fields=Unreadable()),
    "budget": lambda part: part.claim("s", budget=OddMapping()),
    "a limit": lambda part: part.claim("s", budget={"n": with_method(float, "__float__")(1)}),
    "isin": lambda part: part.rows(where=dataplane.tag("n").isin(Unreadable())),
    "expect": lambda part: part.tag(["k"], {"t": 1}, expect=OddMapping()),
}


@pytest.mark.parametrize("what", CALLS)
def test_other_calls_name_what_could_not_be_read(part: Partition, what: str) -> None:
    with pytest.raises(dataplane.DataplaneError, match="Boom: my own code") as caught:
        CALLS[what](part)
    assert isinstance(cause_of(caught.value), Boom)


def test_a_value_without_a_representation_is_refused_all_the_same(part: Partition) -> None:
    dumb = with_method(object, "__repr__")()
    for call in (
        lambda: part.put({"x": [1]}, key=dumb),
        lambda: part.put({"x": [1]}, tags={"t": dumb}),
        lambda: part.put({dumb: [1]}),
        lambda: part.put({"x": dumb}),
        lambda: part.claim("s", rows=dumb),
        lambda: dataplane.tag("n") == dumb,
    ):
        with pytest.raises(dataplane.DataplaneError):
            call()


class Mute(Exception):
    __str__ = __repr__ = boom


def mute(*_: object) -> Any:
    raise Mute


@pytest.mark.parametrize("method", ["__array__", "__getattr__", "__dlpack__"])
@pytest.mark.parametrize("place", ["column", "value", "object"])
def test_an_exception_without_a_text_is_an_error_of_ours_all_the_same(
    part: Partition, method: str, place: str
) -> None:
    odd = type("Mine", (), {method: mute})()
    columns = {"column": {"x": odd}, "value": {"x": [1, odd]}, "object": {"x": [1, {"a": odd}]}}
    with pytest.raises(dataplane.DataplaneError, match=r"\bx\b.*Mute") as caught:
        part.put(columns[place])
    assert isinstance(cause_of(caught.value), Mute)
    assert place == "column" or caught.value.details["row"] == 1


def test_a_tag_without_values_is_refused(part: Partition) -> None:
    with pytest.raises(dataplane.InvalidRows, match="tag 't' has 0 values for 1 row"):
        part.put({"x": [1]}, tags={"t": []})


def short_of_memory(*_: object) -> Any:
    raise MemoryError("my own allocation")


@pytest.mark.parametrize("method", ["__array__", "__iter__", "__len__", "__getattribute__"])
@pytest.mark.parametrize("place", ["column", "value", "beside an array", "object", "key", "tag"])
def test_a_memory_error_of_a_value_names_the_value(
    part: Partition, method: str, place: str
) -> None:
    odd = type("Mine", (), {method: short_of_memory})()
    calls: dict[str, Callable[[], Any]] = {
        "column": lambda: part.put({"x": odd}),
        "value": lambda: part.put({"x": [1, odd]}),
        "beside an array": lambda: part.put({"x": [np.arange(2), odd]}),
        "object": lambda: part.put({"x": [1, {"a": odd}]}),
        "key": lambda: part.put({"x": [1]}, key=odd),
        "tag": lambda: part.put({"x": [1]}, tags={"x": odd}),
    }
    name = "key" if place == "key" else "x"
    with pytest.raises(dataplane.DataplaneError, match=rf"\b{name}\b") as caught:
        calls[place]()
    if place in ("value", "beside an array", "object"):
        assert caught.value.details["row"] == 1


def test_an_array_that_no_memory_holds_is_refused(part: Partition) -> None:
    huge = np.broadcast_to(1.0, (2, 1 << 46))
    for column in (huge, [1, huge]):
        with pytest.raises(dataplane.InvalidValue, match="Pass fewer or smaller values"):
            part.put({"x": column})


@dataclass(frozen=True)
class Point:
    x: int


def test_a_key_that_would_not_stay_a_key_is_refused(part: Partition) -> None:
    for key in (Point(1), (1, Point(2))):
        with pytest.raises(
            dataplane.InvalidValue, match=r"x\[1\]: a dict has a .* as a key"
        ) as caught:
            part.put({"x": [1, {key: 1}]})
        assert caught.value.details["row"] == 1


def test_a_masked_array_from_a_value_keeps_no_hole(part: Partition) -> None:
    masked = type("Mine", (), {"__array__": lambda *_: np.ma.array([1, 2], mask=[False, True])})()
    with pytest.raises(dataplane.InvalidValue, match="lose its mask"):
        part.put({"x": [1, masked]})


def test_an_argument_that_has_no_truth_value_is_refused(part: Partition) -> None:
    odd: Any = np.arange(2)
    calls: dict[str, Callable[[], Any]] = {
        "unit": lambda: part.claim("s", rows=1, unit=odd),
        "short": lambda: part.seal(short=odd),
        "unit=": lambda: part.wait("s", rows=1, unit=odd),
        "remainder": lambda: part.plan("s", rank=0, ranks=1, remainder=odd),
    }
    for name, call in calls.items():
        with pytest.raises(dataplane.InvalidCall, match=rf"{name}.*expected '"):
            call()


NoClass = type("Mine", (), {"__class__": property(boom)})
FORMS: dict[str, Any] = {
    "what hides its class": NoClass(),
    "what hides all": with_method(object, "__getattribute__")(),
    "no form": "x" * 9999,
}


@pytest.mark.parametrize("form", FORMS)
def test_a_form_that_is_none_is_refused_with_its_field(plane: dataplane.Plane, form: str) -> None:
    with pytest.raises(dataplane.InvalidCall, match=r"fields\['x'\]=.*'float32'") as caught:
        plane.partition("forms", {"t": ["x"]}, fields={"x": FORMS[form]})
    assert len(str(caught.value)) < 999


@pytest.mark.parametrize("method", ["__hash__", "__eq__", "__str__"])
def test_a_form_may_be_a_str_of_ones_own_class(plane: dataplane.Plane, method: str) -> None:
    part = plane.partition("own", {"t": ["x"]}, fields={"x": with_method(str, method)("int64[*]")})
    with pytest.raises(dataplane.InvalidValue, match=r"'x' as int64\[\*\]"):
        part.put({"x": [0.5]})
