"""Claims, batches and streams: what is in hand, and which messages end it."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

import dataplane
from dataplane import Batch, Partition, Plane
from dataplane.wire.frames import encode
from dataplane.wire.messages import (
    Body,
    Claim,
    Done,
    Failed,
    Fetch,
    Fetched,
    Finish,
    GiveBack,
    Put,
    PutDone,
    Read,
    ReadDone,
    Reply,
    Request,
    Reserve,
)
from dataplane.wire.packed import U4, U8, column
from dataplane.wire.tables import Definition
from tests.chunk_numbers import chunk_numbers
from tests.client.scripted_peer import SILENCE, ScriptedPeer, shared, written

SLOW_S = 0.2


@pytest.fixture
def put(peer: ScriptedPeer, part: Partition) -> Put:
    part.put(
        {"a": [np.arange(4) + i for i in range(4)], "b": ["p", "q", "r", "s"]},
        key=["k0", "k1", "k2", "k3"],
        group=["g", "h", "g", "h"],
        tags={"v": [1, 2, 3, 4]},
    )
    body: Put = peer.bodies(Put)[0]
    peer.serve_put(body)
    return body


@pytest.fixture
def batch(put: Put, part: Partition) -> Iterator[Batch]:
    yield part.claim("s", rows=4)


def finishes(peer: ScriptedPeer) -> list[tuple[str, Any]]:
    found = peer.bodies(Finish)
    return [(f.outcome, None if f.index is None else column(f.index, U4).tolist()) for f in found]


def test_a_claim_hands_out_read_only_views(batch: Batch) -> None:
    by_key = dict(zip(batch.keys, batch["a"], strict=True))
    assert all((by_key[f"k{i}"] == np.arange(4) + i).all() for i in range(4))
    assert dict(zip(batch.keys, batch.tags["v"], strict=True)) == {f"k{i}": i + 1 for i in range(4)}
    view = batch["a"][0]
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 9
    with pytest.raises(ValueError, match="WRITEABLE"):
        view.setflags(write=True)
    assert len(batch) == 4 and np.shape(batch.numpy("a")) == (4, 4)


def test_groups_come_whole_with_their_own_columns(batch: Batch) -> None:
    found = {g.id: (g.keys, [int(x[0]) for x in g["a"]], g.tags["v"]) for g in batch.groups()}
    assert found == {
        "g": (["k0", "k2"], [0, 2], [1, 3]),
        "h": (["k1", "k3"], [1, 3], [2, 4]),
    }


def test_adds_travel_with_the_ack_in_one_message(peer: ScriptedPeer, batch: Batch) -> None:
    batch.add(reward=[0.5, 1.5, 2.5, 3.5])
    batch.add(logp=np.ones((4, 1800), np.float32))
    assert not peer.bodies(Finish)
    a = "a: int64[4], first [0, 1, 2, 3]"
    assert repr(batch) == f"<Batch 4 rows of 'x' for 's', leased: {a}, added reward, logp>"
    batch.ack()
    (finish,) = peer.bodies(Finish)
    assert (finish.lease, finish.outcome, finish.index) == (11, "ack", None)
    assert finish.values.fields == ["reward", "logp"]
    inline = [chunk.rows for chunk in finish.values.chunks if chunk.inline]
    assert inline == [4] and len(finish.values.chunks) == 3  # small groups share the inline one
    assert len(written(finish)) == 2  # a chunk for each group
    assert repr(batch) == f"<Batch 4 rows of 'x' for 's', acked: {a}>"


def test_an_add_that_no_ack_can_tell_is_refused_before_it_is_written(
    peer: ScriptedPeer, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dataplane.client._sync.lease.MAX_CHUNKS_PER_MESSAGE", 1)
    reserved = len(peer.bodies(Reserve))
    with pytest.raises(dataplane.InvalidRows, match="Nothing was added. Claim fewer rows"):
        batch.add({"x": np.zeros((len(batch), 20_000)), "y": np.zeros((len(batch), 20_000))})
    assert len(peer.bodies(Reserve)) == reserved
    batch.add({"x": np.zeros(len(batch))})
    batch.ack()


def test_a_field_is_added_once(batch: Batch) -> None:
    batch.add(reward=[1, 2, 3, 4])
    with pytest.raises(dataplane.FieldExists, match="reward"):
        batch.add(reward=[1, 2, 3, 4])


def test_what_was_fetched_stays_readable_after_the_ack(batch: Batch) -> None:
    views = batch["a"]
    batch.ack()
    assert int(views[0].sum() + batch["a"][0].sum()) == 2 * int(views[0].sum())
    with pytest.raises(dataplane.LeaseExpired, match="acked"):
        batch.add(reward=[1, 2, 3, 4])
    with pytest.raises(dataplane.LeaseExpired, match="acked"):
        batch.ack()


def test_other_fields_are_fetched_on_first_access(
    peer: ScriptedPeer, put: Put, batch: Batch
) -> None:
    peer.scripts[Fetch] = lambda r, b: Fetched(peer.new_pin(), peer.table(put, b.fields))
    assert sorted(batch["b"]) == ["p", "q", "r", "s"]
    assert sorted(batch["b"]) == ["p", "q", "r", "s"]
    assert [(b.lease, b.fields) for b in peer.bodies(Fetch)] == [(11, ["b"])]


def test_after_the_ack_other_fields_are_read_by_key(
    peer: ScriptedPeer, put: Put, batch: Batch
) -> None:
    peer.scripts[Read] = lambda r, b: ReadDone(peer.table(put, b.fields), peer.new_pin())
    batch.ack()
    assert sorted(batch["b"]) == ["p", "q", "r", "s"]
    (read,) = peer.bodies(Read)
    assert read.rows.names == batch.keys


def test_a_field_that_was_added_here_cannot_be_read_yet(batch: Batch) -> None:
    batch.add(reward=[1, 2, 3, 4])
    with pytest.raises(dataplane.NotFetched, match="cannot read .reward. from this batch yet"):
        batch["reward"]


def test_a_dropped_group_leaves_the_lease_with_what_was_added_for_it(
    peer: ScriptedPeer, batch: Batch
) -> None:
    h = sorted(batch.keys.index(k) for k in ("k1", "k3"))
    g = sorted({0, 1, 2, 3} - set(h))
    batch.add(big=np.arange(4 * 2048).reshape(4, -1))
    batch.drop(groups=["h"])
    assert "leased, 2 left" in repr(batch)
    batch.ack()
    assert finishes(peer) == [("drop", h), ("ack", g)]
    ack = peer.bodies(Finish)[1]
    assert [nbytes for _, nbytes in written(ack)] == [2 * 2048 * 8]  # of this group alone
    assert [(piece.first, piece.given) for piece in ack.values.pieces] == [(0, b"\x03")]


def test_dropping_every_row_ends_the_lease(peer: ScriptedPeer, batch: Batch) -> None:
    with pytest.raises(dataplane.InvalidRows, match="'zz'"):
        batch.drop(groups=["zz"])
    batch.drop(rows=[0, 1])
    batch.drop()
    assert finishes(peer) == [("drop", [0, 1]), ("drop", [2, 3])]
    assert batch.state == "dropped"


def test_a_context_acks_at_its_end_and_releases_on_an_exception(
    peer: ScriptedPeer, put: Put, part: Partition
) -> None:
    with part.claim("s", rows=4):
        pass
    with pytest.raises(RuntimeError, match="mine"), part.claim("s", rows=4) as batch:
        batch.add(reward=[1, 2, 3, 4])
        raise RuntimeError("mine")
    peer.await_body(Finish, 2)
    assert finishes(peer) == [("ack", None), ("release", None)]
    assert not peer.bodies(Finish)[1].values.pieces


def test_a_release_with_tags_is_answered(peer: ScriptedPeer, batch: Batch) -> None:
    batch.release(tags={"attempt": 2})
    ((rid, body),) = [(r.rid, r.body) for r in peer.requests if isinstance(r.body, Finish)]
    assert rid and body.tags == {"attempt": [2]}


def test_a_batch_that_dies_is_released(peer: ScriptedPeer, put: Put, part: Partition) -> None:
    batch = part.claim("s", rows=4)
    batch.add(reward=[np.zeros(5000)] * 4)
    del batch
    gc.collect()
    assert peer.await_body(Finish).outcome == "release"
    peer.await_body(GiveBack)


def test_a_loop_that_ends_during_an_ack_gives_back_no_space_that_the_ack_names(
    peer: ScriptedPeer, put: Put, part: Partition
) -> None:
    """The peer might have granted that space to another client by then."""
    acking, go_on = threading.Event(), threading.Event()

    def finish(request: Request, body: Finish) -> Body:
        if body.outcome == "ack":
            acking.set()
            assert go_on.wait(20)
        return PutDone()

    peer.scripts[Finish] = finish
    loop = iter(part.stream("s", rows=4))
    batch = next(loop)
    batch.add(reward=[np.zeros(5000)] * 4)
    thread = threading.Thread(target=batch.ack)
    thread.start()
    try:
        assert acking.wait(20)
        del loop
        gc.collect()
        assert peer.await_body(Finish).outcome == "release"
    finally:
        go_on.set()
        thread.join(20)
    (ack,) = [one for one in peer.bodies(Finish) if one.outcome == "ack"]
    assert len(written(ack)) == 2 and not peer.bodies(GiveBack)
    assert batch.state == "acked"


def test_an_add_to_a_batch_whose_loop_ends_meanwhile_gives_its_space_back(
    peer: ScriptedPeer, put: Put, part: Partition
) -> None:
    reserving, go_on = threading.Event(), threading.Event()

    def reserve(request: Request, body: Reserve) -> Body:
        reserving.set()
        assert go_on.wait(20)
        return peer.reserved(body)

    loop = iter(part.stream("s", rows=4))
    batch = next(loop)
    peer.scripts[Reserve] = reserve
    failed = list[BaseException]()

    def add() -> None:
        try:
            batch.add(reward=[np.zeros(5000)] * 4)
        except dataplane.LeaseExpired as exc:
            failed.append(exc)

    thread = threading.Thread(target=add)
    thread.start()
    try:
        assert reserving.wait(20)
        del loop
        gc.collect()
        assert peer.await_body(Finish).outcome == "release"
    finally:
        go_on.set()
        thread.join(20)
    (exc,) = failed
    assert "already released" in str(exc)
    part.put({"a": [np.zeros(5000)] * 4})
    assert len(peer.bodies(Reserve)) == 1  # the put has the space of the add


def test_an_expired_lease_is_told_and_nothing_is_kept(peer: ScriptedPeer, batch: Batch) -> None:
    peer.scripts[Finish] = lambda r, b: Failed("LeaseExpired", "the lease ended")
    with pytest.raises(dataplane.LeaseExpired, match="the lease ended"):
        batch.ack()
    assert batch.state == "expired"


def test_extents_of_a_refused_ack_are_not_used_again(
    peer: ScriptedPeer, part: Partition, batch: Batch
) -> None:
    peer.scripts[Finish] = lambda r, b: Failed("LeaseExpired", "the lease ended")
    batch.add(reward=[np.zeros(5000)] * 4)
    with pytest.raises(dataplane.LeaseExpired):
        batch.ack()
    named = {offset for offset, _ in written(peer.bodies(Finish)[0])}
    part.put({"a": [np.zeros(5000)] * 4})
    assert named.isdisjoint([offset for offset, _ in written(peer.bodies(Put)[-1])])


def test_an_ack_that_failed_does_not_pass_without_what_was_added(
    peer: ScriptedPeer, batch: Batch
) -> None:
    peer.scripts[Finish] = lambda r, b: Failed("PartitionGone", "hm")
    batch.add(reward=[1, 2, 3, 4])
    with pytest.raises(dataplane.PartitionGone):
        batch.ack()
    with pytest.raises(dataplane.InvalidCall, match="reward.*add them again"):
        batch.ack()
    del peer.scripts[Finish]
    batch.add(reward=[1, 2, 3, 4])
    batch.ack()
    assert peer.bodies(Finish)[-1].values.fields == ["reward"]


def kept_ranges(body: Finish) -> bytes:
    """Return the numbers that a peer gives to the chunks of a message."""
    count = len(written(body))
    return chunk_numbers([(7 + n, 1) for n in range(count)]).tobytes()


def test_an_ack_that_failed_is_made_again_with_the_values_that_the_peer_keeps(
    peer: ScriptedPeer, batch: Batch
) -> None:
    batch.add(reward=[np.zeros(5000)] * 4)
    peer.scripts[Finish] = lambda r, b: Failed("Unavailable", "hm", {"chunks": kept_ranges(b)})
    with pytest.raises(dataplane.Unavailable) as told:
        batch.ack()
    assert not told.value.details
    del peer.scripts[Finish]
    batch.ack()
    first, second = peer.requests_of(Finish)
    assert first.op != second.op
    assert written(first.body) and not written(second.body)
    assert shared(second.body) == column(kept_ranges(first.body), U8).tolist()
    assert second.body.values.pieces == first.body.values.pieces
    assert batch.state == "acked"


@pytest.mark.parametrize("then", ["ack", "add", "release"])
def test_an_ack_without_an_answer_is_asked_again_under_its_number(
    peer: ScriptedPeer, batch: Batch, then: str
) -> None:
    batch.add(reward=[np.zeros(5000)] * 4)
    peer.scripts[Finish] = lambda r, b: SILENCE
    with pytest.raises(dataplane.DeadlineExceeded):
        batch.ack(timeout=0.1)
    assert batch.state == "leased"
    del peer.scripts[Finish]
    if then == "add":
        with pytest.raises(dataplane.LeaseExpired, match="this batch is already acked"):
            batch.add(other=[1, 2, 3, 4])
    else:
        getattr(batch, then)()
    first, second = peer.requests_of(Finish)
    assert (first.op, first.body) == (second.op, second.body)
    assert batch.state == "acked"


def test_values_for_rows_that_are_acked_are_refused(peer: ScriptedPeer, batch: Batch) -> None:
    """No ack would store these values, because an ack skips finished rows."""
    batch.rows([1]).drop()
    peer.scripts[Finish] = lambda r, b: SILENCE
    with pytest.raises(dataplane.DeadlineExceeded):
        batch.rows([2]).ack(timeout=0.1)
    del peer.scripts[Finish]
    batch.rows([3]).ack()  # the reply says that row 2 is acked, too
    for rows in ([2], [0, 2, 3]):
        with pytest.raises(dataplane.LeaseExpired, match="of them are already acked") as refused:
            batch.rows(rows).add(reward=rows)
        assert refused.value.details["rows"] == [row for row in rows if row]
    batch.rows([0, 1]).add(reward=[1, 2])  # a value of a dropped row is ignored
    batch.ack()
    assert batch.state == "acked"


def answer_slowly(peer: ScriptedPeer, *answers: Body, seconds: float = SLOW_S) -> None:
    """Answer the next finishes so, this long after each arrives, and the others at once."""
    left = list(answers)

    def finish(request: Request, body: Finish) -> Body:
        if not left:
            return PutDone()
        time.sleep(seconds)
        return left.pop(0)

    peer.scripts[Finish] = finish


def time_between(first: Request, second: Request) -> float:
    """How much less time the second has, in seconds."""
    return (first.deadline_ms - second.deadline_ms) / 1e3


def test_the_messages_of_one_ack_share_its_time(peer: ScriptedPeer, batch: Batch) -> None:
    answer_slowly(peer, PutDone(), PutDone())
    batch.rows([0, 1]).add(reward=[1, 2])
    batch.ack()
    first, second = peer.requests_of(Finish)
    assert time_between(first, second) >= SLOW_S


def test_an_ack_in_doubt_is_settled_within_the_time_of_the_next(
    peer: ScriptedPeer, batch: Batch
) -> None:
    peer.scripts[Finish] = lambda r, b: SILENCE
    batch.add(reward=[1, 2, 3, 4])
    with pytest.raises(dataplane.DeadlineExceeded):
        batch.ack(timeout=0.1)
    answer_slowly(peer, Failed("Unavailable", "hm", {"chunks": b""}))
    batch.ack()
    _, again, second = peer.requests_of(Finish)
    assert time_between(again, second) >= SLOW_S


@pytest.mark.parametrize("how", ["release", "drop"])
def test_a_part_whose_release_is_in_doubt_is_settled_before_the_rest_is_acked(
    peer: ScriptedPeer, batch: Batch, how: str
) -> None:
    """The shard may have finished the part: an ack that named all rows would be refused."""
    peer.scripts[Finish] = lambda r, b: SILENCE
    batch.add(reward=[1, 2, 3, 4])
    part = batch.rows([1])
    with pytest.raises(dataplane.DeadlineExceeded):
        getattr(part, how)(timeout=0.1)
    answer_slowly(peer, Done())
    batch.ack()
    first, again, second = peer.requests_of(Finish)
    assert first.rid == again.rid and first.body == again.body
    assert isinstance(second.body, Finish) and second.body.outcome == "ack"
    assert np.frombuffer(second.body.index or b"", np.uint32).tolist() == [0, 2, 3]
    assert batch.state == "acked"


def test_what_a_release_in_doubt_has_finished_cannot_be_acked(
    peer: ScriptedPeer, batch: Batch
) -> None:
    peer.scripts[Finish] = lambda r, b: SILENCE
    for rows, acked in ((batch.rows([1]), batch.rows([1, 2])), (batch, batch)):
        with pytest.raises(dataplane.DeadlineExceeded):
            rows.release(timeout=0.1)
        peer.scripts[Finish] = lambda r, b: Done()
        with pytest.raises(dataplane.LeaseExpired, match="an earlier call, whose reply was lost"):
            acked.ack()
        peer.scripts[Finish] = lambda r, b: SILENCE


def test_a_release_may_be_repeated_until_it_is_answered(peer: ScriptedPeer, batch: Batch) -> None:
    peer.scripts[Finish] = lambda r, b: SILENCE
    values = {"so_far": [1]}
    for given in (None, values):
        part = batch.rows([1] if given is None else [2])
        with pytest.raises(dataplane.DeadlineExceeded):
            part.release(values=given, timeout=0.1)
    peer.scripts[Finish] = lambda r, b: Failed("LeaseExpired", "the lease has ended", {})
    part.release()
    assert batch.state == "expired"


@pytest.mark.parametrize("acked_before", [False, True])
def test_the_time_of_a_streams_claim_begins_as_it_is_sent(
    peer: ScriptedPeer,
    put: Put,
    part: Partition,
    monkeypatch: pytest.MonkeyPatch,
    acked_before: bool,
) -> None:
    """With the last message of a slow ack, or by itself after an ack that was in doubt."""
    monkeypatch.setattr("dataplane.client.session.connection.GRACE_S", 0.0)
    loop = iter(part.stream("s", rows=4, batches=2, timeout=2 * SLOW_S))
    first = next(loop)
    if acked_before:
        peer.scripts[Finish] = lambda r, b: SILENCE
        with pytest.raises(dataplane.DeadlineExceeded):
            first.ack(timeout=0.1)
    else:
        first.rows([0, 1]).add(reward=[1, 2])
    answer_slowly(peer, PutDone(), seconds=3 * SLOW_S)
    claimed = peer.scripts[Claim]

    def claim(request: Request, body: Claim) -> Any:
        time.sleep(0.01)  # so that its answer does not come with the ack's
        return claimed(request, body)

    peer.scripts[Claim] = claim
    second = next(loop)
    assert (first.state, second.state) == ("acked", "leased")
    second.release()


def test_what_the_peer_did_not_look_at_is_still_the_batchs(
    peer: ScriptedPeer, batch: Batch
) -> None:
    batch.add(reward=[np.zeros(5000)] * 4)
    peer.scripts[Finish] = lambda r, b: Failed("Unavailable", "not sure yet", {"unheard": True})
    with pytest.raises(dataplane.Unavailable):
        batch.ack()
    del peer.scripts[Finish]
    batch.ack()
    first, second = peer.bodies(Finish)
    assert first.values == second.values


def test_a_claim_carries_its_demand(peer: ScriptedPeer, put: Put, part: Partition) -> None:
    where = dataplane.tag("version") >= 6
    part.claim("s", rows=8, min=2, where=where, timeout=1.5, lease=60, fields=["b"]).ack()
    (claim,) = peer.bodies(Claim)
    assert (claim.want.unit, claim.want.count, claim.want.minimum) == ("rows", 8, 2)
    assert claim.want.where == ["ge", "version", 6]
    assert (claim.timeout_ms, claim.lease_ms, claim.fields, claim.declare) == (
        1500,
        60_000,
        ["b"],
        None,
    )


def test_a_stage_that_was_not_declared_is_declared_by_its_fields(
    peer: ScriptedPeer, put: Put, part: Partition
) -> None:
    part.claim("other", rows=4, fields=["a"]).ack()
    assert peer.bodies(Claim)[0].declare == ["a"]


def test_a_budget_counts_groups_where_groups_have_a_size(
    peer: ScriptedPeer, put: Put, plane: Plane
) -> None:
    peer.definition = Definition({"s": ["a"]}, 2)
    plane.partition("z").claim("s", budget={"v": 100}).ack()
    plane.partition("z").claim("s", budget={"v": 100}, unit="rows").ack()
    wants = [body.want for body in peer.bodies(Claim)]
    assert [(w.unit, w.budget_tag, w.budget) for w in wants] == [
        ("groups", "v", 100.0),
        ("rows", "v", 100.0),
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"rows": 1, "groups": 1},
        {"rows": 0},
        {"rows": 2, "min": 3},
        {"budget": {}},
        {"budget": {"v": 0}},
        {"budget": {"v": 1}, "min": 1},
        {"rows": 1, "unit": "groups"},
    ],
)
def test_a_claim_that_contradicts_itself_is_an_invalid_call(
    part: Partition, arguments: dict[str, Any]
) -> None:
    with pytest.raises(dataplane.InvalidCall):
        part.claim("s", **arguments)
    with pytest.raises(dataplane.InvalidCall):
        part.stream("s", **arguments)


def ends_after(peer: ScriptedPeer, batches: int) -> None:
    claimed = peer.scripts[Claim]

    def script(request: Any, body: Claim) -> Any:
        if len(peer.bodies(Claim)) < batches:
            return claimed(request, body)
        return Failed("StreamEnd", "sealed and drained")

    peer.scripts[Claim] = script


def answer_acks_late(peer: ScriptedPeer, reverse: bool) -> None:
    """Together with the claim after them. reverse: and after that."""
    acks: list[int] = []
    claimed: Any = peer.scripts[Claim]

    def finish(request: Request, body: Finish) -> Body | bytes:
        if body.outcome != "ack":
            return PutDone()
        acks.append(request.rid)
        return SILENCE

    def claim(request: Request, body: Claim) -> Body | bytes:
        reply = claimed(request, body)
        if not acks:
            return reply  # type: ignore[no-any-return]
        replies = [Reply(acks.pop(), PutDone()), Reply(request.rid, reply)]
        return b"".join(map(encode, replies[:: -1 if reverse else 1]))

    peer.scripts |= {Finish: finish, Claim: claim}


def test_a_stream_acks_each_body_and_ends(peer: ScriptedPeer, put: Put, part: Partition) -> None:
    ends_after(peer, 3)
    count = 0
    for batch in part.stream("s", rows=4):
        batch.add(reward=[1, 2, 3, 4])
        count += len(batch)
    assert count == 12
    assert finishes(peer) == [("ack", None)] * 3
    kinds = [type(r.body).__name__ for r in peer.requests if isinstance(r.body, Claim | Finish)]
    assert kinds == ["Claim", "Finish"] * 3 + ["Claim"]


@pytest.mark.parametrize("reverse", [False, True])
def test_an_ack_and_the_next_claim_of_a_stream_go_in_one_frame(
    peer: ScriptedPeer, put: Put, part: Partition, reverse: bool
) -> None:
    answer_acks_late(peer, reverse)
    loop = iter(part.stream("s", rows=4, batches=2))
    first = next(loop)
    second = next(loop)
    assert (first.state, second.state) == ("acked", "leased")
    assert not peer.bodies(Claim)[1].own
    second.release()


def test_what_went_along_with_an_ack_that_fails_is_given_back(
    peer: ScriptedPeer, put: Put, part: Partition
) -> None:
    peer.scripts[Finish] = lambda r, b: Failed("LeaseExpired", "too late")
    loop = iter(part.stream("s", rows=4))
    batch = next(loop)
    with pytest.raises(dataplane.LeaseExpired):
        next(loop)
    assert batch.state == "expired"
    assert peer.await_body(Finish, 2).outcome == "release"


def test_a_stream_left_by_an_exception_releases(
    peer: ScriptedPeer, put: Put, part: Partition
) -> None:
    def consume() -> None:
        for _batch in part.stream("s", rows=4):
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        consume()
    assert peer.await_body(Finish).outcome == "release"


def test_a_stream_left_by_break_releases_what_was_not_acked(
    peer: ScriptedPeer, put: Put, part: Partition
) -> None:
    for number, batch in enumerate(part.stream("s", rows=4)):
        if number == 1:
            break
        batch.ack()
    assert batch.state == "released"
    peer.await_body(Finish, 2)
    assert finishes(peer) == [("ack", None), ("release", None)]


def test_the_end_of_a_with_sees_that_the_batch_in_hand_is_back(
    peer: ScriptedPeer, put: Put, part: Partition
) -> None:
    with part.stream("s", rows=4) as stream:
        for _batch in stream:
            break
        loop = iter(stream)
        held = next(loop)
        other = iter(stream)
        given_up = next(other)
        given_up.release()
    assert (held.state, given_up.state) == ("released", "released")
    assert {f.outcome for f in peer.bodies(Finish)} == {"release"}
    assert repr(stream) == "<Stream of 'x' for 's': ended>"
    assert next(loop, None) is None and list(stream) == []


def test_a_stream_of_so_many_batches_acks_the_last(
    peer: ScriptedPeer, put: Put, part: Partition
) -> None:
    assert len(list(part.stream("s", rows=4, batches=3))) == 3
    assert finishes(peer) == [("ack", None)] * 3
    assert len(peer.bodies(Claim)) == 3
    with pytest.raises(dataplane.InvalidCall, match="batches"):
        part.stream("s", rows=4, batches=0)


def test_two_loops_over_a_stream_have_each_a_batch_in_hand(
    peer: ScriptedPeer, put: Put, part: Partition
) -> None:
    stream = part.stream("s", rows=4)
    one, two = iter(stream), iter(stream)
    first, second = next(one), next(two)
    next(one)
    assert (first.state, second.state) == ("acked", "leased")


def test_reads_come_page_by_page_as_one(peer: ScriptedPeer, put: Put, part: Partition) -> None:
    def page(request: Any, body: Read) -> ReadDone:
        return ReadDone(peer.table(put, ["a", "b"]), peer.new_pin(), b"" if body.after else b"on")

    peer.scripts[Read] = page
    found = part.get()
    assert [b.after for b in peer.bodies(Read)] == [b"", b"on"]
    assert len(found) == 8 and found.keys[:4] == found.keys[4:]
    assert [int(x.sum()) for x in found["a"]][:4] == [int(x.sum()) for x in found["a"]][4:]
    assert list(found["b"])[:4] == list(found["b"])[4:]
    assert found.tags["v"][:4] == found.tags["v"][4:]
    assert {g.id: len(g) for g in found.groups()} == {"g": 4, "h": 4}


@pytest.mark.parametrize("wrong", ["chunk", "layout", "field", "base"])
def test_a_page_that_refers_to_what_it_does_not_have_is_refused(
    peer: ScriptedPeer, put: Put, part: Partition, wrong: str
) -> None:
    def page(request: Request, body: Read) -> ReadDone:
        table = peer.table(put, ["a", "b"])
        values = table.values
        if body.after and wrong == "layout":
            chunk = msgspec.structs.replace(values.chunks[0], layout=-1)
            values = msgspec.structs.replace(values, chunks=[chunk, *values.chunks[1:]])
        elif body.after:
            bad = [-2] * len(values.pieces[0].fields) if wrong == "field" else -1
            first = msgspec.structs.replace(
                values.pieces[0], **{"fields" if wrong == "field" else wrong: bad}
            )
            values = msgspec.structs.replace(values, pieces=[first, *values.pieces[1:]])
        table = msgspec.structs.replace(table, values=values)
        return ReadDone(table, peer.new_pin(), b"" if body.after else b"on")

    peer.scripts[Read] = page
    with pytest.raises(dataplane.ProtocolError):
        list(part.get()["a"])


def test_rows_lists_without_bytes(peer: ScriptedPeer, put: Put, part: Partition) -> None:
    peer.scripts[Read] = lambda r, b: ReadDone(peer.table(put, b.fields), 0)
    listed = part.rows(where=dataplane.tag("v") == 1)
    (read,) = peer.bodies(Read)
    assert (read.fields, read.where, listed.fields) == ([], ["eq", "v", 1], [])
    assert sorted(listed.keys) == ["k0", "k1", "k2", "k3"]
    assert repr(listed) == "<Rows 4 rows of 'x': no fields>"


def test_a_ref_is_read_under_its_own_generation(
    peer: ScriptedPeer, plane: Plane, part: Partition
) -> None:
    ref = part.put({"a": [1, 2]}, key=["k", "m"])
    table = peer.table(peer.bodies(Put)[0], ["a"])
    peer.scripts[Read] = lambda r, b: ReadDone(table, peer.new_pin())
    assert list(plane.get(ref, fields=["a"])["a"]) == [1, 2]
    (read,) = peer.bodies(Read)
    assert (read.generation, read.rows.names, read.fields) == (4, ["k", "m"], ["a"])
