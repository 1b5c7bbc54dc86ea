"""Peers that die, stop, or come back as another: typed errors in bounded time, others go on."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dataplane
from dataplane import DataplaneError, Partition, Plane
from dataplane.metadata.roster.roster import Roster
from tests.end_to_end.attacks import no_leaks
from tests.end_to_end.conftest import Cluster, in_sync, line, until

BOUND_S = 12.0
"""A peer that is gone is recognised and told of within this."""


def failing(call: Callable[[], Any], seconds: float = BOUND_S) -> DataplaneError:
    """The typed error of a call that ends in bounded time."""
    began = time.monotonic()
    with pytest.raises(DataplaneError) as caught:
        call()
    assert time.monotonic() - began < seconds, caught.value
    assert not isinstance(caught.value, dataplane.InternalError), caught.value
    return caught.value


class Addressed(Cluster):
    """Peers that know where partitions have their home."""

    def homed(self, name: str, prefix: str = "h") -> str:
        """A partition whose home, and that of its stage "s", is this peer."""
        roster = Roster.from_seeds(self.seeds)
        address = self.addresses[name]
        numbers = (f"{prefix}{n}" for n in range(10_000))
        return next(p for p in numbers if roster.home(p) == address)


@pytest.fixture
def hosts(run_dir: Any) -> Any:
    running = Addressed(run_dir, arena="64MiB")
    yield running
    running.stop()


def both(hosts: Addressed, name: str) -> tuple[Plane, Plane, Partition, Partition]:
    hosts.start_all("a", "b")
    a, b = hosts.connect("a"), hosts.connect("b")
    part = a.partition(hosts.homed(name), stages={"s": ["x"]})
    return a, b, part, b.partition(part.name)


def incarnation(plane: Plane, name: str) -> int | None:
    found: int | None = plane.stats()["peers"].get(name, {}).get("incarnation")
    return found


def test_rows_leased_through_a_dead_peer_come_back(hosts: Addressed) -> None:
    a, b, part, far = both(hosts, "a")
    part.put({"x": list(range(6))}, key=list("abcdef"))
    held = far.claim("s", rows=4, timeout=10)
    assert held.keys == list("abcd")
    hosts.kill("b")
    assert part.claim("s", rows=6, timeout=BOUND_S).keys == list("abcdef")
    del held
    a.close()
    with contextlib.suppress(DataplaneError):
        b.close()


def test_calls_go_on_where_a_dead_peers_shards_went(hosts: Addressed) -> None:
    a, b, part, far = both(hosts, "b")
    in_sync(a)
    far.put({"x": [np.zeros(100_000)]}, key=["far"])
    part.put({"x": [np.zeros(100_000)]}, key=["near"])
    got: list[Any] = []
    waits = (
        lambda: got.append(part.claim("s", rows=5).keys),
        lambda: part.wait("s", rows=5),
    )
    threads = [threading.Thread(target=wait) for wait in waits]
    for thread in threads:
        thread.start()
    until(lambda: a.stats()["waiting_claims"] == 1, "the claim waits")
    hosts.kill("b")
    until(lambda: len(a.stats()["peers"]) == 1, "b is no member any more", BOUND_S)
    # Its bytes went with it, and the key of what was lost may be given again.
    assert isinstance(failing(lambda: part.get(keys=["far"])), dataplane.RowsGone)
    part.put({"x": [1, 2, 3, 4]}, key=["far", "p", "q", "r"])
    for thread in threads:
        thread.join(BOUND_S)
        assert not thread.is_alive()
    assert sorted(got[0]) == ["far", "near", "p", "q", "r"]
    a.close()
    with contextlib.suppress(DataplaneError):
        b.close()


def test_no_put_is_answered_before_the_backup_has_it(hosts: Addressed) -> None:
    """Its peer's death would take rows along that somebody counts on."""
    a, b, part, _far = both(hosts, "a")
    in_sync(a)
    part.put({"x": [0]})
    answered = threading.Event()

    def put() -> None:
        part.put({"x": [1]})
        answered.set()

    thread = threading.Thread(target=put)
    hosts.peers["b"].send_signal(signal.SIGSTOP)
    try:
        thread.start()
        assert not answered.wait(0.5)
    finally:
        hosts.peers["b"].send_signal(signal.SIGCONT)
    assert answered.wait(BOUND_S)
    thread.join()
    a.close()
    b.close()


def test_a_peer_that_was_started_anew_is_met_anew(hosts: Addressed) -> None:
    a, b, part, far = both(hosts, "a")
    in_sync(a)
    far.put({"x": [np.zeros(100_000)]}, key=["far"])
    ref = far.put({"x": [np.zeros(100_000)]})
    part.put({"x": [np.ones(100_000)]}, key=["near"])
    hosts.kill("b")
    hosts.start_one("b")
    with hosts.connect("b") as again:
        back = again.partition(part.name)
        back.put({"x": [np.full(100_000, 2.0)]}, key=["new"])
        assert (part.get(keys=["new"])["x"][0] == 2).all()
        assert (part.get(keys=["near"])["x"][0] == 1).all()
        failing(lambda: a.get(ref))
        batch = part.claim("s", rows=2, timeout=10)
        assert sorted(batch.keys) == ["near", "new"]
        batch.ack()
        del batch
        part.seal()
        # What was lost is not passed over in silence.
        assert isinstance(failing(lambda: part.claim("s", rows=1)), dataplane.RowsLost)
        no_leaks(a, again)
    a.close()
    with contextlib.suppress(DataplaneError):
        b.close()


