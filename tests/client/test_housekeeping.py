"""Pins, leftover grants, forks: what a client gives back without being asked."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

import dataplane
from dataplane import Partition, Plane
from dataplane.client.session import handshake, housekeeping, slabs
from dataplane.client.session.housekeeping import undo
from dataplane.client.session.session import Bell
from dataplane.client.session.slabs import Slabs
from dataplane.errors import ShardFull
from dataplane.peer.failures import failed
from dataplane.wire.frames import encode
from dataplane.wire.messages import (
    Admitted,
    Claim,
    Claimed,
    Finish,
    GiveBack,
    Put,
    PutDone,
    Reply,
    Request,
    Stats,
    StatsDone,
    Unpin,
    Withdraw,
)
from dataplane.wire.packed import EXTENT, column
from dataplane.wire.tables import PlanRows, Rows, Table
from tests.client.scripted_peer import SILENCE, ScriptedPeer


@pytest.fixture
def put(peer: ScriptedPeer, part: Partition) -> Iterator[Put]:
    part.put({"a": [np.arange(2000)] * 2})
    body: Put = peer.bodies(Put)[0]
    peer.serve_put(body)
    yield body


def test_a_pin_goes_when_the_last_view_dies(peer: ScriptedPeer, put: Put, part: Partition) -> None:
    batch = part.claim("s", rows=2)
    batch.ack()
    view = batch["a"][1][1:4]
    del batch
    gc.collect()
    assert not peer.bodies(Unpin)
    assert view.tolist() == [1, 2, 3]
    del view
    assert peer.await_body(Unpin).pins == [1]


def test_pins_of_a_lazy_fetch_are_their_own(peer: ScriptedPeer, put: Put, part: Partition) -> None:
    first, second = part.claim("s", rows=2), part.claim("s", rows=2)
    kept = second["a"][0]
    first.ack()
    second.ack()
    del first, second
    gc.collect()
    assert peer.await_body(Unpin).pins == [1]
    assert kept.tolist() == list(range(2000))


def test_released_pins_go_with_the_next_call(peer: ScriptedPeer, plane: Plane) -> None:
    # Without a housekeeper only a call can carry them.
    plane._session.tend = lambda: None
    part = plane.partition("x", stages={"s": ["a"]})
    part.put({"a": [np.arange(4)]})
    peer.serve_put(peer.bodies(Put)[0])
    peer.scripts[Stats] = lambda r, b: StatsDone({})
    batch = part.claim("s", rows=1)
    batch.ack()
    del batch
    gc.collect()
    with pytest.raises(dataplane.InvalidValue):  # it does not leave, and takes nothing along
        part.tag([1], {"t": 1 << 64})
    assert plane._session.pins == 1
    plane.stats()
    assert (type(peer.requests[-1].body), peer.requests[-1].unpin) == (Stats, [1])
    assert plane._session.pins == 0


def test_pins_that_a_call_took_along_which_was_given_up_are_told_again(
    peer: ScriptedPeer, put: Put, part: Partition, plane: Plane
) -> None:
    """It may have been given up before its last byte was sent."""
    peer.scripts[Stats] = lambda r, b: SILENCE
    batch = part.claim("s", rows=2)
    batch.ack()
    del batch
    gc.collect()
    with pytest.raises(dataplane.DeadlineExceeded):
        plane.stats(timeout=0.05)
    assert [1] in [one.unpin for one in peer.requests] or peer.bodies(Unpin)
    assert peer.await_body(Unpin).pins == [1]


def test_a_call_that_was_given_up_may_be_read_until_the_peer_ends_its_connection(
    peer: ScriptedPeer, part: Partition, plane: Plane
) -> None:
    """A peer refuses what is below a request's floor, and would keep the room that it names."""
    reads_on = threading.Event()

    def reads(request: Request, body: Put) -> PutDone:
        assert reads_on.wait(20)
        return PutDone()

    peer.scripts[Put] = reads
    peer.scripts[Stats] = lambda r, b: StatsDone({})
    with pytest.raises(dataplane.DeadlineExceeded):
        part.put({"a": [np.arange(2000)] * 2}, timeout=0.5)
    for _ in range(3):
        plane.stats()  # on another connection, which the peer may read before
    last = peer.requests[-1]
    reads_on.set()
    peer.await_body(Put)
    (put,) = peer.requests_of(Put)
    assert last.floor <= put.op < last.op
    deadline = time.monotonic() + 10
    while peer.requests[-1].floor <= put.op:
        assert time.monotonic() < deadline, "the floor stays below a call that has ended"
        plane.stats()


