"""put: which messages go out, what they carry, and what a failure leaves."""

from __future__ import annotations

import functools
import os
import pickle  # noqa: S403
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import dataplane
from dataplane import Partition, Plane
from dataplane.memory.extents import room
from dataplane.wire.limits import MAX_CHUNKS_PER_MESSAGE
from dataplane.wire.messages import (
    Define,
    Defined,
    Failed,
    Put,
    PutDone,
    Request,
    Reserve,
    Reserved,
    Unpin,
)
from dataplane.wire.packed import DIGEST, EXTENT, KEY, U4, column
from dataplane.wire.tables import Definition
from tests.chunk_numbers import chunk_numbers
from tests.client.scripted_peer import ScriptedPeer, shared, written
from tests.same import equals


def ahead(peer: ScriptedPeer) -> Any:
    return lambda r, b: PutDone(peer.grant(b.want_bytes) if b.want_bytes else b"")


def test_a_put_reserves_copies_and_commits(peer: ScriptedPeer, part: Partition) -> None:
    rows = [np.arange(3000, dtype=np.int16), np.arange(2000, dtype=np.int16)]
    ref = part.put({"a": rows})
    (reserve,), (put,) = peer.bodies(Reserve), peer.bodies(Put)
    assert (reserve.partition, reserve.generation, reserve.continuing) == ("x", 4, False)
    assert len(reserve.units) == 1
    assert equals(peer.view(put, "a"), rows)
    assert (put.partition, put.generation, len(ref)) == ("x", 4, 2)


def test_room_granted_ahead_makes_the_next_put_one_message(
    peer: ScriptedPeer, part: Partition
) -> None:
    peer.scripts[Put] = ahead(peer)
    for _ in range(4):
        part.put({"a": [np.arange(900)]})
    assert len(peer.bodies(Reserve)) == 1
    puts = peer.bodies(Put)
    assert all(equals(peer.view(put, "a"), [np.arange(900)]) for put in puts)
    assert len({offset for put in puts for offset, _ in written(put)}) == 4


def answered(reply: Defined, request: Request, body: Define) -> Defined:
    return reply


def test_room_that_no_message_named_serves_the_next_put(
    peer: ScriptedPeer, part: Partition
) -> None:
    put = {"a": [np.arange(900)]}
    peer.scripts[Put] = lambda r, b: Failed("Unavailable", "not sure yet", {"unheard": True})
    with pytest.raises(dataplane.Unavailable):
        part.put(put)
    peer.scripts[Put] = lambda r, b: PutDone()
    part.put(put)
    assert len(peer.bodies(Reserve)) == 1
    first, second = peer.bodies(Put)
    assert written(first) == written(second)


def test_minted_keys_carry_the_session_and_count_on(peer: ScriptedPeer, part: Partition) -> None:
    first, second = part.put({"a": [1, 2]}), part.put({"a": [3]})
    assert first.keys == [f"~{77:016x}{0:016x}", f"~{77:016x}{1:016x}"]
    assert second.keys == [f"~{77:016x}{2:016x}"]
    assert peer.bodies(Put)[0].rows.names is None


def test_up_to_256_minted_keys_differ_only_in_their_last_byte(
    peer: ScriptedPeer, part: Partition
) -> None:
    counters = []
    for n in (10, 250, 6, 300, 1):
        keys = part.put({"a": list(range(n))}).keys
        first = int(str(keys[0])[17:], 16)
        assert keys == [f"~{77:016x}{first + at:016x}" for at in range(n)]
        counters.append(first)
    assert counters == [0, 256, 506, 512, 812]


def test_given_keys_and_groups_travel_as_names_and_records(
    peer: ScriptedPeer, part: Partition
) -> None:
    part.put({"a": [1, 2, 3, 4]}, key=["k", 7, "m", "n"], group=["g", None, 7, "g"])
    rows = peer.bodies(Put)[0].rows
    order = [rows.names.index(name) for name in ("k", 7, "m", "n")]
    groups = [*rows.group_names, None]
    found = column(rows.group_index, U4)[order].tolist()
    assert [groups[min(g, len(groups) - 1)] for g in found] == ["g", None, 7, "g"]
    assert len(column(rows.keys, KEY)) == 4 and len(column(rows.group_keys, KEY)) == 2


