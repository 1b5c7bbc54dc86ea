"""What happened in a plane, as a client is told it."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import numpy as np

import dataplane
from dataplane.events.merge import Event
from dataplane.timeline.causes import Cause
from dataplane.timeline.step import Step
from dataplane.timeline.why import explain
from tests.end_to_end.conftest import Cluster, in_sync, line, until


def of(events: list[Event], kind: str) -> list[Event]:
    return [event for event in events if event.kind == kind]


def test_a_group_is_followed_from_its_put_to_the_last_ack_across_hosts(cluster: Cluster) -> None:
    cluster.start("a", "b")
    with cluster.connect("a") as here, cluster.connect("b") as there:
        stages = {"reward": ["x"], "train": ["x", "reward"]}
        part = here.partition("p", stages=stages, group_size=2, groups=1)
        far = there.partition("p")
        trained: list[int] = []

        def train() -> None:
            with far.claim("train", groups=1) as batch:
                trained.append(len(batch["x"]))
                batch.ack()

        thread = threading.Thread(target=train)
        began = time.monotonic()
        thread.start()
        until(lambda: there.stats()["waiting_claims"] == 1, "the trainer waits")
        part.put({"x": [np.zeros(2_000)] * 2}, group="g")
        with part.claim("reward", groups=1) as batch:
            batch.add(reward=[0.5, 1.0])
            batch.ack()
        thread.join()
        ended = time.monotonic()
        for plane in (here, there):  # each on its own clock, which is the same clock here
            events = plane.events()
            told = [(e.kind, e.stage) for e in events if e.group == "g"]
            assert told == [
                ("put", ""),
                ("ready", "reward"),
                ("lease_begin", "reward"),
                ("ready", "train"),
                ("lease_end", "reward"),
                ("lease_begin", "train"),
                ("lease_end", "train"),
            ]
            (waited,) = [e for e in of(events, "claim_wait") if e.stage == "train"]
            assert (waited.reason, waited.host) == ("no_rows", "b")
            (pull,) = of(events, "pull")
            assert (pull.peer, pull.by, pull.stage) == ("b", "a", "train")
            assert pull.nbytes >= 32_000
            slack = 1e-6 + max(event.uncertain for event in events)
            assert all(began - slack <= e.at <= ended + slack for e in events if e.group == "g")
            assert not of(events, "missing")
        later = here.events(since=ended + 1e-3)
        assert not [event for event in later if event.group == "g"]


def test_an_ack_tells_how_long_the_client_worked_and_a_put_how_long_its_call_took(
    cluster: Cluster,
) -> None:
    cluster.start("a", "b")
    with cluster.connect("a") as here, cluster.connect("b") as there:
        part = here.partition("p", stages={"reward": ["x"]}, group_size=4, groups=2)
        large = [np.zeros(1 << 20)] * 4
        called = time.monotonic()
        for group in "gh":
            part.put({"x": large}, group=group)
        put_s = time.monotonic() - called
        took = dict[str, float]()
        for batch in there.partition("p").stream("reward", groups=1):
            group = str(batch.group_ids[0])
            got = time.monotonic()
            time.sleep(0.2)
            adding = time.monotonic()
            batch.add(y=large)
            add_s = time.monotonic() - adding
            if group == "g":
                batch.ack()
            took[group] = time.monotonic() - got - add_s / 2  # it copied for most of that time
        events = here.events()
        ended = {e.group: e for e in of(events, "lease_end")}
        for group in "gh":
            assert 0.2 <= ended[group].client_s <= took[group]
            assert ended[group].client_s < ended[group].seconds
        assert all(0 < e.client_s < put_s for e in of(events, "put") if not e.stage)


def test_a_wait_and_a_lease_that_go_on_are_told_with_how_long_they_do() -> None:
    with dataplane.connect() as plane:
        part = plane.partition("p", stages={"train": ["x"]})
        part.put({"x": [1, 2]})
        batch = part.claim("train", rows=2)
        stop = threading.Event()

        def wait() -> None:
            while not stop.is_set():
                try:
                    part.claim("train", rows=1, timeout=0.2).release()
                except dataplane.ClaimTimeout as late:
                    assert late.details["reason"] == "no_rows"

        thread = threading.Thread(target=wait)
        thread.start()
        try:
            going_on: list[Event] = []

            def both() -> bool:
                going_on[:] = [event for event in plane.events() if event.going_on]
                return len(going_on) == 2

            until(both, "both are told")
            lease, wait_now = sorted(going_on, key=lambda event: -event.seconds)
            assert (lease.kind, lease.rows) == ("lease_begin", 2)
            assert (wait_now.kind, wait_now.reason) == ("claim_wait", "no_rows")
        finally:
            stop.set()
            thread.join()
            batch.ack()


def test_a_worker_has_one_name_while_it_lives_and_after_it_ended(cluster: Cluster) -> None:
    """Else what it did before the last look counts for another worker."""
    cluster.start("a")
    worker = cluster.worker("""
        import dataplane
        with dataplane.connect("a") as plane:
            part = plane.partition("p", stages={"train": ["x"]})
            part.put({"x": [1, 2]})
            with part.claim("train", rows=2) as batch:
                batch.ack()
            print("acked", flush=True)
            input()
    """)
    with cluster.connect("a") as plane:
        assert line(worker) == "acked"
        alive = {e.worker for e in plane.events() if e.partition == "p"} - {""}
        assert len(alive) == 1
        worker.communicate("\n")
        until(lambda: plane.stats()["clients"] == 1, "the worker has left")
        assert {e.worker for e in plane.events() if e.partition == "p"} - {""} == alive


def test_why_names_a_trainer_that_keeps_what_its_next_rows_need_room_for(
    cluster: Cluster,
) -> None:
    """It claims a second value of the other host while it holds a view of the first."""
    cluster.start("a", "b", arenas={"a": "32MiB"})
    with cluster.connect("a") as there, cluster.connect("b") as here:
        part = here.partition("step-1", stages={"train": ["x"]}, group_size=1)
        values = [np.zeros(18 << 20, np.uint8) for _ in range(2)]
        for group, value in enumerate(values):
            part.put({"x": [value]}, group=group)
        far = there.partition("step-1")
        first = far.claim("train", groups=1)
        views = first.numpy("x", view=True)
        second = threading.Thread(target=lambda: far.claim("train", groups=1).ack())
        second.start()
        try:

            def waits() -> bool:
                going_on = [e for e in here.events() if e.going_on and e.kind == "room_wait"]
                told = [(e.reason, e.stage, e.peer) for e in going_on]
                return told == [("pull", "train", "a")]

            until(waits, "the wait is told while it lasts")

            def named() -> bool:
                return explain(Step(here.events(), "step-1")).cause is Cause.FULL_ARENA

            until(named, "it is named")
        finally:
            del views
            first.ack()
            del first
            second.join()


def test_why_names_a_reward_host_that_is_slow(cluster: Cluster) -> None:
    """Of three hosts, one takes for one group as long as the others take for nine."""
    cluster.start("a", "b", "c")
    groups, work_s = 10, 0.3
    begun, others_acked, others = threading.Event(), threading.Event(), itertools.count(1)
    with contextlib.ExitStack() as stack:
        planes = [stack.enter_context(cluster.connect(peer)) for peer in "abc"]
        stages = {"reward": ["x"], "train": ["x", "reward"]}
        part = planes[0].partition("step-1", stages=stages, group_size=2, groups=groups)

        def slow_reward() -> None:
            batch = planes[2].partition("step-1").claim("reward", groups=1)
            begun.set()
            others_acked.wait()
            batch.add(reward=[1.0, 2.0])
            batch.ack()

        def reward(plane: dataplane.Plane) -> None:
            begun.wait()
            for batch in plane.partition("step-1").stream("reward", groups=1):
                time.sleep(work_s)
                batch.add(reward=[1.0, 2.0])
                batch.ack()
                if next(others) == groups - 1:
                    others_acked.set()

        def train() -> None:
            for _ in part.stream("train", groups=groups):
                pass

        works: list[Callable[[], None]] = [train, slow_reward]
        works += [functools.partial(reward, plane) for plane in planes[:2]]
        threads = [threading.Thread(target=work) for work in works]
        for thread in threads:
            thread.start()
        for group in range(groups):
            part.put({"x": [1, 2]}, group=group)
        for thread in threads:
            thread.join()
        found = explain(Step(planes[1].events(), "step-1"))
    assert found.cause is Cause.SLOW_WORKER, found.sentence
    assert "lacked `reward`: reward on host c ran at 0." in found.sentence
    assert found.finished


def test_why_names_a_lease_that_is_never_acked() -> None:
    with dataplane.connect() as plane:
        stages = {"reward": ["x"], "train": ["x", "reward"]}
        part = plane.partition("step-1", stages=stages, group_size=2, groups=4)
        for group in range(4):
            part.put({"x": [1, 2]}, group=group)
        thread = threading.Thread(target=lambda: part.claim("train", groups=4).ack())
        thread.start()
        for _ in range(3):
            with part.claim("reward", groups=1) as batch:
                batch.add(reward=[1.0, 2.0])
                batch.ack()
        held = part.claim("reward", groups=1)
        try:

            def named() -> bool:
                return explain(Step(plane.events(), "step-1")).cause is Cause.UNACKED_LEASE

            until(named, "it is named")
            asked = [sys.executable, "-m", "dataplane", "why", "--run", plane.name]
            said = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
            assert said.startswith("step-1 has taken ")
            assert f"pid {os.getpid()} on host" in said
            assert "holds 1 group of stage reward" in said
        finally:
            held.add(reward=[1.0, 2.0])
            held.ack()
            thread.join()


def is_said(plane: dataplane.Plane, name: str, text: str) -> bool:
    return text in explain(Step(plane.events(), name, time.monotonic())).sentence


def test_rows_that_died_with_a_peer_are_told_by_group_and_why_says_so(cluster: Cluster) -> None:
    """Some of the partitions were served by the peer that is killed. It has two groups of each."""
    cluster.start("a", "b", "c")
    served = dict[str, str]()
    with contextlib.ExitStack() as stack:
        here, there = (stack.enter_context(cluster.connect(name)) for name in "ab")
        gone = cluster.connect("c")
        while len(set(served.values())) < 2:  # the peer that keeps the roster serves none
            name = f"step-{len(served)}"
            stages = {"reward": ["x"], "train": ["x", "reward"]}
            here.partition(name, stages=stages, group_size=2, groups=4)
            for plane, groups in ((here, "g"), (there, "h"), (gone, "ij")):
                for group in groups:
                    plane.partition(name).put({"x": [np.zeros(9_000)] * 2}, group=group)
            served[name] = of(here.events(), "put")[-1].peer
        names = list(served)
        in_sync(here)

        def train(name: str) -> None:
            with contextlib.suppress(dataplane.PartitionGone):
                there.partition(name).claim("train", groups=4).ack()

        threads = [threading.Thread(target=train, args=[name]) for name in names]
        for thread in threads:
            thread.start()

        def wait() -> bool:
            waits = [e for e in of(here.events(), "claim_wait") if e.going_on]
            return sorted(e.partition for e in waits) == sorted(names)

        until(wait, "a trainer waits for each")
        cluster.kill("c")
        until(lambda: len(of(here.events(), "lost")) == 2 * len(names), "all losses are told")
        for plane in (here, there):
            lost = of(plane.events(), "lost")
            told = {(e.partition, e.group, e.rows, e.by, e.peer) for e in lost}
            assert told == {(name, group, 2, "c", "b") for name in names for group in "ij"}
        puts = of(here.events(), "put")
        hosts = {(e.partition, e.group): e.host for e in puts}
        for name in names:
            found = explain(Step(here.events(), name))
            assert found.lost == {"c": 4}
            assert "; 4 rows were lost with peer c (events of c are missing" in found.sentence
            if served[name] == "b":
                assert [hosts[name, group] for group in "ghij"] == ["a", "b", "c", "c"]
                text = (
                    "because 2 groups waited for reward, and no worker had claimed from it; 4 rows"
                )
                until(functools.partial(is_said, here, name, text), f"{name}: {text}")
        asked = [sys.executable, "-m", "dataplane", "why", "--run", here.name, "--last", "99"]
        said = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
        assert {line.partition(" ")[0] for line in said.splitlines()} == set(names)
        for name in names:
            here.partition(name).drop()
        for thread in threads:
            thread.join()
        with contextlib.suppress(dataplane.DataplaneError):
            gone.close()