def test_space_in_the_reply_to_a_repeated_ack_goes_back_once(
    peer: ScriptedPeer, put: Put, part: Partition, plane: Plane
) -> None:
    """The peer repeats its reply to the first try, and may have granted the space again since."""
    go_on = threading.Event()
    extents = np.array([(1 << 20, 1 << 16)], EXTENT).tobytes()

    def late(request: Request, body: Finish) -> PutDone:
        assert go_on.wait(20)
        return PutDone(extents)

    peer.scripts[Finish] = late
    peer.scripts[Stats] = lambda r, b: StatsDone({})
    batch = part.claim("s", rows=2)
    batch.add(b=[np.arange(2000)] * 2)
    for _ in range(2):
        with pytest.raises(dataplane.DeadlineExceeded):
            batch.ack(timeout=0.2)
    go_on.set()
    peer.await_body(GiveBack)
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        plane.stats()
    assert [one.op for one in peer.requests_of(Finish)] == [peer.requests_of(Finish)[0].op] * 2
    assert [one.extents for one in peer.bodies(GiveBack)].count(extents) == 1


def test_a_peer_that_is_slow_to_admit_is_told_as_soon_as_it_does(
    peer: ScriptedPeer, put: Put, part: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(housekeeping, "IDLE_S", 0.05)
    monkeypatch.setattr(housekeeping, "_SEND_S", 0.05)
    monkeypatch.setattr(handshake, "LEAST_S", 0.05)
    batch = part.claim("s", rows=2)
    batch.ack()
    view = batch["a"][1]
    peer.silent = 3
    peer.connections[0].shutdown(socket.SHUT_RDWR)
    until = time.monotonic() + 10
    while peer.silent and time.monotonic() < until:
        time.sleep(0.01)
    assert not peer.silent
    del batch, view
    gc.collect()
    assert peer.await_body(Unpin).pins == [1]


def test_a_client_without_file_descriptors_keeps_its_session(
    peer: ScriptedPeer, put: Put, part: Partition, plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took its peer for dead, and let go of the arena."""
    opener, full = plane._session.connections.opener, [True]

    def opens(limit_s: float) -> socket.socket:
        if full:
            raise OSError(errno.EMFILE, "Too many open files")
        return opener(limit_s)

    monkeypatch.setattr(plane._session.connections, "opener", opens)
    peer.scripts[Stats] = lambda r, b: SILENCE
    with pytest.raises(dataplane.DeadlineExceeded):
        plane.stats(timeout=0.01)  # its connection is not used again
    with pytest.raises(dataplane.LimitExceeded, match="file descriptor.*ulimit -n"):
        part.claim("s", rows=2)
    full.clear()
    batch = part.claim("s", rows=2)
    assert batch["a"][1].tolist() == list(range(2000))


def test_grants_that_nobody_uses_go_back(
    peer: ScriptedPeer, part: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(housekeeping, "IDLE_S", 0.05)
    peer.scripts[Put] = lambda r, b: PutDone(peer.grant(b.want_bytes or 16_000))
    part.put({"a": [np.zeros(2000)]})
    given_back = column(peer.await_body(GiveBack).extents, EXTENT)
    assert given_back["length"].sum() >= 16_000


def test_closing_releases_leases_and_gives_grants_back(peer: ScriptedPeer) -> None:
    plane = Plane(peer.keeper())
    part = plane.partition("x", stages={"s": ["a"]})
    peer.scripts[Put] = lambda r, b: PutDone(peer.grant(b.want_bytes or 1))
    part.put({"a": [np.arange(4)]})
    peer.serve_put(peer.bodies(Put)[0])
    batch = part.claim("s", rows=1)
    plane.close()
    told = [type(r.body) for r in peer.requests]
    assert {Finish, GiveBack} <= {*told}
    with pytest.raises(dataplane.ClientClosed):
        batch.ack()


def test_views_stay_readable_after_close_and_their_pin_goes_with_them(peer: ScriptedPeer) -> None:
    plane = Plane(peer.keeper())
    part = plane.partition("x", stages={"s": ["a"]})
    part.put({"a": [np.arange(2000)]})
    peer.serve_put(peer.bodies(Put)[0])
    batch = part.claim("s", rows=1)
    batch.ack()
    view = batch["a"][0]
    plane.close()
    del batch, part, plane
    gc.collect()
    assert view.tolist() == list(range(2000))
    assert not peer.bodies(Unpin)
    del view
    assert peer.await_body(Unpin).pins == [1]
    peer.await_closed(2)


def test_a_client_that_nobody_refers_to_releases_what_it_held(peer: ScriptedPeer) -> None:
    plane = Plane(peer.keeper())
    part = plane.partition("x", stages={"s": ["a"]})
    part.put({"a": [np.arange(4)]})
    peer.serve_put(peer.bodies(Put)[0])
    batch = part.claim("s", rows=1)
    del batch, part, plane
    gc.collect()
    assert peer.await_body(Finish).outcome == "release"
    peer.await_closed(2)


def test_no_thread_runs_until_there_is_something_to_do(peer: ScriptedPeer, plane: Plane) -> None:
    peer.scripts[Stats] = lambda r, b: StatsDone({})
    plane.stats()
    assert plane._keeper._thread is None


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_childs_client_is_poisoned_and_the_parents_goes_on(
    peer: ScriptedPeer, put: Put, part: Partition, plane: Plane
) -> None:
    batch = part.claim("s", rows=2)
    told = multiprocessing.get_context("fork").SimpleQueue()

    def child() -> None:
        try:
            plane.stats()
        except dataplane.ClientClosed as exc:
            told.put(str(exc))

    pid = os.fork()
    if pid == 0:
        child()
        os._exit(0)
    os.waitpid(pid, 0)
    assert "call dataplane.connect() in the child" in told.get()
    batch.ack()
    peer.scripts[Stats] = lambda r, b: StatsDone({"alive": True})
    assert plane.stats() == {"alive": True}


def test_an_answer_that_nobody_waits_for_any_more_is_undone(
    peer: ScriptedPeer, put: Put, part: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    claimed = peer.scripts[Claim]

    def too_late(request: Request, body: Claim) -> bytes:
        # The client has given up by the time the answer goes out.
        peer.connections[-1].recv(1)
        return bytes(encode(Reply(request.rid, claimed(request, body))))  # type: ignore[arg-type]

    monkeypatch.setattr("dataplane.client.session.connection.GRACE_S", 0.01)
    peer.scripts[Claim] = too_late
    with pytest.raises(dataplane.DeadlineExceeded):
        part.claim("s", rows=2, timeout=0.01)
    assert peer.await_body(Finish).outcome == "release"
    assert peer.await_body(Unpin).pins == [1]


def test_a_part_in_a_plan_of_which_nobody_heard_is_left_and_ends_it_for_nobody() -> None:
    claimed = Claimed(31, 0, Table(Rows(b"")), PlanRows(2))
    assert undo(claimed) == [Finish(31, "leave")]


def test_values_of_a_message_that_was_refused_when_nobody_waited_any_more_are_let_go() -> None:
    """The peer holds them for the message that follows where the shard is full, and none does."""
    full = failed(ShardFull("no room", values=True, chunks=bytes(8), pin=9))
    assert undo(full) == [Unpin([9])]
    assert not undo(failed(ShardFull("no room", values=True, chunks=b"", pin=0)))
    assert not undo(failed(ShardFull("no room for rows", peer="a")))


def test_a_permit_of_which_nobody_heard_is_given_back() -> None:
    assert undo(Admitted(31, 7)) == [Withdraw("", 0, [31])]


def test_several_threads_use_one_client(peer: ScriptedPeer, put: Put, part: Partition) -> None:
    claim_script = peer.scripts[Claim]
    together = threading.Barrier(4, timeout=10)

    def claimed(request: object, body: Claim) -> object:
        together.wait()
        return claim_script(request, body)  # type: ignore[arg-type]

    peer.scripts[Claim] = claimed  # type: ignore[assignment]
    rows: list[int] = []
    threads = [
        threading.Thread(target=lambda: rows.append(len(part.claim("s", rows=2)))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert rows == [2, 2, 2, 2]


def test_slabs_give_from_the_front_of_the_first_that_has_room_and_join_neighbours() -> None:
    held = Slabs(0)
    held.keep(given := [(65_536, 8192), (0, 4096)])
    assert given == []
    assert [held.take(n) for n in (1024, 4096, 3072, 8192)] == [0, 65_536, 1024, None]
    held.keep([(73_728, 4096)])
    assert held.take(8192) == 69_632 and not held.nbytes


def test_who_writes_often_asks_for_room_for_several_writes_at_once() -> None:
    held, least = Slabs(1 << 40), slabs.LEAST_AHEAD_BYTES
    assert [held.ahead(n) for n in (0, 64, least, 64)] == [0, least, 4 * least, 4 * least]
    held.keep([(0, 4 * least)])
    for _ in range(3):
        held.take(least)
        assert held.ahead(least) == 0  # the next one finds room
    held.take(64)
    assert held.ahead(64) == 4 * least  # one as large as the largest of late would not
    assert held.ahead(slabs.AHEAD_BYTES) == slabs.AHEAD_BYTES
    assert held.ahead(slabs.AHEAD_BYTES + 64) == 0
    for _ in range(slabs.WRITES_LOOKED_BACK):
        held.take(64)
        held.ahead(64)
    assert held.ahead(64) == 0


def test_a_client_asks_for_a_fair_part_of_the_quota_or_for_one_write() -> None:
    held = Slabs(64 << 20)
    assert [held.ahead(n << 20) for n in (0, 1, 2)] == [0, 1 << 20, 2 << 20]
    assert Slabs(64 << 20).ahead(512 << 10) == 1 << 20


def test_who_writes_rarely_asks_for_nothing_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Slabs(1 << 40)
    monkeypatch.setattr(slabs, "IDLE_S", 0.0)
    assert not held.ahead(4096) and not held.ahead(4096)


def test_slabs_are_bounded_and_small_ends_go_back_together() -> None:
    """One with each put would be a message with each."""
    held, most = Slabs(0), slabs.MAX_SLABS
    ends = [(n << 20, (n + 1) * 4096) for n in range(most + 1)]
    excess = [[end] for end in ends]
    for one in excess:
        held.keep(one)
    assert excess[:-1] == [[]] * most
    assert sorted(excess[-1]) == ends[: -slabs.KEPT_SLABS]
    assert held.nbytes == sum(nbytes for _, nbytes in ends[-slabs.KEPT_SLABS :])
    many = [(1 << 30, 2 * slabs.AHEAD_BYTES)]
    held.keep(many)
    assert many and held.nbytes == 2 * slabs.AHEAD_BYTES


def test_a_bell_wakes_once_for_all_that_happens_until_it_is_heard() -> None:
    bell = Bell()
    bell.ring()
    bell.ring()
    assert bell.wait(0.0) and not bell.wait(0.0)
    bell.ring()  # the woken one is about to look
    assert not bell.wait(0.0)
    bell.reset()
    bell.ring()
    assert bell.wait(0.0)
