"""The tables of protocol/*.md say what the code does: order, types, defaults, tags, unions."""

from __future__ import annotations

import json
import re
import types
import typing
from typing import Any

import msgspec
import numpy as np
import pytest

from dataplane import errors
from dataplane.transport import bulk_frames
from dataplane.transport.owner import EXPIRY_MAX_MS
from dataplane.wire import (
    journal,
    limits,
    messages,
    objects,
    packed,
    peering,
    tables,
)
from tests.protocol import make_vectors
from tests.protocol.documents import (
    DOCUMENTS,
    PROTOCOL,
    REQUIRED,
    forwarded,
    operations,
    sections,
    structures,
    text_of,
)
from tests.protocol.wired import PEERS, STRUCTS, bodies, members

CHANNELS = list(DOCUMENTS)
EVERY = [(channel, name) for channel in CHANNELS for name in STRUCTS[channel]]
README = (PROTOCOL / "README.md").read_text()


def kind_of(annotation: Any) -> str:
    """An annotation in the words of the tables."""
    named = {int: "int", str: "str", bytes: "bin", bool: "bool", float: "float", Any: "any"}
    if annotation == tables.Scalar:
        return "scalar"
    if annotation == tables.Name:
        return "name"
    if annotation == tables.Where:
        return "where"
    if annotation in named:
        return named[annotation]
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is list or (origin is tuple and args[-1] is ...):
        return f"array of {kind_of(args[0])}"
    if origin is tuple:
        return f"[{', '.join(map(kind_of, args))}]"
    if origin is dict:
        return f"map of {kind_of(args[0])} to {kind_of(args[1])}"
    if origin is typing.Literal:
        return " or ".join(json.dumps(word) for word in args)
    if annotation == journal.LogRecord:
        return "log record"
    if origin in (typing.Union, types.UnionType):
        if all(arg.__name__ in PEERS | STRUCTS["local"] | STRUCTS["journal"] for arg in args):
            return "message"
        return " or ".join("nil" if arg is type(None) else kind_of(arg) for arg in args)
    return str(annotation.__name__)


def fields_of(struct: type[msgspec.Struct]) -> list[tuple[str, str, Any]]:
    hints = typing.get_type_hints(struct)
    found = []
    for field in msgspec.structs.fields(struct):
        default: Any = REQUIRED
        if field.default is not msgspec.NODEFAULT:
            default = list(field.default) if field.default == () else field.default
            if isinstance(default, msgspec.Struct) and default == type(default)():
                default = {}
        elif field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        found.append((field.name, kind_of(hints[field.name]), default))
    return found


@pytest.mark.parametrize("channel", CHANNELS)
def test_a_document_describes_every_structure_of_its_channel_and_no_other(channel: str) -> None:
    assert sorted(structures(channel)) == sorted(STRUCTS[channel])


@pytest.mark.parametrize(("channel", "name"), EVERY)
def test_a_table_names_fields_types_and_defaults_in_order(channel: str, name: str) -> None:
    written = structures(channel)[name]
    struct = STRUCTS[channel][name]
    assert written.tag == struct.__struct_config__.tag
    described = [(field.name, field.kind, field.default) for field in written.fields]
    assert described == fields_of(struct), f"protocol/{DOCUMENTS[channel]}, section {name}"


def test_required_fields_come_first_so_that_short_arrays_are_unambiguous() -> None:
    for channel, name in EVERY:
        required = [default is REQUIRED for _, _, default in fields_of(STRUCTS[channel][name])]
        assert required == sorted(required, reverse=True), name


def _named(kinds: list[type[msgspec.Struct]]) -> set[str]:
    return {kind.__name__ for kind in kinds}


def test_the_operations_of_the_local_door_are_its_two_unions() -> None:
    rows = operations("local").values()
    assert {row.name for row in rows if row.sender == "client"} == _named(bodies(messages.Request))
    assert {row.name for row in rows if row.sender == "peer"} == _named(bodies(messages.Reply))
    answers = {row.answer for row in rows if row.answer}
    assert answers <= _named(bodies(messages.Reply))


