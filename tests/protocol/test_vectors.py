"""The committed bytes, read and written by `msgpack` and by the code, in both directions."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from dataplane.errors import ProtocolError
from dataplane.transport import bulk_frames
from dataplane.wire import journal, messages, peering
from tests.protocol.documents import DOCUMENTS, structures
from tests.protocol.make_vectors import FRAMED, Vector, load, message_of, python_of, tail
from tests.protocol.wired import STRUCTS, bodies, built, decoder_of, encode, members

VECTORS = [(channel, vector) for channel in DOCUMENTS for vector in load(channel)]
each = pytest.mark.parametrize(
    ("channel", "vector"), VECTORS, ids=[f"{c}: {v['name']}" for c, v in VECTORS]
)


def body_of(channel: str, vector: Vector) -> bytes:
    data = bytes.fromhex(vector["hex"])
    if channel not in FRAMED:
        return data
    assert int.from_bytes(data[:4], "little") == len(data) - 4
    return data[4:]


def struct_of(channel: str, vector: Vector) -> Any:
    return built(STRUCTS[channel][vector["structure"]], vector["fields"])


def pack(array: Any) -> bytes:
    packed: bytes = msgpack.packb(array, use_bin_type=True)
    return packed


@each
def test_an_independent_decoder_reads_the_literal(channel: str, vector: Vector) -> None:
    array = msgpack.unpackb(body_of(channel, vector), strict_map_key=False)
    literal = python_of(vector["array"])
    assert array == literal
    assert repr(array) == repr(literal)  # 1 is not 1.0 and not True


@each
def test_our_decoder_reads_what_an_independent_encoder_wrote(channel: str, vector: Vector) -> None:
    body = pack(python_of(vector["array"]))
    assert decoder_of(channel, vector["structure"])(body) == struct_of(channel, vector)


@each
def test_our_encoder_writes_exactly_these_bytes(channel: str, vector: Vector) -> None:
    assert encode(channel, struct_of(channel, vector)).hex() == vector["hex"]


@each
def test_trailing_defaults_may_be_left_out(channel: str, vector: Vector) -> None:
    array = python_of(vector["array"])
    message = array[_place_of_body(channel, vector)] if "body" in vector["fields"] else array
    described = _described(channel, message_of(vector))
    defaults = [field.default for field in described.fields]
    for _ in range(tail(described)):
        if message[-1] != defaults[-1] or type(message[-1]) is not type(defaults[-1]):
            break
        del message[-1], defaults[-1]
    decoded = decoder_of(channel, vector["structure"])(pack(array))
    assert decoded == struct_of(channel, vector)


@each
def test_fields_that_a_newer_version_appends_are_ignored(channel: str, vector: Vector) -> None:
    array = python_of(vector["array"])
    if "body" in vector["fields"]:
        array[_place_of_body(channel, vector)] += [7, {"later": [None]}]
    array += [b"later", [1.5]]
    assert decoder_of(channel, vector["structure"])(pack(array)) == struct_of(channel, vector)


@each
def test_a_body_cut_anywhere_is_refused(channel: str, vector: Vector) -> None:
    body = body_of(channel, vector)
    decode = decoder_of(channel, vector["structure"])
    for end in {0, 1, 2, len(body) // 2, len(body) - 1}:
        with pytest.raises(ProtocolError):
            decode(body[:end])


def _place_of_body(channel: str, vector: Vector) -> int:
    envelope = _described("local" if channel == "worker" else channel, vector["structure"])
    return [field.name for field in envelope.fields].index("body")


def _described(channel: str, name: str) -> Any:
    known = structures("local") | structures("journal") if channel == "peers" else {}
    return (known | structures(channel))[name]


def test_no_message_lacks_a_vector() -> None:
    have = {(v["structure"], message_of(v)) for channel, v in VECTORS if channel != "worker"}
    for envelope in (messages.Request, messages.Reply, peering.PeerRequest, peering.PeerReply):
        for body in bodies(envelope):
            assert (envelope.__name__, body.__name__) in have
    told = {v["structure"] for c, v in VECTORS if c == "journal"}
    assert {kind.__name__ for kind in members(journal.LogRecord)} & set(STRUCTS["journal"]) == told
    bulk = [*members(bulk_frames.ToOwner), *members(bulk_frames.FromOwner)]
    assert {kind.__name__ for kind in bulk} <= {v["structure"] for c, v in VECTORS if c == "bulk"}
    worker = [*members(bulk_frames.ToWorker), *members(bulk_frames.FromWorker)]
    assert {k.__name__ for k in worker} <= {v["structure"] for c, v in VECTORS if c == "worker"}


def test_vectors_have_names_of_their_own() -> None:
    for channel in DOCUMENTS:
        names = [vector["name"] for vector in load(channel)]
        assert len(set(names)) == len(names)