def test_a_peer_that_stays_stopped_is_lost_and_returns_as_an_empty_one(hosts: Addressed) -> None:
    hosts.options = ("--lost-after", "4")
    a, b, part, far = both(hosts, "a")
    in_sync(a)
    far.put({"x": [np.zeros(100_000)]}, key=["far"])
    part.put({"x": [np.ones(100_000)]}, key=["near"])
    before = incarnation(a, "b")
    hosts.peers["b"].send_signal(signal.SIGSTOP)
    try:
        assert isinstance(failing(lambda: part.get(keys=["far"])), dataplane.RowsGone)
        assert part.get(keys=["near"]).keys == ["near"]
        assert part.claim("s", rows=1, timeout=BOUND_S).keys == ["near"]
    finally:
        hosts.peers["b"].send_signal(signal.SIGCONT)
    until(lambda: incarnation(a, "b") not in (None, before), "it is back, as a new one", BOUND_S)
    with pytest.raises(DataplaneError):  # its clients are told, and what they had is not there
        far.get(keys=["far"])
    with hosts.connect("b") as again:
        assert again.partition(part.name).get(keys=["near"], timeout=20).keys == ["near"]
        size_bytes = again.stats()["arena"]["size_bytes"]
    maps = Path(f"/proc/{hosts.peers['b'].pid}/maps").read_text().splitlines()
    arenas = [line for line in maps if "memfd:dataplane" in line]
    assert len(arenas) == 1, "its former life's arena went with it"
    assert size_bytes == a.stats()["arena"]["size_bytes"]
    a.close()
    with contextlib.suppress(DataplaneError):
        b.close()


def test_a_claim_waits_through_its_homes_new_start(hosts: Addressed) -> None:
    a, b, part, far = both(hosts, "a")
    del far
    home = a.stats()["address"]
    names = (f"w{n}" for n in range(10_000))
    roster = Roster.from_seeds(hosts.seeds)
    name = next(n for n in names if roster.home(n) != home)
    stage = a.partition(name, stages={"s": ["x"]})
    with pytest.raises(dataplane.ClaimTimeout):
        stage.claim("s", rows=1, timeout=0.1)  # from here on the two peers know each other
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(stage.claim("s", rows=1, timeout=60).keys))
    thread.start()
    until(lambda: a.stats()["waiting_claims"] == 1, "the claim waits")
    in_sync(a)  # else the partition is lost with its only host
    hosts.kill("b")
    hosts.start_one("b")
    with hosts.connect("b") as again:
        again.partition(name).put({"x": [1]}, key=["late"])
        thread.join(30)
    assert got == [["late"]]
    a.close()
    with contextlib.suppress(DataplaneError):
        b.close()


def test_a_peer_that_starts_late_is_waited_for(hosts: Addressed) -> None:
    hosts.seed("a", "b")
    hosts.start_one("a")
    with hosts.connect("a") as a:
        name = hosts.homed("b")
        made: list[Any] = []

        def make() -> None:
            part = a.partition(name, stages={"s": ["x"]})
            part.put({"x": [1]}, key=["k"])
            made.append(part.claim("s", rows=1, timeout=20).keys)

        thread = threading.Thread(target=make)
        thread.start()
        hosts.start_one("b")
        thread.join(30)
        assert made == [["k"]]


PUTS = """
    import dataplane, numpy as np, itertools
    part = dataplane.connect().partition("{name}")
    for i in itertools.count():
        part.put({{"x": np.full((1, 1 << 20), i % 256, np.uint8)}}, timeout=60)
        if i == 3:
            print("putting", flush=True)
"""


def test_an_owner_that_dies_while_it_is_read_fails_the_read_and_no_more(hosts: Addressed) -> None:
    a, b, part, far = both(hosts, "a")
    producer = hosts.worker(PUTS.format(name=part.name), DATAPLANE_PEER="b")
    assert line(producer) == "putting"
    with pytest.raises(DataplaneError) as caught:
        for _ in range(400):
            if _ == 20:
                hosts.peers["b"].kill()
            part.claim("s", rows=1, timeout=2, lease=30).ack()
    assert not isinstance(caught.value, dataplane.InternalError)
    ref = part.put({"x": [np.ones(9000)]})
    assert a.get(ref)["x"][0].sum() == 9000
    del far
    no_leaks(a, seconds=15)
    a.close()
    with contextlib.suppress(DataplaneError):
        b.close()


def test_a_call_whose_deadline_ends_before_a_slow_peer_answers_says_so(hosts: Addressed) -> None:
    """Such a peer is connected, and no evidence says that it is unavailable: a host that is short
    of processor time answers later than in a few tenths of a second."""
    a, b, part, far = both(hosts, "b")
    copied = a.partition(hosts.homed("a"), stages={"s": ["x"]}, replicas=2)
    values = {"x": [np.zeros(100_000)]}
    copied.put(values, key=["first"])
    part.put(values, key=["first"])
    in_sync(a)
    hosts.freeze("b")
    stopped = time.monotonic()
    late = [
        failing(lambda: copied.put(values, key=["k"], timeout=0.4)),  # its replica
        failing(lambda: part.put(values, key=["k"], timeout=0.3)),  # its primary
        failing(lambda: part.get(keys=["first"], timeout=0.1)),
        failing(lambda: a.partition(copied.name).tag(["first"], {"n": 1}, timeout=0.2)),  # backup
    ]
    assert time.monotonic() - stopped < 2.0 * len(late)
    hosts.wake("b")
    assert [type(exc) for exc in late] == [dataplane.DeadlineExceeded] * len(late), late
    assert not any("overdue" in exc.details for exc in late)
    for one in (copied, part):  # the repeated put: once, with its values
        with contextlib.suppress(dataplane.FieldExists):
            one.put(values, key=["k"], timeout=BOUND_S)
        assert one.get(keys=["first", "k"], timeout=BOUND_S)["x"][1].nbytes == 800_000
        one.drop()
    no_leaks(a, b)
    a.close()
    b.close()