def test_the_operations_between_peers_are_their_two_unions() -> None:
    asked, answered = bodies(peering.PeerRequest), bodies(peering.PeerReply)
    own = {kind.__name__ for kind in asked + answered if kind.__module__ == peering.__name__}
    assert set(operations("peers")) == own
    assert set(forwarded()) == _named(asked + answered) - own
    assert {row.answer for row in operations("peers").values()} - {""} <= _named(answered)


def test_the_operations_of_a_journal_are_its_union() -> None:
    own = {kind for kind in members(journal.LogRecord) if kind.__module__ == journal.__name__}
    assert set(operations("journal")) == _named(list(own))
    others = re.findall(r"^\| \[(\w+)\]\(\w+\.md", text_of("journal"), flags=re.M)
    assert set(others) == _named(members(journal.LogRecord)) - _named(list(own))


def test_the_operations_of_bulk_transfer_are_its_unions() -> None:
    owner = {row.name for row in operations("bulk").values() if row.sender == "owner"}
    assert owner == _named(members(bulk_frames.FromOwner))
    rows = operations("worker").values()
    told = {row.name for row in rows if row.sender == "peer"}
    assert told == _named(members(bulk_frames.ToWorker))
    assert {row.name for row in rows} - told == _named(members(bulk_frames.FromWorker))


@pytest.mark.parametrize("channel", CHANNELS)
def test_operations_have_the_tags_of_their_messages(channel: str) -> None:
    structs = STRUCTS[channel]
    for row in operations(channel).values():
        assert row.tag == structs[row.name].__struct_config__.tag, row.name


def test_the_limits_are_those_in_force() -> None:
    section = README.split("## Limits")[1].split("\n## ")[0]
    written = dict(re.findall(r"^\| `(\w+)` \| ([\d,]+) \|", section, flags=re.M))
    in_force = {name: value for name, value in vars(limits).items() if name.isupper()}
    in_force |= {
        name: getattr(bulk_frames, name)
        for name in (
            "MAX_JOIN_FRAME_BYTES",
            "MAX_GET_FRAME_BYTES",
            "MAX_GET_ITEMS",
            "MAX_GET_BYTES",
            "MAX_HELD_BYTES",
            "MAX_CARD_BYTES",
            "CHALLENGE_BYTES",
        )
    }
    in_force["EXPIRY_MAX_MS"] = EXPIRY_MAX_MS
    assert {name: int(value.replace(",", "")) for name, value in written.items()} == in_force


def test_the_records_are_those_in_force() -> None:
    widths = {"u16": "<u2", "u32": "<u4", "u64": "<u8", "16 bytes": "|V16"}
    section = README.split("## Records")[1].split("\n## ")[0]
    found = {}
    for name, size, layout in re.findall(r"^\| `(\w+)` \| (\d+) \| ([^|]+) \|", section, re.M):
        parts = [part.strip().rsplit(" ", 1) for part in layout.split(",")]
        dtype = [(field, widths[width]) for width, field in parts]
        found[name] = (int(size), dtype)
    everywhere = {
        name: dtype
        for module in (packed, bulk_frames)
        for name, dtype in vars(module).items()
        if isinstance(dtype, np.dtype)
    }
    assert set(found) == set(everywhere)
    for name, (size, dtype) in found.items():
        real = everywhere[name]
        assert size == real.itemsize, name
        fields = real.descr if real.names else [("value", real.str)]
        assert dtype == fields, name


def test_every_error_that_may_cross_the_wire_is_listed() -> None:
    section = README.split("## Errors")[1].split("\n## ")[0]
    written = set(re.findall(r"^\| `(\w+)` \|", section, flags=re.M))
    known = {
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.DataplaneError)
    }
    assert written == known


def test_the_ext_codes_are_those_in_force() -> None:
    written = {int(code) for code in re.findall(r"^\| (\d) \| `ext`", README, flags=re.M)}
    assert written == {value for name, value in vars(objects).items() if name.startswith("EXT_")}


def test_every_message_has_an_example() -> None:
    for channel in CHANNELS:
        for title, body in sections(text_of(channel)):
            if "\nTag " in body:
                assert re.search(r"```text\n\[", body), title


def test_examples_and_vectors_are_what_the_tables_make_of_their_fields() -> None:
    for path, text in make_vectors.everything().items():
        assert path.read_text() == text, (
            f"{path.name} is not what its fields make: python -m tests.protocol.make_vectors"
        )
