"""Any envelope that a side may write is read back equal, by us and by an independent decoder."""

from __future__ import annotations

import enum
import types
import typing
from collections.abc import Callable
from functools import cache
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataplane.wire import frames, journal, peering, tables
from dataplane.wire.messages import Reply, Request
from dataplane.wire.peering import PeerReply, PeerRequest

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
INTS = st.integers(-(1 << 63), (1 << 64) - 1)
FLOATS = st.floats(allow_nan=False)
SCALARS = st.none() | st.booleans() | INTS | FLOATS | TEXT
ANYTHING = st.recursive(
    SCALARS | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
PLAIN = {
    int: INTS,
    bool: st.booleans(),
    float: FLOATS,
    str: TEXT,
    bytes: st.binary(max_size=40),
    type(None): st.none(),
    Any: ANYTHING,
}


@cache
def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of an annotation of a struct."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind == tables.Scalar:
        return SCALARS
    if kind == tables.Where or kind is list:
        return st.lists(ANYTHING, max_size=4)
    if origin is typing.Annotated:
        least = [limit.ge for limit in args[1:] if limit.ge is not None]
        return values_of(args[0]).map(abs) if least == [0] else values_of(args[0])
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return st.sampled_from(list(kind))
    if kind in PLAIN:
        return PLAIN[kind]
    if origin is list:
        return st.lists(values_of(args[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(values_of(args[0]), values_of(args[1]), max_size=3)
    if origin is tuple and args[-1] is ...:
        return st.lists(values_of(args[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values_of, args))
    if origin is typing.Literal:
        return st.sampled_from(args)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(values_of, args))
    hints = typing.get_type_hints(kind, include_extras=True)
    names = [field.name for field in msgspec.structs.fields(kind)]

    def later(name: str) -> st.SearchStrategy[Any]:
        return st.deferred(lambda: values_of(hints[name]))

    return st.builds(kind, **{name: later(name) for name in names})


def positional(value: Any) -> Any:
    """What MessagePack holds for a value: structs and tuples are arrays."""
    if isinstance(value, msgspec.Struct):
        tag = value.__struct_config__.tag
        fields = [positional(getattr(value, name)) for name in value.__struct_fields__]
        return fields if tag is None else [tag, *fields]
    if isinstance(value, list | tuple):
        return [positional(item) for item in value]
    if isinstance(value, dict):
        return {key: positional(item) for key, item in value.items()}
    return str(value) if isinstance(value, enum.Enum) else value


def framed_whole(envelope: Any) -> bytes | memoryview:
    (body,) = frames.FrameReader().feed(bytes(frames.encode(envelope)))
    return body


CODECS: dict[type[msgspec.Struct], tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    Request: (framed_whole, frames.decode_request),
    Reply: (framed_whole, frames.decode_reply),
    PeerRequest: (peering.encode, peering.decode_request),
    PeerReply: (peering.encode, peering.decode_reply),
}


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(op=values_of(journal.LogRecord))
def test_operations_are_read_back_equal(op: journal.LogRecord) -> None:
    body = journal.encode(op)
    assert journal.decode(body) == op
    assert msgpack.packb(positional(op), use_bin_type=True) == body


@pytest.mark.parametrize("kind", list(CODECS), ids=lambda kind: kind.__name__)
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_an_envelope_is_read_back_equal(kind: type[msgspec.Struct], data: st.DataObject) -> None:
    envelope = data.draw(values_of(kind))
    encode, decode = CODECS[kind]
    body = encode(envelope)
    assert decode(body) == envelope
    literal = positional(envelope)
    assert repr(msgpack.unpackb(body, strict_map_key=False)) == repr(literal)
    assert msgpack.packb(literal, use_bin_type=True) == body