def test_one_group_and_one_tag_may_stand_for_all_rows(peer: ScriptedPeer, part: Partition) -> None:
    part.put({"a": [1, 2]}, group="g", tags={"version": 7, "length": np.array([3, 4])})
    put = peer.bodies(Put)[0]
    assert put.rows.group_names == ["g"]
    assert put.tags == {"version": [7, 7], "length": [3, 4]}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"key": ["a"]}, "a: 2"),
        ({"group": ["a"]}, "1 group id for 2 rows"),
        ({"tags": {"t": [1, 2, 3]}}, "tag 't' has 3 values for 2 rows"),
        ({"tags": {"t": [{}, {}]}}, r"tag 't' of row 0 is \{\} \(dict\)"),
        ({"key": [1.5, "b"]}, "key at index 0 is 1.5"),
        ({"key": [True, "b"]}, "key at index 0 is True"),
    ],
)
def test_rows_that_do_not_fit_together_are_refused_before_anything_is_sent(
    peer: ScriptedPeer, part: Partition, arguments: dict[str, Any], says: str
) -> None:
    with pytest.raises(dataplane.InvalidRows, match=says):
        part.put({"a": [1, 2]}, **arguments)
    assert not peer.bodies(Reserve, Put)


BIG = np.zeros((3, 100_000))
"""Rows of which each goes with a message of its own."""


@pytest.mark.parametrize(
    ("columns", "arguments", "error", "says"),
    [
        (BIG, {"key": ["a", "b", "a"]}, dataplane.InvalidRows, "'a' appears twice"),
        (BIG, {"tags": {"t": [1, 2, 1 << 70]}}, dataplane.InvalidValue, "64-bit int"),
        (
            BIG,
            {"tags": {"t": ["", "", "\ud800"]}},
            dataplane.InvalidValue,
            "of row 2 .* not valid text",
        ),
        ([1, 2, np.zeros(200_000)], {}, dataplane.ValueTooLarge, "at most 1.0 MiB at once"),
    ],
)
def test_whatever_can_be_wrong_is_found_before_the_first_byte_leaves(
    peer: ScriptedPeer,
    part: Partition,
    columns: Any,
    arguments: dict[str, Any],
    error: type[Exception],
    says: str,
) -> None:
    with pytest.raises(error, match=says):
        part.put({"a": columns}, **arguments)
    assert not peer.bodies(Reserve, Put)


@pytest.mark.parametrize(
    ("n", "group", "error"),
    [
        (2, None, dataplane.InvalidRows),
        (2, ["g", None], dataplane.InvalidRows),
        (3, "g", dataplane.GroupClosed),
    ],
)
def test_rows_that_no_group_takes_are_refused_before_anything_is_sent(
    peer: ScriptedPeer, plane: Plane, n: int, group: Any, error: type[Exception]
) -> None:
    part = plane.partition("sized", {"s": ["a"]}, group_size=2)
    with pytest.raises(error, match="pass group=|at most 2 rows"):
        part.put({"a": np.zeros((n, 100_000))}, group=group)
    assert not peer.bodies(Reserve, Put)


class Batched(Mapping[str, Any]):
    """A mapping that is iterated over by rows, as some libraries' are."""

    def __init__(self, columns: dict[str, Any]) -> None:
        self._columns = columns

    def __getitem__(self, name: str) -> Any:
        return self._columns[name]

    def __iter__(self) -> Any:
        raise TypeError("by rows")

    def __len__(self) -> int:
        return 2

    def items(self) -> Any:
        return self._columns.items()


def test_a_mapping_of_another_kind_is_put_once_and_without_an_error(
    peer: ScriptedPeer, part: Partition
) -> None:
    ref = part.put(Batched({"a": [1, 2], "b": [3, 4]}))
    assert (ref.fields, len(ref), len(peer.bodies(Put))) == (("a", "b"), 2, 1)


