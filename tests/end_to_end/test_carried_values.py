"""Small values that ride in messages, at a real peer: room, failures, and messages that lie."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dataplane
from dataplane.client.core import Call, Operation
from dataplane.wire.limits import CARRIED, MAX_CARRIED_BYTES
from dataplane.wire.messages import Body, GiveBack, Put
from dataplane.wire.records import EXTENT, KEY, VALUE
from dataplane.wire.tables import Column, Rows, Spec
from tests.end_to_end.conftest import Cluster, until

MIB = 1 << 20


def arena(plane: dataplane.Plane) -> dict[str, Any]:
    found: dict[str, Any] = plane.stats()["arena"]
    return found


def test_they_come_out_as_they_went_in_and_leave_nothing_behind(plane: dataplane.Plane) -> None:
    part = plane.partition("p", {"s": ["x"], "t": ["x", "y"]})
    large = np.arange(2000.0)
    for i in range(50):
        part.put({"x": [i], "large": [large + i], "text": [f"row {i}"]})
    for i in range(50):
        batch = part.claim("s", rows=1, fields=["x", "large", "text"], timeout=20)
        assert (batch["x"][0], batch["text"][0]) == (i, f"row {i}")
        np.testing.assert_array_equal(batch["large"][0], large + i)
        batch.add(y=[i / 2])
        batch.ack()
        batch = part.claim("t", rows=1, timeout=20)
        assert batch["y"][0] == i / 2
        batch.ack()
    del batch
    empty = {"used_bytes": 0, "granted_bytes": 0, "ranges": 0}
    until(lambda: empty.items() <= arena(plane).items(), "all bytes are free again")


def test_a_full_arena_makes_them_wait_and_tells_them_when_nobody_can_help(
    cluster: Cluster,
) -> None:
    cluster.start("a", arena="16MiB")
    with cluster.connect("a") as plane:
        part = plane.partition("p", {"s": ["x", "y"]})
        for nbytes in (MIB, 30_000):  # the second ride
            with pytest.raises(dataplane.BackPressure, match="every client waits"):
                for i in range(2000):
                    part.put({"x": [np.zeros(nbytes, np.uint8)]}, key=[f"{nbytes} {i}"], timeout=60)
        part.drop(keys=["30000 0"])
        part.put({"x": [np.zeros(20_000, np.uint8)]}, timeout=20)


def test_what_a_shard_refuses_takes_no_room(plane: dataplane.Plane) -> None:
    part = plane.partition("p", {"s": ["x"]})
    part.put({"x": [1]}, key=["k"])
    used = arena(plane)["used_bytes"]
    for _ in range(20):
        with pytest.raises(dataplane.FieldExists):
            part.put({"x": [np.zeros(3000)]}, key=["k"])
    assert arena(plane)["used_bytes"] == used


# messages that lie


def put_of(generation: int, length: int, carried: bytes) -> Put:
    key = np.frombuffer(b"\0\0" + b"k" * 14, KEY)
    value = np.zeros(1, VALUE)
    value["nbytes"] = 8
    ranges = np.array([(CARRIED, length)], EXTENT)
    return Put(
        "p",
        generation,
        Rows(key.tobytes()),
        [Column("x", value.tobytes())],
        [Spec("array", "int64")],
        ranges=ranges.tobytes(),
        carried=carried,
    )


def generation_of(part: dataplane.Partition) -> int:
    generation: int = part.stats()["generation"]
    return generation


def tell(plane: dataplane.Plane, body: Body) -> None:
    def operation() -> Operation[None]:
        yield Call(body, 20.0)

    plane.run(operation())


@pytest.mark.parametrize(
    ("length", "carried"),
    [
        (8, b""),
        (8, bytes(63)),
        (8, bytes(128)),
        ((1 << 64) - 1, bytes(64)),
        (4, bytes(64)),
        (MAX_CARRIED_BYTES + 64, bytes(MAX_CARRIED_BYTES + 64)),
    ],
)
def test_bytes_that_are_not_as_they_are_told_are_refused(
    plane: dataplane.Plane, length: int, carried: bytes
) -> None:
    part = plane.partition("p", {"s": ["x"]})
    generation = generation_of(part)
    with pytest.raises(dataplane.ProtocolError):
        tell(plane, put_of(generation, length, carried))
    part.put({"x": [5]})
    assert part.claim("s", rows=1, timeout=20)["x"][0] == 5
    assert arena(plane)["ranges"] == 1


def test_room_that_a_client_gives_back_unasked_is_written_into_no_more(
    plane: dataplane.Plane,
) -> None:
    part = plane.partition("p", {"s": ["x"]})
    part.put({"x": [1]})  # at the start of an empty arena; more behind it is for this client
    tell(plane, GiveBack(np.array([(8192, 4096)], EXTENT).tobytes()))
    part.put({"x": [np.full(MIB // 4, i) for i in range(4)]})
    for i in range(8):
        part.put({"x": [np.full(3000, i)]})
    with part.claim("s", rows=13, timeout=20) as batch:
        kinds = [set(np.atleast_1d(value).tolist()) for value in batch["x"]]
    assert kinds == [{1}, *({i} for i in range(4)), *({i} for i in range(8))]
