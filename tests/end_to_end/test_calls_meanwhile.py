"""Peers come and go: clients of others notice nothing in any of their calls."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest

from dataplane import Partition, PartitionGone, Plane, RowsGone, StreamEnd, tag
from tests.end_to_end.conftest import in_sync, until
from tests.end_to_end.test_attacks_peers import Addressed, hosts
from tests.end_to_end.test_joining import join
from tests.end_to_end.test_succession import planes

__all__ = ["hosts", "planes"]

STAGES = {"s": ["x"], "t": ["x", "y"]}


class Worker:
    """Makes every call again and again until it is told to stop, or one fails."""

    def __init__(self, plane: Plane, name: str) -> None:
        self.plane = plane
        self.part: Partition = plane.partition(name, stages=STAGES, replicas=2, group_size=2)
        self.name = name
        self.rounds = 0
        self.failure = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set() and not self.failure:
            try:
                self._call_everything([f"{self.name}-{self.rounds}-{i}" for i in range(4)])
                self.rounds += 1
            except Exception:
                self.failure = traceback.format_exc()

    def _call_everything(self, keys: list[str]) -> None:
        part, groups = self.part, [f"g{keys[0]}", f"g{keys[2]}"]
        values = {"x": np.arange(400).reshape(4, 100)}
        part.put(values, key=keys, group=np.repeat(groups, 2).tolist(), tags={"n": [1, 2, 3, 4]})
        assert part.get(where=tag("n") > 3).keys == [keys[3]]
        assert sorted(part.rows().keys) == keys == part.get(keys=keys).keys
        part.tag(keys[:1], {"seen": True})
        part.wait("s", rows=4, timeout=30)
        with part.claim("s", groups=1, timeout=30) as batch:
            batch.add(y=[1.0] * len(batch))
        part.claim("t", rows=2, timeout=30).release()
        with part.claim("s", rows=2, timeout=30) as batch:
            batch.drop(rows=[0])
        part.reset("s")
        with suppress(RowsGone):  # it may be the one that was dropped
            part.get(keys=keys[:1], fields=["x"])
        part.stats()
        assert self.name in self.plane.partitions()
        part.drop(where=tag("n") == 2)
        part.drop(groups=groups[:1])
        part.drop(keys=keys)


def watched(workers: list[Worker], what: str, then: Callable[[], object]) -> None:
    """Something happens to a peer; afterwards each worker goes through everything twice more."""
    then()
    aims = [worker.rounds + 2 for worker in workers]

    def all_went_on() -> bool:
        assert not any(worker.failure for worker in workers), workers_said(workers)
        return all(worker.rounds >= aim for worker, aim in zip(workers, aims, strict=True))

    until(all_went_on, f"all calls go on after {what}", 60)


def workers_said(workers: list[Worker]) -> str:
    return "\n".join(worker.failure for worker in workers)


def test_no_call_fails_where_another_peer_joins_leaves_or_dies(
    hosts: Addressed, planes: dict[str, Plane]
) -> None:
    workers = [Worker(planes[at], f"p{n}") for n, at in enumerate("bcbc")]
    try:
        for name, end in (("d", hosts.kill), ("e", lambda name: hosts.peers[name].terminate())):
            watched(workers, f"{name} came", lambda name=name: join(hosts, name).close())  # type: ignore[misc]
            watched(workers, f"{name} went", lambda name=name, end=end: end(name))  # type: ignore[misc]
    finally:
        for worker in workers:
            worker.stop()
    assert hosts.peers["e"].wait(60) == 0
    assert not any(worker.failure for worker in workers), workers_said(workers)


def test_all_calls_go_on_while_the_keeper_of_the_roster_is_away(
    hosts: Addressed, planes: dict[str, Plane]
) -> None:
    """It has no rows: nothing but fail-over and joining needs it."""
    in_sync(planes["b"])
    workers = [Worker(planes[at], f"p{at}") for at in "bc"]
    try:
        watched(workers, "the keeper went", lambda: hosts.kill("a"))
    finally:
        for worker in workers:
            worker.stop()
    assert not any(worker.failure for worker in workers), workers_said(workers)
    part = planes["b"].partition("q", stages={"s": ["x"]})
    part.put({"x": [1, 2]})
    part.seal()
    with planes["c"].partition("q").claim("s", rows=2, timeout=30) as batch:
        assert len(batch) == 2
    with pytest.raises(StreamEnd):
        part.claim("s", rows=1, timeout=30)
    part.drop()
    with pytest.raises(PartitionGone):
        part.put({"x": [3]})
