"""What is no message of this protocol gets its typed error, at once and without memory."""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from dataplane import errors
from dataplane.errors import FrameTooLarge, ProtocolError, ValueCorrupt
from dataplane.transport import bulk_frames
from dataplane.wire import frames, limits
from dataplane.wire.messages import Done, PutDone, Reply
from tests.protocol.documents import DOCUMENTS
from tests.protocol.make_vectors import FRAMED, Vector, load
from tests.protocol.wired import DECODERS, decoder_of

REFUSED = load("refused")
ENVELOPE = bytes.fromhex("960102030407")
"""The start of a Request, up to its body."""
MIB = 1 << 20


def refused(decode: Callable[[bytes], Any], body: bytes, limit_bytes: int, why: type) -> Any:
    """The error, which took less than a second of the processor, and no more than so much memory at
    any time."""
    tracemalloc.start()
    start = time.thread_time()
    try:
        with pytest.raises(why) as caught:
            decode(body)
        assert time.thread_time() - start < 1.0
        assert tracemalloc.get_traced_memory()[1] < limit_bytes
    finally:
        tracemalloc.stop()
    return caught.value


@pytest.mark.parametrize("vector", REFUSED, ids=[v["name"] for v in REFUSED])
def test_a_bad_body_gets_its_typed_error(vector: Vector) -> None:
    error = refused(
        DECODERS[vector["channel"]],
        bytes.fromhex(vector["hex"]),
        MIB,
        getattr(errors, vector["error"]),
    )
    assert type(error).__name__ == vector["error"]


@pytest.mark.parametrize("opener", [b"\x91", b"\x81\xa1a", b"\xdd\xff\xff\xff\xff"])
@pytest.mark.parametrize("channel", list(DECODERS))
def test_endless_nesting_is_refused(channel: str, opener: bytes) -> None:
    starts = {"local request": ENVELOPE + bytes.fromhex("9723a17001c0")}
    starts["local reply"] = bytes.fromhex("92059233")
    starts["peer request"] = bytes.fromhex("9901a178020304059206070897 23a17001c0")
    starts["bulk answer"] = bytes.fromhex("9405a178a079")
    body = starts.get(channel, b"") + opener * 200_000
    why = ValueCorrupt if channel == "object" else ProtocolError
    refused(DECODERS[channel], body, 16 * MIB, why)


def test_nested_claims_of_many_items_do_not_add_up() -> None:
    """Each of these arrays claims as many items as there are bytes left in the body."""
    head = ENVELOPE + bytes.fromhex("9723a17001c0")
    body = head + (b"\xdd" + MIB.to_bytes(4, "big")) * 200 + b"\xc0" * MIB
    refused(frames.decode_request, body, 16 * MIB, ProtocolError)


def test_damaged_bytes_are_read_as_a_message_or_refused_and_never_anything_else() -> None:
    chance = random.Random(0)
    for channel in DOCUMENTS:
        for vector in load(channel):
            decode = decoder_of(channel, vector["structure"])
            whole = bytes.fromhex(vector["hex"])[4 * (channel in FRAMED) :]
            for _ in range(60):
                body = bytearray(whole)
                for _ in range(chance.randint(1, 3)):
                    body[chance.randrange(len(body))] = chance.randrange(256)
                try:
                    decode(bytes(body))
                except ProtocolError:
                    continue


# lengths


def frame_of(body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + body


@pytest.mark.parametrize("length", [limits.MAX_FRAME_BYTES + 1, 0xFFFF_FFFF])
def test_an_announced_length_over_the_limit_is_refused_before_its_body(length: int) -> None:
    header = length.to_bytes(4, "little")
    for read in (
        frames.body_length,
        lambda data: list(frames.FrameReader().feed(data)),
        lambda data: frames.body_length(data, bulk_frames.MAX_GET_FRAME_BYTES),
    ):
        error = refused(read, header, MIB, FrameTooLarge)
        assert error.details["size"] == length
        assert error.details["limit"] < length


def test_the_largest_length_is_awaited_without_memory_for_it() -> None:
    reader = frames.FrameReader()
    tracemalloc.start()
    try:
        assert list(reader.feed(limits.MAX_FRAME_BYTES.to_bytes(4, "little") + b"\x92")) == []
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()


def test_a_message_over_the_limit_is_refused_by_its_sender() -> None:
    reply = Reply(1, PutDone(extents=bytes(limits.MAX_FRAME_BYTES)))
    with pytest.raises(FrameTooLarge) as caught:
        frames.encode(reply)
    assert caught.value.details["limit"] == limits.MAX_FRAME_BYTES


# cutting


def test_frames_that_arrive_byte_by_byte_come_out_whole() -> None:
    bodies = [bytes.fromhex(vector["hex"])[4:] for vector in load("local")]
    reader, found = frames.FrameReader(), list[bytes | memoryview]()
    for byte in b"".join(map(frame_of, bodies)):
        found += reader.feed(bytes([byte]))
    assert found == bodies


def test_frames_come_out_alike_however_they_arrive() -> None:
    bodies = [b"", *(bytes.fromhex(vector["hex"])[4:] for vector in load("local")), b"\xc0"]
    stream, chance = b"".join(map(frame_of, bodies)), random.Random(1)
    for _ in range(50):
        reader, found, start = frames.FrameReader(), list[bytes | memoryview](), 0
        while start < len(stream):
            end = start + chance.randint(1, 700)
            found += reader.feed(memoryview(stream)[start:end])
            start = end
        assert found == bodies


def test_half_a_frame_is_awaited_and_is_no_error() -> None:
    frame = bytes(frames.encode(Reply(3, Done())))
    reader = frames.FrameReader()
    assert list(reader.feed(frame + frame[:-1])) == [frame[4:]]
    assert list(reader.feed(b"")) == []
    assert list(reader.feed(frame[-1:])) == [frame[4:]]


def test_what_came_before_a_bad_length_is_still_delivered() -> None:
    frame = bytes(frames.encode(Reply(3, Done())))
    found = []
    with pytest.raises(FrameTooLarge):
        for body in frames.FrameReader().feed(frame + b"\xff\xff\xff\xff"):
            found.append(body)
    assert found == [frame[4:]]
