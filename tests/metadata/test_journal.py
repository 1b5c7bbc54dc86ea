"""What a store tells of its calls, and what a copy makes of it."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest

from dataplane.errors import DataplaneError, FieldExists, InvalidRows, LeaseExpired, ProtocolError
from dataplane.metadata.shard import rows_out
from dataplane.metadata.shard.journal import MAX_RECORD_BYTES, apply, snapshot
from dataplane.metadata.shard.store import Store
from dataplane.wire import peering
from dataplane.wire.journal import (
    Blocks,
    Given,
    Groups,
    Held,
    Leased,
    LogRecord,
    OneBlock,
    OneGroup,
    Ready,
    Remembered,
    Returned,
    Summary,
    decode,
    encode,
    encoded,
)
from dataplane.wire.limits import MAX_CHUNKS_PER_MESSAGE, MAX_LOG_RECORDS
from dataplane.wire.messages import (
    Body,
    Done,
    Drop,
    Dropped,
    Finish,
    Put,
    PutDone,
    Reset,
    Tag,
    Want,
)
from dataplane.wire.peering import Append, PartitionLog, PeerRequest
from dataplane.wire.tables import Definition, Owner, Shape, Values
from tests.chunk_numbers import chunk_numbers, indexes
from tests.metadata import stores
from tests.metadata.observed import carried_over, observed
from tests.metadata.stores import (
    OWNERS,
    STAGES,
    change,
    finish,
    keys_of,
    named,
    put,
    take,
    whole,
    wrote,
)

ROWS, GROUPS = Want("rows", 2, 1), Want("groups", 1, 1)


def journaled(**definition: Any) -> tuple[Store, list[LogRecord]]:
    ops: list[LogRecord] = []
    given = Definition(**{"stages": STAGES, **definition})
    return Store("step-1", given, 1, emit=ops.append), ops


def copy_of(store: Store, many: int = 2, now: float = 0.0) -> Store:
    made = Store("step-1", store.definition, 1)
    carried_over(made, list(snapshot(store, many)), now)
    return made


def chunks(*numbers: int) -> Any:
    return chunk_numbers([(number, 0) for number in numbers])


# what is told


def test_a_call_that_raised_tells_nothing() -> None:
    s, ops = journaled()
    put(s, ["a"])
    told = len(ops)
    with pytest.raises(FieldExists):
        put(s, ["a"], fields=("tokens", "another"))
    with pytest.raises(DataplaneError):
        s.finish(Finish(99, "ack"))
    assert len(ops) == told


def test_a_claim_that_got_nothing_and_an_end_that_ended_nothing_are_not_told() -> None:
    s, ops = journaled()
    assert take(s, "reward", ROWS).lease is None
    assert s.release_holder(1) == 0
    assert ops == []


def test_a_store_without_a_listener_tells_nobody() -> None:
    s, ops = journaled()
    s.emit = None
    put(s, ["a", "b"])
    finish(s, take(s, "reward", ROWS))
    assert ops == []


def test_a_holder_that_is_gone_is_told_once_whatever_it_held() -> None:
    s, ops = journaled()
    put(s, ["a", "b"])
    take(s, "reward", ROWS)
    before = len(ops)
    s.release_holder(1)
    s.release_holder(1)
    assert ops[before:] == [Returned(1)]


# what a copy makes of it


def test_rows_that_come_back_keep_their_order_at_the_copy() -> None:
    s, ops = journaled()
    put(s, ["a", "b", "c", "d"])
    take(s, "reward", ROWS)
    take(s, "reward", ROWS)
    s.release_holder(1)
    other = Store("step-1", s.definition, 1)
    carried_over(other, ops)
    assert keys_of(other, take(other, "reward", Want("rows", 4, 4))) == ["a", "b", "c", "d"]


def test_rows_that_came_back_before_a_snapshot_and_after_it_are_in_order_at_the_copy() -> None:
    s, ops = journaled()
    put(s, ["a", "b", "c", "d", "e"])
    first, second, third = [take(s, "reward", Want("rows", 1, 1)) for _ in range(3)]
    finish(s, second, "release")
    other = Store("step-1", s.definition, 1)
    carried_over(other, list(snapshot(s)))
    before = len(ops)
    finish(s, third, "release")
    finish(s, first, "release")
    carried_over(other, ops[before:])
    for one in (s, other):
        assert keys_of(one, take(one, "reward", Want("rows", 5, 5))) == ["a", "b", "c", "d", "e"]


def test_a_copy_knows_which_claim_a_lease_met() -> None:
    """It is asked again there, when the peer that met it died before it answered."""
    s, ops = journaled()
    put(s, ["a", "b"])
    taken = take(s, "reward", ROWS, claim=7)
    followed = Store("step-1", s.definition, 1)
    carried_over(followed, ops)
    for copy in (followed, copy_of(s)):
        found = copy.leases.of_claim(7)
        assert found is not None and found.number == taken.lease
        copy.finish(Finish(found.number, "release"))
        assert copy.leases.of_claim(7) is None


def test_what_was_changed_is_not_changed_again_at_the_store_nor_at_copies_of_it() -> None:
    """Whoever asks again, because a peer died before it answered, may be behind others by then."""
    store, ops = journaled(free="drop")
    put(store, ["a"])
    follower, rows = Store("step-1", store.definition, 1), named(["a"])

    def asked(at: Store, *changes: Any) -> list[Body]:
        return [at.answers.to(one.change) or at.carry_out(one) for one in changes]

    first = Tag("step-1", 1, rows, {"owner": ["me"]}, change=change(5))
    asked(store, first, Tag("step-1", 1, rows, {"owner": ["you"]}, change=change(6)))
    drop = Drop("step-1", 1, named(["x"]), change=change(4))
    asked(store, Reset("step-1", 1, "reward", change(7)), drop)
    finish(store, take(store, "reward", ROWS))
    columns = [stores.Column("reward", stores.values(1))]
    store.put(wrote(rows, columns, OWNERS, change=change(9)))
    carried_over(follower, list(ops), 0.0)
    for one in (store, follower, copy_of(store)):
        assert one.answers.to(change(9)) == PutDone() and change(8) not in one.answers
        another = msgspec.structs.replace(first, expect={"owner": "nobody"})
        again = another, first, Reset("step-1", 1, "reward", change(7))
        assert asked(one, *again) == [Done()] * 3
        assert asked(one, Drop("step-1", 1, rows, change=change(4))) == [Dropped(0, 0)]
        assert rows_out.tags_held(rows_out.find_rows(one, rows.keys, None))["owner"] == ["you"]
        assert one.reset("reward", change(8)) == 1  # what was acked since


def test_positions_of_a_lease_mean_the_same_rows_at_a_copy() -> None:
    s, _ = journaled()
    put(s, ["a", "b", "c", "d"])
    taken = take(s, "reward", Want("rows", 4, 4))
    finish(s, taken, index=b"\0\0\0\0")
    s.drop(rows=named(["c"]))
    other = copy_of(s)
    assert observed(other) == observed(s)
    finish(other, taken, index=np.array([1, 2], "<u4").tobytes())
    assert other.stage("reward").acked_rows == 2
    assert keys_of(other, taken) == ["d"]


def test_a_copy_refuses_rows_of_a_lease_whose_block_is_gone_as_the_store_does() -> None:
    s = stores.store(stages={"s": ["tokens"]}, free="acked")
    put(s, ["a"])
    put(s, ["b"])
    taken = take(s, "s", Want("rows", 2, 2))
    finish(s, taken, index=b"\0\0\0\0")
    assert len(s.blocks) == 1
    for one in (s, copy_of(s)):
        with pytest.raises(InvalidRows, match="already acked"):
            finish(one, taken, index=b"\1\0\0\0\0\0\0\0")
        with pytest.raises(LeaseExpired, match="earlier ack of these rows") as repeated:
            finish(one, taken, index=b"\0\0\0\0")
        assert repeated.value.details["repeated"] is True


def test_a_repeated_ack_is_recognised_after_thousands_of_others_until_its_time_is_over() -> None:
    s, _ = journaled()
    put(s, list(range(3_001)))
    put(s, list(range(3_001, 6_002)))
    taken = take(s, "reward", Want("rows", 1, 1))
    late = Finish(taken.lease or 0, "ack", index=b"\0\0\0\0")

    def others(many: int, seconds: float) -> None:
        for at in range(many):
            other = take(s, "reward", Want("rows", 1, 1))
            s.finish(Finish(other.lease or 0, "ack"), at * seconds / many)

    def is_known(one: Store) -> bool:
        with pytest.raises(LeaseExpired) as failure:
            one.finish(msgspec.structs.replace(late))
        return failure.value.details.get("repeated") is True

    s.finish(late, 0.0)
    others(5_000, 60.0)
    assert is_known(s)
    assert is_known(copy_of(s))
    others(1_000, 1_000.0)
    assert not is_known(s)
    assert not is_known(copy_of(s))


def test_a_repeated_ack_of_a_plan_is_recognised_before_and_after_the_plan_ends() -> None:
    s, _ = journaled()
    put(s, ["a", "b"])
    s.seal()
    members = [s.join("reward", Shape(ranks=2), rank, 7 + rank, 0.0) for rank in range(2)]
    first, second = (one.number for one in members if one is not None)
    s.finish(Finish(first, "ack"))
    for one in (s, copy_of(s)):
        with pytest.raises(LeaseExpired, match="already acked") as repeated:
            one.finish(Finish(first, "ack"))
        assert repeated.value.details["repeated"] is True
        with pytest.raises(LeaseExpired, match="already acked") as other:
            one.finish(Finish(first, "release"))
        assert "repeated" not in other.value.details
    s.finish(Finish(second, "ack"))
    assert s.stage("reward").acked_rows == 2
    for one in (s, copy_of(s)):
        for member in (first, second):
            with pytest.raises(LeaseExpired, match="has already taken effect") as repeated:
                one.finish(Finish(member, "ack"))
            assert repeated.value.details["repeated"] is True
            with pytest.raises(LeaseExpired, match="may have taken effect") as other:
                one.finish(Finish(member, "release"))
            assert "repeated" not in other.value.details
        assert one.stage("reward").acked_rows == 2


def test_a_repeated_ack_of_a_plan_that_another_rank_released_is_rejected() -> None:
    s, _ = journaled()
    put(s, ["a", "b"])
    s.seal()
    members = [s.join("reward", Shape(ranks=2), rank, 7 + rank, 0.0) for rank in range(2)]
    first, second = (one.number for one in members if one is not None)
    s.finish(Finish(first, "ack"))
    s.finish(Finish(second, "release"))
    with pytest.raises(LeaseExpired, match="rank 1 of 2 exited or released") as ended:
        s.finish(Finish(first, "ack"))
    assert "repeated" not in ended.value.details
    assert s.stage("reward").acked_rows == 0


def test_a_repeated_ack_of_a_whole_lease_that_has_ended_makes_no_claim_about_the_first() -> None:
    s, _ = journaled()
    put(s, ["a"])
    taken = take(s, "reward", Want("rows", 1, 1))
    finish(s, taken, index=b"")  # selects no rows
    finish(s, taken)
    with pytest.raises(LeaseExpired, match="may have taken effect") as ended:
        finish(s, taken)
    assert "repeated" not in ended.value.details


def test_a_long_lease_of_which_every_other_row_is_finished_is_soon_at_a_copy() -> None:
    s, _ = journaled()
    many = 20_000
    s.put(Put("p", 1, named(list(range(many))), whole(["tokens"], many, 1, 8)))
    taken = take(s, "reward", Want("rows", many, many))
    finish(s, taken, index=np.arange(0, many, 2, dtype="<u4").tobytes())
    other = copy_of(s)
    finish(other, taken, index=np.array([many - 1], "<u4").tobytes())
    assert other.stage("reward").acked_rows == many // 2 + 1
    finish(other, taken)
    assert other.stage("reward").acked_rows == many


def test_a_group_that_lost_a_row_while_it_was_open_closes_as_it_would_have() -> None:
    s, _ = journaled(group_size=3)
    put(s, ["a", "b"], ["g", "g"], fields=("tokens", "reward"))
    s.drop(rows=named(["a"]))
    other = copy_of(s)
    for one in (s, other):
        put(one, ["c"], ["g"], fields=("tokens", "reward"))
    assert keys_of(other, take(other, "train", GROUPS)) == ["b", "c"]
    take(s, "train", GROUPS)
    assert observed(other) == observed(s)


def test_a_copy_knows_tombstones_names_tags_that_are_none_and_fields_of_rows_that_are_gone() -> (
    None
):
    s, _ = journaled()
    put(s, ["a", 7, "b"], ["g", None, 5], fields=("tokens", "extra"))
    s.tag(named([7]), {"status": [None]})
    put(s, ["lost"], fields=("rare",))
    s.drop(rows=named(["lost", "x", "y"]))
    other = copy_of(s)
    assert observed(other) == observed(s)
    assert len(rows_out.read(other, where=["exists", "status"])[0]) == 1
    assert rows_out.known(other, ["rare"]) == ["rare"]
    with pytest.raises(DataplaneError, match="dropped"):
        put(other, ["x"])


def test_rows_that_are_too_large_for_one_operation_are_told_in_several() -> None:
    s, _ = journaled(free="drop")
    put(s, list(range(5)), fields=("tokens", "reward"), note=["x" * (3 << 20)] * 5)
    tagged = [op for op in snapshot(s, 5) if isinstance(op, Tag)]
    assert [len(op.rows.keys) // 16 for op in tagged] == [2, 1, 2]
    assert all(len(encode(op)) <= MAX_RECORD_BYTES for op in snapshot(s, 5))
    other = copy_of(s, 5)
    assert observed(other) == observed(s)


def test_a_stage_that_a_claim_declared_is_there_at_a_copy() -> None:
    s, _ = journaled(free="drop")
    put(s, ["a"], fields=("tokens",))
    s.declare_stage("late", ["tokens"])
    other = copy_of(s)
    assert keys_of(other, take(other, "late", ROWS)) == ["a"]


def test_a_copy_that_is_served_tells_its_own_backup() -> None:
    dying, ops = journaled()
    put(dying, ["a", "b"])
    taken = take(dying, "reward", Want("rows", 1, 1))
    successor, more = Store("step-1", dying.definition, 1), list[LogRecord]()
    carried_over(successor, ops)
    backup = copy_of(successor)
    successor.emit = more.append
    finish(successor, taken)
    carried_over(backup, more)
    assert observed(backup) == observed(successor)
    assert keys_of(successor, take(successor, "reward", ROWS)) == ["b"]


def test_a_copy_that_is_not_whole_yet_is_passed_on_and_becomes_whole_there_too() -> None:
    """Its dump comes in several messages, and its primary has begun to leave."""
    s, _ = journaled()
    put(s, ["a", "b", "c", "d"], ["g", "g", 5, None], note=["x", None, 3, 4])
    finish(s, take(s, "reward", Want("rows", 1, 1)))
    take(s, "reward", ROWS)
    s.drop(rows=named(["d"]))
    told = list(snapshot(s, 1))
    for here in range(len(told) + 1):
        part = Store("step-1", s.definition, 1)
        carried_over(part, told[:here])
        other = copy_of(part)
        carried_over(other, told[here:])
        assert observed(other) == observed(s)


# what does not fit


def broken() -> list[LogRecord]:
    """Of a store with rows a and b, in group g: block 2, for the group is 1."""
    a, h, new = (named([name]).keys for name in ("a", "h", "new"))
    both, one = [(2, b"\3")], [(2, b"\1")]
    return [
        Leased("reward", "rows", 9, [(5, b"\1")], 1, 0),
        Leased("nowhere", "rows", 9, one, 1, 0),
        Leased("train", "rows", 9, one, 1, 0),
        Leased("reward", "rows", 9, one + one, 1, 0),
        Leased("reward", "rows", 9, [(2, b"\4")], 1, 0),
        Leased("reward", "rows", 9, [(2, b"")], 1, 0),
        Leased("reward", "groups", 9, both, 1, 0),
        Finish(123, "ack"),
        Groups([OneGroup(8, named(["g"]).keys, None, 2, 0, 0, False, bytes(2))]),
        Groups([OneGroup(8, h, None, 2, 0, 0, False, bytes(1))]),
        Groups([OneGroup(8, h[:-1], None, 2, 0, 0, False, bytes(2))]),
        Groups([OneGroup(8, h, None, 2, 0, 1, False, bytes(2))]),
        Groups([OneGroup(8, h, None, 2, 0, 0, False, b"\1\0")]),
        Groups([OneGroup(8, h, None, 2, 0, 0, False, bytes(2), begun=1)]),
        Groups([OneGroup(8, h, None, 2, 0, 0, False, bytes(2))] * 2),
        Blocks([OneBlock(8, b"", a, None, b"\1", [b"", b""])]),
        Blocks([OneBlock(2, b"", new, None, b"\1", [b"", b""])]),
        Blocks([OneBlock(8, h, new, None, b"\1", [b"", b""])]),
        Blocks([OneBlock(8, b"", new, [], b"\3", [b"", b""])]),
        Blocks([OneBlock(8, b"", new, ["n", "m"], b"\1", [b"", b""])]),
        Blocks([OneBlock(8, b"", new, None, b"\1", [b""])]),
        Blocks([OneBlock(8, b"", new, None, b"\1", [b"", b"\2"])]),
        Blocks([OneBlock(8, b"", new, None, b"\1", [b"", b""], [b"\2", b""])]),
        Blocks([OneBlock(8, b"", new + new, None, b"\3", [b"", b""])]),
        Given(bytes([5, *bytes(7)]), Values()),
        Given(bytes([2, *bytes(7)]) * 2, Values()),
        Given(bytes([2, *bytes(7)]), whole(["x"], 3, 9, 10)),
        Given(bytes([2, *bytes(7)]), whole(["nowhere~x"], 2, 9, 10)),
        Given(bytes([2, *bytes(7)]), whole(["x"], 2, 9, 10), ["train", "train"]),
        Ready("reward", one),
        Ready("train", one + one),
        Ready("train", groups=h),
        Held("train", 9, [], 1, 0),
        Held("train", 9, [(2, b"\3", b"")], 1, 0),
        Held("train", 9, [(2, b"\1", b"\3")], 1, 0),
        Held("train", 9, [(2, b"\4", b"\4")], 1, 0),
        Held("reward", 9, [(2, b"\1", b"\1")], 1, 0),
        Held("train", 9, [(2, b"\1", b"\1")] * 2, 1, 0),
        Remembered(b"short", b"\0"),
        Remembered(bytes(16), b""),
        Summary(False, 9, 0, 0, 0, [f"f{i}" for i in range(65)]),
        Summary(False, 1, 0, 0, 0, []),
        Summary(False, 9, 0, 0, 0, [], lost={"nowhere": 1}),
    ]


@pytest.mark.parametrize("number", range(len(broken())))
def test_an_operation_that_does_not_fit_the_copy_is_refused(number: int) -> None:
    s, _ = journaled()
    put(s, ["a", "b"], ["g", "g"])
    s.emit = None
    with pytest.raises(ProtocolError, match="must begin again from a snapshot"):
        apply(s, broken()[number])


def test_damaged_operations_fit_or_are_refused_and_nothing_else() -> None:
    s, told = journaled(free="drop")
    put(s, ["a", "b", 3], ["g", "g", None], fields=("tokens", "reward"), v=[1, 2.5, None])
    s.close("g", 2)
    finish(s, take(s, "train", GROUPS), index=b"\1\0\0\0", tags={"v": [7]})
    s.release_holder(1)
    s.reset("train")
    s.drop(where=["ge", "v", 7])
    s.relocate(OWNERS[0], chunks(1, 2), Owner("b", 9), chunks(5, 6))
    chance = random.Random(0)
    for ops in (told, list(snapshot(s))):
        for at, op in enumerate(ops):
            for _ in range(40):
                damaged = bytearray(encode(op))
                for _ in range(chance.randint(1, 2)):
                    damaged[chance.randrange(len(damaged))] = chance.randrange(256)
                other = Store("step-1", s.definition, 1)
                try:
                    for one in [*ops[:at], decode(bytes(damaged)), *ops[at + 1 :]]:
                        apply(other, one)
                except ProtocolError:
                    continue


def test_what_is_no_operation_is_refused() -> None:
    good = encode(Remembered(bytes(16), bytes(1)))
    assert decode(good) == Remembered(bytes(16), bytes(1))
    for bad in (b"", good[:-1], b"\x92\xcc\xff\x00", b"\xc0", b"\x91" + good, good + b"\0"):
        with pytest.raises(ProtocolError):
            decode(bad)


def test_operations_stand_in_a_message_as_they_were_encoded_and_are_bounded_in_number() -> None:
    ops: list[LogRecord] = [Returned(1), Remembered(bytes(16), bytes(1))]

    def message(ops: list[LogRecord]) -> bytes:
        append = Append(1, 0, [PartitionLog("p", 1, ops)])
        return peering.encode(PeerRequest(1, "", 1, 1, (1, 1), 1, append))

    raw = message([encoded(encode(op)) for op in ops])
    assert raw == message(ops)
    said = peering.decode_request(raw).body
    assert isinstance(said, Append) and said.partitions[0].records == ops
    with pytest.raises(ProtocolError):
        peering.decode_request(message([Returned(1)] * (MAX_LOG_RECORDS + 1)))


# values that move


def test_values_that_move_are_found_at_their_new_place_and_let_go_at_the_old_one() -> None:
    s, ops = journaled()
    put(s, ["a", "b", "c"])
    put(s, ["d"])  # its value lies in the chunk of a's
    s.freed()
    new = Owner("b", 9)
    counts = s.relocate(OWNERS[0], chunks(3, 1, 77), new, chunks(5, 6, 7))
    assert counts.tolist() == [1, 1, 0]
    found = {owner: (indexes(r), c.tolist()) for owner, r, c in s.holdings()}
    assert {owner: (sorted(r), c) for owner, (r, c) in found.items()} == {
        OWNERS[0]: ([2], [1]),
        new: ([5, 6], [1, 1]),
    }
    freed = [(owner, indexes(r), c.tolist()) for owner, r, c in s.freed()]
    assert freed == [(OWNERS[0], [3, 1], [1, 1])]
    other = Store("step-1", s.definition, 1)
    carried_over(other, ops)
    assert observed(other) == observed(s)
    assert s.lost(OWNERS[0]) == 1


def test_a_chunk_does_not_move_to_where_another_is() -> None:
    s, _ = journaled()
    put(s, ["a", "b"])
    before = observed(s)
    for there in (chunks(5, 2), chunks(5, 0)):
        with pytest.raises(ProtocolError, match="received chunk 2 of|invalid chunk number 0"):
            s.relocate(OWNERS[0], chunks(2, 1), OWNERS[0], there)
    assert observed(s) == before and s.freed() == []


def test_a_chunk_that_two_blocks_use_moves_while_a_dump_tells_them() -> None:
    s, _ = journaled(free="drop")
    for key in ("a", "b"):
        s.put(wrote(named([key]), [stores.Column("tokens", [stores.Value(7, 9)])]))
    s.freed()
    ops: list[LogRecord] = []
    s.emit = ops.append
    pieces = snapshot(s, 1)
    told = next(op for op in pieces if isinstance(op, Given))
    assert told.values.chunks[0].number == 7
    s.relocate(OWNERS[0], chunks(7), Owner("b", 9), chunks(5))
    rest = [op for op in pieces if isinstance(op, Given)]
    assert [(one.values.owners, one.values.chunks[0].number) for one in rest] == [(OWNERS, 7)]


def test_a_copy_has_all_chunks_however_many_a_block_uses() -> None:
    s, _ = journaled(free="drop")
    rows = 200
    for first in range(0, 40, 10):
        columns = [
            stores.Column(f"f{at}", stores.values(rows, first=at * rows))
            for at in range(first, first + 10)
        ]
        s.put(wrote(named(list(range(rows))), columns))
    told = [op for op in snapshot(s, 5) if isinstance(op, Given)]
    assert max(len(op.values.chunks) for op in told) <= MAX_CHUNKS_PER_MESSAGE < len(s.chunks)
    assert observed(copy_of(s, 5)) == observed(s)


def test_a_move_names_each_range_once_and_as_many_new_ones() -> None:
    s, _ = journaled()
    put(s, ["a"])
    for old, new in ((chunks(1, 1), chunks(3, 2)), (chunks(1), chunks(3, 2))):
        with pytest.raises(ProtocolError):
            s.relocate(OWNERS[0], old, Owner("b", 9), new)
    assert s.relocate(Owner("nobody", 1), chunks(1), OWNERS[0], chunks(3)).tolist() == [0]
