"""Retries, seals and drops that race with others: each counts once, or not at all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

import dataplane
from dataplane import DataplaneError, Plane
from dataplane.client.arguments import Deadline
from dataplane.client.session.connection import Connection, answer
from dataplane.client.session.handshake import further
from dataplane.wire.frames import encode
from dataplane.wire.messages import Body, Claim, Claimed, Finish, Request, Unpin, Want
from tests.end_to_end.attacks import Planes, clients_of_three, no_leaks
from tests.end_to_end.conftest import Cluster, line, until
from tests.end_to_end.hosts import running


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running("a", "b", "c") as started:
        yield started


@pytest.fixture
def planes(
    cluster: Cluster, no_launcher: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Planes]:
    with clients_of_three(cluster, monkeypatch) as clients:
        yield clients


def together(*calls: Callable[[], Any]) -> list[Any]:
    """What they return, or the typed error that they raise."""
    results: list[Any] = [None] * len(calls)

    def run(at: int) -> None:
        try:
            results[at] = calls[at]()
        except DataplaneError as exc:
            results[at] = exc

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


class Raw:
    """Requests under operation ids that the test chooses, on connections that it may drop."""

    def __init__(self, plane: Plane) -> None:
        self.session = plane._session
        self.connection = further(self.session, Deadline(20))

    def send(self, op: int, body: Body) -> Connection:
        connection = self.connection
        request = Request(connection.next_rid(), self.session.id, op, 1, 20_000, body)  # type: ignore[arg-type]
        connection.send(encode(request), Deadline(10))
        return connection

    def ask(self, op: int, body: Body) -> Body:
        connection = self.send(op, body)
        return answer(connection.receive(Deadline(20)), connection._rid)

    def again(self) -> None:
        """Leave without reading the answer."""
        self.connection.close()
        self.connection = further(self.session, Deadline(20))


def test_a_repeated_operation_is_answered_as_the_first_time(planes: Planes) -> None:
    a, b, _ = planes
    part = a.partition("retry", stages={"s": ["x"]})
    defined = part._handle.defined
    assert defined is not None
    generation = defined.generation
    b.partition("retry").put({"x": list(range(6))})
    raw = Raw(a)
    claim = Claim("retry", generation, "s", Want("rows", 2, 2), None, timeout_ms=5000)
    first = raw.ask(1 << 40, claim)
    assert isinstance(first, Claimed)
    raw.again()
    second = raw.ask(1 << 40, claim)
    assert second == first
    ack = Finish(first.lease, "ack")
    assert raw.ask((1 << 40) + 1, ack) == raw.ask((1 << 40) + 1, ack)
    raw.ask((1 << 40) + 200, Unpin([first.pin]))
    # Dropped before the answer: in its place, or together with it.
    for op in range(2, 12):
        raw.send((1 << 40) + op, claim)
        raw.again()
        third = raw.ask((1 << 40) + op, claim)
        assert isinstance(third, Claimed), third
        raw.ask((1 << 40) + 100 + op, Finish(third.lease, "release"))
        raw.ask((1 << 40) + 200 + op, Unpin([third.pin]))
    assert part.claim("s", rows=4, timeout=5).keys
    raw.connection.close()


@pytest.mark.parametrize("turn", range(4))
def test_seals_at_once_are_in_force_when_they_return(planes: Planes, turn: int) -> None:
    parts = [p.partition(f"seal-{turn}", stages={"s": ["x"]}) for p in planes]
    accepted: list[tuple[str, float]] = []
    sealed_at: list[float] = []

    def produce(at: int) -> None:
        for i in range(2000):
            began = time.monotonic()
            try:
                parts[at].put({"x": [i]}, key=[f"{at}-{i}"])
            except dataplane.PartitionSealed:
                return
            accepted.append((f"{at}-{i}", began))

    def seal(at: int) -> None:
        until(lambda: len(accepted) > 15, "rows are put")
        parts[at].seal()
        sealed_at.append(time.monotonic())

    together(*(partial(produce, i) for i in range(3)), *(partial(seal, i) for i in range(3)))
    assert len(sealed_at) == 3
    last = max(began for _, began in accepted)
    assert last < min(sealed_at), "a row was accepted after a seal was acknowledged"
    got = [
        key
        for part in parts
        for batch in part.stream("s", rows=7, timeout=20)
        for key in batch.keys
    ]
    assert sorted(got) == sorted(key for key, _ in accepted)


def test_a_drop_ends_every_call_on_the_partition(planes: Planes) -> None:
    a, b, c = planes
    part = a.partition("gone", stages={"s": ["x"]})
    parts = [p.partition("gone") for p in planes]
    parts[1].put({"x": [b"x" * 100_000] * 3})
    held = parts[2].claim("s", rows=2, timeout=10)

    def putting() -> None:
        for i in range(100_000):
            parts[1].put({"x": [b"y" * 10_000]}, key=[f"k{i}"])

    def dropping() -> None:
        until(lambda: sum(p.stats()["waiting_claims"] for p in planes) >= 2, "claims wait")
        part.drop()

    began = time.monotonic()
    results = together(
        putting,
        lambda: parts[0].claim("s", rows=500_000),
        lambda: parts[2].claim("s", rows=500_000, min=400_000),
        lambda: parts[0].wait("s", rows=500_000),
        lambda: parts[2].wait("s", rows=500_000),
        dropping,
    )
    assert time.monotonic() - began < 20
    assert results[-1] is None, results
    for result in results[:-1]:
        assert isinstance(result, dataplane.PartitionGone | dataplane.PutIncomplete), results
    with pytest.raises((dataplane.LeaseExpired, dataplane.PartitionGone)):
        held.ack()
    again = a.partition("gone", stages={"s": ["x"]})
    with pytest.raises(dataplane.PartitionGone):
        parts[1].put({"x": [1]}, key=["late"])
    assert len(again.rows()) == 0
    del held


def test_claims_that_time_out_give_back_what_they_held(planes: Planes) -> None:
    parts = [p.partition("timing", stages={"s": ["x"]}) for p in planes]
    for i, part in enumerate(parts):
        part.put({"x": list(range(10))}, key=[f"{i}-{j}" for j in range(10)])
    calls = [lambda p=p: p.claim("s", rows=31, timeout=0.3) for p in parts * 2]
    assert all(isinstance(r, dataplane.ClaimTimeout) for r in together(*calls))
    no_leaks(*planes)
    assert len(parts[0].claim("s", rows=30, timeout=10).keys) == 30


WAITER = """
    import dataplane
    part = dataplane.connect().partition("kill")
    print("waiting", flush=True)
    part.claim("s", rows=30)
    print("claimed", flush=True)
    input()
"""


def test_a_client_that_dies_while_it_is_granted_rows_gives_them_back(
    planes: Planes, cluster: Cluster
) -> None:
    parts = [p.partition("kill", stages={"s": ["x"]}, free="drop") for p in planes]
    keys = [f"{i}-{j}" for i in range(3) for j in range(10)]
    waiters = [cluster.worker(WAITER, DATAPLANE_PEER=name) for name in "abc"]
    assert [line(w) for w in waiters] == ["waiting"] * 3
    for i, part in enumerate(parts):
        part.put({"x": list(range(10))}, key=[f"{i}-{j}" for j in range(10)])
        waiters[i].kill()
    batch = parts[0].claim("s", rows=30, timeout=20)
    assert sorted(batch.keys) == sorted(keys)


def test_a_stage_that_many_declare_at_once_is_there_for_all(planes: Planes) -> None:
    parts = [p.partition("late-stage", free="drop") for p in planes]
    parts[1].put({"x": list(range(12))})
    got = together(
        *(lambda p=p: p.claim("new", rows=2, fields=["x"], timeout=10) for p in parts * 2)
    )
    assert not [failed for failed in got if isinstance(failed, DataplaneError)]
    assert sorted(x for batch in got for x in batch["x"]) == list(range(12)), got