def test_a_put_over_the_peers_grant_goes_on_unit_by_unit(
    peer: ScriptedPeer, part: Partition
) -> None:
    def one_unit(request: Request, body: Reserve) -> Reserved:
        only = Reserve(body.partition, body.generation, body.units[:1])
        return peer.reserved(only)

    peer.scripts[Reserve] = one_unit
    big = np.arange(3 * 100_000).reshape(3, -1)
    ref = part.put({"a": big}, key=[1, 2, 3])
    puts = peer.bodies(Put)
    assert [put.rows.names for put in puts] == [[1], [2], [3]]
    assert [peer.view(put, "a")[0].tolist() for put in puts] == big.tolist()
    assert ref.keys == [1, 2, 3]


def test_groups_with_thousands_of_chunks_go_over_several_messages(
    peer: ScriptedPeer, part: Partition
) -> None:
    n = MAX_CHUNKS_PER_MESSAGE + 1
    part.put({"a": np.zeros((n, 1_500), np.uint8)}, group=list(range(n)))
    puts = peer.bodies(Put)
    sizes = [len(put.values.chunks) for put in puts]
    assert sum(sizes) == n and max(sizes) <= MAX_CHUNKS_PER_MESSAGE
    assert sum(len(put.rows.keys) // KEY.itemsize for put in puts) == n


def test_a_put_that_fails_half_way_says_which_rows_are_in(
    peer: ScriptedPeer, part: Partition
) -> None:
    def one_unit(request: Request, body: Reserve) -> Reserved | Failed:
        if peer.bodies(Put):
            return Failed("BackPressure", "the arena is full")
        return peer.reserved(Reserve(body.partition, body.generation, body.units[:1]))

    peer.scripts[Reserve] = one_unit
    with pytest.raises(dataplane.PutIncomplete, match="arena is full.*1 of 2 rows") as caught:
        part.put({"a": np.zeros((2, 120_000))}, key=["one", "two"], group=["g", "h"])
    assert caught.value.details["committed"] == ["one"]
    assert caught.value.details["committed_groups"] == ["g"]
    assert isinstance(caught.value.__cause__, dataplane.BackPressure)


def test_a_put_of_which_nothing_is_in_raises_the_error_itself(
    peer: ScriptedPeer, part: Partition
) -> None:
    peer.scripts[Put] = lambda r, b: Failed("FieldExists", "there already")
    with pytest.raises(dataplane.FieldExists):
        part.put({"a": [1]}, key=["k"])


def test_a_group_that_was_put_before_continues(peer: ScriptedPeer, part: Partition) -> None:
    for group in ("g", "h", "g"):
        part.put(
            {"a": np.zeros((1, 8192), np.uint8)}, group=group
        )  # two pages: nothing is left over
    assert [body.continuing for body in peer.bodies(Reserve)] == [False, False, True]


def test_a_group_of_another_partition_with_the_same_name_opens(
    peer: ScriptedPeer, plane: Plane
) -> None:
    """As those of each step have."""
    for generation, step in enumerate(("step-0", "step-1")):
        defined = Defined(generation, Definition(stages={"s": ["a"]}), "open")
        peer.scripts[Define] = functools.partial(answered, defined)
        part = plane.partition(step, stages={"s": ["a"]})
        for _ in range(2):
            part.put({"a": np.zeros((1, 8192), np.uint8)}, group="g")
    assert [body.continuing for body in peer.bodies(Reserve)] == [False, True, False, True]


def test_values_that_the_peer_has_are_shared_after_comparing_bytes(
    peer: ScriptedPeer, part: Partition
) -> None:
    known, collision = np.full(5000, 1, np.uint8), np.full(5000, 2, np.uint8)
    chunk = np.array([5000], U4).tobytes() + bytes(60) + known.tobytes()
    place = np.frombuffer(peer.grant(len(chunk)), EXTENT).copy()
    place["length"] = len(chunk)
    os.pwrite(peer.fd, chunk, int(place["offset"][0]))

    def knows_all(request: Request, body: Reserve) -> Reserved:
        reserved = peer.reserved(body)
        asked = len(column(body.digests, DIGEST))
        reserved.known = chunk_numbers([(40 + i, 1) for i in range(asked)]).tobytes()
        padded = np.array([(place["offset"][0], room(len(chunk)))], EXTENT)
        reserved.places = padded.tobytes() * asked
        reserved.pin = 6
        return reserved

    peer.scripts[Reserve] = knows_all
    part.put({"a": [known, collision]}, dedup=["a"])
    put = peer.bodies(Put)[0]
    assert len(written(put)) == 1  # the collision
    assert shared(put) == [1 << 32 | 40]
    assert equals(peer.view(put, "a", place.tolist()), [known, collision])
    assert (put.pin, len({chunk.digest for chunk in put.values.chunks})) == (6, 2)


def test_a_failed_put_releases_what_was_pinned_for_comparison(
    peer: ScriptedPeer, part: Partition
) -> None:
    def pins(request: Request, body: Reserve) -> Reserved:
        reserved = peer.reserved(body)
        asked = len(column(body.digests, DIGEST))
        reserved.known, reserved.places = bytes(8 * asked), bytes(16 * asked)
        reserved.pin = 6
        return reserved

    peer.scripts[Reserve] = pins
    peer.scripts[Put] = lambda r, b: Failed("GroupClosed", "full")
    with pytest.raises(dataplane.GroupClosed):
        part.put({"a": [np.zeros(5000)]}, dedup=["a"])
    assert peer.await_body(Unpin).pins == [6]


def test_a_scalar_that_no_message_can_hold_is_an_invalid_value(
    peer: ScriptedPeer, part: Partition
) -> None:
    with pytest.raises(dataplane.InvalidValue, match="64-bit int"):
        part.put({"a": [1]}, tags={"t": 1 << 70})
    part.put({"a": [1]})


def test_a_ref_survives_pickling_and_shows_what_it_is(part: Partition) -> None:
    ref = part.put({"a": [1, 2]}, key=["k", 3])
    again = pickle.loads(pickle.dumps(ref))  # noqa: S301
    assert again == ref and again.keys == ["k", 3]
    assert repr(ref) == "<Ref 2 rows of 'x', fields a>"


def test_a_partition_is_attached_to_on_first_use(peer: ScriptedPeer, plane: Plane) -> None:
    lazy = plane.partition("y")
    assert repr(lazy) == "<Partition 'y' of plane 'p', not attached yet>"
    lazy.put({"a": [1]})
    lazy.put({"a": [1]})
    assert [body.definition for body in peer.bodies(Define)] == [None]
    assert repr(lazy) == "<Partition 'y' of plane 'p', generation 4>"


def test_a_partition_is_declared_with_the_copies_that_it_shall_have(
    plane: Plane, peer: ScriptedPeer
) -> None:
    plane.partition("y", replicas=2)
    plane.partition("y", {"s": ["a"]})
    assert [body.definition.replicas for body in peer.bodies(Define)] == [2, 1]


@pytest.mark.parametrize(
    "arguments",
    [
        {"group_size": 0},
        {"groups": -1},
        {"free": "sometimes"},
        {"stages": {"s": "tokens"}},
        {"replicas": 3},
    ],
)
def test_a_definition_that_makes_no_sense_is_an_invalid_call(
    plane: Plane, arguments: dict[str, Any]
) -> None:
    with pytest.raises(dataplane.InvalidCall):
        plane.partition("y", **arguments)


def test_a_put_gives_up_in_time_while_it_encodes(peer: ScriptedPeer, part: Partition) -> None:
    class Slow:
        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            time.sleep(0.001)
            return np.zeros(1, np.float32)

    part.put({"a": [1]})
    sent, began = len(peer.bodies(Put)), time.monotonic()
    with pytest.raises(dataplane.DeadlineExceeded, match="put did not finish within 0.2 s"):
        part.put({"b": [{"of": Slow()} for _ in range(20_000)]}, timeout=0.2)
    assert time.monotonic() - began < 15 and len(peer.bodies(Put)) == sent
